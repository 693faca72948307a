"""What x86 processors can do beyond `Portable`."""

from __future__ import annotations

from typing import Any, ClassVar

from llvmlite import ir
from numba.core.types import float16, float32, int8, int16, int32, uint8, uint16

from qkv.kernels.isa.portable import Portable, clamped_to_half
from qkv.kernels.values import Value, Vector, call

_AVX2 = frozenset({"avx2", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


class AVX2(Portable):
    """Products of bytes in pairs, float16 conversions, 16 registers of 256 bits."""

    name = "avx2"
    needs: ClassVar[tuple[frozenset[str], ...]] = (_AVX2,)

    def multiply_add_bytes(self, a: Value, b: Value) -> Value:
        return call("llvm.x86.avx2.pmadd.ub.sw", Vector(int16, 16), a, b)

    def multiply_add_shorts(self, a: Value, b: Value) -> Value:
        return call("llvm.x86.avx2.pmadd.wd", Vector(int32, 8), a, b)

    def with_sign_of(self, a: Value, b: Value) -> Value:
        return call("llvm.x86.avx2.psign.b", a.kind, a, b)

    def byte_at(self, words: Value, place: Value) -> Value:
        a, size = words.bits(int8), words.kind.bytes
        name = "avx512.pshuf.b.512" if size == 64 else "avx2.pshuf.b"
        control = _byte_shuffles(words.builder, size, (place >> 3) & 3)
        return call(f"llvm.x86.{name}", a.kind, a, Value(a.builder, control, a.kind)).bits(words.element)

    def pinned(self, value: Value) -> Value:
        # LLVM would add as a tree, whose leaves do not fit the registers. This says nothing but "be in one now".
        move = ir.FunctionType(value.ir.type, [value.ir.type])
        return Value(value.builder, value.builder.asm(move, "", "=x,0", [value.ir], False), value.kind)

    def half_to_float(self, a: Value) -> Value:
        return a.bits(float16).to(float32)

    def float_to_half(self, a: Value) -> Value:
        return clamped_to_half(a).to(float16).bits(uint16)


def _byte_shuffles(builder: Any, size: int, number: Value) -> Any:
    """The shuffle, of a table of 4, that brings byte `number` of every 4 to their front, and zeros to the others."""
    byte = ir.IntType(8)
    vectors = ir.VectorType(byte, size)
    name = f"qkv_byte_shuffles_{size}"
    table = builder.module.globals.get(name)
    if table is None:
        lanes = [[at % 16 + b if at % 4 == 0 else 128 for at in range(size)] for b in range(4)]
        constant = ir.Constant(ir.ArrayType(vectors, 4), [ir.Constant(vectors, each) for each in lanes])
        table = ir.GlobalVariable(builder.module, constant.type, name)
        table.initializer, table.global_constant, table.linkage = constant, True, "internal"
    return builder.load(builder.gep(table, [ir.IntType(32)(0), number.ir]))


class AVX512(AVX2):
    """32 registers of 512 bits, but no VNNI: for products as AVX2."""

    name = "avx512"
    needs = (_AVX2 | _AVX512,)
    attention_rows = 4


class VNNI(AVX2):
    """Four products of bytes added to an int32 at once. One factor is unsigned, so int8 weights are moved by 128."""

    name = "vnni"
    needs = (_AVX2 | {"avxvnni"}, _AVX2 | {"avx512vnni", "avx512vl"})
    tile_blocks = 2
    int8_offset = 128

    def int8_weights(self, w: Value) -> Value:
        return w.bits(uint8) ^ 128

    def start_dot(self, signed: bool, start: Value) -> Value:
        return start

    def add_dot(self, total: Value, w: Value, x: Value) -> Value:
        return call(f"llvm.x86.avx512.vpdpbusd.{32 * total.lanes}", total.kind, total, w, x)

    def dot_shorts(self, total: Value, a: Value, b: Value) -> Value:
        a, b = a.bits(int32), b.bits(int32)
        return call(f"llvm.x86.avx512.vpdpwssd.{32 * total.lanes}", total.kind, total, a, b)


class VNNI512(VNNI):
    """The same on registers of 512 bits."""

    name = "vnni512"
    needs = (_AVX2 | _AVX512 | {"avx512vnni"}, _AVX2 | _AVX512 | {"avxvnni"})
    panel_blocks = 2
    attention_rows = 4
