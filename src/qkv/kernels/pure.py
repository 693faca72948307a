"""Two ways to make a kernel cheap to call from other kernels, put above `@kernel`."""

from __future__ import annotations

from typing import Any

from numba.core.dispatcher import Dispatcher


def uncounted(compiled: Any) -> Any:
    """A kernel without reference counting: its arrays belong to the step's caller for as long as the step runs.

    Numba would count them up and down at each call of a kernel by a kernel, in memory that all threads write to.
    Such a kernel cannot allocate; Numba refuses to compile it.
    """
    if isinstance(compiled, Dispatcher):  # not with NUMBA_DISABLE_JIT=1
        compiled.targetoptions["_nrt"] = False
    return compiled


def inlined(compiled: Any) -> Any:
    """An uncounted kernel that becomes a part of its caller, where LLVM sees that it cannot fail."""
    if isinstance(compiled, Dispatcher):
        compiled.targetoptions["forceinline"] = True
    return uncounted(compiled)
