"""From a model's name to what works with it: its config, its tokenizer, its chat template and its packed weights.

The engine, the benchmark, the evaluation and the views of attention all open a model here.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.checks import whole
from qkv.errors import ModelFileError, ModelNotFoundError
from qkv.model.config import PRESETS, ModelConfig, from_hf
from qkv.progress import Progress, silent
from qkv.runtime.cores import available_cores
from qkv.weights import names
from qkv.weights.checkpoint import Checkpoint, open_checkpoint
from qkv.weights.jsonfile import read_json

# The rest is imported when used: Numba, the tokenizers and Jinja take a second, and `qkv info` needs none of them.
if TYPE_CHECKING:
    from qkv.engine.vocabulary import Vocabulary
    from qkv.model.compiled import PackedWeights
    from qkv.text.prompt.template import ChatTemplate
    from qkv.text.tokens.tokenizer import Tokenizer
    from qkv.weights.report import LoadReport

SNAPSHOT = re.compile(r"models--(.+)/snapshots/[0-9a-f]+")
"""How the hub's cache calls the folder of `owner/name`: `models--owner--name/snapshots/<commit>`."""


@dataclass(frozen=True)
class Loaded:
    """Weights in memory, and how they came there."""

    weights: PackedWeights
    report: LoadReport


class Opened:
    """A model whose files were found and whose headers were read. `load` brings its weights into memory."""

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        self.name, self.checkpoint = name, checkpoint
        self.config = checkpoint.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's files. Raises ModelFileError where they have none."""
        from qkv.text.tokens.tokenizer import Tokenizer

        files = self.checkpoint
        if files.tokenizer is None:
            raise ModelFileError(f"{files.path}: has no tokenizer.json; put the model's own beside its weights")
        if isinstance(files.tokenizer, Path):
            made = Tokenizer.from_file(files.tokenizer, files.tokenizer_config)
        else:
            made = Tokenizer.from_gguf(files.tokenizer, files.path.name)
        files.notes.extend(made.assumed)
        return made

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: those of generation_config.json, config.json and the tokenizer together.

        A note says so where there is none, or where one is no row of the model's table.
        """
        files, rows = self.checkpoint, self.config.vocab_size
        known = dict.fromkeys([*files.end_ids, *(sorted(self.tokenizer.end_ids) if files.tokenizer else ())])
        ends = tuple(id for id in known if 0 <= id < rows)
        if len(ends) < len(known):
            outside = ", ".join(str(id)[:20] for id in known if id not in ends)
            files.notes.append(
                f"{files.path}: end tokens outside the vocabulary of {rows:,} are ignored: {outside[:80]}"
            )
        if not ends:
            files.notes.append(
                f"{files.path}: no token is known to end an answer; use max_tokens, stop or stop_token_ids"
            )
        return ends

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Which rows of the model's head are tokens."""
        from qkv.engine.vocabulary import Vocabulary

        return Vocabulary(min(self.tokenizer.vocab_size, self.config.vocab_size), self.tokenizer.unused_ids)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where the files have none. Raises TemplateError for one that is not allowed."""
        from qkv.text.prompt.template import ChatTemplate

        if self.checkpoint.chat_template is None:
            return None
        tokens = {"bos_token": self.tokenizer.bos_token, "eos_token": self.tokenizer.eos_token}
        return ChatTemplate(self.checkpoint.chat_template, **tokens, name=self.checkpoint.path.name)

    @property
    def generation_config(self) -> dict[str, Any]:
        """The sampling its makers recommend, in the keys of generation_config.json. The files win over the name."""
        return {**names.recommended_sampling(self.name), **self.checkpoint.generation_config}

    def formats(self, weights: str | None) -> dict[str, str]:
        """The format that `load(weights)` packs each matrix in. Raises ParameterError for an unknown one."""
        from qkv.weights.choices import matrix_formats

        return matrix_formats(self.config, self.checkpoint.tensors, weights)

    def load(self, weights: str | None = None, *, threads: int, progress: Progress = silent) -> Loaded:
        """Compile the kernels that the weights need and pack the weights.

        weights: one of `qkv.weights.choices.CHOICES`, or None for the files' own format where a kernel reads it.
        Raises ParameterError for an unknown format, ModelFileError for numbers that are not finite.
        """
        from qkv.model.compiled import compile_kernels
        from qkv.weights.load import load_weights
        from qkv.weights.report import report

        compile_kernels(frozenset(self.formats(weights).values()), progress)
        began = time.perf_counter()
        packed = load_weights(self.config, self.checkpoint.tensors, wanted=weights, threads=threads, progress=progress)
        return Loaded(packed, report(self.checkpoint, packed, time.perf_counter() - began))


def open_model(name: str, progress: Progress = silent) -> Opened:
    """Find a model by hub id, tag, file or folder, fetch it if it is not here, and read its headers.

    Raises ModelNotFoundError, ModelFileError, CacheError.
    """
    return Opened(name, open_checkpoint(names.resolve(name, progress=progress)))


@dataclass(frozen=True)
class Known:
    """What can be said of a model without fetching it."""

    label: str
    config: ModelConfig
    files: Opened | None  # None: the weights are not on this machine


def known_model(name: str) -> Known:
    """A model's files if they are on this machine, else its config.json alone, else the shape of a well-known hub id.

    Never asks the network. Raises ModelNotFoundError, ModelFileError.
    """
    path = names.find(name)
    if path is None:
        hub_id = names.full_name(name)
        if hub_id not in PRESETS:
            raise ModelNotFoundError(f"{name} is not on this machine; fetch it: qkv pull {name}")
        return Known(hub_id, PRESETS[hub_id], None)
    described = path / "config.json"
    if described.exists() and not any([*path.glob("*.safetensors*"), *path.glob("*.gguf")]):
        return Known(label(name), from_hf(read_json(described), str(described)), None)
    opened = Opened(name, open_checkpoint(path))
    return Known(label(name), opened.config, opened)


def label(name: str) -> str:
    """A model's name for a heading: a file's name, a folder's last two parts, the hub id of a folder in its cache."""
    if not names.is_local(name):
        return name
    path = Path(name).expanduser().resolve()
    snapshot = SNAPSHOT.search(path.as_posix())
    if snapshot:
        return snapshot[1].replace("--", "/", 1)
    return path.name if path.is_file() else "/".join(path.parts[-2:])


def thread_count(wanted: int | None) -> int:
    """How many threads to use: `wanted`, or the cores of this process. Raises ParameterError."""
    from qkv.runtime.team import MAX_THREADS

    if wanted is None:
        return available_cores()
    return whole("threads", wanted, 1, MAX_THREADS)
