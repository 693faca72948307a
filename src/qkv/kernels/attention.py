# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Attention as compiled kernels: the scores, mask, softmax and convex sum of `qkv.model.attention`, on a paged cache.

The scores of a row are never all there at once. Positions come in blocks of 32, counted from position 0, and each row
keeps three things while it walks over them: the largest score so far `m`, the sum of e^(s - m) so far `l`, and the sum
of e^(s - m) · v so far `o`. A larger score rescales what is there (online softmax: Milakov & Gimelshein, 2018).
After 512 positions, a chunk, the row starts afresh, and the chunks' (m, l, o) are joined by one function, in order.
So chunks may be computed by different threads, and a row has the same bits whichever way it was computed.

A *row* is one query head of one token. Rows that read the same key/value head are computed together on a block
that was converted to float32 once.

    scores   s_j = (Σ_i q_i·k_ji) / √d     each sum in the order of i, one rounding per term (fma)
    mask     j > position: -inf before the softmax
    weights  e^(s_j - m), exactly 0 for the future
    output   o = Σ_j weight_j · v_j / l    in the order of j; values after the row's position are not touched
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from qkv.kernels.kvcache import KV_F16, KV_F32, KV_INT8, NUMBER_BYTES, keys_offset, read_block
from qkv.kernels.memory import load, store, zeros
from qkv.kernels.simd import exp, first_lane, fma, lane_numbers, max_lanes, maximum, select, splat, sum_lanes
from qkv.kernels.sizes import BLOCK, GROUP
from qkv.kernels.sums import WIDE_ROWS, add_term, load_sums, store_sums
from qkv.kernels.values import f32x8, f32x16
from qkv.runtime.jit import kernel

CHUNK_BLOCKS = 16
CHUNK = CHUNK_BLOCKS * BLOCK
"""Positions after which a row's running softmax starts afresh."""


class History(NamedTuple):
    """What a row may look at: the keys and values of one key/value head of a sequence, in one layer."""

    pool: Any  # `kvcache.Pool`
    tables: Any  # int64: block numbers
    table_at: int  # where those of the sequence begin
    layer: int
    kv_head: int
    window: int  # a row sees its newest `window` positions; 0: all


class Block(NamedTuple):
    """The keys and values of one block: float32 in scratch memory if converted, else as the pool has them."""

    converted: bool
    keys: int  # where in scratch memory
    values: int
    at: int  # the byte in the pool where its keys begin
    ahead: int  # the same of the block that comes after it


class Numbers(NamedTuple):
    """The numbers of a block as they are read."""

    array: Any
    keys: int  # where in the array
    values: int
    scales: Any  # float32: those of int8 numbers
    key_scales: int  # where in `scales`
    value_scales: int
    keys_ahead: int  # where in the array memory will be needed soon
    values_ahead: int


class Rows(NamedTuple):
    """A few rows of a tile that see the same positions of a block: where in scratch memory their numbers are."""

    scratch: Any  # float32
    queries: int
    scores: int  # of one block, then its weights
    states: int


LOWEST = np.float32(-3.0e38)  # the maximum of nothing: finite, so that LOWEST - LOWEST is 0 and not NaN
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def padded(d):
    """A head's size, rounded up to a multiple of 32."""
    return (d + 31) // 32 * 32


@kernel
def state_size(d):
    """Elements of a row's state: o (padded), m, l, by how much o shrinks next, and 5 unused ones."""
    return padded(d) + 8


@kernel
def padded_group(group):
    """Rows that a token has in a tile: the heads of a key/value head, and an unused one if their number is odd."""
    return (group + 1) // 2 * 2


# A thread's scratch memory, as offsets in float32 elements: a block's keys and values, the tile's queries, one block's
# scores for each row, each row's state within the chunk, and over all chunks.


@kernel
def scratch_regions(d, rows):
    """Offsets of (keys, values, queries, scores, chunk states, total states, the end)."""
    values = BLOCK * d
    queries = values + BLOCK * padded(d)
    scores = queries + rows * padded(d)
    chunk = scores + rows * BLOCK
    total = chunk + rows * state_size(d)
    return 0, values, queries, scores, chunk, total, total + rows * state_size(d)


# ------------------------------------------------------------------------------------------ one block, a few rows


@kernel
def mask(scratch, scores, first, last, scale):
    """Scale a block's 32 scores; those outside first … last become -inf. Returns the largest."""
    largest = splat(f32x8, LOWEST)
    for i in range(0, BLOCK, 8):
        s = load(f32x8, scratch, scores + i) * scale
        if first > 0 or last < BLOCK - 1:
            j = lane_numbers() + i
            s = select(j > last, MINUS_INFINITY, s)
            s = select(j < first, MINUS_INFINITY, s)
        store(scratch, scores + i, s)
        largest = maximum(s, largest)
    return max_lanes(largest)


@kernel
def weigh(scratch, scores, m):
    """Turn a block's 32 scores into e^(s - m), which is exactly 0 for s = -inf. Returns their sum."""
    w0 = exp(load(f32x8, scratch, scores) - m)
    w1 = exp(load(f32x8, scratch, scores + 8) - m)
    w2 = exp(load(f32x8, scratch, scores + 16) - m)
    w3 = exp(load(f32x8, scratch, scores + 24) - m)
    store(scratch, scores, w0)
    store(scratch, scores + 8, w1)
    store(scratch, scores + 16, w2)
    store(scratch, scores + 24, w3)
    return sum_lanes((w0 + w1) + (w2 + w3))


@kernel
def exp_of(x):
    """e^x of one number, with the bits it has in a vector."""
    return first_lane(exp(splat(f32x8, x)))


@kernel
def soften(scratch, scores, first, last, scale, m_at):
    """Scores → weights, and m and l of the row's state with them; the state's third number is how much o shrinks."""
    m = scratch[m_at]
    largest = mask(scratch, scores, first, last, scale)
    decay = np.float32(1)  # e^0
    if largest > m:
        decay = exp_of(m - largest)
        m = largest
    scratch[m_at] = m
    scratch[m_at + 1] = scratch[m_at + 1] * decay + weigh(scratch, scores, m)
    scratch[m_at + 2] = decay


@cache
def _add_values(kind: int, rows: int, unit: int, vectors: int) -> Any:
    """The kernel for the outputs of `rows` rows in 16·vectors dimensions; `kind` and `unit` as in `_rows_on`."""

    @kernel
    def add_values(these, d, numbers, first, last, i):
        """o = o · decay + Σ_j weight_j · v_j, j = first … last of the block, in the dimensions from i on."""
        scratch, o = these.scratch, these.states
        acc = load_sums(rows, vectors, scratch, o + i, state_size(d), o + padded(d) + 2)
        for j in range(first, last + 1):
            place = (j * d + i) * unit
            acc = add_term(
                kind, 1, acc, scratch, these.scores + j, BLOCK, numbers.array, numbers.values + place, numbers.scales,
                numbers.value_scales + j * (d // GROUP) + i // GROUP, numbers.values_ahead + place,
            )  # fmt: skip
        store_sums(acc, scratch, o + i, state_size(d))

    return add_values


@cache
def _rows_on(kind: int, rows: int, unit: int) -> Any:
    """The kernel that takes `rows` rows over numbers of `kind`, in an array where each takes `unit` elements."""
    add_32, add_16 = _add_values(kind, rows, unit, 2), _add_values(kind, rows, unit, 1)

    @kernel
    def rows_on(these, d, numbers, first, last):
        """Scores → softmax → convex sum, over positions first … last of the block. Lanes are positions, then values."""
        scratch, w = these.scratch, these.scores
        acc = zeros(f32x16, rows, 2)
        for i in range(d):
            line = i * (BLOCK * unit)
            acc = add_term(
                kind, 0, acc, scratch, these.queries + i, padded(d), numbers.array, numbers.keys + line, numbers.scales,
                numbers.key_scales + i // GROUP * BLOCK, numbers.keys_ahead + line,
            )  # fmt: skip
        store_sums(acc, scratch, w, BLOCK)
        scale = np.float32(1) / np.sqrt(np.float32(d))
        for r in range(rows):
            soften(scratch, w + r * BLOCK, first, last, scale, these.states + r * state_size(d) + padded(d))
        whole = d // 32 * 32
        for i in range(0, whole, 32):
            add_32(these, d, numbers, first, last, i)
        if whole < d:
            add_16(these, d, numbers, first, last, whole)

    return rows_on


@cache
def _rows_step(rows: int) -> Any:
    """The kernel that takes `rows` rows over a block."""
    on_f32, on_f16, on_int8 = (_rows_on(kind, rows, NUMBER_BYTES[kind]) for kind in (KV_F32, KV_F16, KV_INT8))
    on_converted = _rows_on(KV_F32, rows, 1)

    @kernel
    def rows_step(pool, block, these, first, last):
        d, half, at, ahead = pool.head_dim, pool.half, block.at, block.ahead
        scales = (at + BLOCK * d) // 4
        numbers = Numbers(pool.bytes, at, at + half, pool.floats, scales, scales + half // 4, ahead, ahead + half)
        if block.converted:
            scratch = these.scratch
            on_converted(these, d, Numbers(scratch, block.keys, block.values, scratch, 0, 0, 0, 0), first, last)
        elif pool.kind == KV_F32:
            on_f32(these, d, numbers, first, last)
        elif pool.kind == KV_F16:
            on_f16(these, d, numbers, first, last)
        else:
            on_int8(these, d, numbers, first, last)

    return rows_step


two_rows, many_rows = _rows_step(2), _rows_step(WIDE_ROWS)


# ------------------------------------------------------------------------------------------ states of rows


@kernel
def clear_states(array, at, rows, d):
    """The states of rows that have seen nothing: o = 0, m = LOWEST, l = 0."""
    for r in range(rows):
        state = at + r * state_size(d)
        for i in range(0, state_size(d), 8):
            store(array, state + i, splat(f32x8, 0))
        array[state + padded(d)] = LOWEST


@kernel
def join(array, into, other, later, d):
    """Join the state of a row's next chunk, other[later …], into its state over the chunks before.

    The softmax over both: m = max(m, m'), and sums made with the smaller maximum shrink. Joining a state that saw
    nothing changes no bit.
    """
    size = padded(d)
    m_into, m_later = array[into + size], other[later + size]
    m = m_later if m_later > m_into else m_into
    decay_into, decay_later = exp_of(m_into - m), exp_of(m_later - m)
    for i in range(0, size, 8):
        o = load(f32x8, array, into + i) * decay_into
        store(array, into + i, fma(load(f32x8, other, later + i), decay_later, o))
    array[into + size] = m
    array[into + size + 1] = array[into + size + 1] * decay_into + other[later + size + 1] * decay_later


@kernel
def write_output(array, state, d, out, out_at):
    """o / l of a finished row → out[out_at : out_at + d]."""
    total = array[state + padded(d) + 1]
    for i in range(0, d, 8):
        store(out, out_at + i, load(f32x8, array, state + i) / total)


# ------------------------------------------------------------------------------------------ one tile


@kernel
def load_queries(q, q_at, q_stride, tokens, group, d, scratch, queries):
    """Copy a tile's queries, [tokens, group·d] at q[q_at + t·q_stride], to padded rows; unused rows become 0."""
    rows = padded_group(group)
    for t in range(tokens):
        for g in range(rows):
            row = queries + (t * rows + g) * padded(d)
            for i in range(0, d, 8):
                if g < group:
                    store(scratch, row + i, load(f32x8, q, q_at + t * q_stride + g * d + i))
                else:
                    store(scratch, row + i, splat(f32x8, 0))


@kernel
def attend_chunk(history, group, scratch, base, tokens, position, chunk):
    """The states of a tile's rows within one chunk of 512 positions.

    The tile: `tokens` tokens of one sequence, the first at `position`; its queries lie in the thread's scratch memory
    at `base`. `group` query heads read the key/value head.
    """
    pool, window, d = history.pool, history.window, history.pool.head_dim
    rows = tokens * padded_group(group)
    keys, values, queries, scores, states, _, _ = scratch_regions(d, rows)
    clear_states(scratch, base + states, rows, d)
    converted = rows > 2 * WIDE_ROWS  # many rows: make float32 of the block once
    newest = position + tokens - 1
    for b in range(chunk * CHUNK_BLOCKS, min((chunk + 1) * CHUNK_BLOCKS, newest // BLOCK + 1)):
        start = b * BLOCK
        if window > 0 and start + BLOCK <= position - window + 1:
            continue
        at, ahead = history_block(history, b), history_block(history, min(b + 1, newest // BLOCK))
        block = Block(converted, base + keys, base + values, at, ahead)
        if converted:
            read_block(pool, at, min(BLOCK, newest - start + 1), block.keys, block.values, scratch)
        r = 0
        while r < rows:
            # Rows of several tokens go together where all of them see the whole block.
            t, t_end = r // padded_group(group), (r + WIDE_ROWS - 1) // padded_group(group)
            first, last = seen(window, position + t_end, start), min(BLOCK - 1, position + t - start)
            many = r + WIDE_ROWS <= rows and (t == t_end or (first == 0 and last == BLOCK - 1))
            if not many:
                first = seen(window, position + t, start)
            if first <= last:
                q, w, o = queries + r * padded(d), scores + r * BLOCK, states + r * state_size(d)
                these = Rows(scratch, base + q, base + w, base + o)
                if many:
                    many_rows(pool, block, these, first, last)
                else:
                    two_rows(pool, block, these, first, last)
            r += WIDE_ROWS if many else 2


@kernel
def seen(window, position, start):
    """The first place in a block from position `start` on that a token at `position` sees."""
    return max(0, position - start - window + 1) if window > 0 else 0


@kernel
def history_block(history, b):
    """The byte where the keys of the sequence's b-th block begin."""
    return keys_offset(history.pool, history.tables[history.table_at + b], history.layer, history.kv_head)


@kernel
def attend_tile(
    history, group, scratch, base, q, q_at, q_stride, tokens, position, out, out_at, out_stride
):  # fmt: skip
    """Attention of a tile over all its chunks → out[out_at + t·out_stride + g·d …], [tokens, group·d]."""
    d = history.pool.head_dim
    rows = padded_group(group)
    _, _, queries, _, states, totals, _ = scratch_regions(d, tokens * rows)
    load_queries(q, q_at, q_stride, tokens, group, d, scratch, base + queries)
    clear_states(scratch, base + totals, tokens * rows, d)
    for chunk in range((position + tokens - 1) // CHUNK + 1):
        attend_chunk(history, group, scratch, base, tokens, position, chunk)
        for r in range(tokens * rows):
            join(scratch, base + totals + r * state_size(d), scratch, base + states + r * state_size(d), d)
    for t in range(tokens):
        for g in range(group):
            state = base + totals + (t * rows + g) * state_size(d)
            write_output(scratch, state, d, out, out_at + t * out_stride + g * d)


@kernel
def attend_part(history, group, scratch, base, q, q_at, position, chunk, parts, parts_at):
    """One chunk of one token: the states of its `group` rows → parts[parts_at …], for `join_parts`."""
    d = history.pool.head_dim
    _, _, queries, _, states, _, _ = scratch_regions(d, padded_group(group))
    load_queries(q, q_at, 0, 1, group, d, scratch, base + queries)
    attend_chunk(history, group, scratch, base, 1, position, chunk)
    for i in range(0, group * state_size(d), 8):
        store(parts, parts_at + i, load(f32x8, scratch, base + states + i))


@kernel
def join_parts(parts, parts_at, stride, chunks, d, scratch, base, out, out_at):
    """Join a row's chunks, parts[parts_at + chunk·stride …], in order → its output."""
    clear_states(scratch, base, 1, d)
    for chunk in range(chunks):
        join(scratch, base, parts, parts_at + chunk * stride, d)
    write_output(scratch, base, d, out, out_at)
