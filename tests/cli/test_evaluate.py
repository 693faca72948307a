"""`qkv eval` on a tiny model and on SmolLM2: the numbers of `LLM.score`, and one line for anything wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from qkv import LLM
from qkv.cli import evaluate
from qkv.cli.main import execute
from qkv.engine import scoring
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.choices import packed_size
from qkv.weights.load import load_weights
from tinyllm import opened, write_model

CACHE = os.environ.get("QKV_CACHE")
TEXT = "".join(chr(32 + n % 95) for n in np.random.default_rng(1).integers(0, 10**6, 700))
OPTIONS = ["--window", "200", "--stride", "80", "--cache", "f32"]
LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, surroundings: None) -> None:
    """The kernels that other tests have compiled, not the empty cache of this room."""
    if CACHE is None:
        monkeypatch.delenv("QKV_CACHE")
    else:
        monkeypatch.setenv("QKV_CACHE", CACHE)


@pytest.fixture
def text(tmp_path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return str(file)


def reported(capsys, *arguments: str) -> dict:
    assert execute(["eval", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_perplexity_is_that_of_score(folder, text, capsys):
    found = reported(capsys, "-m", str(folder), "--weights", "f32", *OPTIONS, text)
    with opened(folder, cache="f32") as llm:
        expected = llm.score(TEXT, window=200, stride=80)
    assert found["formats"][0]["perplexity"] == expected.perplexity
    assert (found["tokens"], found["scored"], found["window"], found["stride"]) == (700, 699, 200, 80)
    assert found["formats"][0]["kl_divergence"] == 0 and found["formats"][0]["same_top"] == 1
    assert found["formats"][0]["tokens_per_second"] > 0


def test_formats_side_by_side_score_as_they_do_alone(folder, text, capsys):
    found = reported(capsys, "-m", str(folder), "--compare", "f32,int8,int4", *OPTIONS, text)["formats"]
    alone = [
        reported(capsys, "-m", str(folder), "--weights", name, *OPTIONS, text)["formats"][0]["perplexity"]
        for name in ("f32", "int8", "int4")
    ]
    assert [one["weights"] for one in found] == ["f32", "int8", "int4"]
    assert [one["perplexity"] for one in found] == alone
    exact, int8, int4 = found
    assert exact["kl_divergence"] == 0 < int8["kl_divergence"] < int4["kl_divergence"]
    assert exact["same_top"] == 1 > int8["same_top"] > int4["same_top"] > 0


def test_the_table_says_how_it_was_measured(folder, text, capsys):
    assert execute(["eval", "-m", str(folder), "--compare", "f32,int4", *OPTIONS, text]) == 0
    out = capsys.readouterr().out
    assert "699 of 700 tokens scored, window 200, stride 80" in out
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["f32", "int4"]
    assert "KL(f32‖·)" in out and "%" in out
    assert execute(["eval", "-m", str(folder), "--tokens", "150", *OPTIONS, text]) == 0
    out = capsys.readouterr().out
    assert "149 of 150 tokens scored, window 200\n" in out and "KL" not in out  # one window has no stride
    assert out.splitlines()[2].startswith("int8 ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n\n\t", "empty"),
        (b"\xff\xfe\x00a", "not UTF-8 text (byte 1)"),
        (b"text \xe2\x82", "not UTF-8 text (byte 6)"),
        (b"GGUF\x03\x00\x00\x00", "null bytes"),
        (b"a", "one token only"),
    ],
)
def test_what_is_not_a_text_is_one_line(folder, tmp_path, capsys, content, message):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    refused(capsys, message, "-m", str(folder), str(file))


def refused(capsys, message: str, *arguments: str) -> None:
    assert execute(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


def test_files_that_cannot_be_read(folder, tmp_path, capsys, monkeypatch):
    refused(capsys, "missing.txt: no such file", "-m", str(folder), str(tmp_path / "missing.txt"))
    if os.name == "posix":
        refused(capsys, "is a directory", "-m", str(folder), str(tmp_path))
    monkeypatch.setattr(evaluate, "LARGEST_FILE", 10)
    (tmp_path / "long.txt").write_text("a" * 11)
    refused(capsys, "larger than 10 bytes", "-m", str(folder), str(tmp_path / "long.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "1"], "window must be a whole number from 2 to 2,048"),
        (["--window", "4096"], "window must be"),
        (["--window", "100", "--stride", "100"], "stride must be a whole number from 1 to 99"),
        (["--stride", "0"], "stride must be"),
        (["--tokens", "1"], "--tokens must be at least 2"),
        (["--compare", "bf16,int3"], "unknown format 'int3'"),
        (["--compare", "bf16"], "two or more"),
        (["--compare", "int8,int8"], "two or more"),
        (["--compare", ""], "unknown format ''"),
        (["--compare", "f32,int8", "--weights", "int8"], "one of the two"),
        (["--weights", "int3"], "unknown format"),
        (["--threads", "0"], "threads must be"),
        (["--cache", "int3"], "cache"),
    ],
)
def test_impossible_options_are_one_line(folder, text, capsys, options, message):
    refused(capsys, message, "-m", str(folder), *options, text)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_ctrl_c_ends_it_within_a_step(folder, text, capsys, monkeypatch):
    def endless(session, *_):
        os.kill(os.getpid(), signal.SIGINT)
        cache = scoring.PagedCache()
        while True:
            session.step([scoring.Feed(cache, [1])])
            session.release(cache)
            yield scoring.Rows(np.zeros((0, 1), np.float32), [])

    monkeypatch.setattr(scoring, "rows_about", endless)
    monkeypatch.setattr(scoring, "_add", lambda *_: None)
    assert execute(["eval", "-m", str(folder), "--weights", "f32", *OPTIONS, text]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err


@pytest.mark.parametrize("options", [["--weights", "f32"], ["--compare", "f32,bf16"]])
def test_numbers_beyond_an_f16_cache_are_one_line(tmp_path, text, capsys, options):
    """A model whose values are too large for its cache: nothing is printed but what to do about it."""

    def enlarge(made):
        made["model.layers.0.self_attn.v_proj.weight"] *= 1e6

    folder = write_model(tmp_path / "large", change=enlarge)
    refused(capsys, 'beyond 65,504, which is too large for an f16 cache; load the model with cache="f32"',
            "-q", "-m", str(folder), *options, "--cache", "f16", text)  # fmt: skip
    assert execute(["eval", "-m", str(folder), *options, "--cache", "f32", text]) == 0


def test_more_formats_than_memory_is_said_before_loading(folder, text, capsys, monkeypatch):
    monkeypatch.setattr("qkv.runtime.memory.free_memory", lambda: 1000)
    monkeypatch.setattr("qkv.opened.Opened.load", lambda *_, **__: pytest.fail("nothing is loaded"))
    refused(capsys, "1 kB are free", "-m", str(folder), "--compare", "f32,int8", text)


@pytest.mark.parametrize("wanted", [None, "f32", "bf16", "int8", "int4"])
def test_the_size_that_is_asked_for_is_the_size_there_is(folder, wanted):
    checkpoint = open_checkpoint(folder)
    loaded = load_weights(checkpoint.config, checkpoint.tensors, wanted=wanted)
    assert packed_size(checkpoint.config, checkpoint.tensors, wanted) == loaded.arena.nbytes


def test_a_real_model_on_english_and_on_noise(smollm2, tmp_path, capsys):
    """The prose of the repository's licence is far likelier than its letters shuffled."""
    shuffled = list(LICENCE.read_text(encoding="utf-8"))
    np.random.default_rng(1).shuffle(shuffled)
    (tmp_path / "noise.txt").write_text("".join(shuffled), encoding="utf-8")
    options = ["-m", str(smollm2), "--tokens", "400", "--window", "256"]
    english, noise = (reported(capsys, *options, str(file))["formats"][0] for file in (LICENCE, tmp_path / "noise.txt"))
    assert 2 < english["perplexity"] < 40
    assert noise["perplexity"] > 300
    with LLM(smollm2, context=512) as llm:
        ids = llm.tokenizer.prompt(LICENCE.read_text(encoding="utf-8"))[:400]
        assert llm.score(ids, window=256).perplexity == english["perplexity"]
