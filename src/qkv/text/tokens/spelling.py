"""How a vocabulary spells text: which bytes a token stands for, and what encoding put before the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.text.tokens.bytelevel import token_to_bytes
from qkv.text.tokens.sentencepiece import SPACE, piece_to_bytes


@dataclass(frozen=True)
class Spelling:
    """`to_bytes`: a token's bytes. `space_first`: a text's first token has a space that was not in the text."""

    to_bytes: Callable[[str], bytes]
    space_first: bool = False


BYTE_LEVEL = Spelling(token_to_bytes)


def sentencepiece_spelling(space_first: bool) -> Spelling:
    return Spelling(piece_to_bytes, space_first)


def spelling_of(decoder: Any) -> Spelling | None:
    """The spelling that a `tokenizers` decoder undoes; None for one that qkv does not know.

    Known are ByteLevel, Metaspace, and what Llama's files have: Replace(▁ → space), ByteFallback, Fuse, and Strip(one
    space at the left) if encoding puts one there.
    """
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return BYTE_LEVEL
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return Spelling(_without_byte_pieces, steps[0]["prepend_scheme"] != "never")
    replaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strips = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != replaces or steps[3:] not in ([], [strips]):
        return None
    return sentencepiece_spelling(space_first=bool(steps[3:]))


def _without_byte_pieces(token: str) -> bytes:
    return token.replace(SPACE, " ").encode("utf-8", "replace")
