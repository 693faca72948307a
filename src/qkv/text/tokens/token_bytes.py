"""How a vocabulary spells text: which bytes a token stands for, and what encoding put before the text.

Byte-level BPE has one printable character for each of the 256 bytes, so tokens can be kept as strings (Radford et al.
2019, the GPT-2 vocabulary). Bytes that are printable in Latin-1 (33–126, 161–172, 174–255) stand for themselves. The
other 68, in order, are the characters from U+0100 on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qkv.text.tokens.sentencepiece import SPACE, piece_to_bytes

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in set(PRINTABLE)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}


def token_to_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for. One written outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


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
