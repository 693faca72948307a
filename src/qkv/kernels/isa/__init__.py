"""The instruction set that kernels are made of, chosen once at import.

To add one, write a class that replaces what `portable.Portable` does, and name it in `SETS`. Nothing else in the
kernels asks what the processor is.

The environment variable QKV_SIMD picks a mode:

* `auto` (the default): the best instruction set that Numba's target has;
* `avx2`: no better one than that;
* `portable`: plain LLVM vectors only. It gives the same bits as `auto`, so a processor can be checked against it;
* `checked`: as `auto`, and every load and store is checked against its array's bounds: see `memory.faults`.
"""

from __future__ import annotations

import os

import numba
from numba.core.codegen import get_host_cpu_features

from qkv.errors import ParameterError
from qkv.kernels.isa.portable import Portable
from qkv.kernels.isa.x86 import AVX2, AVX512, VNNI, VNNI512

SETS: tuple[type[Portable], ...] = (VNNI512, VNNI, AVX512, AVX2, Portable)
"""The best first."""
MODES = ("auto", "avx2", "portable", "checked")


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


def chosen_set(mode: str, features: frozenset[str]) -> Portable:
    """The instruction set for a mode, on a processor with these features. Raises ParameterError if it has none such."""
    usable = [each for each in SETS if any(needed <= features for needed in each.needs)]
    if mode in ("auto", "checked"):
        return usable[0]()
    for each in usable:
        if each.name == mode:
            return each()
    raise ParameterError(f"QKV_SIMD: this processor has no {mode}; choose auto, portable or checked")


MODE = _chosen_mode()
CHECKED = MODE == "checked"
ISA = chosen_set(MODE, _target_features())
