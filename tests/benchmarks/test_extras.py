"""Starting, overhead and the portable code, with engines that are scripted."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_workers import Scripted

from benchmarks import extras
from benchmarks.extras import HOME, PORTABLE, Check, overhead, portable, starting
from benchmarks.report import starting_table
from benchmarks.workers import Launch, WorkerError

MODEL = Path("x.gguf")
PEER = Launch("llama.cpp", "python", "m")


def test_engines_start_in_turns_and_who_cannot_is_named():
    started: list[Scripted] = []

    def start(launch: Launch) -> Scripted:
        said = {"cannot open": "no"} if launch is PEER and len(started) > 2 else {}
        started.append(Scripted(launch.name, {}, {}, said=said))
        return started[-1]

    rows, failures = starting([HOME, PEER], MODEL, 2, 3, start)
    assert [one.name for one in started] == ["qkv", "llama.cpp", "qkv", "llama.cpp", "qkv"]
    assert [do for _, do, _ in started[0].log] == ["open", "first", "memory"]
    assert all(one.closed for one in started)
    assert failures == {"llama.cpp": "no"}
    (row,) = rows
    assert (row.engine, row.load, row.peak) == ("qkv", 0.5, 123_000_000)
    assert row.first >= 0
    assert "0.50" in starting_table(rows) and "123" in starting_table(rows)


def test_overhead_is_in_milliseconds():
    check = overhead(MODEL, 2, lambda launch: Scripted(launch.name, {}, {"overhead": [0.00025]}))
    assert check.value == pytest.approx(0.25) and check.met
    assert not overhead(MODEL, 2, lambda launch: Scripted(launch.name, {}, {"overhead": [0.00031]})).met


def test_the_portable_code_is_compared_with_the_usual(monkeypatch):
    monkeypatch.setattr("benchmarks.measure.SETTLE_SECONDS", 0)
    monkeypatch.setattr("benchmarks.measure.busy_seconds", lambda: 0.0)
    assert PORTABLE.environment == {"QKV_SIMD": "portable"}
    seconds = {HOME.name: [0.1], PORTABLE.name: [0.4]}
    started: list[Scripted] = []

    def start(launch: Launch) -> Scripted:
        variants = {"f16": "f16", "int8": "int8"}
        started.append(Scripted(launch.name, variants, {"f16": seconds[launch.name]}, said={"build": "VNNI"}))
        return started[-1]

    checks = portable(MODEL, 2, 3, start)
    assert [(check.name, check.value, check.met) for check in checks] == [
        ("portable code against VNNI, prefill:512", pytest.approx(4), True),
        ("portable code against VNNI, decode:128", pytest.approx(4), False),
    ]
    assert all(one.closed for one in started)


def test_a_portable_engine_that_fails_is_an_error():
    def start(launch: Launch) -> Scripted:
        return Scripted(
            launch.name, {}, {}, said={"cannot open": "no"} if launch is extras.PORTABLE else {"build": "x"}
        )

    with pytest.raises(WorkerError, match="qkv, portable: no"):
        portable(MODEL, 2, 1, start)


def test_checks_say_what_they_are():
    check = Check("a step outside the compiled code", 0.2512, 0.3, " ms")
    assert check.line() == "a step outside the compiled code: 0.251 ms, at most 0.3 ms: met"
    assert check.as_json() == {"name": check.name, "value": 0.2512, "most": 0.3, "met": True}
    assert Check("x", 5, 3, "×").line().endswith("5×, at most 3×: NOT MET")
