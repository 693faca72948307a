"""`qkv bench` on a tiny model: what it prints is about the points that were asked for. How fast is nobody's test."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from qkv.cli.main import execute
from qkv.measure import bandwidth, speed
from qkv.measure.bandwidth import PIECES, Reader
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.load import load_weights
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf

CACHE = os.environ.get("QKV_CACHE")
CONFIG = tiny_config()
QUICK = ["--weights", "f32", "--rounds", "2", "--threads", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_hf(made, CONFIG, random_tensors(CONFIG))
    return made


@pytest.fixture(autouse=True)
def kernels_and_a_small_memory(monkeypatch: pytest.MonkeyPatch, surroundings: None) -> None:
    """The kernels that other tests have compiled, not the empty cache of this room."""
    if CACHE is None:
        monkeypatch.delenv("QKV_CACHE")
    else:
        monkeypatch.setenv("QKV_CACHE", CACHE)
    monkeypatch.setattr(bandwidth, "Reader", partial(Reader, size=2 * max(PIECES)))


def test_json(folder, capsys):
    options = ["--depths", "30,7", "--prompts", "20", "--batches", "3", "--json"]
    assert execute(["bench", "-m", str(folder), *QUICK, *options]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert [(point["kind"], point["n"]) for point in found["points"]] == [
        ("prefill", 20),
        ("decode", 7),
        ("decode", 30),
        ("batch", 3),
    ]
    assert (found["weights"], found["cache"], found["threads"]) == (["f32"], "f16", 2)
    for point in found["points"]:
        assert len(point["step_seconds"]) == 2
        step = sum(point["step_seconds"]) / 2  # the median of two
        tokens = 1 if point["kind"] == "decode" else point["n"]
        assert point["tokens_per_second"] == pytest.approx(tokens / step)
        assert point["bytes_per_second"] == pytest.approx(point["step_bytes"] / step)
        assert point["operations_per_second"] == pytest.approx(point["step_operations"] / step)
        assert point["fraction_of_read"] == pytest.approx(point["bytes_per_second"] / found["read_bytes_per_second"])
    checkpoint = open_checkpoint(folder)
    weight_bytes = load_weights(checkpoint.config, checkpoint.tensors, wanted="f32").bytes_per_token
    shallow, deep = (point["step_bytes"] for point in found["points"] if point["kind"] == "decode")
    position = 2 * 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim  # f16 keys and values
    assert deep - shallow == 23 * position
    assert weight_bytes < shallow < weight_bytes + 30 * position


def test_table(folder, capsys):
    assert execute(["bench", "-m", str(folder), *QUICK, "--cache", "f32", "--depths", "8", "--batches", "0"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert "f32 weights, f32 cache" in out
    # The default prompts are 128 and 512, and the model has 512 positions, some of which a burst needs.
    titles = [line.split("  ")[0] for line in out.split("─\n")[1].splitlines()]
    assert titles == ["prefill 128", "decode at 8"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "x"], "--depths must be whole numbers with commas between, like 128,512; got 'x'"),
        (["--prompts", "1,,2"], "--prompts must be whole numbers"),
        (["--depths", "-5"], "--depths must be whole numbers"),
        (["--depths", "5000"], "--depths can be at most 496 here, got 5,000"),
        (["--batches", "257"], "--batches can be at most 256 here, got 257"),
        (["--depths", "0", "--prompts", "0", "--batches", "0"], "leave nothing to measure"),
        (["--rounds", "0"], "--rounds must be from 1 to 1000, got 0"),
        (["--threads", "0"], "threads must be a whole number from 1 to 512, got 0"),
        (["--cache", "int2"], "cache must be one of f32, f16, int8, got 'int2'"),
        (["--weights", "int3"], "weights: unknown format 'int3'"),
        (["-m", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_values_are_one_line(folder, capsys, options, message):
    assert execute(["bench", "-m", str(folder), "--weights", "f32", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_ctrl_c_ends_it_within_a_step(folder, capsys, monkeypatch):
    def endless(self, point):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            self._step(0)

    monkeypatch.setattr(speed.Bursts, "burst", endless)
    assert execute(["bench", "-m", str(folder), *QUICK, "--depths", "8", "--prompts", "0", "--batches", "0"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
