"""How every kernel is compiled: one decorator, one set of options.

* `nogil`: the team's threads run side by side.
* `error_model="numpy"`: division by zero gives inf, as in C; the default leaves a raise path that blocks
  vectorizing, and an exception in one thread would leave the others waiting.
* no `fastmath`: LLVM would reassociate sums differently in each kernel, and equal inputs would stop giving
  equal bits. Explicit vectors and explicit `fma` give the speed instead.
* the machine code is kept on disk by `cache.KernelCache`. A kernel may be made by a factory that closes over numbers,
  strings and other kernels, and still be found there by the next process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core.dispatcher import Dispatcher

from qkv.kernels.cache import KernelCache


def kernel(function: Callable[..., object]) -> Any:
    """Compile `function` with Numba for the team's threads at its first call, or take it from the disk.

    What comes back is called like `function` and is Numba's dispatcher, with `compile(signature)` and the like; with
    NUMBA_DISABLE_JIT=1 it is `function` itself.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    if isinstance(compiled, Dispatcher):
        compiled._cache = KernelCache(function)  # type: ignore[attr-defined]
    return compiled
