import os

import pytest

from qkv.runtime import cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up Linux machine: write its files below what this gives; 16 CPUs unless the test says otherwise."""
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine():
    assert 1 <= cores.available_cores() <= (os.cpu_count() or 1)


def test_without_affinity_all_cpus_count(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores.available_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.available_cores() == 1


def test_affinity_and_hyperthreads(machine, monkeypatch):
    assert cores.available_cores() == 16
    for cpu in range(16):
        write(machine / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}\n")
    assert cores.available_cores() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 8, 3})
    assert cores.available_cores() == 2


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 16),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 16),
        ("x y", 16),
        ("", 16),
        ("1 0", 16),
    ],
)
def test_cgroup_v2_quota(machine, quota, expected):
    write(machine / "membership", "0::/outer/inner\n")
    write(machine / "cgroup/outer/inner/cpu.max", quota)
    assert cores.available_cores() == expected


def test_the_tightest_quota_of_all_levels_counts(machine):
    write(machine / "membership", "0::/outer/inner\n")
    write(machine / "cgroup/outer/inner/cpu.max", "max 100000")
    write(machine / "cgroup/outer/cpu.max", "400000 100000")
    write(machine / "cgroup/cpu.max", "800000 100000")
    assert cores.available_cores() == 4


@pytest.mark.parametrize(("quota", "expected"), [("-1", 16), ("300000", 3), ("10000", 1), ("?", 16)])
@pytest.mark.parametrize("folder", ["cpu/job", "cpu,cpuacct/job", "cpu"])
def test_cgroup_v1_quota(machine, quota, expected, folder):
    write(machine / "membership", "5:memory:/job\n4:cpu,cpuacct:/job\n0::/job\n")
    write(machine / f"cgroup/{folder}/cpu.cfs_quota_us", quota)
    write(machine / f"cgroup/{folder}/cpu.cfs_period_us", "100000")
    assert cores.available_cores() == expected


def test_a_path_that_climbs_out_is_not_followed(machine):
    write(machine / "membership", "0::/../../etc\n")
    write(machine / "etc/cpu.max", "100000 100000")
    assert cores.available_cores() == 16
