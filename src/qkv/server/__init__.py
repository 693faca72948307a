"""`qkv serve`: the engine behind the HTTP interfaces of OpenAI and Anthropic.

A request goes: `guard` (who may ask) → `chat`, `completions`, `responses` or `messages` (its API's fields, made into an
`Ask`) → `answering` (an `Ask` becomes an `Answer`) → the same API module (the answer in its API's words) → `streaming`.
"""
