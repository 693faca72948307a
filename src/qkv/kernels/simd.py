"""Vectors of numbers inside Numba kernels: types such as `f32x8`, and the operations on them.

Numba has no vector types, but LLVM has. A `Vector` below is a Numba type whose machine form is an LLVM vector, and
`operation` turns a few lines that emit LLVM code into a function that kernels can call:

    total = fma(load(f32x8, a, i), load(f32x8, b, i), total)

Addresses are an array and an index, never an integer cast to a pointer, and indices are not wrapped around as
`array[-1]` would be. No operation allocates, raises or counts references.

The environment variable QKV_SIMD, read once at import, picks one of three modes:

* `auto` (the default): AVX2 and F16C instructions where Numba's target has them, else the portable form;
* `portable`: plain LLVM vectors only. It gives the same bits as `auto`, so a processor can be checked against it;
* `checked`: as `auto`, and every load and store is checked against its array's bounds. A bad load gives zeros, a bad
  store writes nothing, and both are counted: see `faults`.

Two rules hold everywhere, so that modes and processors agree on every bit: comparisons and selections are spelled
out (`minimum(a, b)` is `a if a < b else b`), and rounding is to the nearest, ties to even.
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.codegen import get_host_cpu_features
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from qkv.errors import ParameterError

MODES = ("auto", "portable", "checked")


def _chosen_mode() -> str:
    mode = os.environ.get("QKV_SIMD") or "auto"
    if mode not in MODES:
        raise ParameterError(f"QKV_SIMD: unknown mode {mode!r}; choose one of {', '.join(MODES)}")
    return mode


def _target_features() -> frozenset[str]:
    """The processor features Numba compiles for: NUMBA_CPU_FEATURES if set, else this machine's."""
    chosen: str | None = getattr(numba.config, "CPU_FEATURES", None)
    spelled = get_host_cpu_features() if chosen is None else chosen  # type: ignore[no-untyped-call]
    return frozenset(name[1:] for name in spelled.split(",") if name.startswith("+"))


MODE = _chosen_mode()
CHECKED = MODE == "checked"
FEATURES = frozenset() if MODE == "portable" else _target_features()
HAS_AVX2 = "avx2" in FEATURES
HAS_F16C = "f16c" in FEATURES
HAS_VNNI = HAS_AVX2 and ("avxvnni" in FEATURES or {"avx512vnni", "avx512vl"} <= FEATURES)

# ---------------------------------------------------------------------------------------------------- types


class Vector(types.Type):
    """`lanes` numbers of one Numba scalar type side by side in a register. Comparisons give lanes of `boolean`."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        if element == types.float32:
            self.scalar = ir.FloatType()
        else:
            self.scalar = ir.IntType(1 if element == types.boolean else element.bitwidth)
        self.llvm = ir.VectorType(self.scalar, lanes)
        super().__init__(name=f"{element}x{lanes}")

    @property
    def bytes(self) -> int:
        """What a load or store moves."""
        return self.element.bitwidth * self.lanes // 8

    @property
    def is_float(self) -> bool:
        return bool(self.element == types.float32)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


f32x8 = Vector(types.float32, 8)
i32x8 = Vector(types.int32, 8)
i16x16 = Vector(types.int16, 16)
i8x32 = Vector(types.int8, 32)
u8x32 = Vector(types.uint8, 32)
i8x8 = Vector(types.int8, 8)
u16x8 = Vector(types.uint16, 8)  # eight float16 or bfloat16 numbers, as bits
mask8 = Vector(types.boolean, 8)

_i32x16 = ir.VectorType(ir.IntType(32), 16)
_i64 = ir.IntType(64)

# ------------------------------------------------------------------------------------------ from code to function

Emit = Callable[..., Any]


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Emit], Any]:
    """Make a kernel function from `emit(builder, *values) -> value`. The emitter stays reachable as `.emit`, so that
    operations can be built from one another."""

    def decorate(emit: Emit) -> Any:
        def typing(context: Any, *given: types.Type) -> Any:
            for want, got in zip(arguments, given, strict=True):
                if isinstance(want, Vector) and want != got:
                    return None
            return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)

        return _intrinsic(typing, emit, list(inspect.signature(emit).parameters)[1:])

    return decorate


def elementwise(emit: Emit) -> Any:
    """Make a kernel function of vectors of one and the same type from `emit(builder, vector_type, *values)`."""

    def typing(context: Any, *given: types.Type) -> Any:
        if not isinstance(given[0], Vector) or any(other != given[0] for other in given):
            return None
        vector = given[0]
        return vector(*given), lambda context, builder, signature, values: emit(builder, vector, *values)

    return _intrinsic(typing, emit, list(inspect.signature(emit).parameters)[2:])


def _intrinsic(typing: Emit, emit: Emit, names: Sequence[str]) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typing.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in ("context", *names)])  # type: ignore[attr-defined]
    typing.__name__ = emit.__name__
    typing.__doc__ = emit.__doc__
    function: Any = intrinsic(typing)
    function.emit = emit
    return function


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    return builder.call(function, values)


def constant(llvm: Any, value: int | float) -> Any:
    """A vector with `value` in every lane."""
    return ir.Constant(llvm, [value] * llvm.count)


def shuffle(builder: Any, value: Any, lanes: Sequence[int]) -> Any:
    """The vector of `value`'s lanes with these numbers."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector with the same scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, scalar, ir.IntType(32)(0)), [0] * lanes)


# ------------------------------------------------------------------------------------------ memory

_fault_count = ctypes.c_int64(0)
llvmlite.binding.add_symbol("qkv_simd_faults", ctypes.addressof(_fault_count))


def faults() -> int:
    """How many loads and stores left their array since the last call. Counted in `checked` mode only."""
    count = _fault_count.value
    _fault_count.value = 0
    return count


def element_pointer(context: Any, builder: Any, array: Any, value: Any, index: Any, llvm: Any) -> Any:
    """The address of `array[index]`, as that of an LLVM type."""
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), llvm.as_pointer())


def _inside(context: Any, builder: Any, array: Any, value: Any, index: Any, size: int) -> Any:
    """Whether `size` bytes from `array[index]` lie in the array; counts a fault if not."""
    count = context.make_array(array)(context, builder, value).nitems
    item = context.get_abi_sizeof(context.get_data_type(array.dtype))
    needed = _i64((size + item - 1) // item)
    good = builder.and_(
        builder.icmp_signed(">=", index, _i64(0)), builder.icmp_signed("<=", builder.add(index, needed), count)
    )
    with builder.if_then(builder.not_(good), likely=False):
        counter = builder.module.globals.get("qkv_simd_faults")
        if counter is None:
            counter = ir.GlobalVariable(builder.module, _i64, "qkv_simd_faults")
        builder.atomic_rmw("add", counter, _i64(1), "monotonic")
    return good


def emit_load(context: Any, builder: Any, array: Any, value: Any, index: Any, llvm: Any, size: int) -> Any:
    """Load `size` bytes, an LLVM type of its own, from `array[index]`, wherever they are aligned."""

    def load_here() -> Any:
        loaded = builder.load(element_pointer(context, builder, array, value, index, llvm))
        loaded.align = 1
        return loaded

    if not CHECKED:
        return load_here()
    result = cgutils.alloca_once_value(builder, ir.Constant(llvm, None))  # type: ignore[no-untyped-call]
    with builder.if_then(_inside(context, builder, array, value, index, size)):
        builder.store(load_here(), result)
    return builder.load(result)


def is_flat(array: types.Type) -> bool:
    """Whether a Numba type is an array that vectors can be loaded from: one dimension, no gaps."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"


def any_intrinsic(typing: Callable[..., Any]) -> Any:
    """`intrinsic`, for the type checker: kernels call these without the typing context."""
    return intrinsic(typing)


@any_intrinsic
def load(typing: Any, vector: Any, array: Any, index: Any) -> Any:
    """`load(f32x8, array, i)`: the vector that starts at array[i]. The array may be of any type (bytes, say)."""
    kind = _named_vector(vector)
    if kind is None or not is_flat(array) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit_load(context, builder, array, values[1], values[2], kind.llvm, kind.bytes)

    return kind(vector, array, types.intp), codegen


def _emit_store(context: Any, builder: Any, array: Any, value: Any, index: Any, stored: Any, size: int) -> None:
    """Store an LLVM value of `size` bytes at `array[index]`, wherever that is aligned."""

    def store_here() -> None:
        written = builder.store(stored, element_pointer(context, builder, array, value, index, stored.type))
        written.align = 1

    if not CHECKED:
        store_here()
        return
    with builder.if_then(_inside(context, builder, array, value, index, size)):
        store_here()


def emit_store(context: Any, builder: Any, array: Any, value: Any, index: Any, vector: Any) -> None:
    """Write an LLVM vector from `array[index]` on, wherever it is aligned."""

    def store_here() -> None:
        written = builder.store(vector, element_pointer(context, builder, array, value, index, vector.type))
        written.align = 1

    if not CHECKED:
        store_here()
        return
    size = context.get_abi_sizeof(vector.type)
    with builder.if_then(_inside(context, builder, array, value, index, size)):
        store_here()


def emit_store_lanes(context: Any, builder: Any, array: Any, value: Any, index: Any, vector: Any, count: Any) -> None:
    """Write the first `count` lanes of an LLVM vector from `array[index]` on."""
    for lane in range(vector.type.count):
        number = _i64(lane)
        with builder.if_then(builder.icmp_signed("<", number, count)):
            part = shuffle(builder, vector, [lane])
            emit_store(context, builder, array, value, builder.add(index, number), part)


@any_intrinsic
def store(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """`store(array, i, vector)`: write the vector's lanes from array[i] on."""
    if not is_flat(array) or not isinstance(vector, Vector) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_store(context, builder, array, *values)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@any_intrinsic
def store_lanes(typing: Any, array: Any, index: Any, vector: Any, count: Any) -> Any:
    """`store_lanes(array, i, vector, n)`: write the vector's first n lanes from array[i] on."""
    if not is_flat(array) or not isinstance(vector, Vector) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_store_lanes(context, builder, array, *values)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, types.intp), codegen


@any_intrinsic
def spread(typing: Any, vector: Any, array: Any, index: Any) -> Any:
    """`spread(f32x8, array, i)`: array[i] in every lane; for `i8x32`, the 4 bytes from array[i] on in every 4 lanes."""
    kind = _named_vector(vector)
    if kind is None or not is_flat(array) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit_spread(context, builder, kind, array, values[1], values[2])

    return kind(vector, array, types.intp), codegen


def emit_spread(context: Any, builder: Any, kind: Vector, array: Any, value: Any, index: Any) -> Any:
    """`spread`, for emitters."""
    unit = ir.IntType(32) if kind.element.bitwidth == 8 else kind.scalar
    size = unit.width // 8 if isinstance(unit, ir.IntType) else 4
    scalar = emit_load(context, builder, array, value, index, unit, size)
    return builder.bitcast(broadcast(builder, scalar, kind.bytes // size), kind.llvm)


def _named_vector(given: Any) -> Vector | None:
    """The vector type a kernel named as an argument."""
    kind = getattr(given, "instance_type", None)
    return kind if isinstance(kind, Vector) else None


# ------------------------------------------------------------------------------------------ making and taking apart


@operation(f32x8, types.float32)
def splat(builder: Any, x: Any) -> Any:
    """The same float32 in 8 lanes."""
    return broadcast(builder, x, 8)


@operation(i32x8, types.int32)
def splat_i32(builder: Any, x: Any) -> Any:
    """The same int32 in 8 lanes."""
    return broadcast(builder, x, 8)


@operation(i32x8)
def lane_numbers(builder: Any) -> Any:
    """0, 1, … 7."""
    return ir.Constant(i32x8.llvm, list(range(8)))


def _tree(builder: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join lanes i and i+4, then i and i+2, then i and i+1: always the same tree."""
    width = value.type.count
    while width > 1:
        width //= 2
        low = shuffle(builder, value, range(width))
        value = join(low, shuffle(builder, value, range(width, 2 * width)))
    return builder.extract_element(value, ir.IntType(32)(0))


@operation(types.float32, f32x8)
def sum_lanes(builder: Any, a: Any) -> Any:
    """The sum ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7))."""
    return _tree(builder, a, builder.fadd)


@operation(types.float32, f32x8)
def max_lanes(builder: Any, a: Any) -> Any:
    """The largest lane."""
    return _tree(builder, a, lambda low, high: builder.select(builder.fcmp_ordered(">", low, high), low, high))


@operation(types.float32, f32x8)
def first_lane(builder: Any, a: Any) -> Any:
    """a0."""
    return builder.extract_element(a, ir.IntType(32)(0))


@operation(types.int32, i32x8)
def max_lanes_i32(builder: Any, a: Any) -> Any:
    """The largest lane."""
    return _tree(builder, a, lambda low, high: builder.select(builder.icmp_signed(">", low, high), low, high))


@operation(types.int32, i32x8)
def sum_lanes_i32(builder: Any, a: Any) -> Any:
    """The sum of the lanes."""
    return _tree(builder, a, builder.add)


# ------------------------------------------------------------------------------------------ arithmetic


@elementwise
def add(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a + b; integers wrap around."""
    return builder.fadd(a, b) if vector.is_float else builder.add(a, b)


@elementwise
def subtract(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a - b; integers wrap around."""
    return builder.fsub(a, b) if vector.is_float else builder.sub(a, b)


@elementwise
def multiply(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a · b; integers wrap around."""
    return builder.fmul(a, b) if vector.is_float else builder.mul(a, b)


@operation(f32x8, f32x8, f32x8)
def divide(builder: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return builder.fdiv(a, b)


@operation(f32x8, f32x8, f32x8, f32x8)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, rounded once."""
    return call(builder, "llvm.fma.v8f32", f32x8.llvm, a, b, c)


def _compare(builder: Any, vector: Vector, relation: str, a: Any, b: Any) -> Any:
    if vector.is_float:
        return builder.fcmp_ordered(relation, a, b)
    return (builder.icmp_signed if vector.element.signed else builder.icmp_unsigned)(relation, a, b)


@elementwise
def minimum(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a if a < b else b."""
    return builder.select(_compare(builder, vector, "<", a, b), a, b)


@elementwise
def maximum(builder: Any, vector: Vector, a: Any, b: Any) -> Any:
    """a if a > b else b."""
    return builder.select(_compare(builder, vector, ">", a, b), a, b)


@operation(mask8, f32x8, f32x8)
def less(builder: Any, a: Any, b: Any) -> Any:
    """a < b; false where either is not a number."""
    return builder.fcmp_ordered("<", a, b)


@operation(mask8, i32x8, i32x8)
def less_i32(builder: Any, a: Any, b: Any) -> Any:
    """a < b."""
    return builder.icmp_signed("<", a, b)


@operation(f32x8, mask8, f32x8, f32x8)
def select(builder: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask holds, else b."""
    return builder.select(mask, a, b)


@operation(f32x8, f32x8)
def absolute(builder: Any, a: Any) -> Any:
    """|a|."""
    bits = builder.and_(builder.bitcast(a, i32x8.llvm), constant(i32x8.llvm, 0x7FFFFFFF))
    return builder.bitcast(bits, f32x8.llvm)


@operation(i32x8, i32x8, i32x8)
def bit_and(builder: Any, a: Any, b: Any) -> Any:
    """a & b."""
    return builder.and_(a, b)


@operation(i32x8, i32x8, i32x8)
def bit_or(builder: Any, a: Any, b: Any) -> Any:
    """a | b."""
    return builder.or_(a, b)


@operation(i32x8, i32x8, i32x8)
def shift_left(builder: Any, a: Any, count: Any) -> Any:
    """a << count, for counts of 0 to 31."""
    return builder.shl(a, count)


# ------------------------------------------------------------------------------------------ products of small integers


@operation(u8x32, u8x32)
def low_nibbles(builder: Any, a: Any) -> Any:
    """The lower 4 bits of every byte."""
    return builder.and_(a, constant(u8x32.llvm, 15))


@operation(u8x32, u8x32)
def high_nibbles(builder: Any, a: Any) -> Any:
    """The upper 4 bits of every byte."""
    shifted = builder.lshr(builder.bitcast(a, i16x16.llvm), constant(i16x16.llvm, 4))  # there is no shift of bytes
    return builder.and_(builder.bitcast(shifted, u8x32.llvm), constant(u8x32.llvm, 15))


def _pairs(builder: Any, value: Any) -> tuple[Any, Any]:
    lanes = value.type.count
    return shuffle(builder, value, range(0, lanes, 2)), shuffle(builder, value, range(1, lanes, 2))


@operation(i16x16, u8x32, i8x32)
def multiply_add_bytes(builder: Any, a: Any, b: Any) -> Any:
    """a0·b0 + a1·b1, … over pairs of bytes, saturated to int16."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.ub.sw", i16x16.llvm, a, b)
    wide = ir.VectorType(ir.IntType(16), 32)
    even, odd = _pairs(builder, builder.mul(builder.zext(a, wide), builder.sext(b, wide)))
    return call(builder, "llvm.sadd.sat.v16i16", i16x16.llvm, even, odd)


@operation(i32x8, i16x16, i16x16)
def multiply_add_shorts(builder: Any, a: Any, b: Any) -> Any:
    """a0·b0 + a1·b1, … over pairs of int16."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", i32x8.llvm, a, b)
    even, odd = _pairs(builder, builder.mul(builder.sext(a, _i32x16), builder.sext(b, _i32x16)))
    return builder.add(even, odd)


@operation(i32x8, i32x8, u8x32, i8x32)
def dot_bytes(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total0 + a0·b0 + a1·b1 + a2·b2 + a3·b3, … over fours of bytes, exactly. Fast only where HAS_VNNI."""
    if HAS_VNNI:
        return call(builder, "llvm.x86.avx512.vpdpbusd.256", i32x8.llvm, total, a, b)
    wide = ir.VectorType(ir.IntType(32), 32)
    even, odd = _pairs(builder, builder.mul(builder.zext(a, wide), builder.sext(b, wide)))
    first, second = _pairs(builder, builder.add(even, odd))
    return builder.add(total, builder.add(first, second))


@operation(i32x8, i16x16)
def add_pairs(builder: Any, a: Any) -> Any:
    """a0 + a1, a2 + a3, … in int32."""
    return multiply_add_shorts.emit(builder, a, constant(i16x16.llvm, 1))


@operation(u8x32, i8x32)
def absolute_bytes(builder: Any, a: Any) -> Any:
    """|a| of signed bytes; 128 for -128."""
    return builder.select(
        builder.icmp_signed("<", a, constant(i8x32.llvm, 0)), builder.sub(constant(i8x32.llvm, 0), a), a
    )


@operation(i8x32, i8x32, i8x32)
def with_sign_of(builder: Any, a: Any, b: Any) -> Any:
    """a·sign(b), with sign(0) = 0. a must not be -128."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.psign.b", i8x32.llvm, a, b)
    zero = constant(i8x32.llvm, 0)
    positive = builder.select(builder.icmp_signed("==", b, zero), zero, a)
    return builder.select(builder.icmp_signed("<", b, zero), builder.sub(zero, a), positive)


# ------------------------------------------------------------------------------------------ conversions


@any_intrinsic
def to_float(typing: Any, a: Any) -> Any:
    """Eight integers of any width as float32 (rounded to nearest above 2^24)."""
    if not isinstance(a, Vector) or a.lanes != 8 or a.is_float:
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return (builder.sitofp if a.element.signed else builder.uitofp)(values[0], f32x8.llvm)

    return f32x8(a), codegen


@operation(i32x8, f32x8)
def round_to_int(builder: Any, a: Any) -> Any:
    """The nearest int32, ties to even, for |a| < 2^22.

    Adding 1.5·2^23 leaves no bits for a fraction, so the addition itself rounds, the same way on every processor.
    """
    moved = builder.bitcast(builder.fadd(a, constant(f32x8.llvm, 12582912.0)), i32x8.llvm)
    return builder.sub(moved, constant(i32x8.llvm, 0x4B400000))


@operation(i32x8, f32x8)
def floor_to_int(builder: Any, a: Any) -> Any:
    """The largest int32 not above a, for |a| < 2^22."""
    nearest = round_to_int.emit(builder, a)
    above = builder.fcmp_ordered(">", builder.sitofp(nearest, f32x8.llvm), a)
    return builder.add(nearest, builder.sext(above, i32x8.llvm))


@operation(i32x8, f32x8)
def as_bits(builder: Any, a: Any) -> Any:
    """The float32 bits as int32."""
    return builder.bitcast(a, i32x8.llvm)


@operation(f32x8, i32x8)
def as_float(builder: Any, a: Any) -> Any:
    """The int32 bits as float32."""
    return builder.bitcast(a, f32x8.llvm)


@operation(i8x8, i32x8)
def narrow(builder: Any, a: Any) -> Any:
    """The low byte of each lane."""
    return builder.trunc(a, i8x8.llvm)


@operation(f32x8, u16x8)
def bf16_to_float(builder: Any, a: Any) -> Any:
    """bfloat16 bits are the upper half of a float32."""
    wide = builder.shl(builder.zext(a, i32x8.llvm), constant(i32x8.llvm, 16))
    return builder.bitcast(wide, f32x8.llvm)


@operation(u16x8, f32x8)
def float_to_bf16(builder: Any, a: Any) -> Any:
    """float32 as bfloat16 bits, rounded to nearest even. Not-a-number stays so."""
    bits = builder.bitcast(a, i32x8.llvm)
    odd = builder.and_(builder.lshr(bits, constant(i32x8.llvm, 16)), constant(i32x8.llvm, 1))
    rounded = builder.add(builder.add(bits, constant(i32x8.llvm, 0x7FFF)), odd)
    nan = builder.or_(bits, constant(i32x8.llvm, 0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", a, a), nan, rounded)
    return builder.trunc(builder.lshr(kept, constant(i32x8.llvm, 16)), u16x8.llvm)


@operation(f32x8, u16x8)
def half_to_float(builder: Any, a: Any) -> Any:
    """float16 bits as float32, exactly."""
    if HAS_F16C:
        return builder.fpext(builder.bitcast(a, ir.VectorType(ir.HalfType(), 8)), f32x8.llvm)

    def number(value: int) -> Any:
        return constant(i32x8.llvm, value)

    wide = builder.zext(a, i32x8.llvm)
    sign = builder.shl(builder.and_(wide, number(0x8000)), number(16))
    magnitude = builder.shl(builder.and_(wide, number(0x7FFF)), number(13))
    exponent = builder.and_(magnitude, number(0x7C00 << 13))
    normal = builder.add(magnitude, number((127 - 15) << 23))
    # A subnormal half is an integer times 2^-24: give it the exponent of 2^-14 and take 2^-14 away again.
    lifted = builder.bitcast(builder.add(normal, number(1 << 23)), f32x8.llvm)
    subnormal = builder.bitcast(builder.fsub(lifted, constant(f32x8.llvm, 2.0**-14)), i32x8.llvm)
    special = builder.add(normal, number((128 - 16) << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7C00 << 13))
    special = builder.or_(special, builder.select(is_nan, number(0x400000), number(0)))  # as the instruction does
    result = builder.select(builder.icmp_unsigned("==", exponent, number(0)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned("==", exponent, number(0x7C00 << 13)), special, result)
    return builder.bitcast(builder.or_(result, sign), f32x8.llvm)


@operation(u16x8, f32x8)
def float_to_half(builder: Any, a: Any) -> Any:
    """float32 as float16 bits, clamped to ±65504, then rounded to nearest even. Not-a-number stays so."""
    top = constant(f32x8.llvm, 65504.0)
    bottom = constant(f32x8.llvm, -65504.0)
    a = builder.select(builder.fcmp_ordered(">", a, top), top, a)
    a = builder.select(builder.fcmp_ordered("<", a, bottom), bottom, a)
    if HAS_F16C:
        return builder.bitcast(builder.fptrunc(a, ir.VectorType(ir.HalfType(), 8)), u16x8.llvm)

    def number(value: int) -> Any:
        return constant(i32x8.llvm, value)

    bits = builder.bitcast(a, i32x8.llvm)
    sign = builder.and_(builder.lshr(bits, number(16)), number(0x8000))
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    # Below 2^-14 the half is subnormal: adding 0.5 moves its last bit to the float's last bit, and rounds.
    moved = builder.fadd(builder.bitcast(magnitude, f32x8.llvm), constant(f32x8.llvm, 0.5))
    subnormal = builder.sub(builder.bitcast(moved, i32x8.llvm), number(0x3F000000))
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    rounded = builder.add(builder.add(magnitude, number(0xFFF - (112 << 23))), odd)
    normal = builder.lshr(rounded, number(13))
    nan = builder.or_(builder.and_(builder.lshr(magnitude, number(13)), number(0x3FF)), number(0x7E00))
    result = builder.select(builder.icmp_unsigned("<", magnitude, number(113 << 23)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">", magnitude, number(0x7F800000)), nan, result)
    return builder.trunc(builder.or_(result, sign), u16x8.llvm)


# ------------------------------------------------------------------------------------------ exp

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 9 bits, so that n·_LN2_HIGH is exact
_LN2_LOW = -2.12194440e-4
_EXP_LOWEST = -87.33654  # e^x below this is under 2^-126, the smallest normal number
_EXP_HIGHEST = 88.37626  # 2^n with n = 127 is the largest power

# (e^r - 1 - r) / r², |r| ≤ ln(2)/2, by a minimax fit of the relative error (3e-9): lowest power first.
_EXP_SERIES = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814539415761828)


@operation(f32x8, i32x8)
def power_of_two(builder: Any, n: Any) -> Any:
    """2^n for -126 ≤ n ≤ 127, by writing the exponent."""
    return builder.bitcast(builder.shl(builder.add(n, constant(i32x8.llvm, 127)), constant(i32x8.llvm, 23)), f32x8.llvm)


@operation(f32x8, f32x8)
def exp(builder: Any, x: Any) -> Any:
    """e^x within 1 ulp or so. exp(0) = 1 exactly; 0 below -87.34 (and for -inf); constant above 88.37; NaN stays.

    x = n·ln 2 + r, e^x = 2^n · e^r.
    """

    def number(value: float) -> Any:
        return constant(f32x8.llvm, value)

    clamped = builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOWEST)), number(_EXP_LOWEST), x)
    clamped = builder.select(builder.fcmp_ordered(">", x, number(_EXP_HIGHEST)), number(_EXP_HIGHEST), clamped)
    n = round_to_int.emit(builder, builder.fmul(clamped, number(_LOG2_E)))
    whole = builder.sitofp(n, f32x8.llvm)
    r = fma.emit(builder, whole, number(-_LN2_HIGH), clamped)
    r = fma.emit(builder, whole, number(-_LN2_LOW), r)
    series = number(_EXP_SERIES[-1])
    for coefficient in reversed(_EXP_SERIES[:-1]):
        series = fma.emit(builder, series, r, number(coefficient))
    power = builder.fadd(fma.emit(builder, builder.fmul(r, r), series, r), number(1.0))
    result = builder.fmul(power, power_of_two.emit(builder, n))
    return builder.select(builder.fcmp_ordered("<", x, number(_EXP_LOWEST)), number(0.0), result)
