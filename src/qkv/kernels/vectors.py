"""Vector types for Numba, how operations on them are made, and how they are loaded and stored.

Numba has no vector types, but LLVM has. A `Vector` is a Numba type whose machine form is an LLVM vector, and
`operation` turns a few lines that emit LLVM code into a function that kernels can call. The operations themselves are
in `simd`; kernels import all of this from there.

Addresses are an array and an index, never an integer cast to a pointer, and indices are not wrapped around as
`array[-1]` would be. Nothing here allocates, raises or counts references.

The environment variable QKV_SIMD, read once at import, picks one of three modes:

* `auto` (the default): AVX2, F16C and VNNI instructions where Numba's target has them, else the portable form;
* `portable`: plain LLVM vectors only. It gives the same bits as `auto`, so a processor can be checked against it;
* `checked`: as `auto`, and every load and store is checked against its array's bounds. A bad load gives zeros, a bad
  store writes nothing, and both are counted: see `faults`.
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
HAS_512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= FEATURES
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
f32x16 = Vector(types.float32, 16)  # two registers where they hold 256 bits
i8x16 = Vector(types.int8, 16)
u16x16 = Vector(types.uint16, 16)
u16x8 = Vector(types.uint16, 8)  # eight float16 or bfloat16 numbers, as bits
mask8 = Vector(types.boolean, 8)

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


def join(builder: Any, low: Any, high: Any) -> Any:
    """The lanes of two vectors in one."""
    lanes = range(2 * low.type.count)
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes)))


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


def emit_prefetch(context: Any, builder: Any, array: Any, value: Any, index: Any) -> None:
    """Ask for the cache line of `array[index]`. The index may lie outside: asking never fails."""
    pointer = element_pointer(context, builder, array, value, index, ir.IntType(8))
    word = ir.IntType(32)
    call(
        builder, "llvm.prefetch.p0", ir.VoidType(), pointer, word(0), word(2), word(1)
    )  # to read, into the second cache, data


def is_flat(array: types.Type) -> bool:
    """Whether a Numba type is an array that vectors can be loaded from: one dimension, no gaps."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"


def any_intrinsic(typing: Callable[..., Any]) -> Any:
    """`intrinsic`, for the type checker: kernels call these without the typing context."""
    return intrinsic(typing)


@any_intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """`prefetch(array, i)`: ask for the cache line of array[i], which may lie outside."""
    if not is_flat(array) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_prefetch(context, builder, array, *values)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@any_intrinsic
def load(typing: Any, vector: Any, array: Any, index: Any) -> Any:
    """`load(f32x8, array, i)`: the vector that starts at array[i]. The array may be of any type (bytes, say)."""
    kind = named_vector(vector)
    if kind is None or not is_flat(array) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit_load(context, builder, array, values[1], values[2], kind.llvm, kind.bytes)

    return kind(vector, array, types.intp), codegen


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
    kind = named_vector(vector)
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


def named_vector(given: Any) -> Vector | None:
    """The vector type a kernel named as an argument."""
    kind = getattr(given, "instance_type", None)
    return kind if isinstance(kind, Vector) else None


def literal(given: Any) -> int | None:
    """The value of an integer that is known at compile time."""
    return given.literal_value if isinstance(given, types.IntegerLiteral) else None
