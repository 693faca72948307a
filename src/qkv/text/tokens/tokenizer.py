"""Strings to ids and back, for BPE vocabularies: byte-level (Qwen, Llama 3, SmolLM2) and SentencePiece's (Llama 2).

The `tokenizers` library does the splitting and merging. Two things are decided here, because engines differ in them and
users were hurt by it:

* **Markers are parsed only on request.** A marker is any added token: control tokens (`<|im_end|>`) and the others
  (`<think>`). `encode(text)` never yields one, so nobody's text can close its own turn; `encode(text, markers=True)`
  yields them.
* **Decoding goes through bytes.** Every id has its bytes (`token_bytes`), and text is those bytes as UTF-8, with U+FFFD
  for what is broken. Nothing is "cleaned up", and streaming (`Detokenizer`) gives the same text as decoding at once.
  Where encoding put a space before a text (SentencePiece does), decoding a whole text takes it away again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from qkv.errors import ModelFileError, ParameterError
from qkv.text.tokens.gguf_vocabulary import read_gguf_vocabulary
from qkv.text.tokens.tokenizer_json import read_tokenizer_json
from qkv.text.tokens.tokenizers_library import Vocabulary, after_text, library_errors, only_markers, without_markers

LONG_TEXT = 10_000
"""Characters from which on a text is encoded as a batch: other Python threads then run meanwhile. (It starts the
library's threads.)"""
MAX_IDS = 1 << 24
"""More ids than any vocabulary has: an id beyond it comes from a damaged or hostile file."""


class Tokenizer:
    """A vocabulary with its rules. Made by `from_file` or `from_gguf`; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        full = vocabulary.full
        self.source = source
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.end_ids = vocabulary.end_ids | ({self.eos_id} if self.eos_id is not None else frozenset())
        """Ids that end an answer, as far as the vocabulary says; `generation_config.json` may know more."""
        self.add_bos = vocabulary.add_bos
        self.assumed = vocabulary.assumed
        """What the file did not say and which value was taken, one sentence each, for the load report."""
        self._full = full
        self._spelling = vocabulary.spelling
        added = full.get_added_tokens_decoder()
        self.marker_ids: dict[str, int] = {token.content: id for id, token in sorted(added.items())}
        """Every added token's text → id: control tokens and the others."""
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """The ids of control tokens: no part of any text."""
        self._marker_text = {id: text for text, id in self.marker_ids.items()}
        self._normalized = any(token.normalized for token in added.values())
        # The same splitting rules and merges without the added tokens: their text is ordinary text here.
        self._plain = without_markers(full, frozenset())
        self._inner = after_text(self._plain)
        self._finder = only_markers(full)
        unknown = full.model.unk_token
        self._never_plain = frozenset(id for id, text in self._marker_text.items() if text != unknown)
        self._ids = full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        """The largest id + 1. A model's matrix may have more rows (Qwen pads 151,669 ids to 151,936)."""
        if not 0 < self.vocab_size <= MAX_IDS:
            raise ModelFileError(f"{source}: the vocabulary's ids go up to {self.vocab_size - 1}, which no model has")
        self.unused_ids = frozenset(range(self.vocab_size)).difference(self._ids.values())
        """Ids below `vocab_size` that no token has."""
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: Path, config: Mapping[str, object] | None = None) -> Tokenizer:
        """Read a `tokenizer.json`. `config`: the parsed `tokenizer_config.json`, for BOS and EOS.

        Raises ModelFileError for a file that is unreadable, damaged or not BPE of a known kind.
        """
        return cls(read_tokenizer_json(path, config or {}), path.name)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Tokenizer:
        """Build the tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe; `source` is the file's name.

        Raises ModelFileError, naming the key, for anything missing, malformed or unknown.
        """
        return cls(read_gguf_vocabulary(metadata, source), source)

    def encode(self, text: str, *, markers: bool = False, inner: bool = False) -> list[int]:
        """The ids of `text`, without BOS. The text of added tokens is plain text unless `markers`.

        `inner`: the text follows a marker in a larger text. Some vocabularies put a space before the larger text only.
        """
        if markers:
            return self._encode(self._full, text)
        ids = self._encode(self._inner if inner else self._plain, text)
        if self._never_plain.isdisjoint(ids):
            return ids
        # The merges themselves can spell a marker. So do without them: this happens once.
        with library_errors(f"{self.source}: the vocabulary cannot be used without its added tokens"):
            self._plain = without_markers(self._full, self._never_plain)
            self._inner = after_text(self._plain)
        return self._encode(self._inner if inner else self._plain, text)

    def segments(self, text: str) -> list[str | int]:
        """`text` cut at its markers: stretches of plain text (never empty), and the id of each marker between them.

        White space that a marker swallows (`lstrip`, `rstrip`) is in none of them.
        """
        pieces: list[str | int] = []
        end = 0
        for id, start, stop in self._marker_spans(text):
            if start > end:
                pieces.append(text[end:start])
            pieces.append(id)
            end = stop
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def spellings(self, text: str) -> dict[str, int]:
        """The markers that `text` holds, as it spells them, with their ids.

        A marker that is looked for in normalized text has more spellings than its own.
        """
        found = {marker: id for marker, id in self.marker_ids.items() if marker in text}
        if self._normalized:
            spelled = {text[start:stop].strip(): id for id, start, stop in self._marker_spans(text)}
            found |= {marker: id for marker, id in spelled.items() if marker}
        return found

    def prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt: markers are parsed, and one BOS starts it if the model's config asks for that."""
        ids = self.encode(text, markers=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, inner: bool = False) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD. Ids the vocabulary doesn't have are empty.

        `inner`: the ids continue others, so a space that they start with is their own.
        """
        hidden = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(id) for id in ids if id not in hidden).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._spelling.space_first and not inner else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes an id stands for (a marker: its text); empty for an id the vocabulary doesn't have."""
        known = self._bytes.get(id)
        if known is not None:
            return known
        if not 0 <= id < self.vocab_size:
            return b""
        if id in self._marker_text:
            data = self._marker_text[id].encode()
        else:
            token = self._full.id_to_token(id)
            data = b"" if token is None else self._spelling.to_bytes(token)
        self._bytes[id] = data
        return data

    @property
    def bos_token(self) -> str | None:
        """The text of `bos_id`, as templates write it."""
        return None if self.bos_id is None else self.token_bytes(self.bos_id).decode("utf-8", "replace")

    @property
    def eos_token(self) -> str | None:
        """The text of `eos_id`, as templates write it."""
        return None if self.eos_id is None else self.token_bytes(self.eos_id).decode("utf-8", "replace")

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it (`<think>`, `Ġthe`), or None."""
        return self._ids.get(token)

    def _marker_spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of each marker in `text`."""
        with self._encoding_errors(text):
            if len(text) < LONG_TEXT:
                found = self._finder.encode(text)
            else:
                (found,) = self._finder.encode_batch([text])
        ids = [self.marker_ids[str(self._finder.id_to_token(id))] for id in found.ids]
        return [(id, *span) for id, span in zip(ids, found.offsets, strict=True)]

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        with self._encoding_errors(text):
            if len(text) < LONG_TEXT:
                encoding = tokenizer.encode(text, add_special_tokens=False)
            else:
                (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    @contextmanager
    def _encoding_errors(self, text: str) -> Iterator[None]:
        """Refuse text that is not text, and a vocabulary that the library finds unusable only now."""
        try:
            with library_errors(f"{self.source}: the tokenizer cannot encode a text"):
                yield
        except ModelFileError as error:
            if not isinstance(error.__cause__, TypeError):
                raise
            bad = next((at for at, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF), None)
            if bad is None:
                raise
            raise ParameterError(
                f"text: half a character (lone surrogate {text[bad]!a}) at position {bad}; send whole characters"
            ) from None
