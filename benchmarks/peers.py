"""Which other engines can be measured here, and how to add those that cannot."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.workers import Launch
from qkv.errors import QkvError


@dataclass(frozen=True)
class Peer:
    """Another engine: how to start it, or how it would be had."""

    name: str
    launch: Launch | None
    version: str
    hint: str

    @property
    def present(self) -> bool:
        return self.launch is not None


LLAMA_HINT = (
    "build it in an environment of its own (about 12 minutes on 2 cores): python3 -m venv llama && "
    'CMAKE_ARGS="-DGGML_NATIVE=ON" llama/bin/pip install llama-cpp-python --no-binary llama-cpp-python; '
    "then --llama-python llama/bin/python"
)


def find_peers(chosen: argparse.Namespace) -> list[Peer]:
    """Raises QkvError when a Python was named that does not have the engine."""
    given = chosen.llama_python or os.environ.get("QKV_BENCH_LLAMA_PYTHON")
    return [_peer("llama.cpp", "llama_cpp", "benchmarks.worker_llama_cpp", given, LLAMA_HINT)]


def _peer(name: str, package: str, module: str, given: str | None, hint: str) -> Peer:
    python = given or sys.executable
    version = _version(python, package)
    if version is None:
        if given:
            raise QkvError(f"{given} is no Python that can import {package}")
        return Peer(name, None, "", hint)
    return Peer(name, Launch(name, python, module), f"{package} {version}", hint)


def _version(python: str, package: str) -> str | None:
    """The version of a package in that Python, None if it cannot be imported there."""
    code = f"import {package}; print({package}.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None
