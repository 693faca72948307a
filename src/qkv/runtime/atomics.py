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


def _is_counters(array: Any) -> bool:
    """Whether `array` has a type that these operations accept."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and array.dtype in _ATOMIC_TYPES


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _external(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The function `name`: one of LLVM's own or a symbol of the C library."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def load(typing_context, array, index):  # type: ignore[no-untyped-def]
    """`array[index]`, with acquire order: what the storing thread wrote before is seen after."""
    if not _is_counters(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(pointer, "acquire", array.dtype.bitwidth // 8)

    return array.dtype(array, types.intp), generate


@intrinsic
def store(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """`array[index] = value`, with release order."""
    if not _is_counters(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store_atomic(arguments[2], pointer, "release", array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _read_modify_write(operation: str, array: Any) -> Any:
    if not _is_counters(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw(operation, pointer, arguments[2], "acq_rel")

    return array.dtype(array, types.intp, array.dtype), generate


@intrinsic
def fetch_add(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Add `value` to `array[index]` and give what was there before."""
    return _read_modify_write("add", array)


@intrinsic
def exchange(typing_context, array, index, value):  # type: ignore[no-untyped-def]
    """Put `value` into `array[index]` and give what was there before."""
    return _read_modify_write("xchg", array)


@intrinsic
def compare_exchange(typing_context, array, index, expected, value):  # type: ignore[no-untyped-def]
    """Put `value` into `array[index]` if `expected` is there; give whether it was."""
    if not _is_counters(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *arguments[:2])
        pair = builder.cmpxchg(pointer, arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tell the core that this is a spinning loop (x86 and Arm; nothing elsewhere)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if ON_X86:
            builder.call(_external(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif platform.machine().lower() in {"aarch64", "arm64"}:
            hint = _external(builder, "llvm.aarch64.hint", ir.VoidType(), [_INT32])
            builder.call(hint, [ir.Constant(_INT32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_thread(typing_context):  # type: ignore[no-untyped-def]
    """Let another thread of the machine have this core, without the GIL (nothing where the system has no such call)."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
    known = binding.address_of_symbol(name) is not None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if known:
            builder.call(_external(builder, name, _INT32, []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def microseconds(typing_context):  # type: ignore[no-untyped-def]
    """A clock that only goes forward, in whole microseconds (int64) from an arbitrary start, without the GIL."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if sys.platform == "win32":
            milliseconds = builder.call(_external(builder, "GetTickCount64", _INT64, []), [])
            return builder.mul(milliseconds, ir.Constant(_INT64, 1000))
        timespec = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        clock = _external(builder, "clock_gettime", _INT32, [_INT32, timespec.type])
        builder.call(clock, [ir.Constant(_INT32, time.CLOCK_MONOTONIC), timespec])
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
        address = builder.bitcast(cell, cgutils.voidptr_t)
        builder.call(_external(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [cgutils.voidptr_t]), [address])
        return builder.load(cell)

    return types.int32(), generate


@intrinsic
def set_float_control(typing_context, value):  # type: ignore[no-untyped-def]
    """Set the thread's MXCSR register to `value` (int32). Nothing off x86."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if ON_X86:
            cell = cgutils.alloca_once_value(builder, arguments[0])
            address = builder.bitcast(cell, cgutils.voidptr_t)
            builder.call(_external(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [cgutils.voidptr_t]), [address])
        return context.get_dummy_value()

    return types.void(types.int32), generate


FLOAT_CONTROL_DEFAULT = 0x1F80
"""MXCSR of a new process: round to nearest, denormal numbers kept, no trap."""
