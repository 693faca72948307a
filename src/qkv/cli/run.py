"""`qkv run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from qkv.cli import options, terminal
from qkv.cli.answer import AnswerPrinter, print_speed
from qkv.cli.chat import Conversation
from qkv.cli.evaluate import read_text
from qkv.cli.info import report_text
from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.llm import Completion


@options.grouped
def run(
    model: options.ModelOptions,
    sampling: options.SamplingOptions,
    prompt: Annotated[str | None, Argument(help="What to ask.", show_default=False)] = None,
    system: options.System = None,
    think: options.Think = None,
    stop: Annotated[
        list[str] | None, Option(metavar="<str>", help="End the answer before this text; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Go on past the model's own end, and when it repeats itself.")
    ] = False,
    json_schema: Annotated[
        str | None, Option(metavar="<file|json>", help="Answer with JSON that this schema allows.")
    ] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: options.Json = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show how the model was loaded, on standard error.")
    ] = False,
) -> None:
    """Answer one prompt.

    \b
    qkv run "Why is the sky blue?"
    qkv run -m smollm2 --temperature 0 "Name three colours."
    qkv run "Summarize this:" < notes.txt
    qkv run --speculation "Correct the spelling:" < notes.txt
    qkv run --json-schema city.json "What is the capital of France?"
    qkv run --json-schema '{"enum": ["yes", "no"]}' "Is the sky blue?"
    qkv run --raw --max-tokens 20 "The capital of France is"
    qkv run --json "Hello" | python -m json.tool

    The prompt is the argument, or what is piped in, or both: the argument, an empty line, then the piped text
    without its last line break. Standard output gets the answer and one line break; thinking is shown on a terminal
    only (--json has it), and there control characters in the answer are spelled out. Timings go to standard error. An
    answer that only repeats itself is ended.
    """
    params = sampling.params(
        stop=stop or (),
        ignore_eos=ignore_eos,
        end_repetition=not ignore_eos,
        json_schema=None if json_schema is None else read_schema(json_schema),
    )
    for option, given in {"--system": system, "--think": think}.items():
        if raw and given is not None:
            raise QkvError(f"{option} needs the chat template, which --raw leaves out")
    for name, text in [("the system message", system), *(("--stop", text) for text in stop or ())]:
        options.check_text(name, text)
    text = read_prompt(prompt)
    with model.open() as llm:
        if verbose:
            terminal.note(terminal.visible(report_text(llm.load_report)).rstrip("\n"))
        messages = Conversation(system).messages(text)
        stream = llm.stream(text, params) if raw else llm.stream_chat(messages, params, thinking=think)
        with closing(stream):
            if as_json:
                deque(stream, maxlen=0)  # all of it
            else:
                AnswerPrinter().print(stream)
        completion = stream.completion
        if as_json:
            terminal.write(json.dumps(_report(completion, llm.name)) + "\n")
        if not model.quiet:
            print_speed(completion, llm.context)


def read_prompt(argument: str | None) -> str:
    """The prompt from the argument and from a standard input that is not a terminal."""
    options.check_text("the prompt", argument)
    parts = [argument, _piped()]
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt.strip():
        raise QkvError('the prompt is empty: give it as an argument (qkv run "Why?") or pipe it in')
    return prompt


def read_schema(given: str) -> str:
    """A schema's JSON text: what was given, or what the file of that name holds. Raises QkvError."""
    from qkv.text.constrain.schema import schema_grammar

    options.check_text("--json-schema", given)
    if not given.strip():
        raise QkvError("--json-schema is empty: give it a file or JSON")
    if given.lstrip().startswith("{") or given.strip() in ("true", "false"):
        text, source = given, "--json-schema"
    else:
        text, source = read_text(Path(given)), given
    schema_grammar(text, source)
    return text


def _piped() -> str:
    if sys.stdin is None or terminal.is_terminal(sys.stdin):
        return ""
    text = options.utf8(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def _report(completion: Completion, model: str) -> dict[str, Any]:
    """What --json prints."""
    shown = ("text", "thinking", "token_ids", "finish_reason", "seed")
    rates = ("prefill_tokens_per_second", "decode_tokens_per_second", "decode_gigabytes_per_second")
    timings = asdict(completion.timings) | {name: getattr(completion.timings, name) for name in rates}
    return {"model": model} | {name: getattr(completion, name) for name in shown} | {"timings": timings}
