"""From what a request asks for to the grammar that llguidance reads; what cannot be meant or afforded is refused.

llguidance refuses keywords that it does not implement, remote references and impossible schemas by itself. Checked here
is what would cost it too much: its time grows steeply with some numbers, and its recursion with the number of parts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

from qkv.errors import ParameterError
from qkv.text.prompt.messages import as_json, parse_json

MAX_TEXT = 1 << 18
"""Characters of a schema, expression or grammar."""
MAX_PARTS = 4000
"""Objects and lists of a schema, rules of a grammar: each may be one level of recursion."""
MAX_MULTIPLE = 100_000
"""`multipleOf` becomes an automaton with as many states; of several, their least common multiple counts."""
MAX_PATTERNS = 100
"""`patternProperties` of one object are compared with each other: 100 take 50 ms, 300 take 5 s."""

JSON_STYLE = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""JSON comes on one line, with or without a space after commas and colons: free white space can go on forever, and with
small models it does. Each text has one spelling (no \\u), since `{"\\u0061": 1}` would pass as a key other than `a`."""


NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""llguidance can also force the tokens of the only text that may follow. It asks the tokenizer for them, and one that
puts a space before texts would answer with other text. Without, every token that fits is allowed, always."""


def schema_grammar(schema: object, field: str = "json_schema") -> str:
    """JSON that a schema allows: an object, a truth value, or its JSON text."""
    return grammar_source(field, f"start: %json {json.dumps(schema_options(schema, field))}")


def schema_options(schema: object, field: str) -> dict[str, Any]:
    """A checked schema as llguidance takes it."""
    if isinstance(schema, str):
        _check_length(schema, field)
        schema = parse_json(schema, field)
    if not isinstance(schema, (bool, Mapping)):
        raise ParameterError(f"{field}: must be a JSON object, true or false, not {type(schema).__name__}")
    copy: dict[str, Any] = {"allOf": [schema]} if isinstance(schema, bool) else as_json(schema, field)
    try:
        json.dumps(copy, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{field}: is not JSON ({error})") from None
    _check(copy, field)
    if "x-guidance" in copy:
        raise ParameterError(f"{field}: x-guidance is not a keyword of JSON Schema")
    return copy | {"x-guidance": JSON_STYLE}


def regex_grammar(regex: str) -> str:
    """Text that a regular expression (Rust's syntax: no look-around, no back-references) matches as a whole."""
    _check_length(regex, "regex")
    return grammar_source("regex", f"start: /{_unslashed(regex)}/")


def lark_grammar(grammar: str, field: str = "grammar") -> str:
    """Text of a grammar in llguidance's variant of Lark's language."""
    _check_length(grammar, field)
    if grammar.count(":") + grammar.count("{") + grammar.count("[") > MAX_PARTS:
        raise ParameterError(f"{field}: has more than {MAX_PARTS} rules and parts; use a smaller one")
    return grammar_source(field, grammar)


def choices_grammar(choices: Sequence[str]) -> str:
    """One of some strings: at least one, and none of them empty (`SamplingParams` refuses others)."""
    _check_length("".join(choices), "choices")
    alternatives = "|".join("".join(map(_literal, choice)) for choice in choices)
    return grammar_source("choices", f"start: /{alternatives}/")


def _literal(char: str) -> str:
    """A character in a regular expression, as itself."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def grammar_source(field: str, lark: str) -> str:
    """A grammar as llguidance reads it. Raises ParameterError, naming `field`, if it is no text."""
    try:
        lark.encode()
    except UnicodeEncodeError:
        raise ParameterError(f"{field}: has half a character (a lone surrogate); send whole characters") from None
    return json.dumps({"grammars": [{"lark_grammar": lark + NO_FORCING}]})


def _unslashed(regex: str) -> str:
    """The expression between slashes: bare ones are escaped, and so are line ends."""
    out, escaped = [], False
    for char in regex:
        if char == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _check_length(text: str, field: str) -> None:
    if len(text) > MAX_TEXT:
        raise ParameterError(f"{field}: has {len(text):,} characters; at most {MAX_TEXT:,} are taken")


def _check(schema: dict[str, Any], field: str) -> None:
    """Refuse what would cost too much, and the few things that llguidance gets wrong."""
    multiple = 1
    bounds: dict[str, set[float]] = {name: set() for name in _BOUNDS}
    for count, part in enumerate(_parts(schema), start=1):
        if count > MAX_PARTS:
            raise ParameterError(f"{field}: has more than {MAX_PARTS} objects and lists; use a smaller schema")
        members = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in members:
            if any(isinstance(text, str) and _UNWRITABLE.search(text) for text in (key, value)):
                raise ParameterError(f"{field}: {key!a:.40} has a control character, which the answer cannot hold")
            if isinstance(value, int) and abs(value) > 2**53 and key not in _BOUNDS:
                raise ParameterError(f"{field}: {str(value)[:40]} is a number that JSON readers round; use a string")
        if not isinstance(part, dict):
            continue
        patterns, required, least = (part.get(key) for key in ("patternProperties", "required", "minProperties"))
        if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
            raise ParameterError(f"{field}: patternProperties has {len(patterns)} entries; at most {MAX_PATTERNS}")
        if _is_number(least) and least > 1 + (len(required) if isinstance(required, list) else 0):
            raise ParameterError(f"{field}: minProperties {least} cannot be kept: keys that are not listed may repeat")
        multiple = _common_multiple(multiple, part.get("multipleOf"), field)
        for name, values in bounds.items():
            if _is_number(part.get(name)):
                values.add(part[name])
    _check_bounds(bounds, field)


_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def _check_bounds(bounds: Mapping[str, set[float]], field: str) -> None:
    """An open interval from a whole number n to less than n + 1 would let n itself through (llguidance 1.9)."""
    lows = bounds["minimum"] | bounds["exclusiveMinimum"]
    highs = bounds["maximum"] | bounds["exclusiveMaximum"]
    for name, others, side in (("exclusiveMinimum", highs, 1), ("exclusiveMaximum", lows, -1)):
        for bound in bounds[name]:
            if bound == int(bound) and any(0 < side * (other - bound) < 1 for other in others):
                raise ParameterError(f"{field}: {name} {bound} less than 1 from another bound; use an inclusive one")


def _common_multiple(multiple: int, number: object, field: str) -> int:
    if not _is_number(number) or number <= 0:
        return multiple
    digits = Decimal(str(number)).normalize().as_tuple().digits
    multiple = math.lcm(multiple, int("".join(map(str, digits))))
    if multiple > MAX_MULTIPLE:
        raise ParameterError(
            f"{field}: multipleOf {str(number)[:20]} takes too many states (with any others, a least common multiple "
            f"of {str(multiple)[:20]}; at most {MAX_MULTIPLE:,}, not counting decimal places)"
        )
    return multiple


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parts(value: Any) -> Iterator[Any]:
    """Every object and list in a JSON value, itself included."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        children = part.values() if isinstance(part, dict) else part
        waiting.extend(child for child in children if isinstance(child, (dict, list)))
