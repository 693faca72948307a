"""How every kernel is compiled: one decorator, one set of options.

* `nogil`: the team's threads run side by side.
* `error_model="numpy"`: division by zero gives inf, as in C; the default leaves a raise path that blocks
  vectorizing, and an exception in one thread would leave the others waiting.
* no `fastmath`: LLVM would reassociate sums differently in each kernel, and equal inputs would stop giving
  equal bits. Explicit vectors and explicit `fma` give the speed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile `function` with Numba for the team's threads, caching the machine code on disk."""
    compiled: Function = numba.njit(nogil=True, error_model="numpy", cache=True, boundscheck=False)(function)
    return compiled
