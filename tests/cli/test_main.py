"""The `qkv` command as a process of its own: exit codes, streams, and what starting it costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from screen import Screen
from typer.main import get_command

import qkv
from qkv.cli.main import app

SCRIPTED = Path(__file__).with_name("scripted_llm.py")
VERBS = sorted(get_command(app).commands)  # of the app itself: a new verb is tested too
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")


def run_qkv(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "qkv", *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=60, **options
    )  # type: ignore[call-overload]


def test_version() -> None:
    result = run_qkv("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"qkv {qkv.__version__}\n".encode(), b"")


def test_help_names_every_verb_and_is_what_qkv_alone_shows() -> None:
    result, alone = run_qkv("--help"), run_qkv()
    assert result.returncode == alone.returncode == 0
    assert result.stdout == alone.stdout
    assert result.stderr == alone.stderr == b""
    assert len(VERBS) >= 11
    for verb in VERBS:
        assert f"  {verb} ".encode() in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "-h"] for verb in VERBS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from qkv.cli.main import execute; code = execute(sys.argv[1:]); "
        "heavy = {'numpy', 'numba', 'tokenizers', 'gguf', 'jinja2', 'rich', 'safetensors', "
        "'huggingface_hub', 'matplotlib'}; "
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stdout != ""
    assert result.stderr == "\n"


def test_an_unknown_model_without_a_network() -> None:
    for name in ("nobody/nothing", "smollm2", "./missing.gguf", "nonsense"):
        result = run_qkv("run", "-m", name, "hi")
        assert result.returncode == 2
        assert result.stdout == b""
        lines = result.stderr.decode().splitlines()
        assert lines[-1].startswith("qkv: ") and name in lines[-1]
        assert "Traceback" not in result.stderr.decode()


@POSIX
def test_a_reader_who_leaves_ends_it_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPTED, "run", "-q", "hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(4) == b"\n\nH" + b"\xc3"
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@POSIX
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_crash(closed: str) -> None:
    command = f'exec "$0" "$1" run --max-tokens 4 hi {closed}'
    result = subprocess.run(
        ["sh", "-c", command, sys.executable, SCRIPTED], capture_output=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr and b"Exception" not in result.stderr


@POSIX
def test_control_c_is_130_and_nothing_ugly() -> None:
    with Screen(SCRIPTED, "run", "hi") as screen:
        screen.expect("word3 ")
        screen.send("\x03")
        assert screen.end() == 130
        assert "Traceback" not in screen.seen and "Exception" not in screen.seen


@POSIX
def test_an_interrupt_without_a_terminal_is_130() -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPTED, "run", "hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_of_another_encoding_is_no_crash(encoding: str) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPTED, "run", "-q", "--max-tokens", "4", "hi"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout == "\n\nHéllo\x1b[31m\n".encode(encoding, "replace").replace(b"\n", os.linesep.encode())


@POSIX
def test_a_terminal_shows_control_characters_and_dim_thinking() -> None:
    with Screen(SCRIPTED, "run", "-q", "--max-tokens", "4", "hi") as screen:
        assert screen.end() == 0
        assert screen.seen == "\x1b[2mLet me think.\r\n\x1b[0m\r\nHéllo\\x1b[31m\r\n"
