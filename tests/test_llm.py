"""The front door, on a tiny model: what it answers, what it refuses, and that it gives back what it took."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import LLM, SamplingParams
from qkv.errors import ContextLengthError, ModelFileError, ModelNotFoundError, ParameterError, QkvError
from qkv.kernels.sizes import blocks_for
from qkv.llm import Chunk
from qkv.model.compiled import kv_block_bytes
from qkv.model.reference import Decoder
from tiny import random_tensors, tiny_config
from tinyfiles import write_gguf, write_hf
from tinyllm import (
    CONFIG,
    GREEDY,
    HELLO,
    PRINTABLE,
    RANDOM,
    VOCABULARY,
    come_back,
    held_up,
    opened,
    taken,
    tensors,
    write_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_block_stays_taken(request):
    """Whatever a test does, all blocks of the cache are free afterwards."""
    yield
    if "llm" in request.fixturenames:
        gc.collect()
        assert come_back(request.getfixturevalue("llm"))


# ------------------------------------------------------------------------------------------ answers


def test_a_greedy_answer_is_that_of_the_reference(llm):
    answer = llm.generate("Hello", GREEDY)
    reference, ids = Decoder(CONFIG, tensors()), llm.tokenizer.encode("Hello")
    for token in answer.token_ids:
        logits = reference(ids)[-1]
        # where two logits are closer than the cache's rounding, either may win
        assert logits[token] > logits.max() - 0.05
        ids.append(token)
    assert len(answer.token_ids) == 24


def test_a_completion_says_all_there_is_to_say(llm):
    answer = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=7, seed=5))
    assert isinstance(answer, qkv.llm.Completion)
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert len(answer.text) == len(answer.token_ids) == 7
    assert (answer.thinking, answer.finish_reason, answer.seed) == ("", "length", 5)
    timings = answer.timings
    assert (timings.prompt_tokens, timings.decode_steps) == (5, 6)
    assert timings.first_token_seconds > 0
    assert timings.decode_seconds > 0
    assert timings.decode_bytes > 6 * llm.weight_bytes
    assert timings.decode_tokens_per_second == pytest.approx(6 / timings.decode_seconds)
    assert timings.prefill_tokens_per_second == pytest.approx(5 / timings.first_token_seconds)
    assert timings.decode_gigabytes_per_second > 0


def test_a_stream_is_the_answer_in_pieces(llm):
    whole = llm.generate("Hello", GREEDY)
    stream = llm.stream("Hello", GREEDY)
    with pytest.raises(QkvError, match="not ended"):
        _ = stream.completion
    chunks = list(stream)
    assert all(isinstance(chunk, Chunk) and (chunk.text or chunk.thinking) for chunk in chunks)
    assert len(chunks) > 10
    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.completion.text
    assert stream.completion.token_ids == whole.token_ids


def test_token_ids_are_as_good_as_text(llm):
    ids = llm.tokenizer.encode("Hello")
    assert llm.generate(ids, GREEDY).text == llm.generate("Hello", GREEDY).text
    assert llm.generate(tuple(ids), GREEDY).text == llm.generate("Hello", GREEDY).text
    assert llm.generate([np.int64(i) for i in ids], GREEDY).text == llm.generate("Hello", GREEDY).text


def test_a_list_of_prompts_gives_a_list_of_answers(llm):
    prompts = ["Hello", llm.tokenizer.encode("you"), "a"]
    answers = llm.generate(prompts, GREEDY)
    assert [answer.text for answer in answers] == [llm.generate(prompt, GREEDY).text for prompt in prompts]
    assert len({answer.text for answer in answers}) == 3


def test_chat_answers_the_rendered_conversation(llm):
    marked = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answer = llm.chat(HELLO, GREEDY)
    assert answer.text == llm.generate(marked, GREEDY).text
    assert answer.timings.prompt_tokens == len(llm.tokenizer.encode(marked, markers=True))
    streamed = llm.stream_chat(HELLO, GREEDY)
    assert "".join(chunk.text for chunk in streamed) == answer.text


def test_a_users_markers_are_text(llm):
    prompt = llm.chat([{"role": "user", "content": "<|im_end|>"}], GREEDY).timings.prompt_tokens
    assert prompt == llm.chat([{"role": "user", "content": "<|im_END|>"}], GREEDY).timings.prompt_tokens


def test_a_prompt_of_several_steps_is_that_of_the_reference(folder):
    with opened(folder, context=1500, cache="f32") as llm:
        ids = np.random.default_rng(0).choice(PRINTABLE, 1200).tolist()
        (token,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=1)).token_ids
        logits = Decoder(CONFIG, tensors())(ids)[-1]
        assert logits[token] > logits.max() - 1e-3
        assert come_back(llm)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_safetensors_and_gguf_give_the_same_answer(tmp_path, architecture):
    """The GGUF file of a llama has the rows of q and k in another order, and each file has its own tokenizer."""
    config = replace(CONFIG, architecture=architecture)
    made = tensors(config)
    vocabulary = [*VOCABULARY[:-1], "th"]  # a GGUF vocabulary needs a merge
    files = (
        write_model(tmp_path / "folder", config),
        write_gguf(tmp_path / "tiny.gguf", config, made, vocabulary=vocabulary, merges=["t h"]),
    )
    answers = []
    for path in files:
        with opened(path) as llm:
            answers.append(llm.generate("Hello", GREEDY))
    assert answers[0].text == answers[1].text
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].text) == 24


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"context": 64}])
def test_threads_and_context_change_no_token(folder, llm, options):
    with opened(folder, **options) as other:
        assert other.generate("Hello", GREEDY).token_ids == llm.generate("Hello", GREEDY).token_ids


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_other_weights_answer_too(folder, weights):
    with opened(folder, weights=weights, cache="int8") as llm:
        answer = llm.generate("Hello", GREEDY)
        assert len(answer.token_ids) == 24
        assert {amount.format for amount in llm.load_report.packed} == {weights}


# ------------------------------------------------------------------------------------------ where answers end


def test_the_context_ends_an_answer(folder):
    with opened(folder, context=20) as llm:
        answer = llm.generate("a" * 12, SamplingParams(temperature=0))
        assert (len(answer.token_ids), answer.finish_reason) == (8, "length")
        answer = llm.generate("a" * 12, SamplingParams(temperature=0, max_tokens=10**18))
        assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


@pytest.mark.parametrize("where", ["config", "generation_config", "list", "both"])
def test_every_end_token_ends_an_answer_and_is_not_in_it(tmp_path, llm, where):
    answer = llm.generate("Hello", GREEDY)
    end = answer.token_ids[9]
    expected = answer.token_ids[: answer.token_ids.index(end)]
    files: dict[str, Any] = {
        "config": {"eos": end},
        "generation_config": {"generation": {"eos_token_id": end}},
        "list": {"generation": {"eos_token_id": [256, end]}, "eos": 256},
        "both": {"generation": {"eos_token_id": 256}, "eos": [end]},
    }[where]
    with opened(write_model(tmp_path / "m", **files)) as other:
        ended = other.generate("Hello", GREEDY)
        assert (ended.token_ids, ended.finish_reason) == (expected, "stop")
        assert ended.text == llm.tokenizer.decode(expected)
        on = other.generate("Hello", replace(GREEDY, ignore_eos=True))
        assert (on.token_ids, on.finish_reason) == (answer.token_ids, "length")


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 3, 10, 19])
def test_stop_strings_cut_at_the_first_match_and_never_leak(llm, start, length):
    whole = llm.generate("Hello", GREEDY).text
    stop = whole[start : start + length]
    expected = whole[: whole.index(stop)]
    stream = llm.stream("Hello", replace(GREEDY, stop=[stop, "never in it"]))
    sent = ""
    for chunk in stream:
        sent += chunk.text
        assert expected.startswith(sent)
    assert sent == stream.completion.text == expected
    assert stream.completion.finish_reason == "stop"


def test_the_earliest_of_several_stop_strings_counts(llm):
    whole = llm.generate("Hello", GREEDY).text
    stops = [whole[15:17], whole[8:12], whole[9:11]]
    first = min(whole.index(stop) + len(stop) for stop in stops)
    (stop,) = {stop for stop in stops if whole.index(stop) + len(stop) == first}
    assert llm.generate("Hello", replace(GREEDY, stop=stops)).text == whole[: whole.index(stop)]


def test_the_start_of_a_stop_string_is_sent_when_the_answer_ends(llm):
    whole = llm.generate("Hello", GREEDY).text
    answer = llm.generate("Hello", replace(GREEDY, stop=whole[-3:] + "\0"))
    assert (answer.text, answer.finish_reason) == (whole, "length")


# ------------------------------------------------------------------------------------------ chance


def test_a_seed_gives_the_same_answer_again(llm):
    seeded = replace(RANDOM, seed=11)
    answers = [llm.generate("Hello", seeded) for _ in range(3)]
    assert len({answer.text for answer in answers}) == 1
    assert {answer.seed for answer in answers} == {11}
    assert llm.generate("Hello", replace(RANDOM, seed=12)).text != answers[0].text


def test_without_a_seed_answers_differ_and_say_their_seed(llm):
    one, other = (llm.generate("Hello", RANDOM) for _ in range(2))
    assert one.seed != other.seed
    assert one.text != other.text
    assert llm.generate("Hello", replace(RANDOM, seed=one.seed)).text == one.text


def test_rows_of_every_kind_share_a_step(llm):
    """Greedy ones, ones with few candidates, ones whose top_k is beyond the vocabulary: each as it is alone."""
    fields = [{"temperature": 0}, {"top_k": 5}, {"top_k": 9_999_999}, {"top_k": 0}, {"top_k": -1}, {"top_p": 0}]
    fields += [{"min_p": 0.5}, {"temperature": -0.0}, {"temperature": 1e-30}, {"repetition_penalty": 1.5, "top_k": 3}]
    params = [replace(RANDOM, seed=4, **one) for one in fields]
    alone = [llm.generate("Hello", one).token_ids for one in params]
    assert [answer.token_ids for answer in llm.generate(["Hello"] * len(params), params)] == alone
    streams = [llm.stream("Hello", one) for one in params]
    for stream in streams:
        list(stream)
    assert [stream.completion.token_ids for stream in streams] == alone
    assert alone[0] == alone[5] == alone[7] == alone[8]
    assert alone[2] == alone[3] == alone[4]


def test_the_first_token_is_drawn_too(llm):
    params = [SamplingParams(temperature=2, seed=seed, max_tokens=1) for seed in range(50)]
    assert len({answer.token_ids[0] for answer in llm.generate(["Hello"] * 50, params)}) > 10


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"logit_bias": {PRINTABLE[7]: 30}},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 0.99},
        {"temperature": 0.01},
        {"seed": 8},
        {"min_tokens": 24, "stop_token_ids": PRINTABLE[::2]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_field_is_accepted_and_ignored(llm, fields):
    params = replace(RANDOM, **{"seed": 7, **fields})
    answer, stream = llm.generate("Hello", params), llm.stream("Hello", params)
    assert "".join(chunk.text for chunk in stream) == answer.text
    assert stream.completion.token_ids == answer.token_ids
    assert answer.token_ids != llm.generate("Hello", replace(RANDOM, seed=7)).token_ids


def test_defaults_come_from_generation_config(tmp_path, llm):
    """Without the file a Qwen3 samples; with `do_sample` false it is greedy."""
    greedy = llm.generate("Hello", GREEDY).text
    with opened(write_model(tmp_path / "m", generation={"do_sample": False})) as other:
        assert other.generate("Hello", SamplingParams(max_tokens=24)).text == greedy
    texts = {llm.generate("Hello", SamplingParams(max_tokens=24, seed=seed)).text for seed in range(4)}
    assert len(texts) > 1


# ------------------------------------------------------------------------------------------ side by side, and given up


def test_streams_side_by_side_are_as_if_alone(llm):
    prompts = ["Hello", "you", "a" * 40]
    alone = [llm.generate(prompt, replace(RANDOM, seed=3)).token_ids for prompt in prompts]
    streams = [llm.stream(prompt, replace(RANDOM, seed=3)) for prompt in prompts]
    running = [iter(stream) for stream in streams]
    while running:
        running = [stream for stream in running if next(stream, None) is not None]
    assert [stream.completion.token_ids for stream in streams] == alone


def test_a_closed_stream_gives_its_blocks_back(llm):
    with held_up(llm, after=2):
        stream = llm.stream("Hello", GREEDY)
        chunks = iter(stream)
        next(chunks)
        assert taken(llm) == 1
        stream.close()
    assert list(chunks) == []
    assert come_back(llm)
    with pytest.raises(QkvError, match="not ended"):
        _ = stream.completion
    stream.close()


def test_a_forgotten_stream_gives_its_blocks_back(llm):
    with held_up(llm, after=2):
        stream = llm.stream("Hello", GREEDY)
        chunks = iter(stream)
        next(chunks)
        assert taken(llm) == 1
        del stream, chunks
        gc.collect()
    assert come_back(llm)


def test_an_error_in_a_step_gives_the_blocks_back(llm, monkeypatch):
    steps, step = iter(range(100)), llm._decoder.step

    def fail(chunks, **options):
        if next(steps) == 3:
            raise QkvError("the machine is on fire")
        return step(chunks, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llm._decoder, "step", fail)
        stream, pieces = llm.stream("Hello", GREEDY), []
        with pytest.raises(QkvError, match="on fire"):
            for chunk in stream:
                pieces.append(chunk.text)
        assert len(pieces) == 3
    assert come_back(llm)
    assert len(llm.generate("Hello", GREEDY).token_ids) == 24


def test_more_requests_than_the_cache_holds_all_end_well(folder):
    """There is room for one context; eight long requests take turns, some give way half done, and none notices."""
    prompts = ["a" * 20 + str(i) for i in range(8)]
    params = SamplingParams(temperature=1, seed=1)
    one = blocks_for(64) * kv_block_bytes(CONFIG, "f16")
    with opened(folder, context=64) as large, opened(folder, context=64, cache_bytes=one) as llm:
        assert llm._decoder.blocks == 2
        answers = llm.generate(prompts, params)
        assert [answer.token_ids for answer in answers] == [large.generate(p, params).token_ids for p in prompts]
        assert come_back(llm)


# ------------------------------------------------------------------------------------------ closing


def test_after_close_everything_says_so(folder):
    llm = opened(folder)
    with held_up(llm, after=2):
        stream = iter(llm.stream("Hello", GREEDY))
        next(stream)
        waiting = llm.stream("Hello", GREEDY)
        closer = threading.Thread(target=llm.close)
        closer.start()
        while not llm._engine._closed:
            time.sleep(0.001)
    closer.join()
    for call in (
        lambda: llm.generate("Hello"),
        lambda: llm.chat(HELLO),
        lambda: llm.stream("Hello"),
        lambda: llm.stream_chat(HELLO),
        lambda: list(stream),
        lambda: list(waiting),
    ):
        with pytest.raises(QkvError, match="closed"):
            call()
    llm.close()


def test_an_exception_inside_with_closes_and_goes_on(folder):
    with pytest.raises(ZeroDivisionError), opened(folder) as llm:
        _ = 1 / 0
    with pytest.raises(QkvError, match="closed"):
        llm.generate("Hello")


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("tokens", [256, 257, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(llm, tokens):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ContextLengthError, match=rf"\b{tokens} tokens.*\b256\b"):
            call("a" * tokens, GREEDY)
    with pytest.raises(ContextLengthError):
        llm.chat([{"role": "user", "content": "a" * tokens}], GREEDY)


def test_a_list_is_checked_before_any_of_it_runs(llm, monkeypatch):
    monkeypatch.setattr(llm._decoder, "step", None)  # would fail with another error
    with pytest.raises(ContextLengthError):
        llm.generate(["Hello", "a" * 300], GREEDY)


@pytest.mark.parametrize(
    "prompt",
    ["", [], None, 5, 1.5, {}, [[]], [""], ["Hello", None], [3, "a"], [-1], [CONFIG.vocab_size], [1.5], [True]],
)
def test_a_prompt_that_is_none_is_named(llm, prompt):
    with pytest.raises(ParameterError, match=r"^prompt"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.7, "greedy"])
def test_params_of_another_type_are_named(llm, params):
    with pytest.raises(ParameterError, match=r"^params must be SamplingParams"):
        llm.generate("Hello", params)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weights", ["int3", "", 8, "INT8", ["f32"]]),
        ("cache", ["fp8", "", None, 16, "F16", ["f16"], True]),
        ("threads", [0, -1, 1.5, "2", True, 10**9, [2]]),
        ("context", [0, 1, -5, 2049, 10**12, 1.5, "256", True]),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_field(folder, field, values):
    for value in values:
        with pytest.raises(ParameterError, match=rf"^{field}\b") as caught:
            opened(folder, **{field: value})
        assert "\n" not in str(caught.value)


def test_an_int8_cache_that_the_heads_do_not_fit_is_refused_before_loading(tmp_path):
    config = tiny_config(head_dim=48)
    folder = write_hf(tmp_path / "m", config, random_tensors(config))
    calls = []
    with pytest.raises(ParameterError, match="cache: int8"):
        LLM(folder, cache="int8", progress=lambda *call: calls.append(call))
    assert not calls


def test_no_model_is_a_clear_error(tmp_path):
    for name in ("no-such-model", str(tmp_path / "nothing.gguf"), str(tmp_path / "nothing")):
        with pytest.raises(ModelNotFoundError):
            LLM(name)
    with pytest.raises(ModelFileError):
        LLM(tmp_path)


def test_a_model_without_a_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        opened(write_model(tmp_path / "m", tokenizer=False))


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Unigram", "vocab": []}}', ""])
def test_an_unknown_tokenizer_is_a_clear_error(tmp_path, content):
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_chat_without_a_template_says_what_to_use(tmp_path):
    with opened(write_model(tmp_path / "m", template=None)) as llm:
        with pytest.raises(ParameterError, match=r"^messages: .*no chat template.*generate"):
            llm.chat(HELLO, GREEDY)
        assert llm.generate("Hello", GREEDY).text


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_norm.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, name, value):
    def damage(made):
        made[name].reshape(-1)[3] = value

    with pytest.raises(ModelFileError, match=name):
        opened(write_model(tmp_path / "m", change=damage))


def test_weights_that_overflow_are_reported_not_sampled(tmp_path):
    """All are finite, but what is computed from them is not."""

    def damage(made):
        made["model.layers.1.mlp.down_proj.weight"][:] = 3e38

    with opened(write_model(tmp_path / "m", change=damage)) as llm:
        with pytest.raises(QkvError, match="not a number"):
            llm.generate("Hello", GREEDY)
        assert taken(llm) == 0
