"""Ids to text as they come: only whole characters leave, and all pieces together are the text of all ids."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from qkv.text.tokens.tokenizer import Tokenizer


class Detokenizer:
    """`push` each id, then `finish`. The concatenation equals `tokenizer.decode(ids, inner=True)`; O(1) per id.

    Characters are assembled from the tokens' bytes, so a character spread over several tokens appears with the last of
    them, and bytes that never become one appear as U+FFFD. The ids are taken to continue a prompt: a space they start
    with is kept.

    hidden: ids without text; None for the control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden: Collection[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if hidden is None else hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that is complete with this id; may be empty."""
        return "" if id in self._hidden else self._decoder.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What is still held: the start of a character that never came, as U+FFFD. A new text may follow."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
