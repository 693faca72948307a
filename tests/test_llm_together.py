"""Many requests at the front door: lists, threads, coroutines, Ctrl-C, fork, and what conversations share."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qkv import SamplingParams
from qkv.completion import Stream
from qkv.errors import ContextLengthError, ParameterError, QkvError, QueueFullError
from qkv.model.compiled import kv_block_bytes
from tinyllm import CONFIG, GREEDY, HELLO, RANDOM, TEMPLATE, come_back, held_up, opened, write_model

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as made:
        yield made


# ------------------------------------------------------------------------------------------ lists


def test_each_prompt_can_have_its_own_params(llm):
    params = [replace(RANDOM, seed=i, max_tokens=4 + i) for i in range(5)]
    answers = llm.generate(["Hello"] * 5, params)
    assert [answer.token_ids for answer in answers] == [llm.generate("Hello", one).token_ids for one in params]
    assert [len(answer.token_ids) for answer in answers] == [4, 5, 6, 7, 8]
    assert [answer.seed for answer in answers] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, []])
def test_a_list_of_params_of_another_length_says_both(llm, params):
    with pytest.raises(ParameterError, match=rf"^params has {len(params)} entries for 2 prompts"):
        llm.generate(["a", "b"], params)


def test_progress_hears_of_every_prompt(llm):
    calls = []
    llm.generate(["Hello"] * 7, GREEDY, progress=lambda *call: calls.append(call))
    assert calls == [("generating", done, 7, "prompts") for done in range(1, 8)]


def test_more_prompts_than_the_queue_holds_are_no_error(folder):
    with opened(folder, max_queue=2) as small:
        answers = small.generate([f"Hello {i}" for i in range(30)], replace(GREEDY, max_tokens=3))
        alone = [small.generate(f"Hello {i}", replace(GREEDY, max_tokens=3)).text for i in range(30)]
        assert [answer.text for answer in answers] == alone


def test_a_full_queue_is_an_error_for_the_next_one(folder):
    with opened(folder, max_queue=2) as small, held_up(small, after=0):
        first = small.stream("Hello", GREEDY)
        while small._engine.scheduler.idle:
            time.sleep(0.001)
        streams = [small.stream("Hello", GREEDY) for _ in range(2)]
        with pytest.raises(QueueFullError):
            small.stream("Hello", GREEDY)
        for stream in [first, *streams]:
            stream.close()


def test_an_error_in_one_of_a_list_cancels_the_others(llm, monkeypatch):
    push, calls = llm.tokenizer.token_bytes, iter(range(1000))

    def fail(token):
        if next(calls) == 20:
            raise ZeroDivisionError("in the text")
        return push(token)

    monkeypatch.setattr(llm.tokenizer, "token_bytes", fail)
    with pytest.raises(ZeroDivisionError):
        llm.generate(["Hello", "you", "there"], LONG)
    assert come_back(llm)


def test_n_answers(llm):
    answer = llm.generate("Hello", replace(RANDOM, seed=1, n=3))
    assert len(answer.choices) == 3
    assert answer.choices[0] is answer
    assert len({one.text for one in answer.choices}) == 3
    assert answer.text == llm.generate("Hello", replace(RANDOM, seed=1)).text
    again = llm.generate("Hello", replace(RANDOM, seed=1, n=3))
    assert [one.text for one in again.choices] == [one.text for one in answer.choices]
    stream = llm.stream("Hello", replace(RANDOM, seed=1, n=3))
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.index] += chunk.text
    assert texts == [one.text for one in answer.choices] == [one.text for one in stream.completion.choices]


def test_logprobs_come_along(llm):
    answer = llm.generate("Hello", replace(GREEDY, logprobs=True, top_logprobs=2, prompt_logprobs=True))
    assert [choice.token for choice in answer.logprobs] == answer.token_ids
    assert all(choice.top[0] == (choice.token, choice.logprob) for choice in answer.logprobs)
    assert len(answer.prompt_logprobs) == 4
    plain = llm.generate("Hello", GREEDY)
    assert plain.logprobs is plain.prompt_logprobs is None


class Dictation:
    """A guide that lets nothing through but the next token of a text."""

    def __init__(self, ids):
        self.ids = list(ids)

    def allowed(self):
        mask = np.zeros(-(-CONFIG.vocab_size // 32), np.uint32)
        mask[self.ids[0] // 32] = 1 << self.ids[0] % 32
        return mask

    def push(self, token):
        assert token == self.ids.pop(0)


CALL = 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("speculation", [None, "prompt"])
def test_tool_calls_come_apart_from_the_text(folder, speculation):
    """Streamed arguments add up to the object; without tools the same tokens are text."""
    with opened(folder, speculation=speculation) as llm:
        ids = llm.tokenizer.encode(CALL)
        params = SamplingParams(temperature=0, stop_token_ids=[3])
        answers = {}
        for tools in (None, TOOLS):
            request = replace(llm._chat_request(HELLO, params, tools=tools), guide=lambda: Dictation([*ids, 3]))
            stream = Stream(request)
            chunks = list(stream)
            answers[tools is None] = stream.completion
            assert "".join(chunk.text for chunk in chunks) == stream.completion.text
            deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
            assert "".join(delta.arguments for delta in deltas) == ("" if tools is None else '{"at": "the sky"}')
        assert (answers[True].text, answers[True].finish_reason, answers[True].tool_calls) == (CALL, "stop", ())
        (call,) = answers[False].tool_calls
        assert (call.name, call.arguments) == ("look", '{"at": "the sky"}')
        assert answers[False].finish_reason == "tool_calls"
        assert "tool_call" not in answers[False].text


STRUCTURES = {
    "choices": ({"choices": ["alpha", "beta", "gamma"]}, "alpha|beta|gamma"),
    "regex": ({"regex": "[0-9]{3}-[a-f]{2,8}"}, "[0-9]{3}-[a-f]{2,8}"),
    "json_schema": ({"json_schema": {"enum": [1, "two", [3, 3, 3, 3]]}}, r'1|"two"|\[\s*3,\s*3,\s*3,\s*3\s*\]'),
    "grammar": ({"grammar": 'start: "ab"~3..5'}, "(ab){3,5}"),
}


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A folder of a model that has an end token."""
    return write_model(tmp_path_factory.mktemp("ending") / "tiny", eos=256)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_hold_and_speculation_changes_nothing(ending, name):
    fields, pattern = STRUCTURES[name]
    with opened(ending) as plain, opened(ending, speculation="prompt") as guessing:
        no_thinking = {plain.tokenizer.id("<think>"): -100}
        greedy = SamplingParams(temperature=0, logit_bias=no_thinking, **fields)
        for params in (greedy, replace(greedy, temperature=1, seed=2, n=2)):
            answer, other = plain.chat(HELLO, params), guessing.chat(HELLO, params)
            assert all(re.fullmatch(pattern, one.text) for one in answer.choices)
            assert all(one.finish_reason == "stop" for one in answer.choices)
            assert [one.token_ids for one in answer.choices] == [one.token_ids for one in other.choices]


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": {"type": "xml"}},
        {"regex": "("},
        {"grammar": "start: nothing"},
        {"thinking_budget": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_structures_that_cannot_be_are_refused_before_anything_is_queued(ending, fields):
    with opened(ending) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(ParameterError, match=rf"^{next(iter(fields))}"):
                call("Hello", SamplingParams(**fields))
        assert llm._engine._thread is None


def test_a_tool_that_must_be_called_is_called(ending):
    with opened(ending, context=1000) as llm:
        schema = {"enum": [{"at": "sky"}, {"at": "sea"}]}
        tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
        choice = {"type": "function", "function": {"name": "look"}}
        answer = llm.chat(HELLO, SamplingParams(temperature=0), tools=[tool], tool_choice=choice)
        assert answer.finish_reason == "tool_calls"
        assert {json.loads(call.arguments)["at"] for call in answer.tool_calls} <= {"sky", "sea"}
        assert {call.name for call in answer.tool_calls} == {"look"}
        with pytest.raises(ParameterError, match=r"^tool_choice"):
            llm.chat(HELLO, tools=[tool], tool_choice={"type": "function", "function": {"name": "hear"}})


@pytest.mark.parametrize("budget", [0, 5])
def test_a_thinking_budget_closes_the_thinking(tmp_path, budget):
    template = TEMPLATE.replace("assistant\n", "assistant\n<think>")
    with opened(write_model(tmp_path / "m", template=template)) as llm:
        closing = llm.tokenizer.id("</think>")
        answer = llm.chat(HELLO, replace(GREEDY, thinking_budget=budget))
        assert answer.token_ids.index(closing) == budget
        assert len(answer.thinking) <= budget < len(answer.text)


# ------------------------------------------------------------------------------------------ the prefix cache


def test_a_conversation_reuses_its_history(folder):
    with opened(folder, context=1000) as llm:
        messages = [{"role": "user", "content": "Hello, " * 20}]
        first = llm.chat(messages, replace(GREEDY, max_tokens=100))
        assert first.timings.reused_tokens == 0
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        second = llm.chat(messages, GREEDY)
        history = first.timings.prompt_tokens + 100 - 1
        assert second.timings.reused_tokens == history // 32 * 32
        stats = llm.cache_stats
        assert (stats.queries, stats.hits, stats.tokens_reused) == (2, 1, second.timings.reused_tokens)
    with opened(folder, context=1000) as cold:
        assert cold.chat(messages, GREEDY).token_ids == second.token_ids


def test_cache_bytes_is_what_the_cache_takes(folder):
    block = kv_block_bytes(CONFIG, "f16")
    with opened(folder, context=64, cache_bytes=5 * block + 1) as llm:
        assert llm.cache_stats.blocks == 5


@pytest.mark.parametrize("value", [0, -1, 1.5, "1 GB", True, 7 * 8192])
def test_cache_bytes_that_hold_no_context_are_refused_before_loading(folder, value):
    with pytest.raises(ParameterError, match=r"^cache_bytes must be .*one context of 256 positions"):
        opened(folder, cache_bytes=value)


@pytest.mark.parametrize(
    ("field", "values"), [("speculation", ["ngram", True, 4, ""]), ("max_queue", [0, -1, 1.5, True, "2"])]
)
def test_other_bad_values_are_named(folder, field, values):
    for value in values:
        with pytest.raises(ParameterError, match=rf"^{field}\b"):
            opened(folder, **{field: value})


# ------------------------------------------------------------------------------------------ coroutines


def test_coroutines_get_what_threads_get(llm):
    async def ask():
        one, several, talk = await asyncio.gather(
            llm.agenerate("Hello", GREEDY), llm.agenerate(["you", "a"], GREEDY), llm.achat(HELLO, GREEDY)
        )
        stream, pieces = llm.stream("Hello", GREEDY), []
        async for chunk in stream:
            pieces.append(chunk.text)
        return one.text, [answer.text for answer in several], talk.text, pieces, stream.completion.text

    one, several, talk, pieces, whole = asyncio.run(asyncio.wait_for(ask(), 60))
    assert one == whole == "".join(pieces) == llm.generate("Hello", GREEDY).text
    assert len(pieces) > 10
    assert several == [answer.text for answer in llm.generate(["you", "a"], GREEDY)]
    assert talk == llm.chat(HELLO, GREEDY).text


def test_fifty_streams_side_by_side_half_of_them_closed(llm):
    expected = llm.generate("Hello", GREEDY).text

    async def read(i):
        stream, text = llm.stream("Hello", GREEDY), ""
        async for chunk in stream:
            text += chunk.text
            if i % 2 and len(text) > 3:
                stream.close()
        return text

    async def all_of_them():
        return await asyncio.gather(*[read(i) for i in range(50)])

    texts = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert texts[::2] == [expected] * 25
    assert all(expected.startswith(text) for text in texts)
    assert come_back(llm)


def test_a_cancelled_task_cancels_its_requests(llm):
    async def give_up():
        with held_up(llm, after=3), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.agenerate(["Hello", "you"], LONG), 0.1)

    asyncio.run(give_up())
    assert come_back(llm)
    assert len(llm.generate("Hello", GREEDY).token_ids) == 24


def test_a_loop_that_ends_before_the_answer_harms_nobody(llm):
    async def begin():
        with held_up(llm, after=2):
            stream = llm.stream("Hello", GREEDY)
            async for _ in stream:
                break
            task = asyncio.ensure_future(stream.__aiter__().__anext__())
            await asyncio.sleep(0)
            task.cancel()
            return stream

    stream = asyncio.run(begin())
    assert len(llm.generate("you", GREEDY).token_ids) == 24
    del stream
    assert come_back(llm)


def test_errors_reach_coroutines(llm):
    async def ask():
        with pytest.raises(ContextLengthError):
            await llm.agenerate("a" * 300, GREEDY)
        with pytest.raises(ParameterError, match=r"^prompt"):
            await llm.agenerate("", GREEDY)

    asyncio.run(ask())


# ------------------------------------------------------------------------------------------ threads, Ctrl-C, fork


@pytest.mark.parametrize("count", [2, 16])
def test_threads_each_get_their_solo_run(llm, count):
    params = replace(RANDOM, seed=42)
    alone = [llm.generate(f"Number {i}", params).token_ids for i in range(count)]
    together = [None] * count

    def use(i):
        together[i] = llm.generate(f"Number {i}", params).token_ids

    threads = [threading.Thread(target=use, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


@pytest.mark.skipif(os.name == "nt", reason="no process can send itself Ctrl-C there")
@pytest.mark.parametrize("prompts", ["Hello", ["Hello", "you", "there"]])
def test_ctrl_c_ends_generate_and_the_model_answers_again(llm, prompts):
    with held_up(llm, after=5):
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, LONG)
        timer.join()
    assert come_back(llm)
    assert len(llm.generate("Hello", GREEDY).token_ids) == 24


def test_close_frees_the_memory(folder):
    llm = opened(folder)
    llm.generate("Hello", GREEDY)
    decoder = llm._decoder
    arenas = [decoder._weights.arena.base, decoder._buffers.pool.bytes.base]
    while not isinstance(arenas[0], memoryview):  # down to the mapping
        arenas[0] = arenas[0].base
    while not isinstance(arenas[1], memoryview):
        arenas[1] = arenas[1].base
    mappings = [arena.obj for arena in arenas]
    del arenas
    llm.close()
    deadline = time.monotonic() + 5
    for mapping in mappings:
        while True:
            try:
                mapping.close()  # refused as long as an array looks into it
                break
            except BufferError:
                assert time.monotonic() < deadline, "somebody still holds the memory"
                time.sleep(0.01)


def test_a_dropped_model_ends_its_thread(folder):
    llm = opened(folder)
    llm.generate("Hello", GREEDY)
    thread = llm._engine._thread
    assert thread.is_alive()
    del llm
    thread.join(10)
    assert not thread.is_alive()


def test_a_stream_keeps_its_model(folder):
    stream = opened(folder).stream("Hello", GREEDY)
    assert len("".join(chunk.text for chunk in stream)) == 24


FORK = """
import os, signal, sys
from qkv import LLM, SamplingParams
from qkv.completion import Stream
from qkv.errors import QkvError
params = SamplingParams(temperature=0, max_tokens=24)
llm = LLM(sys.argv[1], weights="f32", threads=2, context=256)
expected = llm.generate("Hello", params).text
stream = llm.stream("Hello", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
chunks = iter(stream)
next(chunks)
child = os.fork()
if child == 0:
    signal.alarm(60)
    code = 1
    try:
        list(chunks)
        code = 2 if stream.completion is None else 0  # it had ended before the fork
    except QkvError as error:
        code = 0 if "forked" in str(error) else 3
    if code == 0 and [c.text for c in llm.generate(["Hello"] * 3, params)] != [expected] * 3:
        code = 4
    llm.close()
    os._exit(code)
text = "".join(chunk.text for chunk in chunks)
assert len(stream.completion.token_ids) == 200
assert os.waitpid(child, 0)[1] == 0, "the child"
assert llm.generate("Hello", params).text == expected
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_has_an_engine_of_its_own(folder):
    environment = {**os.environ, "PYTHONPATH": str(Path(sys.modules["qkv"].__file__).parents[1])}
    command = [sys.executable, "-c", FORK, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_program_that_ends_without_closing_ends_in_silence(folder):
    code = (
        "import sys; from qkv import LLM, SamplingParams; llm = LLM(sys.argv[1], weights='f32', context=2000)\n"
        "stream = llm.stream('Hello', SamplingParams(temperature=0, ignore_eos=True)); next(iter(stream))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sys.modules["qkv"].__file__).parents[1])}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------------------------------ speculation


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(RANDOM, seed=3),
        replace(RANDOM, seed=4, repetition_penalty=1.3, frequency_penalty=0.5),
        replace(GREEDY, logprobs=True, top_logprobs=3),
        replace(GREEDY, stop=["zz", "ab"]),
        replace(RANDOM, seed=5, n=2),
    ],
    ids=["greedy", "seeded", "penalties", "logprobs", "stop", "n"],
)
def test_speculation_changes_no_token(folder, llm, params):
    params = replace(params, max_tokens=150)
    prompts = ["Hello", "ab" * 40, "the cat and the dog and the cat and the dog"]
    with opened(folder, speculation="prompt") as guessing:
        for prompt in prompts:
            plain, fast = llm.generate(prompt, params), guessing.generate(prompt, params)
            for one, other in zip(plain.choices, fast.choices, strict=True):
                assert (one.text, one.token_ids, one.finish_reason) == (
                    other.text,
                    other.token_ids,
                    other.finish_reason,
                )
                assert one.logprobs == other.logprobs
        assert come_back(guessing)


def test_speculation_is_reported(folder):
    """A tiny random model soon goes round in circles, which is easy to guess."""
    with opened(folder, speculation="prompt") as llm:
        answer = llm.generate("Hello", LONG)
        timings = answer.timings
        assert timings.accepted_tokens + timings.decode_steps == 199
        assert timings.drafted_tokens >= timings.accepted_tokens > 0
        assert timings.tokens_per_step == pytest.approx(199 / timings.decode_steps)
        assert timings.decode_tokens_per_second == pytest.approx(199 / timings.decode_seconds)


def test_after_close_streams_that_run_end_with_an_error(folder):
    llm = opened(folder)
    with held_up(llm, after=4):
        streams = [llm.stream("Hello", LONG) for _ in range(3)]
        threads = [threading.Thread(target=llm.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not llm._engine._closed:
            time.sleep(0.001)
    for thread in threads:
        thread.join(30)
    for stream in streams:
        with pytest.raises(QkvError, match="closed"):
            list(stream)
