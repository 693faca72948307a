"""The alphabet of byte-level BPE: each of the 256 bytes has one printable character, so tokens can be kept as strings.

Bytes that are printable in Latin-1 (33–126, 161–172, 174–255) stand for themselves; the other 68, in order, are the
characters from U+0100 on. (Radford et al. 2019, the GPT-2 vocabulary.)
"""

from __future__ import annotations

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in set(PRINTABLE)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}


def token_to_bytes(token: str) -> bytes:
    """The bytes a token's characters stand for. A token written outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")
