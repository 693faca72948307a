"""Strings to ids and back, for byte-level BPE vocabularies (Qwen, Llama 3, SmolLM2, GPT-2).

The `tokenizers` library does the splitting and merging. Two things are decided here, because engines differ in them and
users were hurt by it:

* **Markers are parsed only on request.** A marker is any added token: control tokens (`<|im_end|>`) and the others
  (`<think>`). `encode(text)` never yields one, so nobody's text can close its own turn; `encode(text, markers=True)`
  yields them.
* **Decoding goes through bytes.** Every id has its bytes (`token_bytes`), and text is those bytes as UTF-8, with U+FFFD
  for what is broken. Nothing is "cleaned up", and streaming (`Detokenizer`) gives the same text as decoding at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from qkv.errors import ModelFileError, ParameterError
from qkv.text.bytelevel import token_to_bytes
from qkv.text.gguf_vocabulary import GgufVocabulary, read_gguf_vocabulary

MAX_IDS = 1 << 24
"""More ids than any vocabulary has: an id beyond it comes from a damaged or hostile file."""


class Tokenizer:
    """A vocabulary with its rules. Made by `from_file` or `from_gguf`; safe to use from several threads."""

    def __init__(
        self,
        full: tokenizers.Tokenizer,
        *,
        source: str,
        bos_id: int | None,
        eos_id: int | None,
        end_ids: Iterable[int],
        add_bos: bool,
        assumed: tuple[str, ...] = (),
    ) -> None:
        self.source = source
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.end_ids = frozenset(end_ids) | ({eos_id} if eos_id is not None else frozenset())
        """Ids that end an answer, as far as the vocabulary says; `generation_config.json` may know more."""
        self.add_bos = add_bos
        self.assumed = assumed
        """What the file did not say and which value was taken, one sentence each, for the load report."""
        self._full = full
        # The same model, splitting rules and merges, but without the added tokens: their text is ordinary text here.
        self._plain = tokenizers.Tokenizer(full.model)
        if full.normalizer is not None:
            self._plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            self._plain.pre_tokenizer = full.pre_tokenizer
        added = full.get_added_tokens_decoder()
        self.marker_ids: dict[str, int] = {token.content: id for id, token in sorted(added.items())}
        """Every added token's text → id: control tokens and the others."""
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """The ids of control tokens: no part of any text."""
        self._marker_text = {id: text for text, id in self.marker_ids.items()}
        self._ids = full.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        """The largest id + 1. A model's matrix may have more rows (Qwen pads 151,669 ids to 151,936)."""
        if not 0 < self.vocab_size <= MAX_IDS:
            raise ModelFileError(f"{source}: the vocabulary's ids go up to {self.vocab_size - 1}, which no model has")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: Path, config: Mapping[str, object] | None = None) -> Tokenizer:
        """Read a `tokenizer.json`. `config`: the parsed `tokenizer_config.json`, for BOS and EOS.

        Raises ModelFileError for a file that is unreadable, damaged or not byte-level BPE.
        """
        config = config or {}
        full = _load_json(path)
        _add_configured(full, config, path)
        bos_id = _configured_id(full, config, "bos_token", path)
        eos_id = _configured_id(full, config, "eos_token", path)
        # What the file's own post-processor puts before an empty text: Llama 3 keeps its BOS there.
        written = full.encode("", add_special_tokens=True).ids
        add_bos = config.get("add_bos_token")
        if add_bos is None:
            add_bos = bos_id is not None and written[:1] == [bos_id]
        elif not isinstance(add_bos, bool):
            raise ModelFileError(f"{path.parent}: add_bos_token is {add_bos!r}, it must be true or false")
        return cls(full, source=path.name, bos_id=bos_id, eos_id=eos_id, end_ids=(), add_bos=add_bos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Tokenizer:
        """Build the tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe; `source` is the file's name.

        Raises ModelFileError, naming the key, for anything missing, malformed or unknown.
        """
        vocabulary = read_gguf_vocabulary(metadata, source)
        return cls(
            _build(vocabulary, source),
            source=source,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            end_ids=vocabulary.end_ids,
            add_bos=vocabulary.add_bos,
            assumed=vocabulary.assumed,
        )

    def encode(self, text: str, *, markers: bool = False) -> list[int]:
        """The ids of `text`, without BOS. The text of added tokens is plain text unless `markers`."""
        ids: list[int] = self._encoding(text, markers).ids
        return ids

    def segments(self, text: str) -> list[str | int]:
        """`text` cut at its markers: stretches of plain text (never empty), and the id of each marker between them."""
        pieces: list[str | int] = []
        end = 0
        encoding = self._encoding(text, markers=True)
        for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if id not in self._marker_text:
                continue
            if start > end:
                pieces.append(text[end:start])
            pieces.append(id)
            end = stop
        if end < len(text):
            pieces.append(text[end:])
        return pieces

    def prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt: markers are parsed, and one BOS starts it if the model's config asks for that."""
        ids = self.encode(text, markers=True)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD. Ids the vocabulary doesn't have are empty."""
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(id) for id in ids if id not in hidden).decode("utf-8", "replace")

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
            data = b"" if token is None else token_to_bytes(token)
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

    def _encoding(self, text: str, markers: bool) -> tokenizers.Encoding:
        try:
            return (self._full if markers else self._plain).encode(text, add_special_tokens=False)
        except TypeError:
            if not isinstance(text, str):
                raise
            bad = next((at for at, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF), None)
            if bad is None:
                raise
            raise ParameterError(
                f"text: half a character (lone surrogate {text[bad]!a}) at position {bad}; send whole characters"
            ) from None


def _load_json(path: Path) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        full = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{path}: not a usable tokenizer.json ({reason}); fetch the file again") from error
    if not isinstance(full.model, models.BPE) or not isinstance(full.decoder, decoders.ByteLevel):
        kind = f"{type(full.model).__name__} with {type(full.decoder).__name__} decoder"
        raise ModelFileError(f"{path}: the tokenizer is {kind}; qkv reads byte-level BPE")
    # Some files were saved with these on; they would cut or fill prompts, or make ids random.
    full.no_truncation()
    full.no_padding()
    full.model.dropout = None
    return full


def _add_configured(full: tokenizers.Tokenizer, config: Mapping[str, object], path: Path) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, as Hugging Face's loader does."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise ModelFileError(f"{path.parent}: added_tokens_decoder must be an object")
    present = full.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not content or not str(key).isdecimal():
            raise ModelFileError(f"{path.parent}: added_tokens_decoder[{key!r}] must be an id with its token's content")
        if int(key) in present and present[int(key)].content == content:
            continue
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        full.add_tokens([AddedToken(content, **flags)])
        if full.token_to_id(content) != int(key):
            raise ModelFileError(
                f"{path.parent}: added_tokens_decoder says {content!r} is id {key}, {path.name} makes it "
                f"{full.token_to_id(content)}; the two files are not of one model"
            )


def _configured_id(full: tokenizers.Tokenizer, config: Mapping[str, object], key: str, path: Path) -> int | None:
    token = config.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise ModelFileError(f"{path.parent}: {key} must be a token, not {token!r}")
    id: int | None = full.token_to_id(token)
    if id is None:
        raise ModelFileError(f"{path.parent}: {key} is {token!r}, which {path.name} does not have")
    return id


def _build(vocabulary: GgufVocabulary, source: str) -> tokenizers.Tokenizer:
    rules = vocabulary.rules
    try:
        model = models.BPE(
            vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False, ignore_merges=rules.ignore_merges
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not Exceptions
        raise ModelFileError(f"{source}: tokenizer.ggml.merges cannot be used ({error})") from error
    full = tokenizers.Tokenizer(model)
    if rules.normalizer is not None:
        full.normalizer = rules.normalizer()
    full.pre_tokenizer = rules.pre_tokenizer()
    full.decoder = decoders.ByteLevel()
    full.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in vocabulary.control])
    full.add_tokens([AddedToken(text, normalized=False, special=False) for text in vocabulary.user_defined])
    return full
