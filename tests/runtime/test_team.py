import os
import threading
import time

import numba
import numpy as np
import pytest
import team_samples as samples

from purity import assert_pure
from qkv.errors import ParameterError
from qkv.runtime import atomics, spmd
from qkv.runtime import team as team_module
from qkv.runtime.team import Program, StepCancelledError, StepFailedError, Team, team


@pytest.fixture
def crew():
    """A team of the test's own; ended after it."""
    made = Team()
    yield made
    made.close()


def three_phase_arrays(length, rounds=1):
    x = np.random.default_rng(length).standard_normal(length)
    blocks = -(-length // samples.CHUNK)
    return np.array([rounds]), x, np.zeros(length), np.zeros(blocks), np.zeros(1)


def three_phases_in_python(x):
    """The same additions in the same order."""
    sums = []
    for first in range(0, len(x), samples.CHUNK):
        total = 0.0
        for value in x[first : first + samples.CHUNK]:
            total += value * value
        sums.append(total)
    total = 0.0
    for value in sums:
        total += value
    return total


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 1000])
def test_three_phases_give_the_same_bits_on_any_number_of_threads(crew, threads, length):
    arrays = three_phase_arrays(length, rounds=20)
    program = Program(samples.three_phases, arrays, threads)
    for _ in range(5):
        arrays[4][:] = np.nan
        crew.run(program)
        assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_the_step_reads_what_its_arrays_hold_now(crew):
    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 2)
    for scale in range(3):
        arrays[1][:] = scale
        crew.run(program)
        assert arrays[4][0] == 100 * scale**2


def test_workers_park_when_idle_and_run_again(crew):
    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 3)
    mailboxes = [spmd.MAILBOXES + tid * spmd.LINE for tid in (1, 2)]
    for _ in range(3):
        arrays[4][:] = np.nan
        crew.run(program)
        assert arrays[4][0] == three_phases_in_python(arrays[1])
        wait_until(lambda: all(crew._sync[mailbox] == spmd.PARKED for mailbox in mailboxes))


def test_every_thread_takes_part_in_every_run(crew):
    counts, log = np.zeros(4, np.int64), np.zeros(301, np.int64)
    program = Program(samples.tally, (counts, log, np.array([7])), 4)
    for _ in range(300):
        crew.run(program)
    assert counts.tolist() == [300] * 4
    assert log.tolist() == [300] + [7] * 300


def test_two_models_in_two_threads_take_turns(crew):
    log = np.zeros(401, np.int64)
    programs = [Program(samples.tally, (np.zeros(n, np.int64), log, np.array([n])), n) for n in (2, 4)]
    for program in programs:
        program.compile()

    def use(program):
        for _ in range(200):
            crew.run(program)

    users = [threading.Thread(target=use, args=(program,)) for program in programs]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert log[0] == 400
    assert [program.arrays[0].tolist() for program in programs] == [[200] * 2, [200] * 4]
    assert sorted(log[1:].tolist()) == [2] * 200 + [4] * 200


def test_turns_are_taken_in_the_order_of_asking(crew):
    started, log = np.zeros(1, np.int64), np.zeros(9, np.int64)
    blocker = Program(samples.endless, (started,), 2)
    programs = [Program(samples.tally, (np.zeros(2, np.int64), log, np.array([i])), 2) for i in range(8)]
    for program in [blocker, *programs]:
        program.compile()

    def block():
        with pytest.raises(StepCancelledError):
            crew.run(blocker)

    users = [threading.Thread(target=block)]
    users += [threading.Thread(target=crew.run, args=(program,)) for program in programs]
    for place, user in enumerate(users, start=1):
        user.start()
        wait_until(lambda place=place: len(crew._queue._waiting) == place)
    crew.abort(blocker)
    for user in users:
        user.join()
    assert log.tolist() == [8, *range(8)]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_abort_takes_everyone_out_and_the_next_run_works(crew, threads):
    started = np.zeros(1, np.int64)
    program = Program(samples.endless, (started,), threads)
    program.compile()

    def cancel():
        wait_until(lambda: started[0] == threads)
        crew.abort(Program(samples.endless, (started,), threads))  # not the one that runs: has no effect
        crew.abort(program)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(StepCancelledError, match="cancelled"):
        crew.run(program)
    canceller.join()
    arrays = three_phase_arrays(100)
    crew.run(Program(samples.three_phases, arrays, threads))
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_abort_between_runs_has_no_effect(crew):
    arrays = three_phase_arrays(100)
    crew.abort()
    crew.run(Program(samples.three_phases, arrays, 2))
    assert arrays[4][0] == three_phases_in_python(arrays[1])


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_an_exception_in_one_thread_reaches_the_caller(crew, culprit):
    program = Program(samples.failing, (np.array([culprit]),), 4)
    expected = (
        (ValueError, "forced") if culprit == 0 else (StepFailedError, "compute thread failed: ValueError: forced")
    )
    for _ in range(3):
        with pytest.raises(expected[0], match=expected[1]):
            crew.run(program)
    arrays = three_phase_arrays(100)
    crew.run(Program(samples.three_phases, arrays, 4))
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_an_exception_in_the_python_part_of_a_worker_reaches_the_caller(crew, monkeypatch):
    serve = crew._serve

    def broken(tid):
        if tid == 2:
            raise MemoryError("no room")
        return serve(tid)

    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 4)
    with monkeypatch.context() as patch:
        patch.setattr(crew, "_serve", broken)
        with pytest.raises(StepFailedError, match="MemoryError: no room") as caught:
            crew.run(program)
    assert isinstance(caught.value.__cause__, MemoryError)
    crew.run(program)
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_threads_that_cannot_be_started_are_reported(crew, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 3)
    program.compile()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StepFailedError, match="could not start compute thread 2 of 3"):
            crew.run(program)
    crew.run(program)
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_close_in_the_middle_of_a_step(crew):
    started = np.zeros(1, np.int64)
    program = Program(samples.endless, (started,), 3)
    outcome = []

    def use():
        try:
            crew.run(program)
        except StepCancelledError as error:
            outcome.append(error)

    user = threading.Thread(target=use)
    user.start()
    wait_until(lambda: started[0] == 3)
    workers = list(crew._threads)
    crew.close()
    user.join()
    assert len(outcome) == 1
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)
    arrays = three_phase_arrays(100)
    crew.run(Program(samples.three_phases, arrays, 3))
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_a_broken_off_cleaning_up_is_done_by_the_next_run(crew, monkeypatch):
    """Two Ctrl-C in a row: one while a worker is being woken (its door is still shut), one in the cleaning up."""

    def interrupt(*_):
        raise KeyboardInterrupt

    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 3)
    with monkeypatch.context() as patch:
        patch.setattr(crew, "_open", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crew.run(program)
    crew.run(program)
    assert arrays[4][0] == three_phases_in_python(arrays[1])


def test_a_signal_handler_that_uses_the_team_in_its_own_step_is_told_so(crew, monkeypatch):
    program = Program(samples.three_phases, three_phase_arrays(100), 2)
    monkeypatch.setattr(crew, "_run_step", lambda _: crew.close())
    with pytest.raises(RuntimeError, match="signal handler"):
        crew.run(program)


def test_forget_lets_go_of_the_arrays(crew):
    program = Program(samples.three_phases, three_phase_arrays(100), 2)
    crew.run(program)
    crew.forget(program)
    assert crew._current is None
    other = three_phase_arrays(50)
    crew.run(Program(samples.three_phases, other, 2))
    assert other[4][0] == three_phases_in_python(other[1])


@pytest.mark.skipif(not atomics.ON_X86, reason="MXCSR is a register of x86")
def test_a_step_keeps_denormal_numbers_whatever_the_callers_thread_does(crew):
    tiny = np.array([np.finfo(np.float32).tiny])
    halves = np.zeros(2, np.float32)
    program = Program(samples.denormals, (tiny, halves), 2)
    original = samples.swap_float_control(0x9FC0)  # flush to zero, as other libraries set it
    try:
        crew.run(program)
    finally:
        left = samples.swap_float_control(original)
    assert left & 0xFFC0 == 0x9FC0  # the caller has its own rules back
    assert halves.tolist() == [float(tiny[0]) / 2] * 2


@pytest.mark.parametrize("threads", [0, -1, 513])
def test_thread_counts_out_of_range(threads):
    with pytest.raises(ParameterError, match=f"^threads: {threads} "):
        Program(samples.endless, (np.zeros(1, np.int64),), threads)


def test_the_machine_code_of_a_step_cannot_raise_and_counts_no_references():
    sync = np.zeros(spmd.sync_size(4), np.int64)
    assert_pure(samples.three_phases, 0, 1, sync, *three_phase_arrays(10))
    with pytest.raises(AssertionError, match="ret i32"):
        assert_pure(samples.failing, 0, 1, sync, np.zeros(1, np.int64))
    with pytest.raises(AssertionError, match="NRT_"):
        assert_pure(numba.njit(samples.allocating.py_func), 0, 1, sync, np.zeros(1, np.int64))


def test_a_kernel_that_allocates_is_not_compiled():
    with pytest.raises(numba.core.errors.NumbaError, match="Only accept returning of array passed"):
        samples.allocating(0, 1, np.zeros(spmd.sync_size(1), np.int64), np.zeros(1, np.int64))


def test_one_team_per_process():
    assert team() is team()
    assert team_module._team is team()


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_team_of_its_own():
    arrays = three_phase_arrays(100)
    program = Program(samples.three_phases, arrays, 3)
    team().run(program)
    child = os.fork()
    if child == 0:
        arrays[4][:] = np.nan
        team().run(program)
        team().close()
        os._exit(0 if arrays[4][0] == three_phases_in_python(arrays[1]) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    team().run(program)
    assert arrays[4][0] == three_phases_in_python(arrays[1])
