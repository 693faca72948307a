"""Coroutines: the event loop goes on while a request is prepared, and an error comes with the first `await`."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from qkv import SamplingParams
from qkv.engine.engine import Engine
from qkv.errors import ParameterError, QkvError
from qkv.text.constrain.guides import Guides
from qkv.text.prompt.template import ChatTemplate
from qkv.text.tokens.tokenizer import Tokenizer
from tinyllm import GREEDY, HELLO, come_back, held_up, opened, write_model

SCHEMA = replace(GREEDY, json_schema={"enum": ["yes", "no"]})


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with opened(write_model(tmp_path_factory.mktemp("model") / "tiny", eos=256)) as made:
        yield made
        assert come_back(made)


async def text_of(stream) -> str:
    stream = await stream
    text = "".join([chunk.text async for chunk in stream])
    assert text == stream.completion.text
    return text


WAYS = {
    "agenerate": (lambda llm: llm.agenerate("Hello", SCHEMA), lambda llm: llm.generate("Hello", SCHEMA).text),
    "a list": (
        lambda llm: llm.agenerate(["Hello"] * 3, SCHEMA),
        lambda llm: [answer.text for answer in llm.generate(["Hello"] * 3, SCHEMA)],
    ),
    "achat": (lambda llm: llm.achat(HELLO, SCHEMA), lambda llm: llm.chat(HELLO, SCHEMA).text),
    "astream": (lambda llm: text_of(llm.astream("Hello", SCHEMA)), lambda llm: llm.generate("Hello", SCHEMA).text),
    "astream_chat": (lambda llm: text_of(llm.astream_chat(HELLO, SCHEMA)), lambda llm: llm.chat(HELLO, SCHEMA).text),
}
HEAVY = {
    "tokenizer": (Tokenizer, "_encode"),
    "template": (ChatTemplate, "_render"),
    "grammar": (Guides, "plan"),
    "checks": (Engine, "check"),
    "start": (Engine, "submit"),
}


def noting(method, threads: set[int]):
    """The method, which notes what threads it is called on."""

    def noted(self, *args, **kwargs):
        threads.add(threading.get_ident())
        return method(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize("way", WAYS)
def test_all_preparing_is_done_off_the_loop(llm, monkeypatch, way):
    """And gives the same answer as without coroutines."""
    make, plain = WAYS[way]
    expected = plain(llm)
    seen: dict[str, set[int]] = {name: set() for name in HEAVY}
    for name, (owner, method) in HEAVY.items():
        monkeypatch.setattr(owner, method, noting(getattr(owner, method), seen[name]))

    async def main():
        return threading.get_ident(), await make(llm)

    loop_thread, answer = asyncio.run(main())
    texts = [one.text for one in answer] if isinstance(answer, list) else getattr(answer, "text", answer)
    assert texts == expected
    assert {name for name, threads in seen.items() if threads} >= HEAVY.keys() - {"template"}
    assert bool(seen["template"]) == ("chat" in way)
    assert all(loop_thread not in threads for threads in seen.values())


BAD = SamplingParams(logit_bias={10**6: 1})


@pytest.mark.parametrize("call", ["agenerate", "astream", "achat", "astream_chat"])
def test_an_error_comes_with_the_first_await(llm, call):
    async def main():
        with pytest.raises(ParameterError, match=r"^logit_bias: "):
            await getattr(llm, call)(HELLO if "chat" in call else "Hello", BAD)
        if "chat" in call:
            with pytest.raises(ParameterError, match=r"^tool_choice: "):
                await getattr(llm, call)(HELLO, GREEDY, tool_choice="required")

    asyncio.run(main())


def test_an_option_that_does_not_exist_is_no_option(llm):
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(TypeError, match="think"):
            call(HELLO, GREEDY, think=True)


@pytest.mark.parametrize("call", ["agenerate", "astream", "achat", "astream_chat"])
def test_cancelling_while_it_is_prepared_leaves_nothing_running(llm, monkeypatch, call):
    """The thread that prepares goes on to its end; what it started is cancelled or never started."""
    entered, leave, check = threading.Event(), threading.Event(), Engine.check

    def wait(self, *args):
        entered.set()
        assert leave.wait(30)
        return check(self, *args)

    async def main():
        task = asyncio.ensure_future(
            getattr(llm, call)(HELLO if "chat" in call else "Hello", replace(GREEDY, max_tokens=200))
        )
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()

    monkeypatch.setattr(Engine, "check", wait)
    asyncio.run(main())
    assert come_back(llm)
    assert llm.stats().running == 0


def test_requests_cancelled_while_they_are_started_all_end(llm, monkeypatch):
    """A list is started in a thread; the task is cancelled between two of them."""
    entered, leave, submit = threading.Event(), threading.Event(), Engine.submit
    handles = []

    def wait(self, *args, **kwargs):
        if len(handles) == 2:
            entered.set()
            assert leave.wait(30)
        handles.append(submit(self, *args, **kwargs))
        return handles[-1]

    async def main():
        task = asyncio.ensure_future(llm.agenerate(["Hello"] * 6, replace(GREEDY, max_tokens=200, ignore_eos=True)))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()

    with held_up(llm, after=1):
        monkeypatch.setattr(Engine, "submit", wait)
        asyncio.run(main())
    assert come_back(llm)
    assert len(handles) == 3
    assert all(handle.cancelled for handle in handles)


def test_the_counts_say_what_runs_and_what_waits(llm):
    quiet = llm.stats()
    assert (quiet.running, quiet.waiting) == (0, 0)
    assert quiet.cache == llm.cache_stats
    with held_up(llm, after=0):
        streams = [llm.stream("Hello", replace(GREEDY, n=16, seed=1)) for _ in range(5)]
        busy = llm.stats()
        assert busy.running + busy.waiting == 5 * 16
        assert busy.waiting >= 16  # no more than 64 run
    for stream in streams:
        list(stream)
        assert len(stream.completion.choices) == 16
    assert come_back(llm)
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_a_model_is_healthy_until_it_is_closed(tmp_path, monkeypatch):
    """A request that fails hurts nobody else."""
    llm = opened(write_model(tmp_path / "m"))
    assert llm.healthy
    with monkeypatch.context() as patch:
        patch.setattr(llm._decoder, "likeliest", lambda: 1 / 0)
        with pytest.raises(QkvError):
            llm.generate("Hello", GREEDY)
    assert llm.healthy
    assert llm.generate("Hello", GREEDY).text
    llm.close()
    assert not llm.healthy


def test_grammars_can_be_prepared_before_anyone_asks(tmp_path, monkeypatch):
    with opened(write_model(tmp_path / "m", eos=256)) as llm:
        llm.prepare_grammars()
        known = llm._guides._known_vocabulary()
        assert llm.generate("Hello", SCHEMA).text in ('"yes"', '"no"')
        assert llm._guides._known_vocabulary() is known
