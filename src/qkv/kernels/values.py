"""Vector types for Numba, and values with operators for code that emits kernels.

Numba has no vector types, but LLVM has. A `Vector` is a Numba type whose machine form is an LLVM vector. A `Value` is
a number or vector of a kernel that is being emitted: `a * b + c` emits the instructions and gives the result.

Types decide as in C: `>>` copies the sign of signed numbers, and comparisons and conversions ask for it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import register_model

_SCALARS = {types.float32: ir.FloatType(), types.float16: ir.HalfType(), types.boolean: ir.IntType(1)}


def _scalar(element: Any) -> Any:
    return _SCALARS.get(element) or ir.IntType(element.bitwidth)


class Vector(types.Type):
    """`lanes` numbers of one Numba scalar type side by side in a register. Comparisons give lanes of `boolean`."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        self.llvm = ir.VectorType(_scalar(element), lanes)
        super().__init__(name=f"{element}x{lanes}")

    @property
    def bytes(self) -> int:
        """What a load or store moves."""
        return self.element.bitwidth * self.lanes // 8


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


f32x8 = Vector(types.float32, 8)
i32x8 = Vector(types.int32, 8)
u32x8 = Vector(types.uint32, 8)
i16x16 = Vector(types.int16, 16)
i8x32 = Vector(types.int8, 32)
u8x32 = Vector(types.uint8, 32)
i8x8 = Vector(types.int8, 8)
f32x16 = Vector(types.float32, 16)  # two registers where they hold 256 bits
i8x16 = Vector(types.int8, 16)
u16x16 = Vector(types.uint16, 16)
u16x8 = Vector(types.uint16, 8)  # eight float16 or bfloat16 numbers, as bits


class Value:
    """A number or vector of an emitted kernel. A number beside a vector counts for every lane, as one of its type.

    builder: llvmlite's IRBuilder, None for a constant; ir: the LLVM value; kind: a `Vector` or a Numba scalar type.
    """

    def __init__(self, builder: Any, value: Any, kind: Any) -> None:
        self.builder, self.ir, self.kind = builder, value, kind

    @property
    def element(self) -> Any:
        """The Numba type of a lane."""
        return self.kind.element if isinstance(self.kind, Vector) else self.kind

    @property
    def lanes(self) -> int:
        """How many numbers these are: 1 for a scalar."""
        return self.kind.lanes if isinstance(self.kind, Vector) else 1

    @property
    def is_float(self) -> bool:
        """Whether the numbers have a fraction."""
        return isinstance(self.element, types.Float)

    @property
    def signed(self) -> bool:
        """Whether the numbers have a sign. Truth values have none."""
        return self.is_float or bool(getattr(self.element, "signed", False))

    def like(self, number: Value | float) -> Value:
        """A number in every lane, as numbers of this type. A vector of this type stays as it is."""
        if not isinstance(number, Value):
            return self._with(constant(self.kind, number).ir)
        return number if number.lanes == self.lanes else number.to(self.element).in_lanes(self.lanes)

    def _kind(self, element: Any, lanes: int) -> Any:
        return Vector(element, lanes) if isinstance(self.kind, Vector) else element

    def _with(self, value: Any, kind: Any = None) -> Value:
        return Value(self.builder, value, kind or self.kind)

    def _apply(self, instruction: str, other: Value | float) -> Value:
        builder = self.builder or (other.builder if isinstance(other, Value) else None)
        return Value(builder, getattr(builder, instruction)(self.ir, self.like(other).ir), self.kind)

    def _arithmetic(self, instruction: str, other: Value | float) -> Value:
        return self._apply(f"f{instruction}" if self.is_float else instruction, other)

    def __add__(self, other: Value | float) -> Value:
        return self._arithmetic("add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._arithmetic("sub", other)

    def __mul__(self, other: Value | float) -> Value:
        return self._arithmetic("mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._apply("fdiv", other)

    def __and__(self, other: Value | int) -> Value:
        return self._apply("and_", other)

    def __or__(self, other: Value | int) -> Value:
        return self._apply("or_", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._apply("xor", other)

    def __lshift__(self, count: Value | int) -> Value:
        return self._apply("shl", count)

    def __rshift__(self, count: Value | int) -> Value:
        return self._apply("ashr" if self.signed else "lshr", count)

    def _compare(self, relation: str, other: Value | float) -> Value:
        name = "fcmp_ordered" if self.is_float else "icmp_signed" if self.signed else "icmp_unsigned"
        result = getattr(self.builder, name)(relation, self.ir, self.like(other).ir)
        return self._with(result, self._kind(types.boolean, self.lanes))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        """Which lanes are equal; not `==`, by which Python finds objects."""
        return self._compare("==", other)

    def is_nan(self) -> Value:
        """Which lanes are not a number."""
        return self._with(self.builder.fcmp_unordered("uno", self.ir, self.ir), self._kind(types.boolean, self.lanes))

    def to(self, element: Any) -> Value:
        """The same numbers as another type. Integers grow by their sign, or lose upper bits; none come from floats."""
        kind = self._kind(element, self.lanes)
        wider = _scalar_bits(element) > _scalar_bits(self.element)
        if isinstance(element, types.Float):
            convert = "sitofp" if self.signed else "uitofp"
            if self.is_float:
                convert = "fpext" if wider else "fptrunc"
        else:
            convert = "trunc" if not wider else "sext" if self.signed else "zext"
        return self._with(getattr(self.builder, convert)(self.ir, llvm_type(kind)), kind)

    def bits(self, element: Any) -> Value:
        """The same bits as numbers of another type, as many as they make."""
        lanes = self.lanes * _scalar_bits(self.element) // _scalar_bits(element)
        kind = self._kind(element, lanes)
        return self._with(self.builder.bitcast(self.ir, llvm_type(kind)), kind)

    def lane(self, number: int) -> Value:
        """One number of a vector."""
        return self._with(self.builder.extract_element(self.ir, ir.IntType(32)(number)), self.element)

    def shuffled(self, lanes: Sequence[int]) -> Value:
        """The vector of the lanes with these numbers."""
        return _shuffle(self, ir.Constant(self.ir.type, ir.Undefined), lanes)

    def joined(self, other: Value) -> Value:
        """The lanes of both vectors in one."""
        return _shuffle(self, other.ir, range(2 * self.lanes))

    def in_lanes(self, lanes: int) -> Value:
        """A vector with this scalar in every lane."""
        empty = ir.Constant(ir.VectorType(self.ir.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, self.ir, ir.IntType(32)(0))
        return self._with(first, Vector(self.element, lanes)).shuffled([0] * lanes)


def _shuffle(a: Value, b: Any, lanes: Sequence[int]) -> Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return Value(a.builder, a.builder.shuffle_vector(a.ir, b, mask), Vector(a.element, len(lanes)))


def _scalar_bits(element: Any) -> int:
    return 1 if element == types.boolean else int(element.bitwidth)


def llvm_type(kind: Any) -> Any:
    """The LLVM type of a `Vector` or a Numba scalar type."""
    return kind.llvm if isinstance(kind, Vector) else _scalar(kind)


def constant(kind: Any, number: float) -> Value:
    """A number, in every lane of a vector."""
    llvm = llvm_type(kind)
    return Value(None, ir.Constant(llvm, [number] * kind.lanes if isinstance(kind, Vector) else number), kind)


def call(name: str, kind: Any, *values: Value) -> Value:
    """Call an LLVM intrinsic by name; `kind` is what it gives."""
    builder = next(value.builder for value in values if value.builder)
    signature = ir.FunctionType(llvm_type(kind), [value.ir.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, name)  # type: ignore[no-untyped-call]
    return Value(builder, builder.call(function, [value.ir for value in values]), kind)


def fma(a: Value, b: Value, c: Value) -> Value:
    """a·b + c, rounded once; a is a vector."""
    return call(f"llvm.fma.v{a.lanes}f32", a.kind, a, a.like(b), a.like(c))


def select(mask: Value, a: Value | float, b: Value | float) -> Value:
    """a where the mask holds, else b; one of them is a vector."""
    vector = next(each for each in (a, b) if isinstance(each, Value) and each.lanes == mask.lanes)
    return Value(mask.builder, mask.builder.select(mask.ir, vector.like(a).ir, vector.like(b).ir), vector.kind)
