"""The team and the process around it: Ctrl-C, exit, fork. Each test is a process of its own that must end in time."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from qkv.runtime import cache

HERE = Path(__file__).parent
SOURCE = Path(cache.__file__).parents[2]
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals and fork")

PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import team_samples as samples
from qkv.runtime import spmd
from qkv.runtime.aside import aside
from qkv.runtime.team import Program, StepCancelledError, team

started = np.zeros(1, np.int64)
counts, log, turn = np.zeros(64, np.int64), np.zeros(100_000, np.int64), np.zeros(1, np.int64)

def endless(n):
    return Program(samples.endless, (started,), n)

def short(n):
    return Program(samples.tally, (counts, log, turn), n)

def run_short(n):
    before = counts[:n].copy()
    team().run(short(n))
    assert (counts[:n] == before + 1).all(), counts

def when_started(n, action, *arguments):
    def wait():
        while started[0] < n:
            time.sleep(0.001)
        action(*arguments)
    threading.Thread(target=wait, daemon=True).start()

def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
"""


def run(code, expected="", code_of_exit=0, error=""):
    """Run `code` after PREAMBLE; its standard output, its exit code and the last line of its standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [SOURCE, HERE]))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.strip().splitlines()[-1:]
    assert (done.stdout, done.returncode, last) == (expected, code_of_exit, [error] if error else []), done.stderr


@posix
@pytest.mark.parametrize("n", [1, 2, 8])
def test_ctrl_c_in_the_middle_of_a_step(n):
    run(
        f"""
        for _ in range(3):
            started[0] = 0
            when_started({n}, press_ctrl_c)
            try:
                aside(lambda: team().run(endless({n})))
            except KeyboardInterrupt:
                print("interrupted")
            run_short({n})
        """,
        "interrupted\n" * 3,
    )


@posix
def test_ctrl_c_that_nobody_catches_ends_the_process():
    run(
        "when_started(3, press_ctrl_c); aside(lambda: team().run(endless(3)))",
        code_of_exit=-signal.SIGINT,
        error="KeyboardInterrupt",
    )


@posix
def test_ctrl_c_at_any_moment_is_one_keyboard_interrupt():
    """Hundreds of interrupts at random moments of short steps: each is raised once, and no run after it fails."""
    run(
        """
        import random
        random.seed(1)
        pressed = caught = 0
        program = short(4)
        team().run(program)

        def press():
            global pressed
            while pressed < 300:
                time.sleep(0.0005 + random.random() / 200)
                if caught == pressed:
                    pressed += 1
                    press_ctrl_c()

        threading.Thread(target=press, daemon=True).start()
        while caught < 300:
            try:
                while True:
                    log[0] = 0
                    team().run(program)
            except KeyboardInterrupt:
                caught += 1
        run_short(4)
        """
    )


@posix
def test_ctrl_c_between_the_steps_of_work_put_aside():
    """The work has steps before and after the signal: it ends with the next one, which is aborted."""
    run(
        """
        def work():
            for _ in range(100):
                run_short(2)
            press_ctrl_c()
            time.sleep(0.2)
            team().run(endless(2))
        try:
            aside(work)
        except KeyboardInterrupt:
            print("interrupted")
        run_short(2)
        """,
        "interrupted\n",
    )


@posix
def test_what_work_put_aside_gives_and_raises():
    run(
        """
        print(aside(lambda: run_short(2) or 7))
        try:
            aside(lambda: 1 // 0)
        except ZeroDivisionError:
            print("raised")
        """,
        "7\nraised\n",
    )


@posix
def test_in_the_main_thread_a_handler_runs_when_the_step_is_over():
    run(
        """
        handler = signal.getsignal(signal.SIGINT)
        program = Program(samples.busy, (np.array([300]),), 2)
        program.compile()
        signal.signal(signal.SIGINT, lambda *_: print("handled"))
        threading.Timer(0.1, press_ctrl_c).start()
        team().run(program)
        print("whole step")
        signal.signal(signal.SIGINT, handler)
        threading.Timer(0.1, press_ctrl_c).start()
        try:
            team().run(program)
        except KeyboardInterrupt:
            print("interrupted")
        run_short(2)
        """,
        "handled\nwhole step\ninterrupted\n",
    )


@posix
def test_ctrl_c_while_a_worker_thread_of_python_runs_the_step():
    """The main thread gets the KeyboardInterrupt, and aborts."""
    run(
        """
        program = endless(2)
        outcome = []
        def use():
            try:
                team().run(program)
            except StepCancelledError as error:
                outcome.append(error)
        threading.Thread(target=use).start()
        when_started(2, press_ctrl_c)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            assert not outcome
            team().abort(program)
            while not outcome:
                time.sleep(0.001)
        run_short(2)
        """
    )


def test_exit_with_threads_polling_parked_and_never_used():
    run("run_short(8)")
    run("run_short(8); time.sleep(0.2)")
    run("")


def test_exit_when_the_main_thread_dies():
    run("run_short(8); raise ValueError('dead')", code_of_exit=1, error="ValueError: dead")


def test_exit_while_a_daemon_thread_is_in_a_step():
    run(
        """
        def use():
            try:
                team().run(endless(4))
            except StepCancelledError:
                pass
        threading.Thread(target=use, daemon=True).start()
        while started[0] < 4:
            time.sleep(0.001)
        """
    )


def test_a_step_at_exit_is_refused():
    run(
        """
        import atexit
        from qkv.runtime import team as module
        def late():
            try:
                run_short(2)
            except RuntimeError as error:
                print(error)
        run_short(2)
        atexit.unregister(module._at_exit)
        atexit.register(late)
        atexit.register(module._at_exit)  # handlers run in reverse
        """,
        "the interpreter is exiting: no step can run any more\n",
    )


def test_exit_while_a_daemon_thread_runs_step_after_step():
    run(
        """
        def use():
            program = short(4)
            while True:
                log[0] = 0
                team().run(program)
        user = threading.Thread(target=use, daemon=True)
        threading.excepthook = lambda hook: None  # cancelled in the middle, or refused at the beginning
        user.start()
        while counts[3] < 100:
            time.sleep(0.001)
        """
    )


@posix
def test_fork_while_another_thread_is_in_a_step():
    """The child has no team threads and no step; the parent goes on."""
    run(
        """
        program = endless(3)
        def use():
            try:
                team().run(program)
            except StepCancelledError:
                print("cancelled", flush=True)
        user = threading.Thread(target=use)
        user.start()
        while started[0] < 3:
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            run_short(3)
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        team().abort(program)
        user.join()
        run_short(3)
        """,
        "cancelled\n",
    )


@posix
def test_multiprocessing_fork_after_use():
    run(
        """
        import multiprocessing
        run_short(2)
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=run_short, args=(2,)) for _ in range(2)]
        for child in children: child.start()
        for child in children: child.join()
        assert [child.exitcode for child in children] == [0, 0]
        run_short(2)
        """
    )


def test_more_threads_than_cores():
    """64 threads and 200 barriers on whatever this machine has: if waiting threads kept their cores, hours."""
    run(
        """
        x = np.arange(1000.0)
        arrays = (np.array([67]), x, np.zeros(1000), np.zeros(63), np.zeros(1))
        team().run(Program(samples.three_phases, arrays, 64))
        assert arrays[4][0] == (x * x).sum()
        """
    )
