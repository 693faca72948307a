"""What can go wrong around the real step. Each case is a process of its own that must end in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qkv

SOURCE = Path(qkv.__file__).parents[1]
TESTS = Path(__file__).parents[1]
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals and fork")


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(map(str, [SOURCE, TESTS, TESTS / "model"]))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> str:
    """What it printed; fails if it complained or did not end."""
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert errors == ""
    return output


def run(code: str, **environment: str) -> str:
    return finish(start(code, **environment))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("interrupted", marks=posix),
        "closed",
        pytest.param("forked", marks=posix),
        pytest.param("forked_in_the_middle", marks=posix),
        "two_at_once",
        "one_decoder_in_two_threads",
        "more_threads_than_cores",
        "failing_thread",
    ],
)
def test_case(case):
    run(f"import fault_samples; fault_samples.{case}()")


DIGEST = "import fault_samples; from qkv.kernels.memory import faults; print(fault_samples.digest(), faults())"


@pytest.mark.slow
def test_no_load_or_store_leaves_its_array():
    """The step with every load and store checked: none is out of bounds, and no number is another one."""
    plain, checked = run(DIGEST).split(), run(DIGEST, QKV_SIMD="checked").split()
    assert checked == [plain[0], "0"]


@pytest.mark.slow
def test_the_portable_form_has_the_same_bits():
    assert run(DIGEST, QKV_SIMD="portable") == run(DIGEST)


ANSWER = """
import fault_samples
from qkv.runtime import cache
from qkv.model.compiled import compile_kernels
compile_kernels(["f32"])
compiled = []
cache.on_compiled.append(compiled.append)
print(hash(fault_samples.solo(fault_samples.deep(), fault_samples.prompt()).tobytes()), len(compiled))
"""


@pytest.mark.slow
def test_two_processes_that_compile_at_once(tmp_path):
    """One compiles, in a child of its own, and the other waits; then neither has anything left to compile."""
    environment = {"QKV_CACHE": str(tmp_path), "PYTHONHASHSEED": "0"}
    processes = [start(ANSWER, **environment) for _ in range(2)]
    answers = {finish(process) for process in processes}
    assert len(answers) == 1
    assert answers.pop().split()[1] == "0"
    (folder,) = (tmp_path / "kernels").iterdir()
    assert len(list(folder.glob("*program-*.nbc"))) == 1
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_truncated_kernels_are_compiled_again(tmp_path):
    """By the child, with a progress bar, and not here when they are first called."""
    environment = {"QKV_CACHE": str(tmp_path), "PYTHONHASHSEED": "0"}
    first = run(ANSWER, **environment).split()[0]
    for path in tmp_path.glob("kernels/*/*.nbc"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(ANSWER, **environment).split() == [first, "0"]
