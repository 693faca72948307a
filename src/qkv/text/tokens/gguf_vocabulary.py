"""The `tokenizer.ggml.*` keys of a GGUF file, checked: nothing in them is trusted.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Two kinds of vocabulary are read:
"gpt2", byte-level BPE with merges, and "llama", SentencePiece's BPE with scores. The splitting rule of the first is not
in the file, only its name (`tokenizer.ggml.pre`); a wrong rule gives other ids and worse answers without any error, so
an unknown name is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from qkv.errors import ModelFileError
from qkv.text.tokens.library import library_errors
from qkv.text.tokens.sentencepiece import byte_of, merges_from_scores
from qkv.text.tokens.spelling import BYTE_LEVEL, Spelling, sentencepiece_spelling
from qkv.text.tokens.splitting import RULES, Rules, sentencepiece_rules

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 24
MAX_SPLITTING = 1 << 27
"""Characters to look at for finding the merges of a scored vocabulary; Llama's 32,000 pieces take about 10⁶."""

END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})
"""Control tokens that end an answer. A GGUF names one; `generation_config.json`, which has the rest, is not in it."""


@dataclass(frozen=True)
class GgufVocabulary:
    """What `read_gguf_vocabulary` found. `ids` holds every token in use; unused ones are left out."""

    ids: dict[str, int]
    merges: list[tuple[str, str]]
    control: list[str]
    user_defined: list[str]
    unknown: str | None
    """The token for a character that cannot be spelled; byte-level vocabularies have none."""
    rules: Rules
    spelling: Spelling
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    assumed: tuple[str, ...]

    def build(self, source: str) -> Tokenizer:
        """The tokenizer of the `tokenizers` library for it. Raises ModelFileError if the library refuses it."""
        with library_errors(f"{source}: tokenizer.ggml.merges cannot be used"):
            model = models.BPE(
                vocab=self.ids,
                merges=self.merges,
                unk_token=self.unknown,
                fuse_unk=self.unknown is not None,
                byte_fallback=self.spelling is not BYTE_LEVEL,
                ignore_merges=self.rules.ignore_merges,
            )
        full = Tokenizer(model)
        if self.rules.normalizer is not None:
            full.normalizer = self.rules.normalizer()
        if self.rules.pre_tokenizer is not None:
            full.pre_tokenizer = self.rules.pre_tokenizer()
        with library_errors(f"{source}: tokenizer.ggml.tokens cannot be used"):
            full.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in self.control])
            full.add_tokens([AddedToken(text, normalized=False, special=False) for text in self.user_defined])
        return full


def read_gguf_vocabulary(metadata: Mapping[str, object], source: str) -> GgufVocabulary:
    """Read and check the keys. Raises ModelFileError that names `source` and the key."""
    keys = _Keys(metadata, source)
    scored = keys.choice("tokenizer.ggml.model", ["gpt2", "llama"]) == "llama"
    rules = None if scored else RULES[keys.choice("tokenizer.ggml.pre", sorted(RULES))]
    tokens = keys.strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise keys.wrong("tokenizer.ggml.tokens", f"has {len(tokens)} entries")
    types = keys.types("tokenizer.ggml.token_type", len(tokens))
    ids = _ids(keys, tokens, types)
    assumed: list[str] = []
    if rules is None:
        space_first = keys.flag_or("tokenizer.ggml.add_space_prefix", True, "one space before texts", assumed)
        rules, spelling = sentencepiece_rules(space_first), sentencepiece_spelling(space_first)
        merges = _scored_merges(keys, tokens, types, ids)
    else:
        spelling = BYTE_LEVEL
        merges = keys.merges("tokenizer.ggml.merges", ids)
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL)]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    return GgufVocabulary(
        ids=ids,
        merges=merges,
        control=control,
        user_defined=[token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED],
        unknown=unknown if scored else None,
        rules=rules,
        spelling=spelling,
        bos_id=_special_id(keys, "bos", scored, tokens, assumed),
        eos_id=_special_id(keys, "eos", scored, tokens, assumed),
        end_ids=_end_ids(keys, control, ids, len(tokens)),
        add_bos=keys.flag_or("tokenizer.ggml.add_bos_token", rules.add_bos, "one BOS before raw prompts", assumed),
        assumed=tuple(assumed),
    )


def _ids(keys: _Keys, tokens: list[str], types: list[int]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED:
            continue
        if ids.setdefault(token, id) != id:
            raise keys.wrong("tokenizer.ggml.tokens", f"has {token[:40]!r} twice, as {ids[token]} and {id}")
        if not token and kind != NORMAL:
            raise keys.wrong("tokenizer.ggml.tokens", f"has an empty control token, id {id}")
    return ids


def _scored_merges(keys: _Keys, tokens: list[str], types: list[int], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary: only normal pieces are made, and only from normal pieces."""
    scores = keys.scores("tokenizer.ggml.scores", len(tokens))
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == BYTE and byte_of(token) is None:
            raise keys.wrong(
                "tokenizer.ggml.tokens", f"has the byte token {token[:40]!r}, id {id}; not <0x00> to <0xFF>"
            )
    if sum(len(token) ** 2 for token in tokens) > MAX_SPLITTING:
        raise keys.wrong("tokenizer.ggml.tokens", "has longer tokens than any model's vocabulary")
    if keys.flag("tokenizer.ggml.remove_extra_whitespaces"):
        raise keys.wrong("tokenizer.ggml.remove_extra_whitespaces", "is true, which qkv does not do")
    normal = {token: id for token, id in ids.items() if types[id] == NORMAL}
    return merges_from_scores(normal, {token: scores[id] for token, id in normal.items()})


def _special_id(keys: _Keys, name: str, scored: bool, tokens: list[str], assumed: list[str]) -> int | None:
    """A special token's id. Where a SentencePiece file names none, the format's default: <s> is 1 and </s> is 2."""
    key = f"tokenizer.ggml.{name}_token_id"
    id = keys.id(key, len(tokens))
    default = {"bos": 1, "eos": 2}[name]
    if id is None and scored and default < len(tokens):
        id = default
        assumed.append(f"{key} is missing: {id}, which is {tokens[id][:40]!r}")
    return id


def _end_ids(keys: _Keys, control: list[str], ids: dict[str, int], count: int) -> frozenset[int]:
    named = (keys.id(f"tokenizer.ggml.{kind}_token_id", count) for kind in ("eos", "eot", "eom"))
    known = (ids[token] for token in control if token in END_NAMES)
    return frozenset(id for id in (*named, *known) if id is not None)


class _Keys:
    """Typed access to the metadata: each method returns a checked value or raises naming the key."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def wrong(self, key: str, what: str) -> ModelFileError:
        return ModelFileError(f"{self._source}: {key} {what}")

    def choice(self, key: str, known: list[str]) -> str:
        value = self._metadata.get(key)
        if value is None:
            raise self.wrong(key, f"is missing; qkv knows {', '.join(known)}")
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"is {str(value)[:40]!r}; qkv knows {', '.join(known)}")
        return value

    def strings(self, key: str) -> list[str]:
        values = self._array(key)
        for at, value in enumerate(values):
            if not isinstance(value, str):
                raise self.wrong(key, f"must hold strings; entry {at} is {type(value).__name__}")
        return values

    def types(self, key: str, count: int) -> list[int]:
        values = self._array(key)
        if len(values) != count:
            raise self.wrong(key, f"has {len(values)} entries for {count} tokens")
        for at, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int) or not NORMAL <= value <= BYTE:
                raise self.wrong(key, f"must hold token types from 1 to 6; entry {at} is {str(value)[:40]}")
        return values

    def flag(self, key: str) -> bool | None:
        value = self._metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, f"must be true or false, not {str(value)[:40]!r}")

    def flag_or(self, key: str, default: bool, meaning: str, assumed: list[str]) -> bool:
        """A flag, or its default; then what that means is added to `assumed`."""
        value = self.flag(key)
        if value is None:
            value = default
            assumed.append(f"{key} is missing: {meaning if value else meaning.replace('one', 'no', 1)}")
        return value

    def scores(self, key: str, count: int) -> list[float]:
        values = self._array(key)
        if len(values) != count:
            raise self.wrong(key, f"has {len(values)} entries for {count} tokens")
        for at, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise self.wrong(key, f"must hold finite numbers; entry {at} is {str(value)[:40]}")
        return values

    def id(self, key: str, count: int) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.wrong(key, f"must be an id below {count}, not {str(value)[:40]}")
        return value

    def merges(self, key: str, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """Pairs of tokens, written as `"a b"` or as `["a", "b"]`; both parts and the result are tokens."""
        pairs: list[tuple[str, str]] = []
        seen: set[tuple[str, str]] = set()
        for at, entry in enumerate(self._array(key)):
            parts = entry.split(" ") if isinstance(entry, str) else entry
            if (
                not isinstance(parts, (list, tuple))
                or len(parts) != 2
                or not all(isinstance(p, str) and p for p in parts)
            ):
                raise self.wrong(key, f"entry {at} must be two tokens, not {str(entry)[:40]!r}")
            pair = (parts[0], parts[1])
            missing = next((token for token in (*pair, pair[0] + pair[1]) if token not in ids), None)
            if missing is not None:
                raise self.wrong(key, f"entry {at} uses {missing[:40]!r}, which is not in the vocabulary")
            if pair in seen:
                raise self.wrong(key, f"entry {at} repeats an earlier one")
            seen.add(pair)
            pairs.append(pair)
        return pairs

    def _array(self, key: str) -> list[Any]:
        value = self._metadata.get(key)
        if value is None:
            raise self.wrong(key, "is missing")
        if hasattr(value, "tolist"):  # a NumPy array
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            raise self.wrong(key, f"must be an array, not {type(value).__name__}")
        return list(value)
