"""How much memory a run takes, measured in a process of its own (Linux counts it there; elsewhere this is skipped)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

SOURCE = Path(qkv.__file__).parents[1]
ALLOWANCE = 350_000_000
"""Bytes of anonymous memory beside weights and cache: Python, NumPy, Numba and LLVM, kernels, a step's arrays."""

RUN = """
import json, sys
from pathlib import Path
from qkv.engine.params import SamplingParams
from qkv.llm import LLM
from qkv.model.compiled import kv_block_bytes

with LLM(sys.argv[1], context=2048, threads=2) as llm:
    llm.generate(list(range(1, 600)), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    blocks = -(-620 // 32)
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    print(json.dumps({
        "anonymous": int(used.split()[1]) * 1024,
        "weights": llm.weight_bytes,
        "cache": blocks * kv_block_bytes(llm.config, llm.cache),
    }))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_run_takes_little_more_than_weights_and_cache(smollm2):
    command = [sys.executable, "-c", RUN, str(smollm2)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)  # compiles, if need be
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    measured = json.loads(done.stdout)
    assert measured["anonymous"] >= measured["weights"]  # it is the weights' memory that is measured
    assert measured["anonymous"] <= measured["weights"] + measured["cache"] + ALLOWANCE, measured
