"""`qkv pull`, `list`, `info`, `rm`: with names that lead to scripted places, and a real folder of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from screen import Terminal

from qkv.cli.main import execute
from qkv.errors import ModelNotFoundError
from qkv.model.config import PRESETS
from qkv.progress import Progress
from qkv.weights import names
from qkv.weights.names import CachedModel
from tiny import TINY, random_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with F32 weights, F16 norms, no tokenizer."""
    config = {
        "model_type": "qwen3",
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.num_hidden_layers,
        "num_attention_heads": TINY.num_attention_heads,
        "num_key_value_heads": TINY.num_key_value_heads,
        "head_dim": TINY.head_dim,
        "vocab_size": TINY.vocab_size,
        "max_position_embeddings": TINY.max_position_embeddings,
        "rms_norm_eps": TINY.rms_norm_eps,
        "rope_theta": TINY.rope_theta,
        "tie_word_embeddings": False,
        "eos_token_id": [5, 3],
    }
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = {n: t.astype(np.float16) if "norm" in n else t for n, t in random_tensors(TINY).items()}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[CachedModel]:
    models = [CachedModel("Qwen/Qwen3-0.6B", folder, 1_503_300_328, "hub"), CachedModel("a", folder, 12, "hub")]
    monkeypatch.setattr(names, "cached_models", lambda: models)
    return models


def rows_of(text: str) -> dict[str, list[str]]:
    """The table of `info`: the values of each name."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, value = line[:15].strip(), line[17:]
        rows.setdefault(name, []).append(value)
    return rows


def test_list(cached: list[CachedModel], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "NAME             SIZE      FROM  WHERE",
        f"Qwen/Qwen3-0.6B  1.5 GB    hub   {folder}",
        f"a                12 bytes  hub   {folder}",
    ]


def test_list_of_an_empty_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list"]) == 0
    assert capsys.readouterr() == ("", "no models yet; fetch one: qkv pull smollm2\n")


def test_pull_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("qkv.cli.bars.LONG_SECONDS", 0)

    def pull(name: str, progress: Progress) -> Path:
        progress(f"downloading {name}", 0, 2_000_000)
        progress(f"downloading {name}", 2_000_000, 2_000_000)
        return Path("somewhere") / name

    monkeypatch.setattr(names, "pull", pull)
    assert execute(["pull", "x"]) == 0
    assert capsys.readouterr() == (f"{Path('somewhere') / 'x'}\n", "downloading x (2 MB)\n")
    assert execute(["pull", "-q", "x"]) == 0
    assert capsys.readouterr().err == ""


def test_info_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["info", str(folder)]) == 0
    rows = rows_of(capsys.readouterr().out)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert rows["parameters"] == [f"{sum(t.size for t in tensors.values()):,}"]
    sizes = {
        kind: sum(t.nbytes for t in tensors.values() if t.dtype == dtype)
        for kind, dtype in [("F32", np.float32), ("F16", np.float16)]
    }
    norms = sum("norm" in name for name in tensors)
    assert rows["weights"] == [
        f"F32: {sizes['F32'] / 1000:.3g} kB in {len(tensors) - norms} tensors",
        f"F16: {sizes['F16']} bytes in {norms} tensors",
    ]
    assert rows["query heads"] == ["H = 4, head_dim = 32, so H x head_dim = 128"]
    # Keys and values, 2 layers, 2 heads of 32 numbers, 2 bytes each.
    assert rows["KV cache (f16)"] == ["512 bytes a token, 262 kB for the context"]
    assert rows["tokenizer"] == ["none"]
    assert rows["chat template"] == ["no"]
    assert rows["end tokens"] == ["5, 3"]
    assert rows["path"] == [str(folder)]
    assert len(rows["note"]) == 1


def test_info_of_a_folder_without_weights_has_the_shape_and_no_advice_to_fetch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    assert execute(["info", str(folder)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["query heads"] == ["H = 4, head_dim = 32, so H x head_dim = 128"]
    assert rows["weights"] == ["none in this folder"]


def test_info_says_how_rope_is_scaled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    assert execute(["info", str(folder)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["RoPE scaling"] == ["yarn, factor 4, first trained on 4,096 positions"]
    assert rows["context"] == ["16,384 positions"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3:8b"])
def test_info_of_a_preset_needs_no_files(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert execute(["info", name]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["model"] == ["Qwen/Qwen3-8B"]
    assert rows["parameters"] == [f"{PRESETS['Qwen/Qwen3-8B'].parameter_count:,}"]
    assert rows["weights"] == ["not downloaded; fetch them: qkv pull Qwen/Qwen3-8B"]


def test_info_reads_the_cached_files_of_a_preset(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(names, "find", lambda name: folder)
    assert execute(["info", "qwen3:0.6b"]) == 0
    assert rows_of(capsys.readouterr().out)["path"] == [str(folder)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "nobody/nothing is not on this machine; fetch it: qkv pull nobody/nothing"),
        ("smollm2", "smollm2 is not on this machine; fetch it: qkv pull smollm2"),
        ("smolm2", "did you mean smollm2"),
        ("./missing.gguf", "no such file"),
        ("x" * 5000, "unknown model"),
        ("a/" + "x" * 5000, "maximum length is 96"),
    ],
)
def test_info_of_nothing(capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    assert execute(["info", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qkv: ") and err.count("\n") == 1
    assert message in err


def test_rm_says_what_it_freed(
    monkeypatch: pytest.MonkeyPatch, cached: list[CachedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(names, "remove", lambda name: removed.append(name) or 1234)
    assert execute(["rm", "-y", "a"]) == 0
    assert capsys.readouterr() == ("deleted a: 1,234 bytes freed\n", "")
    assert removed == ["a"]


@pytest.mark.parametrize(("answer", "removed"), [("y\n", ["a"]), ("\n", []), ("n\n", [])])
def test_rm_asks_a_person(
    monkeypatch: pytest.MonkeyPatch,
    cached: list[CachedModel],
    capsys: pytest.CaptureFixture[str],
    answer: str,
    removed: list[str],
) -> None:
    found: list[str] = []
    monkeypatch.setattr(names, "remove", lambda name: found.append(name) or 1234)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert execute(["rm", "a"]) == 0
    assert found == removed
    assert "delete a (12 bytes)?" in capsys.readouterr().err


def test_rm_does_not_ask_a_pipe(
    monkeypatch: pytest.MonkeyPatch, cached: list[CachedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(names, "remove", lambda name: pytest.fail("removed without a yes"))
    assert execute(["rm", "a"]) == 2
    assert "-y deletes without asking" in capsys.readouterr().err


def test_rm_of_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["rm", "-y", "nobody/nothing"]) == ModelNotFoundError.exit_code
    assert "nobody/nothing is not in the cache" in capsys.readouterr().err
