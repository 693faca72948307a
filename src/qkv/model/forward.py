# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The decoder of `reference.py`, compiled: one step over a ragged batch, run by all threads of a team at once.

A batch is any mix of tokens: prompts of several sequences, or parts of them, or one new token each. Every token knows
its position and where its sequence's cache blocks are listed. `step` below is the whole forward pass, in the order of
the book. Each of its lines is a phase that the threads share: they claim tokens, heads, tiles or blocks of rows from
counters, and a barrier ends it. No number depends on who computed it, or on what else is in the batch.

All that a phase works on is in a `Step`: what to compute (`StepInput`, which changes every step), the model's `Shape`,
its `Weights`, and `Buffers` (the cache and what is in between). Rows of floats are padded with zeros to a multiple of
32. A step that is aborted drains: claims find nothing and barriers do not wait (see `spmd`), so no phase looks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.kernels.argmax import survey
from qkv.kernels.attention import CHUNK, History, attend_part, attend_tile, join_parts, state_size
from qkv.kernels.formats import dequantize_row
from qkv.kernels.kvcache import LARGEST_HALF, ask_for_keys, keys_offset, write_key, write_value
from qkv.kernels.matmul import Inputs, Outputs, matmul_for, quantize_groups, weights_at
from qkv.kernels.pointwise import add_row, rms_norm_row, rope_row, swiglu_row
from qkv.kernels.sizes import BLOCK
from qkv.model.probe import HEADS, MIDDLE, POINTS, STREAM, Probe, probe_heads, probe_stream
from qkv.runtime.jit import kernel
from qkv.runtime.spmd import barrier, claim, first_share

Array = NDArray[Any]

# What `StepInput.command` holds: the numbers of tokens, tiles, parts, rows of logits and rows of the last norm, which
# are more where taps want rows without logits; and whether there are taps or edits.
TOKENS, TILES, PARTS, OUTPUTS, NORMED, PROBED = range(6)
COMMANDS = 6

INFINITY, NOT_A_NUMBER = np.float32(np.inf), np.float32(np.nan)

ROW_BLOCKS = 16  # blocks of 8 rows that a thread claims at a time
SEGMENTS = 8  # parts of a row of logits that threads survey by themselves
RUN_TOKENS = 8  # neighbouring tokens whose heads a thread rotates and stores at a time
ACTIVATION_GROUPS = 8  # groups of 32 SwiGLU outputs that a thread claims at a time


class StepInput(NamedTuple):
    """What the next step computes. Capacities are fixed; `command` says how much of each array counts."""

    command: Array  # int64 [COMMANDS]
    ids: Array  # int64 [tokens]
    positions: Array  # int64 [tokens]
    table_at: Array  # int64 [tokens]: where in `tables` the token's sequence begins
    tables: Array  # int64: block numbers, sequence after sequence
    cos: Array  # float32 [tokens · d/2]
    sin: Array
    tiles: Array  # int64 [tiles · 2]: first token, tokens (of one sequence, in order)
    parts: Array  # int64 [parts · 2]: token, chunk; a token's chunks are neighbours
    part_at: Array  # int64 [tokens]: the token's first part, or -1 if it belongs to a tile
    outputs: Array  # int64 [outputs]: tokens whose hidden state is wanted; logits are those of the first ones
    tap_row: Array  # int64 [tokens]: which of a tapped point's rows is the token's; -1: none
    edits_at: Array  # int64 [tokens]: where in `Probe.starts` its sequence's edits begin; -1: it has none


class Shape(NamedTuple):
    """The shape of the decoder, and of the rows of `Buffers`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_row: int  # hidden, padded to 32
    qkv_row: int  # (heads + 2 kv_heads) · head_dim
    o_row: int  # heads · head_dim, padded to 32
    mlp_row: int  # the MLP's width, padded to 32
    scratch_row: int  # what one thread needs for a tile of attention
    quantized: bool  # whether any matrix wants its input as int8
    eps: Any  # float32


class Weights(NamedTuple):
    """All weights; `layers` says where those of each layer are."""

    arena: Array  # uint8: the matrices
    matrices: Array  # MATRIX records; the token table and the head come last
    vectors: Array  # float32: norms and biases; the last norm comes last
    layers: Array  # LAYER records


class Buffers(NamedTuple):
    """The KV cache, and the numbers between the phases (row t is token t, unless said)."""

    pool: Any  # `kvcache.Pool`: the KV cache
    x: Array  # float32 [tokens, hidden_row]: the residual stream
    h: Array  # [tokens, hidden_row]: x, normed
    qkv: Array  # [tokens, qkv_row]: q, k and v of every head
    o: Array  # [tokens, o_row]: the heads' outputs
    gate_up: Array  # [tokens, 2 · mlp_row]
    act: Array  # [tokens, mlp_row]: silu(gate) · up
    y: Array  # [tokens, hidden_row]: what o_proj or down_proj adds to x
    xq: Array  # int8: the quantized input of the next product
    xs: Array  # float32: its scales
    xinfo: Array  # int32: its group sums and outliers
    parts: Array  # float32 [parts, heads, state_size]
    scratch: Array  # float32 [threads, scratch_row]
    too_large: Array  # int64 [tokens]: 1 where a key or value is finite, but too large for an f16 cache
    logits: Array  # float32 [outputs, vocab]
    largest: Array  # float32 [outputs, SEGMENTS]: the largest of each part of a row of logits, or not a number
    places: Array  # int64 [outputs, SEGMENTS]: and where in the part


class Step(NamedTuple):
    """What a thread knows of the step it runs: all that a phase needs."""

    sync: Array  # int64: see `spmd`
    tid: int  # which of the threads this is, 0 … n-1
    n: int
    input: StepInput
    shape: Shape
    weights: Weights
    buffers: Buffers
    probe: Probe


class Linear(NamedTuple):
    """A product: matrices that share the input x, and whose outputs lie side by side in the rows of `out`."""

    matrices: int  # how many
    x: Array  # float32 [tokens, columns padded to 32], flat
    out: Array  # float32 [tokens, stride], flat
    stride: int
    second: int  # the column where the second matrix's outputs begin
    third: int


# ------------------------------------------------------------------------------------------ the phases


@kernel
def embed(s):
    """x = the tokens' rows of the table; no number is too large yet."""
    table = s.weights.matrices[len(s.weights.matrices) - 2]
    t = claim(s.sync, 0, 1)
    while t < s.input.command[TOKENS]:
        dequantize_row(s.weights.arena, table, s.input.ids[t], s.buffers.x, t * s.shape.hidden_row)
        s.buffers.too_large[t] = 0
        t = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def norm_rows(s, norm, residual, place):
    """x += y if there is a residual yet; h = norm(x), quantized for the products that follow. `place`: see `probe`."""
    t = claim(s.sync, 0, 1)
    while t < s.input.command[TOKENS]:
        norm_row(s, t, t, norm, residual, place)
        t = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def norm_row(s, t, row, norm, residual, place):
    """Row `row` of h = norm of token t's x (+ y)."""
    size, x, h = s.shape.hidden_row, s.buffers.x, s.buffers.h
    if residual:
        add_row(x, t * size, s.buffers.y, t * size, size)
    if s.input.command[PROBED] != 0:
        probe_stream(s, t, place)
    rms_norm_row(x, t * size, s.shape.hidden, size, s.weights.vectors, norm, s.shape.eps, h, row * size)
    quantize_row(s, h, row, size)


@kernel
def quantize_row(s, x, row, size):
    """Quantize row `row` of the next product's input."""
    if s.shape.quantized:
        groups = size // 32
        quantize_groups(x, 0, s.buffers.xq, s.buffers.xs, s.buffers.xinfo, row * groups, (row + 1) * groups)


@kernel
def rotate_and_cache(s, layer):
    """For each token and key/value head: bias, norm and rotate its query heads and its key; store key and value."""
    shape, pool = s.shape, s.buffers.pool
    group, tokens = shape.heads // shape.kv_heads, s.input.command[TOKENS]
    # Neighbours share the cache lines of a block's keys, so one thread takes a few of them.
    runs = (tokens + RUN_TOKENS - 1) // RUN_TOKENS
    item = claim(s.sync, 0, 1)
    while item < runs * shape.kv_heads:
        run, g = item // shape.kv_heads, item % shape.kv_heads
        k, v = shape.heads + g, shape.heads + shape.kv_heads + g
        for t in range(run * RUN_TOKENS, min((run + 1) * RUN_TOKENS, tokens)):
            position = s.input.positions[t]
            block, slot = s.input.tables[s.input.table_at[t] + position // BLOCK], position % BLOCK
            keys = keys_offset(pool, block, layer.index, g)
            ask_for_keys(pool, keys)
            for h in range(g * group, (g + 1) * group):
                prepare_head(s, layer, t, h, layer.q_norm)
            prepare_head(s, layer, t, k, layer.k_norm)
            add_bias(s, layer, t, v)
            largest_k = write_key(pool, keys, slot, s.buffers.qkv, head_at(s.shape, t, k))
            largest_v = write_value(pool, keys + pool.half, slot, s.buffers.qkv, head_at(s.shape, t, v))
            note_largest(s, t, max(largest_k, largest_v))
        item = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def note_largest(s, t, largest):
    """Mark token t if a number is too large for an f16 cache, which has clamped it."""
    if largest > LARGEST_HALF:
        if largest == INFINITY:  # damage, which has to reach the logits
            s.buffers.x[t * s.shape.hidden_row] = NOT_A_NUMBER
        else:
            s.buffers.too_large[t] = 1


@kernel
def head_at(shape, t, head):
    """Where one head of token t begins in `Buffers.qkv`; heads count over q, k and v."""
    return t * shape.qkv_row + head * shape.head_dim


@kernel
def prepare_head(s, layer, t, head, norm):
    """Bias, norm over the head's d values, rotation: what is done to q and k, each where the family has it."""
    qkv, at, d = s.buffers.qkv, head_at(s.shape, t, head), s.shape.head_dim
    add_bias(s, layer, t, head)
    if norm >= 0:
        rms_norm_row(qkv, at, d, d, s.weights.vectors, norm, s.shape.eps, qkv, at)
    rope_row(qkv, at, d, s.input.cos, s.input.sin, t * (d // 2))


@kernel
def add_bias(s, layer, t, head):
    """q, k or v + its bias, where the family has one."""
    if layer.qkv_bias >= 0:
        d = s.shape.head_dim
        add_row(s.buffers.qkv, head_at(s.shape, t, head), s.weights.vectors, layer.qkv_bias + head * d, d)


@kernel
def attend(s, layer):
    """o = attention(q, k, v): tiles of neighbouring tokens, and single tokens' chunks, for each key/value head."""
    shape, input, buffers = s.shape, s.input, s.buffers
    d, group = shape.head_dim, shape.heads // shape.kv_heads
    base = s.tid * shape.scratch_row
    item = claim(s.sync, 0, 1)
    while item < input.command[TILES] * shape.kv_heads:
        tile, g = item // shape.kv_heads, item % shape.kv_heads
        t, tokens = input.tiles[2 * tile], input.tiles[2 * tile + 1]
        history = History(buffers.pool, input.tables, input.table_at[t], layer.index, g, layer.window)
        attend_tile(
            history, group, buffers.scratch, base, buffers.qkv, head_at(shape, t, g * group), shape.qkv_row,
            tokens, input.positions[t], buffers.o, t * shape.o_row + g * group * d, shape.o_row,
        )  # fmt: skip
        item = claim(s.sync, 0, 1)
    item = claim(s.sync, 1, 1)
    while item < input.command[PARTS] * shape.kv_heads:
        part, g = item // shape.kv_heads, item % shape.kv_heads
        t, chunk = input.parts[2 * part], input.parts[2 * part + 1]
        history = History(buffers.pool, input.tables, input.table_at[t], layer.index, g, layer.window)
        attend_part(
            history, group, buffers.scratch, base, buffers.qkv, head_at(shape, t, g * group), input.positions[t], chunk,
            buffers.parts, (part * shape.heads + g * group) * state_size(d),
        )  # fmt: skip
        item = claim(s.sync, 1, 1)
    barrier(s.sync, s.n)


@kernel
def finish_attention(s, place):
    """Join the chunks of tokens that were computed in parts; quantize o."""
    d, o_row, o = s.shape.head_dim, s.shape.o_row, s.buffers.o
    stride = s.shape.heads * state_size(d)
    t = claim(s.sync, 0, 1)
    while t < s.input.command[TOKENS]:
        if s.input.part_at[t] >= 0:
            first, chunks = s.input.part_at[t] * stride, s.input.positions[t] // CHUNK + 1
            for h in range(s.shape.heads):
                join_parts(
                    s.buffers.parts, first + h * state_size(d), stride, chunks, d,
                    s.buffers.scratch, s.tid * s.shape.scratch_row, o, t * o_row + h * d,
                )  # fmt: skip
        if s.input.command[PROBED] != 0:
            probe_heads(s, t, place)
        quantize_row(s, o, t, o_row)
        t = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def activate(s):
    """act = silu(gate) · up, quantized; a few groups of a token at a time."""
    size, buffers = s.shape.mlp_row, s.buffers
    share = 32 * ACTIVATION_GROUPS
    shares = (size + share - 1) // share
    item = claim(s.sync, 0, 1)
    while item < s.input.command[TOKENS] * shares:
        t, first = item // shares, item % shares * share
        n = min(share, size - first)
        gate = t * 2 * size + first
        swiglu_row(buffers.gate_up, gate, buffers.gate_up, gate + size, n, buffers.act, t * size + first)
        if s.shape.quantized:
            group = (t * size + first) // 32
            quantize_groups(buffers.act, 0, buffers.xq, buffers.xs, buffers.xinfo, group, group + n // 32)
        item = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def norm_outputs(s):
    """Row r of h = the last norm of the r-th token that is asked for."""
    last_norm = len(s.weights.vectors) - s.shape.hidden_row
    r = claim(s.sync, 0, 1)
    while r < s.input.command[NORMED]:
        norm_row(s, s.input.outputs[r], r, last_norm, True, len(s.weights.layers) * POINTS + STREAM)
        r = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def survey_logits(s, vocab):
    """Find the largest logit of each part of each row, while the row is still in the caches."""
    size = segment_size(vocab)
    item = claim(s.sync, 0, 1)
    while item < s.input.command[OUTPUTS] * SEGMENTS:
        row, first = item // SEGMENTS, item % SEGMENTS * size
        start, end = row * vocab + min(first, vocab), row * vocab + min(first + size, vocab)
        survey(s.buffers.logits, start, end, s.buffers.largest, s.buffers.places, item)
        item = claim(s.sync, 0, 1)
    barrier(s.sync, s.n)


@kernel
def segment_size(vocab):
    """Logits in one of the SEGMENTS parts of a row, but for the last."""
    return (vocab + SEGMENTS - 1) // SEGMENTS


@kernel
def find_blocks(weights, first, count, item):
    """The item-th run of ROW_BLOCKS blocks: the number of its matrix (`count` for none), and its first block."""
    i = 0
    while i < count:
        items = (weights.matrices[first + i].blocks + ROW_BLOCKS - 1) // ROW_BLOCKS
        if item < items:
            return i, item * ROW_BLOCKS
        item -= items
        i += 1
    return count, 0


# ------------------------------------------------------------------------------------------ the step


@cache
def step_for(formats: frozenset[str]) -> Callable[..., Any]:
    """The step for matrices of these formats (names of `formats.FORMATS`), compiled for no others."""
    matmul = matmul_for(formats)

    @kernel
    def multiply(s, first, linear, tokens):
        """The rows of `linear.out` = those of x times the matrices from number `first` on.

        A thread knows which rows are its next before it begins with those it has, so their weights are asked for in
        time. At the end of a phase they are the first ones of the next.
        """
        weights, buffers, count = s.weights, s.buffers, linear.matrices
        inputs = Inputs(linear.x, 0, buffers.xq, buffers.xs, buffers.xinfo, tokens)
        i, block = find_blocks(weights, first, count, first_share(s.sync, s.tid))
        while i < count:
            next_i, next_block = find_blocks(weights, first, count, s.n + claim(s.sync, 0, 1))
            if next_i < count:
                ahead = weights_at(weights.matrices[first + next_i], next_block)
            else:
                following = min(first + count, len(weights.matrices) - 1)
                ahead = weights_at(weights.matrices[following], s.tid * ROW_BLOCKS)
            matrix = weights.matrices[first + i]
            outputs = Outputs(linear.out, 0 if i == 0 else linear.second if i == 1 else linear.third, linear.stride)
            matmul(
                weights.arena, matrix, inputs, outputs, block, min(block + ROW_BLOCKS, matrix.blocks), ahead,
                buffers.scratch, s.tid * s.shape.scratch_row,
            )  # fmt: skip
            i, block = next_i, next_block
        barrier(s.sync, s.n)

    @kernel
    def step(tid, n, sync, input, shape, weights, buffers, probe):
        s = Step(sync, tid, n, input, shape, weights, buffers, probe)
        tokens, outputs = input.command[TOKENS], input.command[OUTPUTS]
        layers, head = weights.layers, len(weights.matrices) - 1
        k_column, v_column = shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim
        hidden, mlp, vocab = shape.hidden_row, shape.mlp_row, weights.matrices[head].rows
        qkv_proj = Linear(3, buffers.h, buffers.qkv, shape.qkv_row, k_column, v_column)
        o_proj = Linear(1, buffers.o, buffers.y, hidden, 0, 0)
        gate_up_proj = Linear(2, buffers.h, buffers.gate_up, 2 * mlp, mlp, 0)
        down_proj = Linear(1, buffers.act, buffers.y, hidden, 0, 0)
        lm_head = Linear(1, buffers.h, buffers.logits, vocab, 0, 0)

        embed(s)
        for i in range(len(layers)):
            layer = layers[i]
            norm_rows(s, layer.input_norm, i > 0, i * POINTS + STREAM)
            multiply(s, layer.qkv_proj, qkv_proj, tokens)
            rotate_and_cache(s, layer)
            attend(s, layer)
            finish_attention(s, i * POINTS + HEADS)
            multiply(s, layer.o_proj, o_proj, tokens)
            norm_rows(s, layer.post_attention_norm, True, i * POINTS + MIDDLE)
            multiply(s, layer.gate_up_proj, gate_up_proj, tokens)
            activate(s)
            multiply(s, layer.down_proj, down_proj, tokens)
        norm_outputs(s)
        multiply(s, head, lm_head, outputs)
        survey_logits(s, vocab)

    return step
