"""The command: what it measures, what it says about peers that are absent or fail, and its last line."""

from __future__ import annotations

import json
import sys

import pytest
from scripted_workers import Scripted

from benchmarks import compare, models, peers
from benchmarks.peers import KINDS, Peer, find_peers
from benchmarks.workers import Launch, WorkerError
from qkv.errors import QkvError
from qkv.measure.speed import Point
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    config = tiny_config()
    return str(write_gguf(tmp_path_factory.mktemp("models") / "x.gguf", config, random_tensors(config)))


@pytest.fixture
def engines(monkeypatch):
    """Scripted engines in place of processes: the list of those that were started."""
    started: list[Scripted] = []
    script: dict[str, Scripted] = {}

    def start(launch: Launch) -> Scripted:
        made = script.get(launch.name) or Scripted(
            launch.name, {"f16": "f16", "int8": "int8"}, {"f16": [0.01], "int8": [0.02], "": [1.0]}
        )
        started.append(made)
        return made

    monkeypatch.setattr(compare, "Worker", start)
    monkeypatch.setattr("benchmarks.measure.SETTLE_SECONDS", 0)
    monkeypatch.setattr("benchmarks.measure.busy_seconds", lambda: 0.0)
    return script, started


def run(capsys, *arguments: str) -> tuple[str, dict]:
    assert compare.main(list(arguments)) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, json.loads(out.splitlines()[-1])


def test_without_any_peer(capsys, monkeypatch, engines, file, tmp_path):
    monkeypatch.setattr(peers, "_version", lambda python, package: ("", "no such module"))
    options = ["--models", f"q4_0={file}", "--points", "decode:64", "prefill:8", "--rounds", "2"]
    out, found = run(capsys, *options, "--only", "speed", "--out", str(tmp_path))
    for name in ("llama.cpp", "ik_llama.cpp", "OpenVINO"):
        assert f"{name}: absent. To add it: " in out
    assert found["peers"] == {"llama.cpp": None, "ik_llama.cpp": None, "OpenVINO": None}
    assert [(row["point"], row["cache"], row["peers"]) for row in found["rows"]] == [
        ("prefill:8", "f16", {}),
        ("decode:64", "f16", {}),
        ("decode:64", "int8", {}),
    ]
    assert [row["tokens_per_s"] for row in found["rows"]] == [800, 800, 400]
    assert all(row["read_gb_per_s"] == 2 for row in found["rows"])
    assert {"date", "processor", "cores", "memory_bytes", "system", "python"} <= set(found["machine"])
    _, started = engines
    assert [one.name for one in started] == ["qkv", "memory"]
    assert all(one.closed for one in started)


def test_beside_peers_one_of_which_cannot_load(capsys, monkeypatch, engines, file, tmp_path):
    present = [Peer(kind.name, Launch(kind.name, "python", "m"), "9") for kind in KINDS[:2]]
    monkeypatch.setattr(compare, "find_peers", lambda given: present)
    script, started = engines
    script["llama.cpp"] = Scripted(
        "llama.cpp",
        {"f16": "f16", "f16 flash": "f16", "q8_0 flash": "q8_0"},
        {"f16": [0.04], "f16 flash": [WorkerError("no flash")], "q8_0 flash": [0.03]},
    )
    script["ik_llama.cpp"] = Scripted("ik_llama.cpp", {}, {}, said={"cannot open": "unknown type"})
    options = ["--models", f"q4_0={file}", "--points", "decode:128", "--only", "speed", "--out", str(tmp_path)]
    out, found = run(capsys, *options)
    assert "ik_llama.cpp is left out: unknown type" in out
    assert "llama.cpp, f16 flash: no flash" in out
    assert found["failures"] == ["q4_0, ik_llama.cpp: unknown type"]
    f16, int8 = found["rows"]
    assert f16["ratios"] == {"llama.cpp": 4} and f16["bars"] == {"llama.cpp": 1.6}
    assert f16["peers"]["llama.cpp"]["setting"] == "f16"
    assert int8["peers"]["llama.cpp"]["setting"] == "q8_0 flash" and int8["ratios"] == {"llama.cpp": 1.5}
    assert len(f16["rounds"]) == 5
    assert "1 of 2 bars met" in out  # the fraction of a scripted memory is not
    assert all(one.closed for one in started)


def test_if_qkv_cannot_load_it_is_said(capsys, monkeypatch, engines, file):
    monkeypatch.setattr(compare, "find_peers", lambda given: [])
    script, started = engines
    script["qkv"] = Scripted("qkv", {}, {}, said={"cannot open": "broken"})
    assert compare.main(["--models", file, "--only", "speed"]) == 2
    assert capsys.readouterr().err == f"compare: qkv cannot measure {file}: broken\n"
    assert all(one.closed for one in started)


def test_a_break_keeps_what_was_measured(capsys, monkeypatch, engines, file, tmp_path):
    monkeypatch.setattr(compare, "find_peers", lambda given: [])
    script, started = engines
    script["qkv"] = Scripted("qkv", {"f16": "f16"}, {"f16": [0.01, 0.01, KeyboardInterrupt()]})
    options = ["--models", file, "--points", "prefill:8", "decode:64", "--rounds", "2", "--only", "speed"]
    assert compare.main([*options, "--out", str(tmp_path)]) == 130
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["point"] for row in rows] == ["prefill:8"]
    assert all(one.closed for one in started)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--points", "decode"], "is not a kind, a colon and a number, like decode:2048"),
        (["--points", "batch:0"], "must be from 1 to 256"),
        (["--rounds", "0"], "'0' is not a whole number from 1 to 1000"),
        (["--threads", "900"], "--threads: must be at most 512"),
        (["--only", "everything"], "invalid choice: 'everything'"),
        (["--also-qkv", "nowhere"], "there is no qkv in nowhere"),
    ],
)
def test_command_lines_that_cannot_be(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        compare.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "q5"], "--models q5: neither one of q4_0, q8_0, q4_k, smollm2 nor a file"),
        (["--models", f"q5={__file__}"], "q5 is none of"),
        (["--llama-python", "no-such-python"], "--llama-python no-such-python: cannot be started"),
        (["--openvino-python", sys.executable], f"--openvino-python {sys.executable}: "),
    ],
)
def test_what_is_not_there_is_one_line(capsys, engines, arguments, message):
    assert compare.main(["--only", "speed", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    out = capsys.readouterr().out
    assert "python -m benchmarks.compare --quick --models q4_0" in out
    assert all(kind.option in out and kind.variable in out for kind in KINDS)


def test_peers_are_looked_for_in_the_pythons_that_are_named(monkeypatch):
    asked = []

    def version(python, package):
        asked.append((python, package))
        return ("7", "") if python != "bad" else ("", "boom")

    monkeypatch.setattr(peers, "_version", version)
    monkeypatch.delenv("QKV_BENCH_LLAMA_PYTHON", raising=False)
    monkeypatch.setenv("QKV_BENCH_OPENVINO_PYTHON", "ov")
    found = {peer.name: peer for peer in find_peers({"--llama-python": "ll", "--ik-python": None})}
    assert asked == [("ll", "llama_cpp"), ("ov", "openvino_genai")]
    assert found["llama.cpp"].launch == Launch("llama.cpp", "ll", "benchmarks.worker_llama_cpp")
    assert found["llama.cpp"].version == "llama_cpp 7"
    assert found["ik_llama.cpp"].launch is None  # this Python's own llama_cpp would be llama.cpp
    with pytest.raises(QkvError, match="--ik-python bad: boom"):
        find_peers({"--ik-python": "bad"})


def test_default_points_fit_the_models():
    by_key = {model.key: models.default_points(model, quick=False) for model in models.MODELS}
    assert Point("decode", 8192) in by_key["q4_0"] and Point("decode", 4096) not in by_key["q4_0"]
    assert Point("decode", 4096) in by_key["smollm2"] and Point("decode", 8192) not in by_key["smollm2"]
    for points in by_key.values():
        assert {Point("batch", n) for n in (2, 4, 8, 16)} | {Point("prefill", n) for n in (128, 512, 2048)} <= set(
            points
        )


def test_the_models_that_bars_name_exist():
    from benchmarks.points import BARS, FRACTION_BARS

    points = {model.key: set(models.default_points(model, quick=False)) for model in models.MODELS}
    for bar in BARS:
        assert bar.point in points[bar.model]
    for model, point in FRACTION_BARS:
        assert point in points[model]
