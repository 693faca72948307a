"""How every kernel is compiled: one decorator, one set of options.

* `nogil`: the team's threads run side by side.
* `error_model="numpy"`: division by zero gives inf, as in C; the default leaves a raise path that blocks
  vectorizing, and an exception in one thread would leave the others waiting.
* no `fastmath`: LLVM would reassociate sums differently in each kernel, and equal inputs would stop giving
  equal bits. Explicit vectors and explicit `fma` give the speed instead.
* no reference counting (`_nrt`): arrays belong to the caller for as long as a kernel runs, and counts would be written
  by all threads at once. So a kernel cannot allocate: Numba refuses to compile one that does.
* the machine code is kept on disk by `cache.KernelCache`. A kernel may be made by a factory that closes over numbers,
  strings and other kernels, and still be found there by the next process.
* kernels that a kernel calls become a part of it: see `compiler`. That rests on Numba's insides. With QKV_PLAIN_NUMBA=1
  Numba links in its own way: the same numbers, and a first compilation that takes a few times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
from numba.core.dispatcher import Dispatcher

from qkv.runtime.cache import KernelCache

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False}
_PLAIN = os.environ.get("QKV_PLAIN_NUMBA") == "1"
_WITHOUT_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel(function: Callable[..., object]) -> Any:
    """Compile `function` with Numba for the team's threads at its first call, or take it from the disk.

    What comes back is called like `function` and is Numba's dispatcher, with `compile(signature)` and the like; with
    NUMBA_DISABLE_JIT=1 it is `function` itself.
    """
    if _PLAIN:
        compiled: Any = numba.njit(**_OPTIONS)(function)
        compiled.part = compiled
    else:
        compiled = _linked(function)
    if isinstance(compiled, Dispatcher):  # not with NUMBA_DISABLE_JIT=1
        compiled._cache = KernelCache(function)  # type: ignore[attr-defined]
    return compiled


def _linked(function: Callable[..., object]) -> Any:
    """The kernel, and what the kernels that call it get to see: another one, which becomes a part of them."""
    from qkv.runtime.compiler import PartCompiler, ProgramCompiler  # fails where Numba has changed inside

    compiled: Any = numba.njit(pipeline_class=ProgramCompiler, **_OPTIONS)(function)
    if not isinstance(compiled, Dispatcher):
        return compiled
    part: Any = numba.njit(pipeline_class=PartCompiler, **_WITHOUT_WRAPPERS, **_OPTIONS)(function)
    compiled.get_call_template = part.get_call_template  # type: ignore[method-assign]
    compiled.get_overload = part.get_overload  # type: ignore[method-assign]
    compiled.part = part  # type: ignore[attr-defined]
    return compiled


def inlined(compiled: Any) -> Any:
    """Put above `@kernel`: it is copied into every kernel that calls it, however large."""
    if isinstance(compiled, Dispatcher):  # not with NUMBA_DISABLE_JIT=1
        compiled.part.targetoptions["forceinline"] = True  # type: ignore[attr-defined]
    return compiled
