"""How each family cuts text before merging: the rule is not in a GGUF file, only its name (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from qkv.text.tokens.sentencepiece import SPACE


@dataclass(frozen=True)
class Rules:
    """What happens to text before a vocabulary's merges are applied."""

    pre_tokenizer: Callable[[], Any] | None
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


def _modern(words: list[str], digits: str, after_punctuation: str = "") -> Callable[[], Any]:
    """Words with one leading non-letter, numbers, punctuation with its newlines, newlines, spaces."""
    punctuation = r" ?[^\s\p{L}\p{N}]+[\r\n" + after_punctuation + "]*"
    return _split_then_bytes("|".join([*words, digits, punctuation, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]))


_CONTRACTIONS_AND_WORDS = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"]
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS_BY_CASE = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]

_LLAMA3 = Rules(_modern(_CONTRACTIONS_AND_WORDS, r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = _modern(_CONTRACTIONS_AND_WORDS, r"\p{N}")

RULES: dict[str, Rules] = {
    "deepseek-r1-qwen": Rules(_QWEN2),
    "falcon3": _LLAMA3,
    "gpt-2": Rules(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": Rules(_QWEN2, normalizer=normalizers.NFC),
    "smollm": Rules(_digits_then_gpt2),
    "tekken": Rules(_modern(_WORDS_BY_CASE, r"\p{N}", "/"), ignore_merges=True, add_bos=True),
}
"""The rules of byte-level vocabularies by name. Names that share a rule are those of models that share it."""


def sentencepiece_rules(space_first: bool) -> Rules:
    """No cutting at all: spaces become ▁, and if `space_first` one is put before each stretch of text."""

    def normalizer() -> Any:
        replace = normalizers.Replace(" ", SPACE)
        return normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if space_first else replace

    return Rules(None, normalizer, add_bos=True)
