"""A model that says what a script tells it to, in the place of the real one.

In a test, `install(monkeypatch, ScriptedLLM(...))`. As a program, `python scripted_llm.py run …` is the `qkv` command
with the script below: the tests that need a process of their own use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import qkv.llm
from qkv.engine.params import SamplingParams
from qkv.errors import QkvError
from qkv.llm import Chunk, Completion, Timings
from qkv.weights.report import Amount, LoadReport

Answer = Sequence[tuple[str, str]]  # pairs of (text, thinking), a chunk each


class ScriptedStream:
    """What the command line reads of a `qkv.llm.Stream`."""

    def __init__(self, items: Iterator[Chunk | Completion]) -> None:
        self._items = items
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[Chunk]:
        for item in self._items:
            if isinstance(item, Completion):
                self._completion = item
            else:
                yield item

    @property
    def completion(self) -> Completion:
        if self._completion is None:
            raise QkvError("the stream has not ended yet")
        return self._completion

    def close(self) -> None:
        self._items.close()  # type: ignore[attr-defined]  # a generator


class ScriptedLLM:
    """Gives `answers` in order, then the last again; `calls` holds what it was asked.

    Every chunk counts as one token. An exception in an answer's place is raised there.
    """

    def __init__(
        self, *answers: Answer, context: int = 1000, name: str = "scripted", pause: float = 0, end: str = "stop"
    ) -> None:
        self.answers, self.context, self.name, self.pause = answers, context, name, pause
        self.calls: list[dict[str, Any]] = []
        self.closed = False
        self.end = end
        self.load_report = LoadReport(
            path="/models/scripted",
            stored=(Amount("BF16", 3, 6000), Amount("F32", 1, 4)),
            packed=(Amount("int8", 3, 3400),),
            requantized=("3 matrices from BF16 to int8",),
            notes=("rope_theta is missing; using 10000.0",),
            seconds=0.25,
        )

    def stream(self, prompt: str, params: SamplingParams) -> ScriptedStream:
        self.calls.append({"prompt": prompt, "params": params})
        return self._stream(params, len(prompt.split()))

    can_think = True

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, thinking: bool | None = None
    ) -> ScriptedStream:
        copies = [dict(message) for message in messages]
        self.calls.append({"messages": copies, "params": params, "thinking": thinking})
        return self._stream(params, sum(len(str(message["content"]).split()) for message in copies))

    def _stream(self, params: SamplingParams, prompt_tokens: int) -> ScriptedStream:
        answer = self.answers[min(len(self.calls), len(self.answers)) - 1]
        return ScriptedStream(self._run(answer, params, prompt_tokens))

    def _run(self, answer: Answer, params: SamplingParams, prompt_tokens: int) -> Iterator[Chunk | Completion]:
        kept = answer[: params.max_tokens]
        for item in kept:
            if isinstance(item, BaseException):
                raise item
            time.sleep(self.pause)
            yield Chunk(*item)
        yield Completion(
            text="".join(text for text, _ in kept),
            thinking="".join(thinking for _, thinking in kept),
            token_ids=list(range(len(kept))),
            finish_reason="length" if len(kept) < len(answer) else self.end,
            seed=7 if params.seed is None else params.seed,
            timings=timings(prompt_tokens, max(len(kept) - 1, 0)),
        )

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> ScriptedLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def timings(prompt_tokens: int, steps: int) -> Timings:
    """Half a second for the prompt, a quarter for all steps, and two gigabytes read in them."""
    return Timings(prompt_tokens, 0.5, steps, 0.25, 2e9)


def install(monkeypatch: Any, llm: ScriptedLLM) -> ScriptedLLM:
    """Let the verbs get `llm`, whatever model they ask for; `llm.opened` is what they asked for."""

    def load(model: str, *, progress: Any, **settings: Any) -> ScriptedLLM:
        llm.opened = {"model": model, **settings}
        return llm

    monkeypatch.setattr(qkv.llm, "LLM", load)
    return llm


if __name__ == "__main__":
    from qkv.cli.main import main

    words = [(f"word{i} ", "") for i in range(400)]
    llm = ScriptedLLM([("", "Let me "), ("", "think.\n"), ("\n\nHé", ""), ("llo\x1b[31m", ""), *words], pause=0.02)
    qkv.llm.LLM = lambda model, **settings: llm  # type: ignore[assignment,misc]
    main()
