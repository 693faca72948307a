"""`qkv explain`: every topic on a command line, with and without a model, and what it says to bad input."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from qkv.cli import explain
from qkv.cli.main import execute
from qkv.explain import attention_cost
from qkv.explain.trace import Heads
from qkv.measure import attention_timing
from qkv.model.cost import Limits
from qkv.opened import open_model
from qkv.runtime.team import team

CACHE = os.environ.get("QKV_CACHE")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: times are made up, as c·T² and c·T."""
    monkeypatch.setattr(attention_cost, "measure_limits", lambda *_: Limits(2e10, 1e11, 4e11))
    monkeypatch.setattr(
        attention_cost, "measure", lambda config, a, b, *_: ([1e-7 * T**2 for T in a], [1e-6 * T for T in b])
    )


TOPICS = {
    "scaling": "Var<q,k> = d·σ⁴",
    "mask": "-1e9 before, -1e4 before: the same bits as -∞",
    "convex": "coordinates are outside",
    "heads": "1024 → 16·128 = 2048 → 1024",
    "cost": "measured time ~ T^2.00",
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_needs_no_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, topic: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert execute(["explain", topic]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert TOPICS[topic] in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= columns
    assert "\x1b" not in out  # the terminal's own colours


@pytest.fixture(scope="module")
def layers(smollm2: Path) -> list[Heads]:
    """SmolLM2's q, k and v, as the command line traces them."""
    return explain.trace(str(smollm2))


def test_a_file_is_traced(smollm2: Path, layers: list[Heads]) -> None:
    """30 layers of 9 query heads and 3 key/value heads of 64 numbers."""
    T = len(open_model(str(smollm2)).tokenizer.prompt(explain.SAMPLE))
    assert [(x.q.shape, x.k.shape, x.v.shape) for x in layers] == [((T, 9, 64), (T, 3, 64), (T, 3, 64))] * 30


@pytest.mark.parametrize("topic", ["scaling", "mask", "convex"])
def test_a_models_own_heads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, layers: list[Heads], topic: str
) -> None:
    monkeypatch.setattr(explain, "trace", lambda model: layers)
    assert execute(["explain", topic, "-m", "smollm2"]) == 0
    out = capsys.readouterr().out
    assert "smollm2" in out
    if topic == "scaling":
        assert sum(line.startswith("layer 29 ") and "▕" not in line for line in out.splitlines()) == 1
        assert "after RoPE" in out
        assert "after q/k norm" not in out  # Llama-shaped: none
    if topic == "convex":
        assert "0 of 40,320 coordinates are outside by more than rounding" in out


@pytest.mark.parametrize("topic", ["heads", "cost"])
def test_a_models_shape(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    assert execute(["explain", topic, "-m", "qwen3:8b"]) == 0
    assert "Qwen/Qwen3-8B" in capsys.readouterr().out


@pytest.mark.parametrize("topic", TOPICS)
def test_png(capsys: pytest.CaptureFixture[str], tmp_path: Path, topic: str) -> None:
    pytest.importorskip("matplotlib")
    assert execute(["explain", topic, "--png", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sparsity"], "unknown topic 'sparsity'; qkv explains scaling, mask, convex, heads, cost"),
        ([], "Missing argument 'topic'"),
        (["scaling", "-m", "no-such-model"], "unknown model 'no-such-model'"),
        (["heads", "-m", "no-such-model"], "unknown model 'no-such-model'"),
        (["mask", "-m", "./nowhere.gguf"], "no such file"),
        (["heads", "--png", "nowhere/plot.png"], "nowhere: no such folder"),
        (["heads", "--png", "."], "is a folder; name a file"),
        (["scaling", "--model"], "--model"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert execute(["explain", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_missing_plot_library_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert execute(["explain", "heads", "--png", "plot.png"]) == 2
    assert capsys.readouterr() == (
        "",
        "qkv: a PNG needs matplotlib, which is not installed: pip install 'qkv[plots]'\n",
    )


def test_a_model_too_large_for_numpy_is_refused(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.runtime.memory.free_memory", lambda: 10**6)
    monkeypatch.setattr("qkv.weights.tensor.StoredTensor.to_float32", lambda tensor: pytest.fail("nothing is read"))
    with pytest.raises(explain.QkvError, match="takes 538 MB in float32, and 1 MB of memory are free"):
        explain.trace(str(smollm2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_ctrl_c_ends_the_measuring(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that other tests have compiled are used, on a length that does not end by itself."""

    def endless(program: Any, *_: object) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            team().run(program)

    if CACHE is None:
        monkeypatch.delenv("QKV_CACHE")
    else:
        monkeypatch.setenv("QKV_CACHE", CACHE)
    monkeypatch.setattr(attention_timing, "fastest", endless)
    monkeypatch.setattr(attention_cost, "measure", attention_timing.measure)
    monkeypatch.setattr(attention_cost, "PROMPTS", [32])
    monkeypatch.setattr(attention_cost, "CONTEXTS", [64])
    assert execute(["explain", "cost"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
