"""The compiled decoder as an object: its memory, and steps over batches of sequences.

`forward.py` is the computation. Here are its arrays and the description of each batch. Which blocks of the cache a
sequence has is for others to say.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ModelFileError, ParameterError, QkvError
from qkv.kernels import packing
from qkv.kernels.attention import CHUNK, padded_group, scratch_regions, state_size
from qkv.kernels.formats import MATRIX, new_arena
from qkv.kernels.kvcache import Pool
from qkv.kernels.panels import panel_size
from qkv.kernels.sizes import BLOCK, CACHE_KINDS, STEP_TOKENS, blocks_for, half_block_bytes
from qkv.kernels.tiles import INFO
from qkv.model import forward
from qkv.model.config import PRESETS, ModelConfig
from qkv.model.feed import CacheOverflowError, Feed, StepAbortedError
from qkv.model.forward import Buffers, Shape, StepInput, Weights, step_for
from qkv.model.layers import LAYER, layer_records, padded_row
from qkv.model.probe import Edits, new_probe, point_count
from qkv.model.readback import Tapped, read_tap, tap_sizes
from qkv.progress import Progress, silent
from qkv.runtime.memory import free_memory
from qkv.runtime.team import Program, StepCancelledError, team
from qkv.runtime.warmup import compile_in_child

TILE_TOKENS = 32
MAX_PARTS = 512


@dataclass(frozen=True)
class PackedWeights:
    """A model's weights as the kernels want them. `layers.py` says in which order `matrices` and `vectors` are."""

    arena: NDArray[np.uint8]
    matrices: NDArray[Any]  # MATRIX records
    vectors: NDArray[np.float32]
    formats: frozenset[str]
    bytes_per_token: int
    """What decoding one token reads: all of it, but for an untied token table, of which it reads a row."""
    notes: tuple[str, ...] = ()
    """What packing had to say: formats that could not be kept."""


class CompiledDecoder:
    """A decoder that runs on `threads` threads. One step at a time: calls from several threads take turns.

    cache: "f16", "int8" or "f32"; context: the most positions of a sequence; outputs: the most rows of a step's logits;
    cache_bytes: memory for keys and values of all sequences, None is `pool_blocks`' default.
    Raises ParameterError for an impossible value, ModelFileError for a shape the kernels do not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedWeights,
        *,
        cache: str = "f16",
        context: int,
        threads: int,
        outputs: int = 1,
        cache_bytes: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if config.head_dim % 16:
            raise ModelFileError(f"head_dim {config.head_dim} is not a multiple of 16; the kernels need that")
        self.config, self.context, self.outputs = config, context, outputs
        self._rope = config.rope()
        self.step_tokens = STEP_TOKENS
        self.blocks = pool_blocks(config, cache, context, cache_bytes)
        self._shape = step_shape(config, weights.formats)
        self._weights = Weights(weights.arena, weights.matrices, weights.vectors, layer_records(config))
        self._input = new_input(config, blocks_for(context))
        self._cos, self._sin = np.zeros((2, context, config.head_dim // 2), np.float32)
        self._rotated = 0
        self._buffers = new_buffers(config, self._shape, self.blocks, cache, threads, outputs)
        compile_kernels(weights.formats, progress)
        self._formats, self._threads = weights.formats, threads
        self._probe, self._tap_rows = new_probe(), list[range]()
        self._probed: tuple[tuple[Edits, ...], list[int]] = (), []
        self._program = self._new_program()
        self._one_step = threading.Lock()  # the batch's arrays serve one step at a time
        self._closed = False
        _decoders.add(self)

    @property
    def weights(self) -> Weights:
        """All weights, as the step reads them. Raises QkvError after `close`."""
        with self._one_step:
            if self._closed:
                raise QkvError("the model has been closed")
            return self._weights

    def _new_program(self) -> Program:
        arrays = (self._input, self._shape, self._weights, self._buffers, self._probe)
        return Program(step_for(self._formats), arrays, self._threads)

    def step(self, feeds: Sequence[Feed], *, copy: bool = True) -> NDArray[np.float32]:
        """Compute a batch. Logits [rows, vocab] of the tokens asked for, in their order.

        The feeds are of different sequences, whose caches have the blocks already. Without `copy` the next step
        overwrites the logits. If it raises, the sequences are as long as they were. Raises QkvError after `close`,
        StepAbortedError in a step that `close` or `abort` found running, and CacheOverflowError for keys or values that
        an f16 cache cannot hold.
        """
        with self._one_step:
            if self._closed:
                raise QkvError("the model has been closed")
            rows = self._describe(feeds, self._attach(feeds))
            try:
                team().run(self._program)
            except StepCancelledError:
                reason = "the model was closed while it was computing" if self._closed else "the step was broken off"
                raise StepAbortedError(reason) from None
            overflowed = self._overflowed(feeds)
            if overflowed:
                raise CacheOverflowError(overflowed)
            for feed in feeds:
                feed.cache.length += len(feed.ids)
            logits = self._buffers.logits[: rows * self.config.vocab_size].reshape(rows, self.config.vocab_size)
            return logits.copy() if copy else logits

    def _overflowed(self, feeds: Sequence[Feed]) -> list[int]:
        """Which feeds of the last step have keys or values that are too large for the cache."""
        ends = np.cumsum([0, *(len(feed.ids) for feed in feeds)]).tolist()
        marks = self._buffers.too_large
        return [i for i in range(len(feeds)) if marks[ends[i] : ends[i + 1]].any()]

    def likeliest(self) -> NDArray[np.int64]:
        """The id of the largest logit of each of the last step's rows, the lowest of equals; -1: one is not finite."""
        rows, vocab = int(self._input.command[forward.OUTPUTS]), self.config.vocab_size
        largest = self._buffers.largest[: rows * forward.SEGMENTS].reshape(rows, forward.SEGMENTS)
        places = self._buffers.places[: rows * forward.SEGMENTS].reshape(rows, forward.SEGMENTS)
        part = largest.argmax(axis=1)  # not-a-number counts as the largest
        ids = part * -(-vocab // forward.SEGMENTS) + places[np.arange(rows), part]
        return np.where(np.isfinite(largest.max(axis=1)), ids, -1)

    def tapped(self, feeds: Sequence[Feed], number: int) -> Tapped:
        """What the layers in `taps` of a feed had: of the last step's feeds the one of this number."""
        return read_tap(self._probe, self._shape, self._buffers.pool, feeds[number], self._tap_rows[number])

    def abort(self) -> None:
        """Break off a step that runs in another thread."""
        if not self._closed:
            team().abort(self._program)

    def close(self) -> None:
        """End: a step that runs in another thread is broken off, and all memory is let go. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        team().abort(self._program)
        team().forget(self._program)
        with self._one_step:  # the broken-off step is over
            del self._program, self._buffers, self._weights, self._input

    def _attach(self, feeds: Sequence[Feed]) -> tuple[Edits, ...]:
        """Have the program with this batch's taps and edits, which are returned. Most often it is the last step's."""
        edited = tuple(dict.fromkeys(feed.edits for feed in feeds if feed.edits is not None))
        layers = sorted({layer for feed in feeds for layer in feed.taps})
        if layers or (edited, layers) != self._probed:
            self._probed = edited, layers  # with taps each step has new memory: whoever looks keeps it
            rows = sum(len(feed.ids) for feed in feeds if feed.taps)
            sizes = tap_sizes(self._shape, layers, self.config.num_hidden_layers, rows)
            self._probe = new_probe(edited, sizes)
            self._program = self._new_program()
        return edited

    def _describe(self, feeds: Sequence[Feed], edited: Sequence[Edits]) -> int:
        """Fill `StepInput` for these feeds; how many rows of logits there will be."""
        new: Any = StepInput._make([] for _ in StepInput._fields)
        tapped, points = 0, point_count(self.config.num_hidden_layers)
        self._tap_rows.clear()
        for feed in feeds:
            cache, count = feed.cache, len(feed.ids)
            first, end = len(new.ids), cache.length + count
            assert 0 < count <= STEP_TOKENS - first and end <= self.context, "the engine keeps to the limits"
            assert end <= len(cache.blocks) * BLOCK, "whoever feeds has taken the blocks"
            new.ids.extend(feed.ids)
            new.positions.extend(range(cache.length, end))
            new.table_at.extend([len(new.tables)] * count)
            new.tables.extend(cache.blocks)
            pieces, parts_so_far = -(-end // CHUNK), len(new.parts) // 2
            if count == 1 and parts_so_far + pieces <= MAX_PARTS:
                new.part_at.append(parts_so_far)
                for piece in range(pieces):
                    new.parts.extend((first, piece))
            else:
                new.part_at.extend([-1] * count)
                for token in range(first, first + count, TILE_TOKENS):
                    new.tiles.extend((token, min(TILE_TOKENS, first + count - token)))
            if feed.outputs != "none":
                new.outputs.extend(range(first if feed.outputs == "all" else first + count - 1, first + count))
            taps = range(tapped, tapped + count if feed.taps else tapped)
            tapped = taps.stop
            self._tap_rows.append(taps)
            new.tap_row.extend(taps or [-1] * count)
            edits_at = -1 if feed.edits is None else edited.index(feed.edits) * (points + 1)
            new.edits_at.extend([edits_at] * count)
        rows = len(new.outputs)
        assert rows <= self.outputs, "more rows of logits than the decoder was made for"
        if tapped:  # the stream after the last layer is summed for the last norm only
            new.outputs.extend(sorted({t for t, row in enumerate(new.tap_row) if row >= 0} - {*new.outputs}))
        probed = bool(tapped or edited)
        new.command.extend((len(new.ids), len(new.tiles) // 2, len(new.parts) // 2, rows, len(new.outputs), probed))
        for array, values in zip(self._input, new, strict=True):
            array[: len(values)] = values
        self._rotate(new.positions)
        return rows

    def _rotate(self, positions: list[int]) -> None:
        """Give the batch the angles of these positions; each is worked out once."""
        last = max(positions)
        if last >= self._rotated:
            start, self._rotated = self._rotated, min(self.context, (last // CHUNK + 1) * CHUNK)
            new = slice(start, self._rotated)
            self._cos[new], self._sin[new] = self._rope.rotation(np.arange(start, self._rotated), np.float32)
        size = len(positions) * self.config.head_dim // 2
        self._input.cos[:size], self._input.sin[:size] = self._cos[positions].ravel(), self._sin[positions].ravel()


_decoders: weakref.WeakSet[CompiledDecoder] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child no step is running, whatever a thread of the parent was doing."""
    for decoder in list(_decoders):
        decoder._one_step = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def compile_kernels(formats: Iterable[str], progress: Progress = silent) -> None:
    """Have all kernels that a model with matrices of these formats needs on the disk: packing and the step."""
    compile_in_child(__name__, sorted(formats), progress)


def warm(spec: list[str]) -> None:
    """Compile the kernels for these weight formats (called by `compile_in_child`)."""
    packing.compile_all()
    config = PRESETS["Qwen/Qwen3-0.6B"]  # any would do: only the types of its numbers and arrays count
    shape = step_shape(config, frozenset(spec))
    weights = Weights(new_arena(64), np.zeros(1, MATRIX), np.zeros(1, np.float32), np.zeros(1, LAYER))
    arrays = (new_input(config, 1), shape, weights, new_buffers(config, shape, 1, "f32", 1, 1), new_probe())
    Program(step_for(frozenset(spec)), arrays, 1).compile()


def step_shape(config: ModelConfig, formats: Iterable[str]) -> Shape:
    """The shape of a model's step, its matrices in these formats."""
    rows = TILE_TOKENS * padded_group(config.heads_per_kv_head)
    widest = max(config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_row=padded_row(config.hidden_size),
        qkv_row=(config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim,
        o_row=padded_row(config.num_attention_heads * config.head_dim),
        mlp_row=padded_row(config.intermediate_size),
        scratch_row=padded_row(max(scratch_regions(config.head_dim, rows)[-1], panel_size(widest))),
        quantized=any(name.startswith("int") for name in formats),
        eps=np.float32(config.rms_norm_eps),
    )


MOST_CONTEXTS = 8


def pool_blocks(config: ModelConfig, cache: str, context: int, cache_bytes: int | None = None) -> int:
    """How many blocks `cache_bytes` hold. Raises ParameterError if these are not enough for one context.

    None is a quarter of the memory that is free now, but no more than 8 full contexts and never less than one. Memory
    is only taken when a block is first written.
    """
    one, block = blocks_for(context), kv_block_bytes(config, cache)
    if cache_bytes is None:
        share = (free_memory() or 0) // 4 // block
        return max(one, min(MOST_CONTEXTS * one, share))
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < one * block:
        raise ParameterError(
            f"cache_bytes must be a whole number of at least {one * block} for one context of {context} positions, "
            f"got {cache_bytes!r}; a smaller context needs less"
        )
    return cache_bytes // block


def kv_block_bytes(config: ModelConfig, cache: str) -> int:
    """Bytes of 32 positions in all layers."""
    return 2 * half_block_bytes(cache, config.head_dim) * config.num_key_value_heads * config.num_hidden_layers


def new_input(config: ModelConfig, table: int) -> StepInput:
    """An empty batch of up to 512 tokens, each with at most `table` cache blocks."""
    sizes = dict.fromkeys(StepInput._fields, STEP_TOKENS)
    sizes |= {"command": forward.COMMANDS, "tables": table * STEP_TOKENS, "tiles": 2 * STEP_TOKENS}
    sizes["parts"] = 2 * MAX_PARTS
    arrays = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
    rotation = {name: np.zeros(STEP_TOKENS * config.head_dim // 2, np.float32) for name in ("cos", "sin")}
    return StepInput(**arrays | rotation)


def new_buffers(config: ModelConfig, shape: Shape, blocks: int, cache: str, threads: int, outputs: int) -> Buffers:
    """Room for a step on so many threads, and a cache of so many blocks."""
    memory = new_arena(blocks * kv_block_bytes(config, cache))
    pool = Pool(
        kind=CACHE_KINDS.index(cache),
        bytes=memory,
        floats=memory.view(np.float32),
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        half=half_block_bytes(cache, config.head_dim),
    )
    widest = max(shape.hidden_row, shape.o_row, shape.mlp_row)
    float32 = {
        "x": STEP_TOKENS * shape.hidden_row,
        "h": STEP_TOKENS * shape.hidden_row,
        "qkv": STEP_TOKENS * shape.qkv_row,
        "o": STEP_TOKENS * shape.o_row,
        "gate_up": STEP_TOKENS * 2 * shape.mlp_row,
        "act": STEP_TOKENS * shape.mlp_row,
        "y": STEP_TOKENS * shape.hidden_row,
        "xs": STEP_TOKENS * widest // 32,
        "parts": MAX_PARTS * shape.heads * state_size(shape.head_dim),
        "scratch": threads * shape.scratch_row,
        "logits": outputs * config.vocab_size,
        "largest": outputs * forward.SEGMENTS,
    }
    return Buffers(
        pool=pool,
        too_large=np.zeros(STEP_TOKENS, np.int64),
        xq=np.zeros(STEP_TOKENS * widest, np.int8),
        places=np.zeros(outputs * forward.SEGMENTS, np.int64),
        xinfo=np.zeros(INFO * STEP_TOKENS * widest // 32, np.int32),
        **{name: new_arena(4 * size).view(np.float32) for name, size in float32.items()},  # from cache line to line
    )
