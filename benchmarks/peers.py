"""Which other engines can be measured here, and how to add those that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.workers import Launch
from qkv.errors import QkvError


@dataclass(frozen=True)
class Kind:
    """A peer there may be. `option` names its Python on the command line, `variable` in the environment."""

    name: str
    package: str
    module: str
    option: str
    variable: str
    hint: str


@dataclass(frozen=True)
class Peer:
    """A peer there is (`launch`), or how it would be had (`hint`)."""

    name: str
    launch: Launch | None
    version: str = ""
    hint: str = ""


KINDS = [
    Kind(
        "llama.cpp",
        "llama_cpp",
        "benchmarks.worker_llama_cpp",
        "--llama-python",
        "QKV_BENCH_LLAMA_PYTHON",
        'python3 -m venv llama && CMAKE_ARGS="-DGGML_NATIVE=ON" llama/bin/pip install --no-binary llama-cpp-python '
        "llama-cpp-python (a C++ compiler and about 12 minutes), then --llama-python llama/bin/python",
    ),
    Kind(
        "ik_llama.cpp",
        "llama_cpp",
        "benchmarks.worker_llama_cpp",
        "--ik-python",
        "QKV_BENCH_IK_PYTHON",
        "--ik-python names a Python whose llama_cpp package is built from it; it has to have llama.cpp's present C "
        "interface (llama_memory_*, flash_attn_type)",
    ),
    Kind(
        "OpenVINO",
        "openvino_genai",
        "benchmarks.worker_openvino",
        "--openvino-python",
        "QKV_BENCH_OPENVINO_PYTHON",
        "python3 -m venv openvino && openvino/bin/pip install openvino-genai, then "
        "--openvino-python openvino/bin/python",
    ),
]


def find_peers(given: dict[str, str | None]) -> list[Peer]:
    """Every kind of peer, present or absent. `given`: the Pythons that the command line names, by option.

    Raises QkvError when a Python was named that does not have the engine.
    """
    return [_find(kind, given.get(kind.option) or os.environ.get(kind.variable)) for kind in KINDS]


def _find(kind: Kind, given: str | None) -> Peer:
    if given is None and kind.name == "ik_llama.cpp":  # an importable llama_cpp is taken for llama.cpp itself
        return Peer(kind.name, None, hint=kind.hint)
    python = given or sys.executable
    version, reason = _version(python, kind.package)
    if version:
        return Peer(kind.name, Launch(kind.name, python, kind.module), f"{kind.package} {version}")
    if given:
        raise QkvError(f"{kind.option} {given}: {reason}")
    return Peer(kind.name, None, hint=kind.hint)


def _version(python: str, package: str) -> tuple[str, str]:
    """The version of a package in that Python; or an empty text, and why it cannot be imported there."""
    code = f"import {package}; print({package}.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"cannot be started ({getattr(error, 'strerror', None) or 'no answer in two minutes'})"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return (last, "") if done.returncode == 0 else ("", last)
