"""What every processor can do. Other instruction sets must give the same, bit by bit."""

from __future__ import annotations

from typing import ClassVar

from numba.core import types
from numba.core.types import float32, int8, int16, int32, uint16, uint32

from qkv.kernels.values import Value, Vector, call, constant, select


class Portable:
    """An instruction set. A class of another one says which features it needs, and replaces what it can do better.

    The products of weights and activations are sums over 4 columns at a time. Each lane of 32 bits has 4 bytes of a row
    of weights, and 4 activations within ±127. `start_dot`, `add_dot` for each 4 columns and `end_dot` make the sum.
    """

    name: ClassVar[str] = "portable"
    needs: ClassVar[tuple[frozenset[str], ...]] = (frozenset(),)
    """Sets of LLVM's processor features; one of them must be there."""
    tile_blocks: ClassVar[int] = 1
    """Blocks of 8 rows whose sums with 4 tokens fit the registers."""
    panel_blocks: ClassVar[int] = 1
    """Blocks of 8 rows in one vector of a panel."""
    attention_rows: ClassVar[int] = 2
    """Rows of attention whose sums of 32 numbers fit the registers."""
    int8_offset: ClassVar[int] = 0
    """What `int8_weights` adds to each weight."""

    # ------------------------------------------------------------------------------------------ sums of products

    def int8_weights(self, w: Value) -> Value:
        """Bytes of signed weights, as `add_dot` takes them."""
        return w.bits(int8)

    def start_dot(self, signed: bool, start: Value) -> Value:
        """The running sum before any product: `start`, or zeros where `end_dot` adds that. signed: as the weights."""
        return start if signed else constant(Vector(int16, 2 * start.lanes), 0)

    def add_dot(self, total: Value, w: Value, x: Value) -> Value:
        """total + w·x. The weights are signed bytes, or 0 … 15 if unsigned."""
        if w.signed:
            positive = select(w < 0, w.like(0) - w, w)
            products = self.multiply_add_bytes(positive.bits(types.uint8), self.with_sign_of(x, w))
            return self.pinned(total + self.add_pairs(products))
        return self.pinned(self.multiply_add_bytes(w, x) + total)  # 8 times 2·15·127 is 30,480: fits int16

    def end_dot(self, total: Value, start: Value) -> Value:
        """start + all products, as int32."""
        return total if total.element == int32 else self.add_pairs(total) + start

    def dot_shorts(self, total: Value, a: Value, b: Value) -> Value:
        """total0 + a0·b0 + a1·b1, … over pairs of int16."""
        return total + self.multiply_add_shorts(a, b)

    def add_pairs(self, a: Value) -> Value:
        """a0 + a1, a2 + a3, … of int16, as int32."""
        return self.multiply_add_shorts(a, a.like(1))

    def multiply_add_bytes(self, a: Value, b: Value) -> Value:
        """a0·b0 + a1·b1, … over pairs of unsigned and signed bytes, saturated to int16."""
        even, odd = _pairs(a.to(uint16).bits(int16) * b.to(int16))
        return call(f"llvm.sadd.sat.v{even.lanes}i16", even.kind, even, odd)

    def multiply_add_shorts(self, a: Value, b: Value) -> Value:
        """a0·b0 + a1·b1, … over pairs of int16, as int32."""
        even, odd = _pairs(a.to(int32) * b.to(int32))
        return even + odd

    def with_sign_of(self, a: Value, b: Value) -> Value:
        """a·sign(b) of bytes, with sign(0) = 0. a must not be -128."""
        zero = a.like(0)
        return select(b < 0, zero - a, select(b.equals(0), zero, a))

    def byte_at(self, words: Value, place: Value) -> Value:
        """One byte of every 32 bits; the lower 5 bits of `place` are 8 times its number."""
        return (words >> (place & 31).in_lanes(words.lanes)) & 255

    def pinned(self, value: Value) -> Value:
        """The value, in a register, here: some compilers' order of sums needs more registers than there are."""
        return value

    # ------------------------------------------------------------------------------------------ float16

    def half_to_float(self, a: Value) -> Value:
        """float16 bits as float32, exactly."""
        wide = a.to(uint32)
        sign = (wide & 0x8000) << 16
        magnitude = (wide & 0x7FFF) << 13
        infinity = 0x7C00 << 13
        normal = magnitude + ((127 - 15) << 23)
        # A subnormal half is an integer times 2^-24: give it the exponent of 2^-14 and take 2^-14 away again.
        subnormal = ((normal + (1 << 23)).bits(float32) - 2.0**-14).bits(uint32)
        quiet = select(magnitude > infinity, magnitude.like(0x400000), magnitude.like(0))  # as the instruction does
        special = (normal + ((128 - 16) << 23)) | quiet
        exponent = magnitude & infinity
        result = select(exponent.equals(0), subnormal, normal)
        return (select(exponent.equals(infinity), special, result) | sign).bits(float32)

    def float_to_half(self, a: Value) -> Value:
        """float32 as float16 bits, clamped to ±65504, then rounded to nearest even. Not-a-number stays so."""
        bits = clamped_to_half(a).bits(uint32)
        sign = (bits >> 16) & 0x8000
        magnitude = bits & 0x7FFFFFFF
        # Below 2^-14 the half is subnormal: adding 0.5 moves its last bit to the float's last bit, and rounds.
        subnormal = (magnitude.bits(float32) + 0.5).bits(uint32) - 0x3F000000
        odd = (magnitude >> 13) & 1
        normal = (magnitude + (0xFFF - (112 << 23)) + odd) >> 13
        nan = ((magnitude >> 13) & 0x3FF) | 0x7E00
        result = select(magnitude < (113 << 23), subnormal, normal)
        return (select(magnitude > 0x7F800000, nan, result) | sign).to(uint16)


def _pairs(value: Value) -> tuple[Value, Value]:
    return value.shuffled(range(0, value.lanes, 2)), value.shuffled(range(1, value.lanes, 2))


def clamped_to_half(a: Value) -> Value:
    """float32 within ±65504, the largest float16."""
    a = select(a > 65504.0, 65504.0, a)
    return select(a < -65504.0, -65504.0, a)
