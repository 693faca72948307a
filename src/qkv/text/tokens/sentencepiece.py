"""Vocabularies in the manner of SentencePiece's BPE (Llama 2, Mistral): pieces with scores, spaces written as ▁.

There are no merges in such a vocabulary: of all neighbours whose concatenation is a piece, the pair with the highest
score is joined first (Kudo and Richardson 2018). The same is said by a list of merges in the order of the scores, which
is what the `tokenizers` library works with. A character without a piece of its own is written as its UTF-8 bytes, each
a piece `<0x00>` … `<0xFF>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SPACE = "\u2581"
"""▁, which stands for a space."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of(piece: str) -> int | None:
    """The byte that a piece such as `<0x0A>` stands for; None for every other piece."""
    match = _BYTE.fullmatch(piece)
    return None if match is None else int(match[1], 16)


def piece_to_bytes(piece: str) -> bytes:
    """The bytes of text a piece stands for."""
    byte = byte_of(piece)
    return piece.replace(SPACE, " ").encode("utf-8", "replace") if byte is None else bytes([byte])


def merges_from_scores(pieces: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, the highest score of the concatenation first.

    `pieces`: piece → id, `scores`: piece → score of the pieces that may be made. Equal scores are ordered as Hugging
    Face orders them: the longer left part first, then the longer right part, then the ids of the results and parts.
    """
    found: list[tuple[float, int, int, int, int, int]] = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            left, right = pieces.get(piece[:at]), pieces.get(piece[at:])
            if left is not None and right is not None:
                found.append((-score, -at, at - len(piece), pieces[piece], left, right))
    found.sort()
    spelled = {id: piece for piece, id in pieces.items()}
    return [(spelled[left], spelled[right]) for *_, left, right in found]
