"""The options that several verbs share, and the checks of what was typed."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from qkv.errors import ParameterError, QkvError

Model = Annotated[
    str,
    typer.Option("--model", "-m", envvar="QKV_MODEL", help="Hub id, short name, .gguf file or folder."),
]
System = Annotated[str | None, typer.Option("--system", help="System message.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="The most tokens to make (default: until the context is full).")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "--temp", help="0 always takes the likeliest token (default: the model's own)."),
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the K likeliest tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this sum; 1 is off.")]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Keep tokens at least this fraction as likely as the first; 0 is off."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Make what is there already less likely: 1.1 is mild, 1 is off (default: the model's own).",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="Make what the answer has already less likely: -2 to 2, 0 is off."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
Think = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Think before answering (default: as the model does).")
]
ThinkingBudget = Annotated[
    int | None,
    typer.Option("--thinking-budget", help="Close the thinking after so many tokens, such as 256 (default: never)."),
]
Context = Annotated[
    int | None, typer.Option("--context", help="The most positions to use (default: the model's maximum).")
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help="int8, int4, bf16 or f32 (default: a GGUF file's own 4 and 8 bits, else int8)."),
]
Cache = Annotated[str, typer.Option("--cache", help="How keys and values are kept: f16, int8 or f32.")]
CacheSize = Annotated[
    str | None,
    typer.Option(
        "--cache-size",
        metavar="<size>",
        help="Memory for keys and values, such as 512MB or 2GiB (default: up to a quarter of what is free).",
    ),
]
Speculation = Annotated[
    bool,
    typer.Option(
        "--speculation",
        help="Guess tokens from the text so far: the same answer, sooner where it quotes or repeats.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Cores to use (default: those it may use).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no timings on standard error.")]


def check_text(name: str, text: str | None) -> None:
    """Refuse an argument that was not UTF-8: such bytes arrive as lone surrogates."""
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise QkvError(f"{name} is not valid UTF-8 text (at character {error.start + 1})") from None


_UNITS = {"": 1, "b": 1, **{f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)}}
_UNITS |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)}


def byte_count(option: str, text: str | None) -> int | None:
    """ "512MB" → 512,000,000 and "1.5 GiB" → 1,610,612,736; None → None. Raises ParameterError."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([a-z]{0,3})", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ParameterError(f"{option} must be a size such as 512MB or 2GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
