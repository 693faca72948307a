"""Turns, disturbances, failures and who was fastest, with engines that are scripted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted_workers import Order, Scripted

from benchmarks.measure import Memory, Result, Rounds, best, opened
from benchmarks.workers import WorkerError
from qkv.measure.speed import Point

DECODE = Point("decode", 128)


def measured(workers: Sequence[Scripted], points: list[Point], rounds: int, **options) -> list[Result]:
    said = opened(workers, "file", 2, points, {})
    options = {"settle": 0, "busy": lambda: sum(worker.cpu for worker in workers), **options}
    return list(Rounds(workers, said, rounds, **options).measure(points))


def test_engines_take_turns_and_every_other_round_goes_backwards():
    log: list[Order] = []
    home = Scripted("qkv", {"f16": "f16", "int8": "int8"}, {"f16": [0.1], "int8": [0.2]}, log)
    peer = Scripted("peer", {"f16 flash": "f16"}, {"f16 flash": [0.4]}, log)
    reader = Scripted("memory", {}, {"": [0.5]}, log)
    (result,) = measured([home, peer], [DECODE], 2, memory=Memory(reader, 3e9))
    turns = [(name, variant) for name, do, variant in log if do == "burst"]
    forward = [("qkv", "f16"), ("qkv", "int8"), ("peer", "f16 flash")]
    assert turns == [("memory", ""), *forward, ("memory", ""), *reversed(forward)]
    prepared = [(name, variant) for name, do, variant in log if do == "prepare"]
    assert prepared == forward
    assert [one.rates for one in result.contestants] == [[80, 80], [40, 40], [20, 20]]  # eight steps of a token
    assert result.reads == [6e9, 6e9]


def test_rates_count_all_tokens_of_a_step():
    home = Scripted("qkv", {"f16": "f16"}, {"f16": [0.5]})
    results = measured([home], [Point("batch", 4), Point("prefill", 300), DECODE], 1)
    assert [(str(result.point), result.contestants[0].rate) for result in results] == [
        ("prefill:300", 600),
        ("decode:128", 16),
        ("batch:4", 64),
    ]


def test_the_median_of_the_rounds_counts_and_the_fastest_setting():
    home = Scripted("qkv", {"f16": "f16"}, {"f16": [1.0, 8.0, 2.0]})
    peer = Scripted(
        "peer",
        {"f16": "f16", "f16 flash": "f16", "q8_0 flash": "q8_0"},
        {"f16": [9.0, 1.0, 4.0], "f16 flash": [2.0, 2.0, 80.0], "q8_0 flash": [1.0, 1.0, 1.0]},
    )
    (result,) = measured([home, peer], [DECODE], 3)
    assert best(result.contestants, "qkv", {"f16"}).rate == 4  # eight tokens in two seconds
    assert best(result.contestants, "peer", {"f16"}).variant == "f16 flash"
    assert best(result.contestants, "peer", None).variant == "q8_0 flash"
    assert best(result.contestants, "peer", {"int8"}) is None
    assert best(result.contestants, "other", None) is None


def test_a_disturbed_round_is_measured_again_but_not_for_ever():
    class Busy:
        """Other programs use a core whenever `disturbed`, which every call to `burst` consumes."""

        def __init__(self, bursts: list[bool]) -> None:
            self.bursts, self.total = bursts, 0.0

        def __call__(self) -> float:
            return self.total

    def run(disturbed: list[bool]) -> tuple[list[float], float]:
        busy = Busy(disturbed)
        left = iter(disturbed)

        class Worker(Scripted):
            def ask(self, do, **order):
                if do == "burst" and next(left):
                    busy.total += 1e6
                return super().ask(do, **order)

        seconds = [8.0 / (1 + i) for i in range(len(disturbed))]
        worker = Worker("qkv", {"f16": "f16"}, {"f16": seconds})
        (result,) = measured([worker], [DECODE], 2, busy=busy)
        assert next(left, None) is None  # all of them were used
        return result.contestants[0].rates, result.company.strangers

    assert run([False, False]) == ([1, 2], 0)
    assert run([True, False, True, False]) == ([2, 4], 0)
    rates, strangers = run([True, True, True, True])
    assert rates == [3, 4]  # two rounds and two more are all there are
    assert strangers == 2e6  # and it is said


def test_engines_that_do_not_rest_are_noticed():
    class Restless(Scripted):
        def cpu_seconds(self) -> float:
            self.cpu += 1e6
            return self.cpu

    home = Scripted("qkv", {"f16": "f16"}, {"f16": [1.0]})
    (result,) = measured([home, Restless("peer", {}, {})], [DECODE], 1, busy=lambda: 0.0)
    assert result.company.waiting == 1e6
    assert result.company.share(result.company.waiting) > 1


def test_who_fails_is_out_of_that_point_and_nobody_else():
    home = Scripted("qkv", {"f16": "f16"}, {"f16": [1.0]})
    peer = Scripted("peer", {"a": "f16", "b": "f16"}, {"a": [2.0, WorkerError("no memory")], "b": [4.0]})
    broken = Scripted("broken", {}, {}, said={"cannot open": "what is this file"})
    failures: dict[str, str] = {}
    workers = [home, peer, broken]
    said = opened(workers, "file", 2, [DECODE], failures)
    assert failures == {"broken": "what is this file"}
    (result,) = Rounds(workers[:2], said, 3, settle=0, busy=lambda: 0.0).measure([DECODE])
    assert [one.failure for one in result.contestants] == [None, "no memory", None]
    assert [len(one.rates) for one in result.contestants] == [3, 1, 3]
    assert best(result.contestants, "peer", None).variant == "b"


def test_prompts_are_measured_with_f16_caches_alone():
    home = Scripted("qkv", {"f16": "f16", "int8": "int8"}, {"f16": [1.0], "int8": [1.0]})
    results = measured([home], [DECODE, Point("prefill", 9), Point("batch", 2)], 1)
    assert [[one.variant for one in result.contestants] for result in results] == [
        ["f16"],
        ["f16", "int8"],
        ["f16", "int8"],
    ]


def test_a_kind_that_an_engine_has_not_is_not_asked_for():
    peer = Scripted("peer", {"f16": "f16"}, {"f16": [1.0]}, said={"kinds": ["decode"]})
    results = measured([peer], [DECODE, Point("batch", 2)], 1)
    assert [len(result.contestants) for result in results] == [1, 0]


@pytest.mark.parametrize("name", ["user", "guest"])
def test_the_system_says_how_busy_it_was(name, monkeypatch, tmp_path):
    from benchmarks import measure

    file = tmp_path / "stat"
    numbers = {"user": "100 20 30 5000 600 7 8 9 0 0", "guest": "100 20 30 5000 600 7 8 9 50 0"}
    file.write_text(f"cpu  {numbers[name]}\ncpu0 1 2 3\n")
    monkeypatch.setattr(measure, "Path", lambda _: file)
    monkeypatch.setattr(measure.os, "sysconf", lambda _: 100)
    assert measure.busy_seconds() == (100 + 20 + 30 + 7 + 8 + 9) / 100  # guest time is in user time already
