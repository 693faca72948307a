"""The `tokenizer.ggml.*` keys of a GGUF file, checked: nothing in them is trusted.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Two kinds of vocabulary are read:
"gpt2", byte-level BPE with merges, and "llama", SentencePiece's BPE with scores. The splitting rule of the first is not
in the file, only its name (`tokenizer.ggml.pre`); a wrong rule gives other ids and worse answers without any error, so
an unknown name is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from tokenizers import AddedToken, models

from qkv.errors import ModelFileError
from qkv.model.keys import Keys, short
from qkv.text.tokens.pretokenization import RULES, sentencepiece_rules
from qkv.text.tokens.sentencepiece import byte_of, merges_from_scores
from qkv.text.tokens.token_bytes import BYTE_LEVEL, sentencepiece_spelling
from qkv.text.tokens.tokenizers_library import NO_EOS, Vocabulary, library_errors, tokenizer_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = TYPES = range(1, 7)
MAX_TOKENS = 1 << 24
MAX_SPLITTING = 1 << 27
"""Characters to look at for finding the merges of a scored vocabulary; Llama's 32,000 pieces take about 10⁶."""

END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})
"""Control tokens that end an answer. A GGUF names one; `generation_config.json`, which has the rest, is not in it."""


def read_gguf_vocabulary(metadata: Mapping[str, object], source: str) -> Vocabulary:
    """Read and check the keys. Raises ModelFileError that names `source` and the key."""
    keys = Keys(metadata, source, prefix="tokenizer.ggml.")
    scored = _choice(keys, "model", ["gpt2", "llama"]) == "llama"
    rules = None if scored else RULES[_choice(keys, "pre", sorted(RULES))]
    tokens = _array(keys, "tokens", "strings", lambda value: isinstance(value, str))
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise _wrong(keys, "tokens", f"has {len(tokens)} entries")
    types = _array(
        keys, "token_type", "token types from 1 to 6", lambda kind: type(kind) is int and kind in TYPES, len(tokens)
    )
    ids = _ids(keys, tokens, types)
    if rules is None:
        space_first = _flag(keys, "add_space_prefix", True, "one space before texts")
        rules, spelling = sentencepiece_rules(space_first), sentencepiece_spelling(space_first)
        merges = _scored_merges(keys, tokens, types, ids)
    else:
        spelling = BYTE_LEVEL
        merges = _merges(keys, ids)

    def of(*kinds: int) -> list[str]:
        return [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]

    control = of(UNKNOWN, CONTROL)
    unknown = next(iter(of(UNKNOWN)), None) if scored else None
    with library_errors(f"{source}: tokenizer.ggml.merges cannot be used"):
        model = models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=unknown,
            fuse_unk=unknown is not None,
            byte_fallback=scored,
            ignore_merges=rules.ignore_merges,
        )
    full = tokenizer_of(model, rules.normalizer and rules.normalizer(), rules.pre_tokenizer and rules.pre_tokenizer())
    with library_errors(f"{source}: tokenizer.ggml.tokens cannot be used"):
        full.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
        full.add_tokens([AddedToken(text, normalized=False, special=False) for text in of(USER_DEFINED)])
    return Vocabulary(
        full,
        spelling,
        bos_id=_special_id(keys, "bos", scored, tokens),
        eos_id=_special_id(keys, "eos", scored, tokens),
        end_ids=_end_ids(keys, control, ids, len(tokens)),
        add_bos=_flag(keys, "add_bos_token", rules.add_bos, "one BOS before raw prompts"),
        assumed=(*keys.assumed, *([NO_EOS] if keys.get("add_eos_token") else [])),
    )


def _ids(keys: Keys, tokens: list[str], types: list[int]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED:
            continue
        if ids.setdefault(token, id) != id:
            raise _wrong(keys, "tokens", f"has {token[:40]!r} twice, as {ids[token]} and {id}")
        if not token and kind != NORMAL:
            raise _wrong(keys, "tokens", f"has an empty control token, id {id}")
    return ids


def _scored_merges(keys: Keys, tokens: list[str], types: list[int], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary: only normal pieces are made, and only from normal pieces."""
    scores = _array(keys, "scores", "finite numbers", _is_finite, len(tokens))
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == BYTE and byte_of(token) is None:
            raise _wrong(keys, "tokens", f"has the byte token {token[:40]!r}, id {id}; not <0x00> to <0xFF>")
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITTING:
        raise _wrong(keys, "tokens", "has longer tokens than any model's vocabulary")
    if keys.flag("remove_extra_whitespaces"):
        raise _wrong(keys, "remove_extra_whitespaces", "is true, which qkv does not do")
    normal = {token: id for token, id in ids.items() if types[id] == NORMAL}
    return merges_from_scores(normal, {token: scores[id] for token, id in normal.items()})


def _special_id(keys: Keys, name: str, scored: bool, tokens: list[str]) -> int | None:
    """A special token's id. Where a SentencePiece file names none, the format's default: <s> is 1 and </s> is 2."""
    key = f"{name}_token_id"
    id = _id(keys, key, len(tokens))
    default = {"bos": 1, "eos": 2}[name]
    if id is None and scored and default < len(tokens):
        id = default
        keys.assumed.append(f"{keys.prefix}{key} is missing: {id}, which is {tokens[id][:40]!r}")
    return id


def _end_ids(keys: Keys, control: list[str], ids: dict[str, int], count: int) -> frozenset[int]:
    named = (_id(keys, f"{kind}_token_id", count) for kind in ("eos", "eot", "eom"))
    known = (ids[token] for token in control if token in END_NAMES)
    return frozenset(id for id in (*named, *known) if id is not None)


def _is_type(value: object) -> bool:
    return type(value) is int and value in TYPES


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _wrong(keys: Keys, key: str, what: str) -> ModelFileError:
    return ModelFileError(f"{keys.source}: {keys.prefix}{key} {what}")


def _choice(keys: Keys, key: str, known: list[str]) -> str:
    value = keys.get(key)
    if not isinstance(value, str) or value not in known:
        found = "is missing" if value is None else f"is {short(value)}"
        raise _wrong(keys, key, f"{found}; qkv knows {', '.join(known)}")
    return value


def _flag(keys: Keys, key: str, default: bool, meaning: str) -> bool:
    """A flag, or its default; then what that means is noted as assumed."""
    if keys.get(key) is None:
        keys.assumed.append(f"{keys.prefix}{key} is missing: {meaning if default else meaning.replace('one', 'no', 1)}")
    return keys.flag(key, default)


def _id(keys: Keys, key: str, count: int) -> int | None:
    value = keys.get(key)
    if value is None or (type(value) is int and 0 <= value < count):
        return value
    raise keys.wrong(key, f"an id below {count}")


def _array(keys: Keys, key: str, wanted: str, fits: Callable[[Any], bool], count: int | None = None) -> list[Any]:
    """An array of values that all fit: as many as there are tokens, if that `count` is given."""
    values = keys.get(key)
    if values is None:
        raise _wrong(keys, key, "is missing")
    if not isinstance(values, (list, tuple)):
        raise keys.wrong(key, "an array")
    if count is not None and len(values) != count:
        raise _wrong(keys, key, f"has {len(values)} entries for {count} tokens")
    for at, value in enumerate(values):
        if not fits(value):
            raise _wrong(keys, key, f"must hold {wanted}; entry {at} is {short(value)}")
    return list(values)


def _merges(keys: Keys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens, written as `"a b"` or as `["a", "b"]`; both parts and the result are tokens."""
    pairs: dict[tuple[str, str], None] = {}
    for at, entry in enumerate(_array(keys, "merges", "pairs of tokens", lambda entry: True)):
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, (list, tuple)) or [type(part) for part in parts] != [str, str] or not all(parts):
            raise _wrong(keys, "merges", f"entry {at} must be two tokens, not {short(entry)}")
        pair = (parts[0], parts[1])
        missing = next((token for token in (*pair, pair[0] + pair[1]) if token not in ids), None)
        if missing is not None:
            raise _wrong(keys, "merges", f"entry {at} uses {short(missing)}, which is not in the vocabulary")
        if pair in pairs:
            raise _wrong(keys, "merges", f"entry {at} repeats an earlier one")
        pairs[pair] = None
    return list(pairs)
