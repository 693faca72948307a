# mypy: disable-error-code="no-untyped-call"
"""From Python code that emits to functions that kernels call, and how those load and store.

Addresses are an array and an index, never an integer cast to a pointer, and indices are not wrapped around as
`array[-1]` would be. Nothing here allocates, raises or counts references.

In `checked` mode a load outside its array gives zeros, a store there writes nothing, and both are counted.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from qkv.kernels.isa import CHECKED
from qkv.kernels.values import Value, Vector, constant, llvm_type

Index = Annotated[Value, types.intp]
"""An integer of a kernel, in the signature of an `emitted` function."""

_fault_count = ctypes.c_int64(0)
llvmlite.binding.add_symbol("qkv_simd_faults", ctypes.addressof(_fault_count))


def faults() -> int:
    """How many loads and stores left their array since the last call. Counted in `checked` mode only."""
    count = _fault_count.value
    _fault_count.value = 0
    return count


class Memory:
    """A flat array of any number type. Indices count its elements; what lies there is read as the type asked for."""

    def __init__(self, context: Any, builder: Any, array: Any, value: Any) -> None:
        self.builder, self.array = builder, array
        self._struct = context.make_array(array)(context, builder, value)
        self._item = context.get_abi_sizeof(context.get_data_type(array.dtype))

    def load(self, kind: Any, index: Value) -> Value:
        """The number or vector that starts at `index`, wherever that is aligned."""
        llvm = llvm_type(kind)

        def load_here() -> Any:
            loaded = self.builder.load(self._pointer(index, llvm))
            loaded.align = 1
            return loaded

        if not CHECKED:
            return Value(self.builder, load_here(), kind)
        result = cgutils.alloca_once_value(self.builder, ir.Constant(llvm, None))
        with self.builder.if_then(self._inside(index, kind)):
            self.builder.store(load_here(), result)
        return Value(self.builder, self.builder.load(result), kind)

    def store(self, index: Value, value: Value) -> None:
        """Write a number or vector from `index` on, wherever that is aligned."""

        def store_here() -> None:
            written = self.builder.store(value.ir, self._pointer(index, value.ir.type))
            written.align = 1

        if not CHECKED:
            store_here()
            return
        with self.builder.if_then(self._inside(index, value.kind)):
            store_here()

    def store_lanes(self, index: Value, value: Value, count: Value) -> None:
        """Write the first `count` lanes from `index` on."""
        for lane in range(value.lanes):
            with self.builder.if_then((count > lane).ir):
                self.store(index + lane, value.lane(lane))

    def spread(self, kind: Vector, index: Value) -> Value:
        """The number at `index` in every lane; for bytes, the 4 from there on in every 4 lanes."""
        unit: Any = types.int32 if kind.element.bitwidth == 8 else kind.element
        scalar = self.load(unit, index)
        return scalar.in_lanes(8 * kind.bytes // unit.bitwidth).bits(kind.element)

    def prefetch(self, index: Value) -> None:
        """Ask for the cache line of `index`, which may lie outside: asking never fails."""
        word = ir.IntType(32)
        pointer = self._pointer(index, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        ask = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(ask, [pointer, word(0), word(2), word(1)])  # to read, into the second cache, data

    def _pointer(self, index: Value, llvm: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self._struct.data, [index.ir]), llvm.as_pointer())

    def _inside(self, index: Value, kind: Any) -> Any:
        """Whether a number or vector from `index` on lies in the array; counts a fault if not."""
        size = kind.bytes if isinstance(kind, Vector) else kind.bitwidth // 8
        end = index + (size + self._item - 1) // self._item
        good = ((index >= 0) & (end <= Value(self.builder, self._struct.nitems, types.intp))).ir
        with self.builder.if_then(self.builder.not_(good), likely=False):
            counter = self.builder.module.globals.get("qkv_simd_faults")
            if counter is None:
                counter = ir.GlobalVariable(self.builder.module, ir.IntType(64), "qkv_simd_faults")
            self.builder.atomic_rmw("add", counter, ir.IntType(64)(1), "monotonic")
        return good


class Sums(dict[tuple[int, int], Value]):
    """Sums held in registers: sums[r, t] is a vector. Kernels have them as a tuple of tuples."""

    def __init__(self, vector: Vector, rows: int, columns: int) -> None:
        self.vector, self.rows, self.columns = vector, range(rows), range(columns)
        super().__init__({(r, t): constant(vector, 0) for r in self.rows for t in self.columns})

    @property
    def type(self) -> Any:
        """The Numba type."""
        tuple_of: Any = types.UniTuple
        return tuple_of(tuple_of(self.vector, len(self.columns)), len(self.rows))


# ------------------------------------------------------------------------------------------ from code to function

Emit = Callable[..., Any]


def emitted(result: Callable[..., Any] | None = None) -> Callable[[Emit], Any]:
    """Make a kernel function from Python code that emits it. The annotations say what a kernel passes.

    `int` is a number known at compile time, `Vector` the name of a vector type, `Index` an integer, `Value` a vector or
    a number, `Memory` a flat array, `Sums` a tuple of tuples of vectors. `result` gives the type of what comes back,
    from those arguments that it has in its own signature: numbers known at compile time, else types. Without it nothing
    comes back. The Python function stays reachable as `.emit`.
    """

    def decorate(emit: Emit) -> Any:
        wants = get_type_hints(emit, include_extras=True)
        wants.pop("return", None)
        needed = inspect.signature(result).parameters if result else ()

        def typing(context: Any, *given: Any) -> Any:
            pairs = list(zip(wants.values(), given, strict=True))
            if not all(_ACCEPTS[want](got) for want, got in pairs):
                return None
            passed = [_PASSED_AS[want](got) if want in _PASSED_AS else got for want, got in pairs]
            known = dict(zip(wants, map(_known, passed), strict=True))

            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                arguments = map(_argument, wants.values(), known.values(), values)
                done = emit(*(make(context, builder) for make in arguments))
                if isinstance(done, Sums):
                    return _tuple_of(context, builder, done)
                return context.get_dummy_value() if done is None else done.ir

            returned = result(**{name: known[name] for name in needed}) if result else types.void
            return returned(*passed), codegen

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [inspect.Parameter(name, kind) for name in ("context", *wants)]
        typing.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        typing.__name__ = emit.__name__
        typing.__doc__ = emit.__doc__
        function: Any = intrinsic(typing)
        function.emit = emit
        return function

    return decorate


def _is_sums(given: Any) -> bool:
    inner = getattr(given, "dtype", None)
    return isinstance(inner, types.UniTuple) and isinstance(inner.dtype, Vector)


_ACCEPTS: dict[Any, Callable[[Any], bool]] = {
    int: lambda given: isinstance(given, types.IntegerLiteral),
    Vector: lambda given: isinstance(getattr(given, "instance_type", None), Vector),
    Index: lambda given: isinstance(given, types.Integer),
    Value: lambda given: isinstance(given, (Vector, types.Number)),
    Memory: lambda given: isinstance(given, types.Array) and given.ndim == 1 and given.layout == "C",
    Sums: _is_sums,
}
_PASSED_AS: dict[Any, Callable[[Any], Any]] = {Index: lambda given: types.intp, Value: types.unliteral}


def _known(given: Any) -> Any:
    """What is known of an argument at compile time: its number, the vector type it names, or its type."""
    return getattr(given, "literal_value", getattr(given, "instance_type", given))


def _argument(want: Any, known: Any, value: Any) -> Callable[[Any, Any], Any]:
    """What an emitting function gets for an LLVM value, once context and builder are there."""
    if want is Memory:
        return lambda context, builder: Memory(context, builder, known, value)
    if want is Sums:
        return lambda context, builder: _sums_of(builder, known, value)
    if want in (int, Vector):
        return lambda context, builder: known
    return lambda context, builder: Value(builder, value, known)


def _sums_of(builder: Any, kind: Any, value: Any) -> Sums:
    sums = Sums(kind.dtype.dtype, kind.count, kind.dtype.count)
    for at in sums:
        sums[at] = Value(builder, builder.extract_value(value, at), sums.vector)
    return sums


def _tuple_of(context: Any, builder: Any, sums: Sums) -> Any:
    value = ir.Constant(context.get_value_type(sums.type), None)
    for at, each in sums.items():
        value = builder.insert_value(value, each.ir, at)
    return value


# ------------------------------------------------------------------------------------------ for kernels


@emitted(lambda vector: vector)
def load(vector: Vector, array: Memory, index: Index) -> Value:
    """`load(f32x8, array, i)`: the vector that starts at array[i]. The array may be of any type (bytes, say)."""
    return array.load(vector, index)


@emitted(lambda vector: vector)
def spread(vector: Vector, array: Memory, index: Index) -> Value:
    """`spread(f32x8, array, i)`: array[i] in every lane; for `i8x32`, the 4 bytes from array[i] on in every 4 lanes."""
    return array.spread(vector, index)


@emitted()
def store(array: Memory, index: Index, vector: Value) -> None:
    """`store(array, i, vector)`: write the vector's lanes from array[i] on."""
    array.store(index, vector)


@emitted()
def store_lanes(array: Memory, index: Index, vector: Value, count: Index) -> None:
    """`store_lanes(array, i, vector, n)`: write the vector's first n lanes from array[i] on."""
    array.store_lanes(index, vector, count)


@emitted()
def prefetch(array: Memory, index: Index) -> None:
    """`prefetch(array, i)`: ask for the cache line of array[i], which may lie outside."""
    array.prefetch(index)


@emitted(lambda vector, rows, columns: Sums(vector, rows, columns).type)
def zeros(vector: Vector, rows: int, columns: int) -> Sums:
    """Sums of zero, for numbers of rows and columns known at compile time."""
    return Sums(vector, rows, columns)
