"""An answer on its way to standard output, and the line about its speed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from qkv.cli import terminal

if TYPE_CHECKING:
    from qkv.llm import Chunk, Completion


class AnswerPrinter:
    """Writes chunks as they come.

    A terminal gets the thinking too, dim (or between `[thinking]` and `[answer]` where there is no colour), and control
    characters spelled out. Anything else gets the answer alone, character for character. Both end with a line break.
    """

    def __init__(self) -> None:
        self._on_terminal = terminal.is_terminal(sys.stdout)
        self._colour = terminal.has_colour(sys.stdout)
        self._part: Literal["thinking", "answer"] | None = None
        self._last = "\n"  # the last character written
        self.text = ""  # what has come so far
        self.thinking = ""

    def print(self, chunks: Iterable[Chunk]) -> None:
        """Write every chunk. However it ends, the terminal's colour and line are put right."""
        try:
            for chunk in chunks:
                self.text += chunk.text
                self.thinking += chunk.thinking
                if self._on_terminal and chunk.thinking:
                    self._show("thinking", chunk.thinking)
                if chunk.text:
                    self._show("answer", chunk.text)
        finally:
            self._end()

    def _show(self, part: Literal["thinking", "answer"], text: str) -> None:
        if part != self._part and self._on_terminal:
            text = text.lstrip("\n")
            if not text:
                return
            self._change_to(part)
        self._part = part
        self._write(terminal.for_output(text))

    def _change_to(self, part: Literal["thinking", "answer"]) -> None:
        if self._part is not None:
            if self._colour:
                terminal.write(terminal.RESET)
            self._write("\n" if self._last == "\n" else "\n\n")
        if part == "thinking":
            self._write(terminal.DIM if self._colour else "[thinking]\n")
        elif self._part is not None and not self._colour:
            self._write("[answer]\n")

    def _write(self, text: str) -> None:
        terminal.write(text)
        self._last = text[-1:] or self._last

    def _end(self) -> None:
        if self._part == "thinking" and self._colour:
            terminal.write(terminal.RESET)
        if self._last != "\n":
            terminal.write("\n")


def speed_line(completion: Completion) -> str:
    """ "36 prompt tokens in 0.21 s (171 tokens/s), 8 new at 16 tokens/s (9.1 GB/s)": under 80 columns for most."""
    timings = completion.timings
    prompt = (
        f"{terminal.count_text(timings.prompt_tokens, 'prompt token')} in {timings.first_token_seconds:.2f} s "
        f"({_rate(timings.prefill_tokens_per_second)})"
    )
    answer = f"{len(completion.token_ids):,} new"
    if timings.decode_steps:
        answer += f" at {_rate(timings.decode_tokens_per_second)} ({timings.decode_gigabytes_per_second:.2g} GB/s)"
    return f"{prompt}, {answer}"


def cut_off(completion: Completion, context: int) -> str:
    """What cut the answer off; empty if the model ended it."""
    if context_is_full(completion, context):
        return f"cut off: the context of {context:,} tokens is full"
    if completion.finish_reason == "repetition":
        return "ended: the answer only repeated itself; another --seed or --repetition-penalty 1.1 may help"
    return "cut off by --max-tokens" if completion.finish_reason == "length" else ""


def context_is_full(completion: Completion, context: int) -> bool:
    """Whether the answer ended because no position was left."""
    used = completion.timings.prompt_tokens + len(completion.token_ids)
    return completion.finish_reason == "length" and used >= context


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.3g} tokens/s" if tokens_per_second < 1000 else f"{tokens_per_second:,.0f} tokens/s"


def print_speed(completion: Completion, context: int) -> None:
    """The speed line on standard error, and what cut the answer off; dim on a terminal."""
    text = "\n".join(filter(None, [speed_line(completion), cut_off(completion, context)]))
    terminal.note(f"{terminal.DIM}{text}{terminal.RESET}" if terminal.has_colour(sys.stderr) else text)
