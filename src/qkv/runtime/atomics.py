"""Atomic operations on int64 arrays, and what a spinning thread needs: Numba has none of these for the CPU.

Every location is `array[index]`, addressed with a GEP on the array's own pointer (an address kept as an integer is
miscompiled by LLVM 22). `array` is one-dimensional, contiguous, int64 or int32; `index` is not checked and never
negative. They are called from kernels only.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as typed_cgutils
from numba.extending import intrinsic as numba_intrinsic

ON_X86 = platform.machine().lower() in {"x86_64", "amd64"}
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
cgutils: Any = typed_cgutils
intrinsic: Callable[[Callable[..., Any]], Any] = numba_intrinsic  # Numba's annotation has the caller pass a context
_ATOMIC_TYPES = (types.int64, types.int32)


def _on_counter(array: Any, values: int, emit: Callable[..., Any], result: Any = None) -> Any:
    """Type and code of an operation on `array[index]` that takes so many values of the array's type.

    emit(builder, pointer, bytes, *values) writes the code; `result` is what it gives, None for a number of the array's
    type. None, which Numba reports as a wrong type, for any other array.
    """
    if not (
        isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in _ATOMIC_TYPES
    ):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        given = emit(builder, builder.gep(data, [arguments[1]]), array.dtype.bitwidth // 8, *arguments[2:])
        return context.get_dummy_value() if result is types.void else given

    return (result or array.dtype)(array, types.intp, *[array.dtype] * values), generate


def _external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call `name`, one of LLVM's own functions or a symbol of the C library."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _as_bytes(builder: Any, cell: Any) -> Any:
    return builder.bitcast(cell, cgutils.voidptr_t)


@intrinsic
def load(typing_context, array, index):  # type: ignore[no-untyped-def]
    """`array[index]`, with acquire order: what the storing thread wrote before is seen after."""
    return _on_counter(array, 0, lambda builder, at, size: builder.load_atomic(at, "acquire", size))


@intrinsic
def store(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """`array[index] = value`, with release order."""

    def emit(builder: Any, at: Any, size: int, new: Any) -> None:
        builder.store_atomic(new, at, "release", size)

    return _on_counter(array, 1, emit, types.void)


@intrinsic
def fetch_add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Add `value` to `array[index]` and give what was there before."""
    return _on_counter(array, 1, lambda builder, at, _, more: builder.atomic_rmw("add", at, more, "acq_rel"))


@intrinsic
def exchange(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Put `value` into `array[index]` and give what was there before."""
    return _on_counter(array, 1, lambda builder, at, _, new: builder.atomic_rmw("xchg", at, new, "acq_rel"))


@intrinsic
def compare_exchange(typing_context, array, index, expected, value):  # type: ignore[no-untyped-def]
    """Put `value` into `array[index]` if `expected` is there; give whether it was."""

    def emit(builder: Any, at: Any, _: int, old: Any, new: Any) -> Any:
        return builder.extract_value(builder.cmpxchg(at, old, new, "acq_rel", "acquire"), 1)

    return _on_counter(array, 2, emit, types.boolean)


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spinning loop (x86 and Arm; nothing elsewhere)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if ON_X86:
            _external(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif platform.machine().lower() in {"aarch64", "arm64"}:
            _external(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(_INT32, 1))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_thread(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread of the machine have this core, without the GIL (nothing where the system has no such call)."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    known = binding.address_of_symbol(name) is not None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if known:
            _external(builder, name, _INT32)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def microseconds(typing_context):  # type: ignore[no-untyped-def]
    """A clock that only goes forward, in whole microseconds (int64) from an arbitrary start, without the GIL."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if sys.platform == "win32":
            return builder.mul(_external(builder, "GetTickCount64", _INT64), ir.Constant(_INT64, 1000))
        timespec = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        _external(builder, "clock_gettime", _INT32, ir.Constant(_INT32, time.CLOCK_MONOTONIC), timespec)
        seconds, nanoseconds = cgutils.unpack_tuple(builder, builder.load(timespec), 2)
        whole = builder.mul(seconds, ir.Constant(_INT64, 1_000_000))
        return builder.add(whole, builder.sdiv(nanoseconds, ir.Constant(_INT64, 1000)))

    return types.int64(), generate


@intrinsic
def float_control(typing_context):  # type: ignore[no-untyped-def]
    """The thread's MXCSR register (int32): rounding and what happens to denormal numbers. 0 off x86."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not ON_X86:
            return ir.Constant(_INT32, 0)
        cell = cgutils.alloca_once(builder, _INT32)
        _external(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), _as_bytes(builder, cell))
        return builder.load(cell)

    return types.int32(), generate


@intrinsic
def set_float_control(typing_context, value):  # type: ignore[no-untyped-def]
    """Set the thread's MXCSR register to `value` (int32). Nothing off x86."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if ON_X86:
            cell = cgutils.alloca_once_value(builder, arguments[0])
            _external(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), _as_bytes(builder, cell))
        return context.get_dummy_value()

    return types.void(types.int32), generate


FLOAT_CONTROL_DEFAULT = 0x1F80
"""MXCSR of a new process: round to nearest, denormal numbers kept, no trap."""
