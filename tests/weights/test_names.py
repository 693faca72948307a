"""What a model's name may be, and where each leads. Nothing here needs the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.errors import ModelNotFoundError
from qkv.weights import hub, names, wheel
from qkv.weights.names import TAGS, CachedModel, cached_models, pull, remove, resolve
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Offline, with empty caches, in an empty folder."""
    monkeypatch.setenv("QKV_OFFLINE", "1")
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, str | None]]:
    """The hub is not asked; what it would have been asked for is listed."""
    calls: list[tuple[str, str | None]] = []

    def fetch(repo: str, file: str | None = None, progress: object = None) -> Path:
        calls.append((repo, file))
        return Path("fetched")

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(hub, "cached", lambda repo, file=None: None)
    return calls


def pretend_cached(name: str) -> wheel.WheelModel:
    model = wheel.WHEELS[name]
    model.folder.mkdir(parents=True)
    with model.path.open("wb") as file:
        file.truncate(model.size)  # a file of holes: only its size is looked at
    return model


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", None)),
        ("hf-internal/tiny_model.1", ("hf-internal/tiny_model.1", None)),
        ("qwen3:0.6b", ("Qwen/Qwen3-0.6B", None)),
        ("Qwen3:1.7B", ("Qwen/Qwen3-1.7B", None)),
        ("smollm2:360m", ("HuggingFaceTB/SmolLM2-360M-Instruct", None)),
        ("Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", ("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf")),
        ("Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", ("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf")),
        ("owner/repo/sub/folder/file.gguf", ("owner/repo", "sub/folder/file.gguf")),
    ],
)
def test_names_of_the_hub(asked, name, target):
    assert resolve(name) == Path("fetched")
    assert asked == [target]
    asked.clear()
    assert pull(name) == Path("fetched")
    assert asked == [target]


def test_a_cached_hub_model_is_used_without_asking(asked, monkeypatch):
    monkeypatch.setattr(hub, "cached", lambda repo, file=None: Path("cached"))
    assert resolve("Qwen/Qwen3-0.6B") == Path("cached")
    assert asked == []
    assert pull("Qwen/Qwen3-0.6B") == Path("fetched")


def test_local_files_and_folders(tmp_path):
    file = tmp_path / "here" / "model.gguf"
    file.touch()
    folder = write_hf(tmp_path / "here" / "owner" / "model", tiny_config(), random_tensors(tiny_config()))
    assert resolve("model.gguf") == Path("model.gguf")
    assert resolve(str(file)) == file
    assert resolve("owner/model") == Path("owner/model")  # a folder here wins over the hub
    assert resolve(str(folder)) == folder
    assert pull(str(folder)) == folder


def test_a_short_name_wins_over_a_folder_of_that_name(tmp_path):
    model = pretend_cached("smollm2")
    (tmp_path / "here" / "smollm2").mkdir()
    assert resolve("smollm2") == model.path
    assert resolve("./smollm2") == Path("smollm2")


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("qwen3:0.7b", "did you mean qwen3:"),
        ("smolm2", "did you mean smollm2"),
        ("", "a model is a .gguf file"),
        ("  ", "a model is a .gguf file"),
        ("x" * 5000, "a model is a .gguf file"),
        ("a\0b", "a model is a .gguf file"),
        ("a/b/c/d", "a model is a .gguf file"),
        ("https://example.com/model", "a model is a .gguf file"),
        ("./none", "no such file or folder"),
        ("/none/a\nb", "no such file or folder"),
        ("~/none.gguf", "no such file or folder"),
        ("~nobody-of-that-name/x", "no such file or folder"),
        ("C:\\models\\x.gguf", "no such file or folder"),
        ("none.gguf", "no such file"),
    ],
)
def test_names_that_lead_nowhere(name, because):
    for verb in (resolve, pull, remove):
        with pytest.raises(ModelNotFoundError) as caught:
            verb(name)
        message = str(caught.value)
        assert because in message
        assert "\n" not in message
        assert len(message) < 500
        assert "smollm2" in message or "no such file" in message


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "here" / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"neither a \.gguf file nor a model folder"):
        resolve("notes.txt")


@pytest.mark.parametrize("name", ["smollm2", "qwen3:0.6b", "Qwen/Qwen3-0.6B", "a/b/c.gguf"])
def test_offline_a_missing_model_is_one_clear_line(name, tmp_path):
    for verb in (resolve, pull):
        with pytest.raises(ModelNotFoundError, match=r"not in the .*cache.*QKV_OFFLINE") as caught:
            verb(name)
        assert "\n" not in str(caught.value)


def test_offline_a_cached_model_is_used():
    model = pretend_cached("smollm2")
    assert resolve("smollm2") == model.path
    assert pull("smollm2") == model.path


def test_listing_and_removing():
    assert cached_models() == []
    model = pretend_cached("smollm2")
    assert cached_models() == [CachedModel("smollm2", model.path, model.size, "package index")]
    assert remove("smollm2") == model.size
    assert cached_models() == []
    with pytest.raises(ModelNotFoundError, match="not in the cache; cached models: none"):
        remove("smollm2")
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        remove("Qwen/Qwen3-0.6B")


def test_what_the_user_named_by_path_is_never_removed(tmp_path):
    file = tmp_path / "here" / "model.gguf"
    file.write_bytes(b"precious")
    folder = tmp_path / "here" / "owner" / "model"
    folder.mkdir(parents=True)
    for name in ("model.gguf", str(file), "owner/model", str(folder), "."):
        with pytest.raises(ModelNotFoundError, match="delete it yourself"):
            remove(name)
    assert file.read_bytes() == b"precious"
    assert folder.is_dir()


def test_every_tag_is_a_hub_id():
    for tag, repo in TAGS.items():
        assert tag == tag.lower()
        assert names.HUB_NAME.fullmatch(repo)
        assert tag.split(":")[1] in repo.lower()
