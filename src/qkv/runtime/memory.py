"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that could be taken now without swapping: the system's own figure, and the container's limit.

    Where the system does not say, half of its memory; None where it does not even say that.
    """
    figures = [figure for figure in (_available(), _left_in_container()) if figure is not None]
    return min(figures) if figures else _half_of_all()


def _available() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):  # not Linux, or not readable
        pass
    return None


def _left_in_container() -> int | None:
    """What the control group's limit leaves; None without a limit (the file then says "max")."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return max(0, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def _half_of_all() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None
