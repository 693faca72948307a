"""Around the `tokenizers` library: what qkv reads with it, its errors as qkv's, and tokenizers with other rules.

The library is written in Rust, whose panics are no `Exception`s.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from qkv.errors import ModelFileError
from qkv.text.tokens.token_bytes import Spelling

NO_EOS = "add_eos_token is true, but no EOS is put after prompts: the model is to go on"


@dataclass(frozen=True)
class Vocabulary:
    """What the files of a model say of its tokens."""

    full: tokenizers.Tokenizer
    spelling: Spelling
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    """Whether one BOS starts a raw prompt."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end an answer, beside `eos_id`."""
    assumed: tuple[str, ...] = ()
    """What the files did not say and which value was taken, one sentence each, for the load report."""


@contextmanager
def library_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn anything the library raises into a ModelFileError: `what` (the library's reason); `advice`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{what} ({reason}){advice and '; ' + advice}") from error


def tokenizer_of(model: Any, normalizer: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """A tokenizer without added tokens. The rules may be None, which the library does not take back."""
    made = tokenizers.Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


def without_markers(full: tokenizers.Tokenizer, unreachable: Collection[int]) -> tokenizers.Tokenizer:
    """The same model and splitting rules, without added tokens.

    `unreachable`: ids to leave out of the model as well, because its merges lead to them. That copies the whole model.
    """
    if unreachable:
        spec = json.loads(full.to_str())
        model = spec["model"]
        model["vocab"] = {token: id for token, id in model["vocab"].items() if id not in unreachable}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        known = model["vocab"]
        model["merges"] = [[a, b] for a, b in pairs if a in known and b in known and a + b in known]
        return tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))
    return tokenizer_of(full.model, full.normalizer, full.pre_tokenizer)


def only_markers(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The added tokens alone: it finds them where `full` does, and has no token for any other text."""
    finder = tokenizer_of(models.BPE(vocab={}, merges=[]), full.normalizer, None)
    finder.add_tokens([token for _, token in sorted(full.get_added_tokens_decoder().items())])
    return finder


def after_text(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`plain` for text that follows a marker: where only a text's first stretch gets a space, this one gets none."""
    if plain.pre_tokenizer is None:
        return plain
    state = json.loads(plain.pre_tokenizer.__getstate__())
    changed = _never_first(state)
    if changed == state:
        return plain
    pre_tokenizer = copy.copy(plain.pre_tokenizer)
    pre_tokenizer.__setstate__(json.dumps(changed).encode())
    return tokenizer_of(plain.model, plain.normalizer, pre_tokenizer)


def _never_first(state: Any) -> Any:
    """A pre-tokenizer's state with every "first" as "never"."""
    if isinstance(state, dict):
        fixed = {key: _never_first(value) for key, value in state.items()}
        return fixed | {"prepend_scheme": "never"} if state.get("prepend_scheme") == "first" else fixed
    return [_never_first(item) for item in state] if isinstance(state, list) else state
