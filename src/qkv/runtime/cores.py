"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def available_cores() -> int:
    """Cores for computing: the physical ones among the CPUs this process may run on, within its cgroups' quota.

    Two hyperthreads of a core share what a kernel needs most, so they count once. A quota of 2.5 CPUs gives 2: with a
    third thread all of them would be stopped for a part of every period, each time in the middle of a step.
    """
    cores = _physical_cores(allowed_cpus())
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """The CPUs (hyperthreads, where cores have them) that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    """How many of `cpus` are on different cores; all of them where the system doesn't tell (anything but Linux)."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            return len(cpus)
    return max(1, len(cores))


def _quota() -> float | None:
    """The smallest CPU quota of the cgroups around this process (v1 and v2), in CPUs; None without one."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders = _ancestors(_CGROUPS, path) + _ancestors(_CGROUPS / "unified", path)
            quotas += [_v2_quota(folder) for folder in folders]
        elif "cpu" in controllers.split(","):
            quotas += [_v1_quota(folder) for folder in _ancestors(_CGROUPS / controllers, path)]
            quotas += [_v1_quota(folder) for folder in _ancestors(_CGROUPS / "cpu", path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it. In a container its own path may not exist, but `root` is its group."""
    inner = root / path.strip("/")
    return [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]


def _v2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _v1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
