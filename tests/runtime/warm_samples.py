"""Modules ask for kernels like this; the tests of the cache compile it in child processes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numba
import numpy as np

from qkv.runtime.jit import kernel


@kernel
def double(x):
    return x * 2


def scaled(factor):
    """A kernel that closes over a number and over another kernel."""

    @kernel
    def scale(x):
        return double(x) * factor

    return scale


@kernel
def total(x):
    result = 0.0
    for i in range(x.shape[0]):
        result += scale_by_three(x[i])
    return result


scale_by_three = scaled(3)


def called(factor):
    """A kernel that calls another, which closes over a number too long for LLVM to make it part of its caller."""

    @kernel
    def long(x):
        y = math.erf(x + math.erf(x + math.erf(x + math.erf(x + math.erf(x)))))
        y = math.erf(y + math.erf(y + math.erf(y + math.erf(y + math.erf(y)))))
        y = math.erf(y + math.erf(y + math.erf(y + math.erf(y + math.erf(y)))))
        return factor + 0 * y

    @kernel
    def call(x):
        return long(x) + long(2 * x)

    return call


TYPES = {"float64": numba.float64, "int64": numba.int64}


def warm(spec):
    """Compile `total` for arrays of the types in spec["types"], after doing what the test asks for."""
    if "note" in spec:
        with Path(spec["note"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
    time.sleep(spec.get("sleep", 0))
    if "fail" in spec:
        raise RuntimeError(spec["fail"])
    if "exit" in spec:
        os._exit(spec["exit"])
    print("this is not a report")
    for name in spec["types"]:
        total.compile((TYPES[name][::1],))


def use():
    """Run `total`; its result, and whether it came from the disk."""
    result = total(np.arange(4.0))
    return result, sum(total.stats.cache_hits.values())
