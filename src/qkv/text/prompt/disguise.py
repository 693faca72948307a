"""Marker text inside messages, disguised while a template runs.

A template works on one string, in which its own `<|im_end|>` and one that a user typed look alike. So each marker that
occurs in the conversation is replaced by one character that occurs nowhere in it, nor in the template, and that no
string method treats specially. Any marker the template then writes is its own.

The characters are rare ideographs rather than private-use ones, because `repr` (a template that prints a dict) would
escape the latter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qkv.errors import ParameterError
from qkv.text.tokens.tokenizer import Tokenizer

STAND_INS = range(0x20000, 0x2A6D7)
"""CJK Extension B: 42,711 letters without case, decomposition or width, printable to Python."""


class Disguise:
    """The replacements for one conversation. Without marker text in it, everything passes unchanged."""

    def __init__(self, tokenizer: Tokenizer, variables: dict[str, Any], template_source: str) -> None:
        found: dict[str, int] = {}
        for text in _strings(variables):
            found |= tokenizer.spellings(text)
        self._shown = dict(zip(unused(variables, template_source) if found else (), found, strict=False))
        if len(self._shown) < len(found):
            raise ParameterError("messages: use too many markers and too many rare characters to keep them apart")
        hidden = {marker: char for char, marker in self._shown.items()}
        control = {marker: char for marker, char in hidden.items() if found[marker] in tokenizer.special_ids}
        self._hidden, self._control, self._revealed = _Replacer(hidden), _Replacer(control), _Replacer(self._shown)

    @property
    def stand_ins(self) -> frozenset[str]:
        """The characters in use."""
        return frozenset(self._shown)

    def hide_in(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A copy of a template's variables with marker text disguised."""
        if not self._shown:
            return variables
        out: dict[str, Any] = self._hide({k: v for k, v in variables.items() if k not in TEMPLATE_OWN})
        out |= {k: v for k, v in variables.items() if k in TEMPLATE_OWN}
        for message, original in zip(out["messages"], variables["messages"], strict=True):
            if original["role"] == "assistant":
                message["content"] = self._control(original["content"])
        return out

    def reveal(self, text: str) -> str:
        """`text` with the markers' own text back in place."""
        return self._revealed(text)

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden(value)
        if isinstance(value, dict):
            return {self._hidden(key): self._hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hide(item) for item in value]
        return value


def unused(variables: dict[str, Any], template_source: str) -> Iterator[str]:
    """Rare characters that occur neither in a template's variables nor in the template."""
    used = set(template_source).union(*_strings(variables))
    return (chr(code) for code in STAND_INS if chr(code) not in used)


TEMPLATE_OWN = frozenset({"bos_token", "eos_token"})
"""Variables that are markers on purpose."""


class _Replacer:
    """Replaces the leftmost, longest keys of a table, as the tokenizer would find them."""

    def __init__(self, table: dict[str, str]) -> None:
        self._table = table
        self._pattern = re.compile("|".join(re.escape(key) for key in sorted(table, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._table[match[0]], text) if self._table else text


def _strings(value: Any) -> Iterator[str]:
    """Every string in a template's variables, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in TEMPLATE_OWN:
                yield key
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
