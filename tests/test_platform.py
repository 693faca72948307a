"""What Windows and macOS lack is taken away from this Python, and everything must still work.

This is no substitute for running there: it shows that calls are guarded, not that the systems' own ways work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

TESTS = Path(__file__).parent
SOURCE = Path(qkv.__file__).parents[1]

TAKEN_AWAY = """
# asyncio and other people's packages look at their platform when they are imported: they come first.
import asyncio, mmap, os, signal, sys
import numpy, numba, llvmlite, tokenizers, filelock, tempfile, threading, jinja2, gguf, safetensors, typer, rich

def take_away(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

take_away(os, "sched_getaffinity", "sched_setaffinity", "memfd_create")
take_away(mmap, "MADV_HUGEPAGE", "MADV_POPULATE_READ", "MADV_POPULATE_WRITE", "MAP_POPULATE", "MAP_HUGETLB")
"""

NOT_ON_WINDOWS = """
take_away(os, "sysconf", "register_at_fork", "fork", "getuid", "geteuid", "O_DIRECTORY", "statvfs", "pread", "fchmod")
take_away(mmap, *[name for name in dir(mmap) if name.startswith("MADV_")])
take_away(signal, "SIGPIPE", "SIGKILL", "SIGHUP", "SIGALRM", "pthread_sigmask", "pthread_kill", "siginterrupt")
"""

USE = """
import fault_samples as samples
from qkv.runtime.cores import available_cores
import qkv.llm, qkv.cli.main
assert available_cores() >= 1
one, three = samples.deep(threads=1), samples.deep(threads=3)
ids = samples.prompt(40)
assert numpy.array_equal(samples.solo(one, ids), samples.solo(three, ids))
one.close()
"""


def run(code: str) -> None:
    paths = os.pathsep.join(map(str, [SOURCE, TESTS, TESTS / "model"]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("gone", [TAKEN_AWAY, TAKEN_AWAY + NOT_ON_WINDOWS], ids=["macOS", "Windows"])
def test_calls_that_a_platform_lacks_are_guarded(gone):
    run(gone + USE)


def test_without_a_wakeup_descriptor_steps_still_run():
    """In a subinterpreter, which signals are no business of."""
    run("import signal, numpy\ndef refuse(*_, **__): raise ValueError\nsignal.set_wakeup_fd = refuse\n" + USE)


NO_HUGE_PAGES = """
import mmap, numpy

class Mapping(mmap.mmap):
    def madvise(self, *arguments):
        raise OSError(22, "Invalid argument")

mmap.mmap = Mapping
"""


def test_a_linux_that_has_no_huge_pages():
    run(NO_HUGE_PAGES + USE)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_suite_takes_ctrl_c_though_it_was_started_in_the_background(tmp_path):
    """A shell's background job begins with SIGINT ignored. The suite's processes and their children must not."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (tmp_path / "test_it.py").write_text(
        f"import subprocess, sys\ndef test_it():\n    command = [sys.executable, '-c', {child!r}]\n"
        "    assert subprocess.check_output(command) == b'True\\n'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(SOURCE)])}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stdout
