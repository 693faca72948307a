"""A model by name: the label it gets, what is known of it without its weights, and how its makers sample it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qkv import SamplingParams
from qkv.errors import ModelFileError
from qkv.model.config import PRESETS
from qkv.opened import Opened, known_model, label, open_model
from qkv.weights import names
from tiny import random_tensors
from tinyfiles import hf_config, write_gguf
from tinyllm import CONFIG, VOCABULARY, write_model
from tinyllm import opened as tiny_llm


@pytest.mark.parametrize(
    ("folder", "shown"),
    [
        ("Qwen3-0.6B/hf", "Qwen3-0.6B/hf"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd", "Qwen/Qwen3-0.6B"),
        ("hub/models--a--b--c/snapshots/0123abcd", "a/b--c"),
        ("smollm2.gguf", "smollm2.gguf"),
    ],
)
def test_a_path_is_labelled_by_a_name_that_a_reader_recognizes(tmp_path, folder, shown):
    path = tmp_path / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    assert label(str(path)) == shown


@pytest.mark.parametrize("name", ["smollm2", "qwen3:0.6b", "Qwen/Qwen3-0.6B"])
def test_a_name_is_its_own_label(tmp_path, monkeypatch, name):
    (tmp_path / "smollm2").mkdir()  # the short name wins over the folder
    monkeypatch.chdir(tmp_path)
    assert label(name) == name


def test_a_relative_folder_is_labelled_by_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "Qwen3-0.6B" / "hf").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "Qwen3-0.6B" / "hf")
    assert label(".") == "Qwen3-0.6B/hf"


def test_a_folder_with_a_config_alone_has_a_shape_and_no_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(CONFIG)))
    known = known_model(str(tmp_path))
    assert known.files is None
    assert known.config.parameter_shapes() == CONFIG.parameter_shapes()


def test_a_well_known_name_has_a_shape_until_its_files_are_here(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "find", lambda name: None)
    assert known_model("qwen3:8b").config == PRESETS["Qwen/Qwen3-8B"]
    folder = write_model(tmp_path / "tiny")
    monkeypatch.setattr(names, "find", lambda name: folder)
    known = known_model("qwen3:8b")
    assert known.files is not None and known.files.checkpoint.path == folder


@pytest.mark.parametrize("weights", [None, "f32", "int8", "int4"])
def test_the_formats_that_are_promised_are_those_that_are_loaded(tmp_path, weights):
    opened = open_model(str(write_model(tmp_path / "tiny")))
    loaded = opened.load(weights, threads=1)
    assert loaded.weights.formats == frozenset(opened.formats(weights).values())
    assert {amount.format for amount in loaded.report.packed} == loaded.weights.formats


def test_files_without_a_tokenizer_can_be_opened_and_the_tokenizer_is_refused(tmp_path):
    folder = write_model(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    opened = open_model(str(folder))
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        opened.tokenizer  # noqa: B018


RECOMMENDED = {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("smollm2", RECOMMENDED),
        (" SmolLM2 ", RECOMMENDED),
        ("smollm2:360m", RECOMMENDED),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", RECOMMENDED),
        ("Qwen/Qwen3-0.6B", {}),
        ("./smollm2", {}),
    ],
)
def test_a_name_carries_its_makers_sampling_and_the_files_win(tmp_path, monkeypatch, name, sampling):
    folder = write_model(tmp_path / "tiny")
    (folder / "generation_config.json").unlink(missing_ok=True)
    monkeypatch.setattr(names, "resolve", lambda name, progress: folder)
    assert open_model(name).generation_config == sampling
    stated = {"temperature": 0.7, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert open_model(name).generation_config == {**sampling, **stated}


IM_END, END_OF_TEXT = VOCABULARY.index("<|im_end|>"), VOCABULARY.index("<|endoftext|>")


def ids(value):
    return {value} if isinstance(value, int) else set(value or ())


@pytest.mark.parametrize("config", [None, 5, END_OF_TEXT, [5, 6]])
@pytest.mark.parametrize("generation", [None, 6, [END_OF_TEXT, 7]])
@pytest.mark.parametrize("token", [None, "<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
def test_a_folders_end_tokens_are_those_of_all_its_files(tmp_path, config, generation, token):
    """With and without the list of added tokens, which newer files do not have."""
    folder = write_model(tmp_path / "tiny", eos=config, generation={"eos_token_id": generation})
    for added in ({}, {"added_tokens_decoder": {str(IM_END): {"content": "<|im_end|>", "special": True}}}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, **added}))
        opened = open_model(str(folder))
        assert set(opened.end_ids) == ids(config) | ids(generation) | ({IM_END} if token else set())
        assert any("no token is known to end" in note for note in opened.checkpoint.notes) == (not opened.end_ids)


@pytest.mark.parametrize("keys", [{}, {"eos": 5}, {"eos": 5, "eot": 6}, {"eos": IM_END, "eom": 7}])
def test_a_ggufs_end_tokens_are_those_it_names_and_those_its_vocabulary_is_known_for(tmp_path, keys):
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, random_tensors(CONFIG), vocabulary=VOCABULARY)
    checkpoint = open_model(str(path)).checkpoint
    metadata = {key: value for key, value in checkpoint.tokenizer.items() if key != "tokenizer.ggml.eos_token_id"}
    metadata |= {"tokenizer.ggml.merges": []} | {f"tokenizer.ggml.{name}_token_id": id for name, id in keys.items()}
    opened = Opened("tiny", replace(checkpoint, tokenizer=metadata))
    assert set(opened.end_ids) == {IM_END, END_OF_TEXT} | set(keys.values())
    assert not any("no token is known" in note for note in checkpoint.notes)


def test_end_tokens_that_the_table_does_not_have_are_ignored_and_told(tmp_path):
    opened = open_model(str(write_model(tmp_path / "tiny", eos=[10**6, -1, 5])))
    assert opened.end_ids == (5,)
    (note,) = [note for note in opened.checkpoint.notes if "end tokens" in note]
    assert note.endswith("are ignored: 1000000, -1")


def test_the_engine_and_the_grammars_get_all_end_tokens(tmp_path):
    folder = write_model(tmp_path / "tiny", eos=5)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with tiny_llm(folder) as llm:
        assert llm._engine.end_ids == llm._guides._end_ids == {5, IM_END}
        said = llm.generate([65], SamplingParams(max_tokens=20, logit_bias={IM_END: 100}))
        assert (said.token_ids, said.finish_reason) == ([], "stop")
