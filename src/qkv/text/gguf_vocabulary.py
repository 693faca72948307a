"""The `tokenizer.ggml.*` keys of a GGUF file, checked: nothing in them is trusted.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The splitting rule is not in the file,
only its name (`tokenizer.ggml.pre`); a wrong rule gives other ids and worse answers without any error, so an unknown
name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from qkv.errors import ModelFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKENS = 1 << 24

END_NAMES = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})
"""Control tokens that end an answer. A GGUF names one; `generation_config.json`, which has the rest, is not in it."""


@dataclass(frozen=True)
class Rules:
    """How a family cuts text before merging."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    """A piece that is itself a token is taken whole, without merging (Llama 3)."""
    add_bos: bool = False
    """Whether a raw prompt starts with BOS when the file has no `add_bos_token`."""


def _split_then_bytes(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _modern_pattern(digits: str) -> str:
    """Words with one leading non-letter, numbers, punctuation with its newlines, newlines, spaces."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return "|".join(
        [
            contractions,
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


RULES: dict[str, Rules] = {
    "gpt-2": Rules(_gpt2),
    "llama-bpe": Rules(_split_then_bytes(_modern_pattern(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True),
    "qwen2": Rules(_split_then_bytes(_modern_pattern(r"\p{N}")), normalizer=normalizers.NFC),
    "smollm": Rules(_digits_then_gpt2),
}


@dataclass(frozen=True)
class GgufVocabulary:
    """What `read_gguf_vocabulary` found. `ids` holds every token in use; unused ones are left out."""

    ids: dict[str, int]
    merges: list[tuple[str, str]]
    control: list[str]
    user_defined: list[str]
    rules: Rules
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    assumed: tuple[str, ...]


def read_gguf_vocabulary(metadata: Mapping[str, object], source: str) -> GgufVocabulary:
    """Read and check the keys. Raises ModelFileError that names `source` and the key."""
    keys = _Keys(metadata, source)
    keys.choice("tokenizer.ggml.model", ["gpt2"])
    rules = RULES[keys.choice("tokenizer.ggml.pre", sorted(RULES))]
    tokens = keys.strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise keys.wrong("tokenizer.ggml.tokens", f"has {len(tokens)} entries")
    types = keys.types("tokenizer.ggml.token_type", len(tokens))
    ids: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED:
            continue
        if ids.setdefault(token, id) != id:
            raise keys.wrong("tokenizer.ggml.tokens", f"has {token[:40]!r} twice, as {ids[token]} and {id}")
        if not token and kind != NORMAL:
            raise keys.wrong("tokenizer.ggml.tokens", f"has an empty control token, id {id}")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL)]
    merges = keys.merges("tokenizer.ggml.merges", ids)
    assumed: list[str] = []
    add_bos = keys.flag("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = rules.add_bos
        assumed.append(f"tokenizer.ggml.add_bos_token is missing: {'one' if add_bos else 'no'} BOS before raw prompts")
    return GgufVocabulary(
        ids=ids,
        merges=merges,
        control=control,
        user_defined=[token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED],
        rules=rules,
        bos_id=keys.id("tokenizer.ggml.bos_token_id", len(tokens)),
        eos_id=keys.id("tokenizer.ggml.eos_token_id", len(tokens)),
        end_ids=_end_ids(keys, control, ids, len(tokens)),
        add_bos=add_bos,
        assumed=tuple(assumed),
    )


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
