"""Every file of a model, replaced by what a download often leaves in its place: one line says what it is."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest

from qkv.errors import ModelFileError
from qkv.opened import open_model
from qkv.weights.mapped import check_file
from tinyfiles import safetensors_bytes, write_gguf
from tinyllm import CONFIG, tensors, write_model


def _zip(content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("inner", content)
    return made.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
IMPOSTORS = {
    "pointer": (lambda content: POINTER, "a git-lfs pointer, not the file itself; run `git lfs pull`"),
    "page": (lambda content: b"<!DOCTYPE html>\n<html><body>Please log in</body></html>", "a web page"),
    "page-bom": (lambda content: b"\xef\xbb\xbf \r\n<HTML lang='en'>" + b" " * 9000, "a web page"),
    "error-page": (lambda content: b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page"),
    "gzip": (gzip.compress, "a gzip archive, not the file itself; unpack it first"),
    "zip": (_zip, "a zip archive, not the file itself; unpack it first"),
    "empty": (lambda content: b"", "the file is empty; fetch it again"),
}
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
    "one.safetensors",
    "two.safetensors",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that has every file qkv reads, its weights in two parts."""
    made = write_model(tmp_path / "tiny", generation={"temperature": 0.5})
    parts = {"one.safetensors": {}, "two.safetensors": {}}
    for number, (name, values) in enumerate(tensors().items()):
        parts[list(parts)[number % 2]][name] = values
    for file, held in parts.items():
        (made / file).write_bytes(safetensors_bytes(held))
    (made / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    (made / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (made / "chat_template.json").write_text('{"chat_template": "x"}')
    return made


def opened_whole(path: Path) -> None:
    opened = open_model(str(path))
    assert opened.tokenizer is not None and opened.template is not None


@pytest.mark.parametrize("kind", IMPOSTORS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_its_name_says_is_called_what_it_is(folder, name, kind):
    opened_whole(folder)
    if name == "chat_template.json":  # read only where there is no chat_template.jinja
        (folder / "chat_template.jinja").unlink()
    make, message = IMPOSTORS[kind]
    (folder / name).write_bytes(make((folder / name).read_bytes()))
    with pytest.raises(ModelFileError) as caught:
        opened_whole(folder)
    assert str(caught.value).startswith(f"{folder / name}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_a_gguf_file_that_is_not_one(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, CONFIG, tensors())
    make, message = IMPOSTORS[kind]
    path.write_bytes(make(path.read_bytes()))
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path))
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    "start", [b"{% if messages %}<html>", b"<|im_start|>", b"version 1", b'{"a": "<!doctype html>"}']
)
def test_what_only_looks_alike_is_left_alone(tmp_path, start):
    (tmp_path / "file").write_bytes(start)
    check_file(tmp_path / "file")
