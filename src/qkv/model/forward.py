# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""The decoder of `reference.py`, compiled: one step over a ragged batch, run by all threads of a team at once.

A batch is any mix of tokens: prompts of several sequences, or parts of them, or one new token each. Every token knows
its position and where its sequence's cache blocks are listed. `step` below is the whole forward pass, in the order of
the book; each line is a phase that the threads share (they claim tokens, heads, tiles or blocks of rows from counters),
and a barrier ends it. No number depends on who computed it, or on what else is in the batch.

The arrays a step works on are grouped in four named tuples: `Batch` (what to compute; changes every step), `Model`
(the shape), `Weights`, and `Work` (the cache and what is in between). Rows of floats are padded with zeros to a
multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from qkv.kernels.argmax import survey
from qkv.kernels.attention import CHUNK, History, attend_part, attend_tile, join_parts, state_size
from qkv.kernels.formats import dequantize_row
from qkv.kernels.kvcache import BLOCK, ask_for_keys, keys_offset, write_key, write_value
from qkv.kernels.matmul import Inputs, Outputs, matmul_for, quantize_groups, weights_at
from qkv.kernels.pointwise import add_row, copy_row, rms_norm_row, rope_row, swiglu_row
from qkv.runtime.jit import kernel
from qkv.runtime.spmd import barrier, claim

Array = NDArray[Any]

# What `Batch.command` holds.
TOKENS, TILES, PARTS, OUTPUTS, WANT_LOGITS, TAP_LAYER = range(6)
COMMANDS = 6

# The matrices of a layer, in the order of `Weights.matrices`; the token table and the head follow the last layer's.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
PER_LAYER = 7

ROW_BLOCKS = 16  # blocks of 8 rows that a thread claims at a time
SEGMENTS = 8  # parts of a row of logits that threads survey by themselves
RUN_TOKENS = 8  # neighbouring tokens whose heads a thread rotates and stores at a time
ACTIVATION_GROUPS = 8  # groups of 32 SwiGLU outputs that a thread claims at a time


class Batch(NamedTuple):
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
    outputs: Array  # int64 [outputs]: tokens whose hidden state (and logits) are wanted


class Model(NamedTuple):
    """The shape of the decoder, and of the rows of `Work`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    hidden_row: int  # hidden, padded to 32
    o_row: int  # heads · head_dim, padded to 32
    mlp_row: int  # intermediate, padded to 32
    scratch_row: int  # what one thread needs for a tile of attention
    quantized: bool  # whether any matrix wants its input as int8
    qk_norm: bool
    qkv_bias: bool
    eps: Any  # float32


class Weights(NamedTuple):
    """All weights. Vectors of a layer: input norm, post-attention norm, q norm, k norm, then the biases of q, k, v."""

    arena: Array  # uint8: the matrices
    matrices: Array  # MATRIX records
    vectors: Array  # float32: layer after layer, then the last norm
    windows: Array  # int64 [layers]: how many of the newest positions a layer sees; 0: all


class Work(NamedTuple):
    """The KV cache, and the numbers between the phases (row t is token t, unless said)."""

    pool: Any  # `kvcache.Pool`: the KV cache
    x: Array  # float32 [tokens, hidden_row]: the residual stream
    h: Array  # [tokens, hidden_row]: x, normed
    qkv: Array  # [tokens, (heads + 2 kv_heads) · d]
    o: Array  # [tokens, o_row]: the heads' outputs
    gate_up: Array  # [tokens, 2 · mlp_row]
    act: Array  # [tokens, mlp_row]: silu(gate) · up
    y: Array  # [tokens, hidden_row]: what o_proj or down_proj adds to x
    xq: Array  # int8: the quantized input of the next product
    xs: Array  # float32: its scales
    xinfo: Array  # int32: its group sums and outliers
    parts: Array  # float32 [parts, heads, state_size]
    scratch: Array  # float32 [threads, scratch_row]
    logits: Array  # float32 [outputs, vocab]
    largest: Array  # float32 [outputs, SEGMENTS]: the largest of each part of a row of logits, or not a number
    places: Array  # int64 [outputs, SEGMENTS]: and where in the part
    taps: Array  # float32 [tokens, (heads + 2 kv_heads) · d]: q, k, v of layer TAP_LAYER as attention gets them


# ------------------------------------------------------------------------------------------ the phases


@kernel
def embed(sync, batch, model, weights, work):
    """x = the tokens' rows of the table."""
    table = weights.matrices[model.layers * PER_LAYER]
    t = claim(sync, 0, 1)
    while t < batch.command[TOKENS]:
        dequantize_row(weights.arena, table, batch.ids[t], work.x, t * model.hidden_row)
        t = claim(sync, 0, 1)


@kernel
def norm_rows(sync, batch, model, weights, work, norm_at, residual):
    """x += y if there is a residual yet; h = norm(x), quantized for the products that follow."""
    t = claim(sync, 0, 1)
    while t < batch.command[TOKENS]:
        norm_row(model, weights, work, t, t, norm_at, residual)
        t = claim(sync, 0, 1)


@kernel
def norm_row(model, weights, work, t, row, norm_at, residual):
    """Row `row` of h = norm of token t's x (+ y)."""
    size = model.hidden_row
    if residual:
        add_row(work.x, t * size, work.y, t * size, size)
    rms_norm_row(work.x, t * size, model.hidden, size, weights.vectors, norm_at, model.eps, work.h, row * size)
    quantize_row(model, work, work.h, row, size)


@kernel
def quantize_row(model, work, x, row, size):
    """Quantize row `row` of the next product's input."""
    if model.quantized:
        groups = size // 32
        quantize_groups(x, 0, work.xq, work.xs, work.xinfo, row * groups, (row + 1) * groups)


@kernel
def rotate_and_cache(sync, batch, model, weights, work, layer, vectors_at):
    """For each token and key/value head: bias, norm and rotate its query heads and its key; store key and value."""
    group, tokens = model.heads // model.kv_heads, batch.command[TOKENS]
    # Neighbours share the cache lines of a block's keys, so one thread takes a few of them.
    runs = (tokens + RUN_TOKENS - 1) // RUN_TOKENS
    item = claim(sync, 0, 1)
    while item < runs * model.kv_heads:
        run, g = item // model.kv_heads, item % model.kv_heads
        k, v = model.heads + g, model.heads + model.kv_heads + g
        for t in range(run * RUN_TOKENS, min((run + 1) * RUN_TOKENS, tokens)):
            block = batch.tables[batch.table_at[t] + batch.positions[t] // BLOCK]
            keys = keys_offset(work.pool, block, layer, g)
            ask_for_keys(work.pool, keys)
            for h in range(g * group, (g + 1) * group):
                prepare_head(batch, model, weights, work, t, h, vectors_at, 2 * model.hidden_row)
            prepare_head(batch, model, weights, work, t, k, vectors_at, 2 * model.hidden_row + model.head_dim)
            add_bias(model, weights, work, t, v, vectors_at)
            slot = batch.positions[t] % BLOCK
            write_key(work.pool, keys, slot, work.qkv, head_at(model, t, k))
            write_value(work.pool, keys + work.pool.half, slot, work.qkv, head_at(model, t, v))
        item = claim(sync, 0, 1)


@kernel
def head_at(model, t, head):
    """Where one head of token t begins in `Work.qkv`; heads count over q, k and v."""
    return (t * (model.heads + 2 * model.kv_heads) + head) * model.head_dim


@kernel
def prepare_head(batch, model, weights, work, t, head, vectors_at, norm):
    """Bias, norm over the head's d values, rotation: what is done to q and k, each where the family has it."""
    at, d = head_at(model, t, head), model.head_dim
    add_bias(model, weights, work, t, head, vectors_at)
    if model.qk_norm:
        rms_norm_row(work.qkv, at, d, d, weights.vectors, vectors_at + norm, model.eps, work.qkv, at)
    rope_row(work.qkv, at, d, batch.cos, batch.sin, t * (d // 2))


@kernel
def add_bias(model, weights, work, t, head, vectors_at):
    """q, k or v + its bias."""
    if model.qkv_bias:
        d = model.head_dim
        bias = vectors_at + 2 * model.hidden_row + 2 * d + head * d
        add_row(work.qkv, head_at(model, t, head), weights.vectors, bias, d)


@kernel
def tap(sync, batch, model, work):
    """Copy q, k and v of all tokens as attention gets them, for whoever looks inside."""
    size = (model.heads + 2 * model.kv_heads) * model.head_dim
    t = claim(sync, 1, 1)
    while t < batch.command[TOKENS]:
        copy_row(work.qkv, t * size, work.taps, t * size, size)
        t = claim(sync, 1, 1)


@kernel
def attend(sync, tid, batch, model, weights, work, layer):
    """o = attention(q, k, v): tiles of neighbouring tokens, and single tokens' chunks, for each key/value head."""
    d, group = model.head_dim, model.heads // model.kv_heads
    base = tid * model.scratch_row
    item = claim(sync, 0, 1)
    while item < batch.command[TILES] * model.kv_heads:
        tile, g = item // model.kv_heads, item % model.kv_heads
        t, tokens = batch.tiles[2 * tile], batch.tiles[2 * tile + 1]
        history = History(work.pool, batch.tables, batch.table_at[t], layer, g, weights.windows[layer])
        attend_tile(
            history, group, work.scratch, base, work.qkv, head_at(model, t, g * group), head_at(model, 1, 0),
            tokens, batch.positions[t], work.o, t * model.o_row + g * group * d, model.o_row,
        )  # fmt: skip
        item = claim(sync, 0, 1)
    item = claim(sync, 1, 1)
    while item < batch.command[PARTS] * model.kv_heads:
        part, g = item // model.kv_heads, item % model.kv_heads
        t, chunk = batch.parts[2 * part], batch.parts[2 * part + 1]
        history = History(work.pool, batch.tables, batch.table_at[t], layer, g, weights.windows[layer])
        attend_part(
            history, group, work.scratch, base, work.qkv, head_at(model, t, g * group), batch.positions[t], chunk,
            work.parts, (part * model.heads + g * group) * state_size(d),
        )  # fmt: skip
        item = claim(sync, 1, 1)


@kernel
def finish_attention(sync, tid, batch, model, work):
    """Join the chunks of tokens that were computed in parts; quantize o."""
    d = model.head_dim
    stride = model.heads * state_size(d)
    t = claim(sync, 0, 1)
    while t < batch.command[TOKENS]:
        if batch.part_at[t] >= 0:
            for h in range(model.heads):
                join_parts(
                    work.parts, batch.part_at[t] * stride + h * state_size(d), stride, batch.positions[t] // CHUNK + 1,
                    d, work.scratch, tid * model.scratch_row, work.o, t * model.o_row + h * d,
                )  # fmt: skip
        quantize_row(model, work, work.o, t, model.o_row)
        t = claim(sync, 0, 1)


@kernel
def activate(sync, batch, model, work):
    """act = silu(gate) · up, quantized; a few groups of a token at a time."""
    size = model.mlp_row
    share = 32 * ACTIVATION_GROUPS
    shares = (size + share - 1) // share
    item = claim(sync, 0, 1)
    while item < batch.command[TOKENS] * shares:
        t, first = item // shares, item % shares * share
        n = min(share, size - first)
        gate = t * 2 * size + first
        swiglu_row(work.gate_up, gate, work.gate_up, gate + size, n, work.act, t * size + first)
        if model.quantized:
            group = (t * size + first) // 32
            quantize_groups(work.act, 0, work.xq, work.xs, work.xinfo, group, group + n // 32)
        item = claim(sync, 0, 1)


@kernel
def norm_outputs(sync, batch, model, weights, work, norm_at):
    """Row r of h = the last norm of the r-th token that is asked for."""
    r = claim(sync, 0, 1)
    while r < batch.command[OUTPUTS]:
        norm_row(model, weights, work, batch.outputs[r], r, norm_at, True)
        r = claim(sync, 0, 1)


@kernel
def survey_logits(sync, batch, work, vocab):
    """Find the largest logit of each part of each row, while the row is still in the caches."""
    size = segment_size(vocab)
    item = claim(sync, 0, 1)
    while item < batch.command[OUTPUTS] * SEGMENTS:
        row, first = item // SEGMENTS, item % SEGMENTS * size
        start, end = row * vocab + min(first, vocab), row * vocab + min(first + size, vocab)
        survey(work.logits, start, end, work.largest, work.places, item)
        item = claim(sync, 0, 1)


@kernel
def segment_size(vocab):
    """Logits in one of the SEGMENTS parts of a row, but for the last."""
    return (vocab + SEGMENTS - 1) // SEGMENTS


# ------------------------------------------------------------------------------------------ the step


@kernel
def vectors_per_layer(model):
    """Elements of `Weights.vectors` per layer."""
    return 2 * model.hidden_row + (2 + model.heads + 2 * model.kv_heads) * model.head_dim


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


@cache
def step_for(formats: frozenset[str]) -> Callable[..., Any]:
    """The step for matrices of these formats (names of `formats.FORMATS`), compiled for no others."""
    matmul = matmul_for(formats)

    @kernel
    def multiply(sync, tid, n, model, weights, work, first, count, x, tokens, out, out_stride, second, third):
        """`count` matrices from `first` on, all of the same input x; they write from column 0, `second`, `third` on.

        A thread knows which rows are its next before it begins with those it has, so their weights are asked for in
        time. At the end of a phase they are the first ones of the next.
        """
        inputs = Inputs(x, 0, work.xq, work.xs, work.xinfo, tokens)
        item = tid
        i, block = find_blocks(weights, first, count, item)
        while i < count:
            item = n + claim(sync, 0, 1)
            next_i, next_block = find_blocks(weights, first, count, item)
            if next_i < count:
                ahead = weights_at(weights.matrices[first + next_i], next_block)
            else:
                following = min(first + count, len(weights.matrices) - 1)
                ahead = weights_at(weights.matrices[following], tid * ROW_BLOCKS)
            matrix = weights.matrices[first + i]
            outputs = Outputs(out, 0 if i == 0 else second if i == 1 else third, out_stride)
            matmul(
                weights.arena, matrix, inputs, outputs, block, min(block + ROW_BLOCKS, matrix.blocks), ahead,
                work.scratch, tid * model.scratch_row,
            )  # fmt: skip
            i, block = next_i, next_block

    @kernel
    def step(tid, n, sync, batch, model, weights, work):
        tokens = batch.command[TOKENS]
        heads, kv_heads, d = model.heads, model.kv_heads, model.head_dim
        embed(sync, batch, model, weights, work)
        if barrier(sync, n):
            return
        for layer in range(model.layers):
            vectors, matrices = layer * vectors_per_layer(model), layer * PER_LAYER

            norm_rows(sync, batch, model, weights, work, vectors, layer > 0)
            if barrier(sync, n):
                return
            multiply(
                sync, tid, n, model, weights, work, matrices + Q, 3, work.h, tokens,
                work.qkv, (heads + 2 * kv_heads) * d, heads * d, (heads + kv_heads) * d,
            )  # fmt: skip
            if barrier(sync, n):
                return
            rotate_and_cache(sync, batch, model, weights, work, layer, vectors)
            if barrier(sync, n):
                return
            if batch.command[TAP_LAYER] == layer:
                tap(sync, batch, model, work)
            attend(sync, tid, batch, model, weights, work, layer)
            if barrier(sync, n):
                return
            finish_attention(sync, tid, batch, model, work)
            if barrier(sync, n):
                return
            multiply(
                sync, tid, n, model, weights, work, matrices + O, 1, work.o, tokens, work.y, model.hidden_row, 0, 0
            )
            if barrier(sync, n):
                return

            norm_rows(sync, batch, model, weights, work, vectors + model.hidden_row, True)
            if barrier(sync, n):
                return
            multiply(
                sync, tid, n, model, weights, work, matrices + GATE, 2, work.h, tokens,
                work.gate_up, 2 * model.mlp_row, model.mlp_row, 0,
            )  # fmt: skip
            if barrier(sync, n):
                return
            activate(sync, batch, model, work)
            if barrier(sync, n):
                return
            multiply(
                sync, tid, n, model, weights, work, matrices + DOWN, 1, work.act, tokens, work.y, model.hidden_row, 0, 0
            )
            if barrier(sync, n):
                return

        norm_outputs(sync, batch, model, weights, work, model.layers * vectors_per_layer(model))
        if barrier(sync, n):
            return
        if batch.command[WANT_LOGITS] != 0:
            head = model.layers * PER_LAYER + 1
            multiply(
                sync, tid, n, model, weights, work, head, 1, work.h, batch.command[OUTPUTS],
                work.logits, weights.matrices[head].rows, 0, 0,
            )  # fmt: skip
            if barrier(sync, n):
                return
            survey_logits(sync, batch, work, weights.matrices[head].rows)

    return step
