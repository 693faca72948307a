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

from typing import Any, NamedTuple

import numpy as np

from qkv.kernels.jit import kernel
from qkv.kernels.kvcache import BLOCK, keys_offset, read_keys, read_values
from qkv.kernels.simd import (
    add,
    divide,
    exp,
    f32x8,
    first_lane,
    fma,
    lane_numbers,
    less_i32,
    load,
    max_lanes,
    maximum,
    multiply,
    select,
    splat,
    splat_i32,
    spread,
    store,
    subtract,
    sum_lanes,
)

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


LOWEST = np.float32(-3.0e38)  # the maximum of nothing: finite, so that LOWEST - LOWEST is 0 and not NaN
MINUS_INFINITY = np.float32(-np.inf)


@kernel
def padded(d):
    """A head's size, rounded up to a multiple of 32."""
    return (d + 31) // 32 * 32


@kernel
def state_size(d):
    """Elements of a row's state: o (padded), m, l, and 6 unused ones."""
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


# ------------------------------------------------------------------------------------------ one block, two rows


@kernel
def score_two_rows(scratch, q_a, q_b, keys, d, scores_a, scores_b):
    """<q, k_j> of two rows with the 32 keys of a block, whose lanes are positions: keys [d, 32]."""
    a0 = a1 = a2 = a3 = splat(np.float32(0))
    b0 = b1 = b2 = b3 = splat(np.float32(0))
    for i in range(d):
        qa = spread(f32x8, scratch, q_a + i)
        qb = spread(f32x8, scratch, q_b + i)
        k0 = load(f32x8, scratch, keys + i * BLOCK)
        k1 = load(f32x8, scratch, keys + i * BLOCK + 8)
        k2 = load(f32x8, scratch, keys + i * BLOCK + 16)
        k3 = load(f32x8, scratch, keys + i * BLOCK + 24)
        a0, a1, a2, a3 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qa, k2, a2), fma(qa, k3, a3)
        b0, b1, b2, b3 = fma(qb, k0, b0), fma(qb, k1, b1), fma(qb, k2, b2), fma(qb, k3, b3)
    store_block(scratch, scores_a, a0, a1, a2, a3)
    store_block(scratch, scores_b, b0, b1, b2, b3)


@kernel
def store_block(array, at, v0, v1, v2, v3):
    """Four vectors, one behind the other."""
    store(array, at, v0)
    store(array, at + 8, v1)
    store(array, at + 16, v2)
    store(array, at + 24, v3)


@kernel
def mask(scratch, scores, first, last, scale):
    """Scale a block's 32 scores; those outside first … last become -inf. Returns the largest."""
    largest = splat(LOWEST)
    for i in range(0, BLOCK, 8):
        j = add(lane_numbers(), splat_i32(np.int32(i)))
        s = multiply(load(f32x8, scratch, scores + i), splat(scale))
        s = select(less_i32(splat_i32(np.int32(last)), j), splat(MINUS_INFINITY), s)
        s = select(less_i32(j, splat_i32(np.int32(first))), splat(MINUS_INFINITY), s)
        store(scratch, scores + i, s)
        largest = maximum(s, largest)
    return max_lanes(largest)


@kernel
def weigh(scratch, scores, m):
    """Turn a block's 32 scores into e^(s - m), which is exactly 0 for s = -inf. Returns their sum."""
    w0 = exp(subtract(load(f32x8, scratch, scores), splat(m)))
    w1 = exp(subtract(load(f32x8, scratch, scores + 8), splat(m)))
    w2 = exp(subtract(load(f32x8, scratch, scores + 16), splat(m)))
    w3 = exp(subtract(load(f32x8, scratch, scores + 24), splat(m)))
    store_block(scratch, scores, w0, w1, w2, w3)
    return sum_lanes(add(add(w0, w1), add(w2, w3)))


@kernel
def exp_of(x):
    """e^x of one number, with the bits it has in a vector."""
    return first_lane(exp(splat(x)))


@kernel
def soften(scratch, scores, first, last, scale, m_at):
    """Scores → weights, and m and l of the row's state with them. Returns by how much o is to shrink."""
    m = scratch[m_at]
    largest = mask(scratch, scores, first, last, scale)
    larger = largest if largest > m else m
    decay = exp_of(m - larger)
    scratch[m_at] = larger
    scratch[m_at + 1] = scratch[m_at + 1] * decay + weigh(scratch, scores, larger)
    return decay


@kernel
def add_values(scratch, o_a, o_b, decay_a, decay_b, weights_a, weights_b, values, first, last, size):
    """o = o · decay + Σ_j weight_j · v_j for two rows, j = first … last of the block: values [32, size]."""
    for i in range(0, size, 32):
        a0, a1, a2, a3 = load_block(scratch, o_a + i, splat(decay_a))
        b0, b1, b2, b3 = load_block(scratch, o_b + i, splat(decay_b))
        for j in range(first, last + 1):
            wa = spread(f32x8, scratch, weights_a + j)
            wb = spread(f32x8, scratch, weights_b + j)
            v0 = load(f32x8, scratch, values + j * size + i)
            v1 = load(f32x8, scratch, values + j * size + i + 8)
            v2 = load(f32x8, scratch, values + j * size + i + 16)
            v3 = load(f32x8, scratch, values + j * size + i + 24)
            a0, a1, a2, a3 = fma(wa, v0, a0), fma(wa, v1, a1), fma(wa, v2, a2), fma(wa, v3, a3)
            b0, b1, b2, b3 = fma(wb, v0, b0), fma(wb, v1, b1), fma(wb, v2, b2), fma(wb, v3, b3)
        store_block(scratch, o_a + i, a0, a1, a2, a3)
        store_block(scratch, o_b + i, b0, b1, b2, b3)


@kernel
def load_block(array, at, factor):
    """Four vectors, one behind the other, each times a factor."""
    return (
        multiply(load(f32x8, array, at), factor),
        multiply(load(f32x8, array, at + 8), factor),
        multiply(load(f32x8, array, at + 16), factor),
        multiply(load(f32x8, array, at + 24), factor),
    )


# ------------------------------------------------------------------------------------------ states of rows


@kernel
def clear_states(array, at, rows, d):
    """The states of rows that have seen nothing: o = 0, m = LOWEST, l = 0."""
    for r in range(rows):
        state = at + r * state_size(d)
        for i in range(0, state_size(d), 8):
            store(array, state + i, splat(np.float32(0)))
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
        o = multiply(load(f32x8, array, into + i), splat(decay_into))
        store(array, into + i, fma(load(f32x8, other, later + i), splat(decay_later), o))
    array[into + size] = m
    array[into + size + 1] = array[into + size + 1] * decay_into + other[later + size + 1] * decay_later


@kernel
def write_output(array, state, d, out, out_at):
    """o / l of a finished row → out[out_at : out_at + d]."""
    total = splat(array[state + padded(d) + 1])
    for i in range(0, d, 8):
        store(out, out_at + i, divide(load(f32x8, array, state + i), total))


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
                    store(scratch, row + i, splat(np.float32(0)))


@kernel
def attend_chunk(history, group, scratch, base, tokens, position, chunk):
    """The states of a tile's rows within one chunk of 512 positions.

    The tile: `tokens` tokens of one sequence, the first at `position`; its queries lie in the thread's scratch memory
    at `base`. `group` query heads read the key/value head.
    """
    pool, window, d = history.pool, history.window, history.pool.head_dim
    rows = padded_group(group)
    keys, values, queries, scores, states, _, _ = scratch_regions(d, tokens * rows)
    clear_states(scratch, base + states, tokens * rows, d)
    scale = np.float32(1) / np.sqrt(np.float32(d))
    newest = position + tokens - 1
    for b in range(chunk * CHUNK_BLOCKS, min((chunk + 1) * CHUNK_BLOCKS, newest // BLOCK + 1)):
        start = b * BLOCK
        if window > 0 and start + BLOCK <= position - window + 1:
            continue
        block = keys_offset(pool, history.tables[history.table_at + b], history.layer, history.kv_head)
        read_keys(pool, block, scratch, base + keys)
        slots = min(BLOCK, newest - start + 1)
        read_values(pool, block + pool.half, slots, scratch, base + values, padded(d))
        for t in range(tokens):
            last = min(BLOCK - 1, position + t - start)
            first = max(0, position + t - start - window + 1) if window > 0 else 0
            if first > last:
                continue
            for r in range(t * rows, (t + 1) * rows, 2):
                q = base + queries + r * padded(d)
                w = base + scores + r * BLOCK
                o = base + states + r * state_size(d)
                score_two_rows(scratch, q, q + padded(d), base + keys, d, w, w + BLOCK)
                decay_a = soften(scratch, w, first, last, scale, o + padded(d))
                decay_b = soften(scratch, w + BLOCK, first, last, scale, o + state_size(d) + padded(d))
                add_values(
                    scratch, o, o + state_size(d), decay_a, decay_b, w, w + BLOCK, base + values, first, last, padded(d)
                )


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
