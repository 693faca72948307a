"""The machine code of the products' innermost loops: that it multiplies as meant, and keeps its sums in registers.

The code is compiled for a named processor and only looked at, so any x86 machine can run these tests.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import NullCache

from qkv.kernels import formats
from qkv.kernels.matmul import Inputs, Outputs, matmul_for
from qkv.kernels.panels import panel_size
from qkv.kernels.tiles import INFO

AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"
TARGETS = {
    "AVX2": {"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": AVX2},
    "AVX-512": {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512vnni",
    },
}
MULTIPLY = {"AVX2": "vpmaddubsw", "AVX-512": "vpdpbusd"}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or bool(os.environ.get("QKV_SIMD")), reason="not x86, or not its code"
)


def assembly(fmt: str) -> str:
    """The product kernel for one format, for the processor that Numba compiles for."""
    rows, columns, tokens = 64, 1024, 64
    matrix = formats.place(fmt, rows, columns)
    groups = tokens * columns // 32
    x, info = np.zeros(tokens * columns, np.float32), np.zeros(INFO * groups, np.int32)
    inputs = Inputs(x, 0, np.zeros(x.size, np.int8), np.zeros(groups, np.float32), info, tokens)
    arena, scratch = formats.new_arena(64), np.zeros(panel_size(columns), np.float32)
    arguments = (arena, matrix, inputs, Outputs(x, 0, rows), 0, 8, 0, scratch, 0)
    kernel = matmul_for((fmt,))
    kernel._cache = NullCache()
    kernel.compile(tuple(numba.typeof(argument) for argument in arguments))
    code: str = next(iter(kernel.inspect_asm().values()))
    return code


def innermost_loops(code: str) -> list[list[str]]:
    """The instructions between a label and a jump back to it with no other label between."""
    lines = code.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"(\.?L\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"\s+j\w+\s+(\.?L\w+)", line)
        if jump and labels.get(jump[1], i) < i:
            body = lines[labels[jump[1]] + 1 : i]
            if not any(re.match(r"\.?L\w+:", inside) for inside in body):
                loops.append([inside.strip() for inside in body])
    return loops


def spilled(loop: list[str]) -> int:
    """Vectors that a loop writes to the stack."""
    return sum(bool(re.search(r"%[xyz]mm\d+, -?\d*\(%r[sb]p", line)) for line in loop)


def report() -> None:
    """Run in the other processes: for each format, (multiplications, spills) of the loops that multiply."""
    target = sys.argv[1]
    for fmt in ("int4", "int4m", "int8"):
        for loop in innermost_loops(assembly(fmt)):
            count = sum(MULTIPLY[target] in line for line in loop)
            if count:
                print(fmt, count, spilled(loop))


@pytest.fixture(scope="module", params=["AVX2", pytest.param("AVX-512", marks=pytest.mark.slow)])
def loops(request):
    """{format: {multiplications of a loop: its spills, the worst where several have as many}}."""
    result = subprocess.run(
        [sys.executable, "-c", "import test_assembly; test_assembly.report()", request.param],
        env={**os.environ, **TARGETS[request.param]},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[int, int]] = {}
    for line in result.stdout.splitlines():
        fmt, count, spills = line.split()
        sizes = found.setdefault(fmt, {})
        sizes[int(count)] = max(int(spills), sizes.get(int(count), 0))
    return request.param, found


def test_every_tile_multiplies_bytes(loops):
    """8 multiplications for each vector of rows and token of a group: 1, 2 and 4 tokens directly, 4 on a panel."""
    target, found = loops
    tiles = {8, 16, 32} if target == "AVX2" else {16, 32, 64}
    assert all(tiles <= set(found[fmt]) for fmt in ("int4", "int4m", "int8")), found


def test_the_sums_stay_in_registers(loops):
    """A tile of 4 tokens has 8 sums (AVX2) or 16; without the pins of `isa`, LLVM spills about twice as many."""
    target, found = loops
    for fmt, sizes in found.items():
        assert max(spills for count, spills in sizes.items() if count <= 16) == 0, (fmt, sizes)
        most = {"int4": 4, "int4m": 5, "int8": 4}[fmt] if target == "AVX2" else 8
        assert max(spills for count, spills in sizes.items() if count <= 64) <= most, (fmt, sizes)
