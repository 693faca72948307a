"""Reading `tokenizer.json` and `tokenizer_config.json`: the library parses, the rest is checked here.

The file's own rules count. (transformers 5 replaces those of its class LlamaTokenizer, so that a space goes before the
first stretch of a text only; Llama 2's own file puts one before each stretch between markers, as SentencePiece does.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from qkv.errors import ModelFileError
from qkv.model.keys import Keys
from qkv.text.tokens.token_bytes import Spelling, spelling_of
from qkv.text.tokens.tokenizers_library import NO_EOS, Vocabulary, library_errors

MAX_FILE_BYTES = 64 << 20
"""Gemma 3's tokenizer.json, the largest in common use, has 33 MB."""
MAX_GROWTH = 64
"""How much longer the normalizers may make a text; ▁ for each space and one before it make about 7."""


def read_tokenizer_json(path: Path, config: Mapping[str, object]) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`. `config`: the parsed `tokenizer_config.json` beside it.

    Raises ModelFileError for what qkv cannot use.
    """
    full, spelling = _read(path)
    _add_configured(full, config, path)
    keys = Keys(config, str(path.parent))
    bos_id, eos_id = (_configured_id(full, keys, f"{name}_token", path) for name in ("bos", "eos"))
    add_bos = keys.flag("add_bos_token")
    if keys.get("add_bos_token") is None:
        # The file's own post-processor decides: Llama 3 keeps its BOS there.
        written = _written_before(full, path)
        bos_id = written if bos_id is None else bos_id
        add_bos = written is not None and written == bos_id
    assumed = (NO_EOS,) if keys.flag("add_eos_token") else ()
    return Vocabulary(full, spelling, bos_id=bos_id, eos_id=eos_id, add_bos=add_bos, assumed=assumed)


def _read(path: Path) -> tuple[tokenizers.Tokenizer, Spelling]:
    """The library's tokenizer, and how its tokens spell bytes."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelFileError(f"{path}: {path.stat().st_size:,} bytes; at most {MAX_FILE_BYTES:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error
    with library_errors(f"{path}: not a usable tokenizer.json", "fetch the file again"):
        full = tokenizers.Tokenizer.from_buffer(data)
    spelling = spelling_of(full.decoder) if isinstance(full.model, models.BPE) else None
    if spelling is None or full.model.continuing_subword_prefix or full.model.end_of_word_suffix:
        kind = f"{type(full.model).__name__} with {type(full.decoder).__name__} decoder"
        raise ModelFileError(f"{path}: the tokenizer is {kind}; qkv reads BPE, byte-level or in SentencePiece's manner")
    _check_growth(full, path)
    # Some files were saved with these on; they would cut or fill prompts, or make ids random.
    full.no_truncation()
    full.no_padding()
    full.model.dropout = None
    return full, spelling


def _add_configured(full: tokenizers.Tokenizer, config: Mapping[str, object], path: Path) -> None:
    """Add the tokens that only `tokenizer_config.json` lists, as Hugging Face's loader does."""
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise ModelFileError(f"{path.parent}: added_tokens_decoder must be an object")
    present = full.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: (len(str(item[0])), str(item[0]))):
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not content or not _is_id(key):
            shown = str(key)[:40]
            raise ModelFileError(
                f"{path.parent}: added_tokens_decoder[{shown!r}] must be an id with its token's content"
            )
        if int(key) in present and present[int(key)].content == content:
            continue
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        with library_errors(f"{path.parent}: added_tokens_decoder[{key}] cannot be added"):
            full.add_tokens([AddedToken(content, **flags)])
        if full.token_to_id(content) != int(key):
            raise ModelFileError(
                f"{path.parent}: added_tokens_decoder says {content[:40]!r} is id {key}, {path.name} makes it "
                f"{full.token_to_id(content)}; the two files are not of one model"
            )


def _configured_id(full: tokenizers.Tokenizer, keys: Keys, key: str, path: Path) -> int | None:
    """The id of the token that `bos_token` or `eos_token` names, a string or an object with the token's content."""
    token = keys.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise keys.wrong(key, "a token")
    with library_errors(f"{keys.source}: {key} cannot be looked up"):
        id: int | None = full.token_to_id(token)
    if id is None:
        raise ModelFileError(f"{keys.source}: {key} is {token[:40]!r}, which {path.name} does not have")
    return id


def _written_before(full: tokenizers.Tokenizer, path: Path) -> int | None:
    """The id that the file's post-processor writes before a text, if any. Raises ModelFileError for more than one."""
    with library_errors(f"{path}: post_processor cannot be used"):
        plain = full.encode("a", add_special_tokens=False).ids
        written = full.encode("a", add_special_tokens=True).ids
    starts = (at for at in range(len(written)) if written[at : at + len(plain)] == plain)
    before = written[: next(starts, len(written))]
    if len(before) > 1:
        raise ModelFileError(f"{path}: post_processor writes {len(before)} tokens before a text; qkv writes one, BOS")
    return before[0] if before else None


def _is_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10


def _check_growth(full: tokenizers.Tokenizer, path: Path) -> None:
    """Refuse normalizers that could turn a prompt into gigabytes."""
    growth = 1
    for step in _steps(full.normalizer, "normalizers"):
        if step["type"] == "Prepend":
            growth += len(step["prepend"].encode())
        elif step["type"] == "Replace":
            # Each character could match (or the place before it), and be replaced by the whole content.
            growth *= 1 + len(step["content"].encode())
    if growth > MAX_GROWTH:
        raise ModelFileError(f"{path}: normalizer makes texts up to {growth} times as long, more than any model's does")


def _steps(component: Any, children: str) -> Iterator[dict[str, Any]]:
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting.extend(step[children])
        else:
            yield step
