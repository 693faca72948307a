"""The hub's client against a local stand-in for the hub. Each trial is a process of its own, since `huggingface_hub`
reads its environment once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkv.errors import ModelNotFoundError
from qkv.weights.hub import choose_files
from tiny import random_tensors, tiny_config
from tinyfiles import hf_config, safetensors_bytes

REPO = "someone/tiny"
PROGRAM = """
import json, sys
from qkv.errors import QkvError
from qkv.weights import hub, names
from qkv.weights.checkpoint import open_checkpoint
lines = []
def progress(what, done, total, unit="bytes"):
    lines.append([what, done, total])
verb, name = sys.argv[1:]
try:
    if verb in ("resolve", "pull"):
        path = names.resolve(name, progress=progress) if verb == "resolve" else names.pull(name, progress)
        answer = {"path": str(path), "files": sorted(p.name for p in path.rglob("*")) if path.is_dir() else None}
        if path.is_dir() and (path / "config.json").exists():
            answer["tensors"] = len(open_checkpoint(path).tensors)
    elif verb == "list":
        answer = {"models": [[m.name, str(m.path), m.size_bytes, m.kind] for m in names.cached_models()]}
    else:
        answer = {"freed": names.remove(name)}
except QkvError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print(json.dumps({**answer, "progress": lines}))
"""


@pytest.fixture
def run(tmp_path, model_hub):
    """`run(verb, name, **environment)` in a process whose hub is the stand-in."""

    def run(verb: str, name: str = "", **environment: str) -> dict:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "QKV_"))}
        known = {"HF_ENDPOINT": model_hub.url, "HF_HOME": str(tmp_path / "hf"), "QKV_CACHE": str(tmp_path / "qkv")}
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, verb, name],
            env={**clean, **known, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        assert "\n" not in answer.get("message", "")
        return answer

    return run


def files_of_a_model() -> dict[str, bytes]:
    config = tiny_config()
    return {
        "config.json": json.dumps(hf_config(config)).encode(),
        "model.safetensors": safetensors_bytes(random_tensors(config)),
        "generation_config.json": b'{"eos_token_id": 1}',
        "tokenizer_config.json": b"{}",
        "README.md": b"read me",
        "pytorch_model.bin": b"no",
        "onnx/model.safetensors": b"no",
    }


def test_a_model_comes_with_the_files_that_count(run, model_hub):
    model_hub.repos[REPO] = files = files_of_a_model()
    answer = run("resolve", REPO)
    wanted = ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"]
    assert answer["files"] == wanted
    assert sorted(model_hub.served) == wanted
    assert answer["tensors"] == len(tiny_config().parameter_shapes())
    total = sum(len(files[name]) for name in wanted)
    bars = [(done, total_) for what, done, total_ in answer["progress"] if what == f"downloading {REPO}"]
    assert bars[-1] == (total, total)
    assert {total_ for _, total_ in bars} == {total}
    assert [done for done, _ in bars] == sorted(done for done, _ in bars)
    assert len(bars) > 1


def test_a_cached_model_needs_no_hub(run, model_hub):
    model_hub.repos[REPO] = files_of_a_model()
    path = run("resolve", REPO)["path"]
    count = len(model_hub.served)
    for nowhere in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}, {"QKV_OFFLINE": "1"}):
        assert run("pull", REPO, **nowhere)["path"] == path
    assert run("resolve", REPO, HF_ENDPOINT="http://127.0.0.1:9")["path"] == path
    assert len(model_hub.served) == count


def test_a_model_that_is_only_partly_cached_is_no_model(run, model_hub):
    model_hub.repos[REPO] = files_of_a_model()
    path = Path(run("resolve", REPO)["path"])
    (path / "model.safetensors").unlink()
    assert run("resolve", REPO, QKV_OFFLINE="1")["error"] == "ModelNotFoundError"
    assert run("resolve", REPO)["tensors"] == len(tiny_config().parameter_shapes())


def test_one_file_of_several(run, model_hub):
    model_hub.repos[REPO] = {"a[1].gguf": np.random.default_rng(0).bytes(50_000), "sub/b.gguf": b"b"}
    answer = run("resolve", REPO)
    assert answer["error"] == "ModelNotFoundError"
    assert "several GGUF files" in answer["message"]
    assert "a[1].gguf, sub/b.gguf" in answer["message"]
    for name in (f"{REPO}/a[1].gguf", f"{REPO}:a[1].gguf"):
        assert Path(run("resolve", name)["path"]).read_bytes() == model_hub.repos[REPO]["a[1].gguf"]
    assert model_hub.served == ["a[1].gguf"]
    assert Path(run("resolve", f"{REPO}/sub/b.gguf")["path"]).read_bytes() == b"b"
    answer = run("resolve", f"{REPO}/c.gguf")
    assert "has no c.gguf; its GGUF files: a[1].gguf, sub/b.gguf" in answer["message"]


def test_a_split_model_comes_whole(run, model_hub):
    parts = [f"q4/big-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    model_hub.repos[REPO] = {**{part: part.encode() for part in parts}, "small.gguf": b"small"}
    first = Path(run("resolve", f"{REPO}/{parts[1]}")["path"])  # any part names the set
    assert first.name == Path(parts[0]).name
    assert sorted(model_hub.served) == parts
    assert [file.read_bytes() for file in sorted(first.parent.glob("*.gguf"))] == [part.encode() for part in parts]
    Path(first.parent, Path(parts[2]).name).unlink()
    assert run("resolve", f"{REPO}/{parts[0]}", QKV_OFFLINE="1")["error"] == "ModelNotFoundError"
    del model_hub.repos[REPO][parts[1]]
    answer = run("pull", f"{REPO}/{parts[0]}")
    assert f"has no {parts[1]}" in answer["message"]


@pytest.mark.parametrize(
    ("status", "because"),
    [
        ((404, "RepoNotFound"), "the hub has no model someone/tiny, or it is private and needs HF_TOKEN"),
        ((401, ""), "check HF_TOKEN"),
        ((403, "GatedRepo"), "is gated: accept its terms on the hub and set HF_TOKEN"),
    ],
)
def test_refusals_are_one_line(run, model_hub, status, because):
    model_hub.status = status
    answer = run("resolve", REPO)
    assert answer["error"] == "ModelNotFoundError"
    assert because in answer["message"]
    assert "smollm2 (-m smollm2) needs only a package index" in answer["message"]


def test_a_hub_that_cannot_be_reached(run):
    answer = run("resolve", REPO, HF_ENDPOINT="http://127.0.0.1:9")
    assert answer["error"] == "ModelNotFoundError"
    assert "the hub cannot be reached" in answer["message"]
    assert "smollm2 (-m smollm2) needs only a package index" in answer["message"]
    answer = run("resolve", REPO, HF_ENDPOINT="no endpoint")
    assert answer["error"] == "ModelNotFoundError"


def test_a_name_the_hub_would_not_take(run):
    assert run("resolve", "a--b/c..d")["error"] == "ModelNotFoundError"


def test_listing_and_removing(run, model_hub):
    model_hub.repos[REPO] = files_of_a_model()
    # The stand-in gives both the same commit, as the hub does for a copied repository.
    model_hub.repos["someone/bert"] = files_of_a_model() | {"config.json": b'{"model_type": "bert"}'}
    path = run("resolve", REPO)["path"]
    run("pull", "someone/bert")
    other = path.replace("tiny", "bert")
    assert Path(other, "config.json").exists()
    (name, listed, size, kind), *rest = run("list")["models"]
    assert rest == []  # what qkv cannot load is not listed
    assert (name, listed, kind) == (REPO, path, "hub")
    assert size >= len(model_hub.repos[REPO]["model.safetensors"])
    assert run("remove", f"{REPO}/x.gguf")["error"] == "ModelNotFoundError"
    assert run("remove", REPO)["freed"] == size
    assert not Path(path).exists()
    assert Path(other, "config.json").exists()
    assert run("list")["models"] == []
    assert run("remove", REPO)["error"] == "ModelNotFoundError"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["config.json", "model.safetensors", "model.gguf", "x.py"], ["config.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "consolidated.safetensors"], ["config.json", "model.safetensors"]),
        (
            ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "other.safetensors"],
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
        ),
        (["config.json", "weights.safetensors"], ["config.json", "weights.safetensors"]),
        (["config.json", "q4.gguf"], ["q4.gguf"]),
        (["q4-00001-of-00002.gguf", "q4-00002-of-00002.gguf"], ["q4-00001-of-00002.gguf", "q4-00002-of-00002.gguf"]),
    ],
)
def test_which_files_are_fetched(files, wanted):
    assert choose_files("a/b", files, None) == wanted


def test_a_repository_without_weights():
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor GGUF"):
        choose_files("a/b", ["config.json", "pytorch_model.bin"], None)
