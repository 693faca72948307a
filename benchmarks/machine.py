"""What was measured on, and when."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import qkv
from qkv.runtime.cores import available_cores


def machine() -> dict[str, Any]:
    """The processor, cores, memory, system, versions and today's date."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": available_cores(),
        "memory_bytes": memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "qkv": qkv.__version__,
        **{package: _version(package) for package in ("numba", "llvmlite", "numpy")},
    }


def text(about: dict[str, Any]) -> str:
    """Two lines."""
    size = about["memory_bytes"]
    memory = "" if size is None else f", {size / 1e9:.0f} GB"
    return (
        f"{about['processor']}, {about['cores']} cores{memory}; {about['date']}\n"
        f"{about['system']}; Python {about['python']}, qkv {about['qkv']}, Numba {about['numba']}\n"
    )


def processor() -> str:
    """The processor's name. Hypervisors hide part of it: then family and model say which generation it is."""
    found: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        found[key.strip()] = value.strip()
    name = found.get("model name")
    if not name:
        return platform.processor() or platform.machine()
    if "cpu family" in found and "model" in found:
        name += f" (family {found['cpu family']}, model {found['model']})"
    return name


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
