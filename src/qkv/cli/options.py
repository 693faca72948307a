"""The options that several verbs share, and the checks of what was typed.

A verb takes a group of options as one dataclass; `grouped` shows typer each field as an option of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from qkv.cli.bars import Bars
from qkv.engine.params import SamplingParams
from qkv.errors import ParameterError, QkvError

if TYPE_CHECKING:
    from qkv.llm import LLM

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"

Model = Annotated[str, Option("--model", "-m", envvar="QKV_MODEL", help="Hub id, short name, .gguf file or folder.")]
System = Annotated[str | None, Option(help="System message.")]
Think = Annotated[bool | None, Option(help="Think before answering (default: as the model does).")]
Weights = Annotated[
    str | None, Option(help="int8, int4, bf16 or f32 (default: a GGUF file's own 4 and 8 bits, else int8).")
]
Cache = Annotated[str, Option(help="How keys and values are kept: f16, int8 or f32.")]
Threads = Annotated[int | None, Option(help="Cores to use (default: those it may use).")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress and no timings on standard error.")]
Json = Annotated[bool, Option("--json", help="One line of JSON on standard output, nothing else.")]


@dataclass
class ModelOptions:
    """Which model, and how it is opened."""

    model: Model = DEFAULT_MODEL
    context: Annotated[int | None, Option(help="The most positions to use (default: the model's maximum).")] = None
    weights: Weights = None
    cache: Cache = "f16"
    cache_size: Annotated[
        str | None,
        Option(metavar="<size>", help="For keys and values, such as 2GiB (default: up to a quarter of free memory)."),
    ] = None
    speculation: Annotated[
        bool, Option("--speculation", help="Guess tokens: the same answer, sooner where it quotes or repeats the text.")
    ] = False
    threads: Threads = None
    quiet: Quiet = False

    def open(self) -> LLM:
        """Open the model, fetching it first when it is not here, with progress bars unless `quiet`."""
        from qkv.llm import LLM

        cache_bytes = byte_count("--cache-size", self.cache_size)
        with Bars(quiet=self.quiet) as bars:
            return LLM(
                self.model,
                context=self.context,
                weights=self.weights,
                cache=self.cache,
                cache_bytes=cache_bytes,
                speculation="prompt" if self.speculation else None,
                threads=self.threads,
                progress=bars,
            )


@dataclass
class SamplingOptions:
    """How tokens are chosen. The fields are those of `SamplingParams`."""

    max_tokens: Annotated[int | None, Option(help="The most new tokens (default: until the context is full).")] = None
    temperature: Annotated[
        float | None, Option("--temperature", "--temp", help="0 takes the likeliest token (default: the model's own).")
    ] = None
    top_k: Annotated[int | None, Option(help="Keep the K likeliest tokens; 0 is off.")] = None
    top_p: Annotated[float | None, Option(help="Keep the likeliest tokens up to this sum; 1 is off.")] = None
    min_p: Annotated[float | None, Option(help="Keep tokens at least this likely beside the first; 0 is off.")] = None
    repetition_penalty: Annotated[
        float | None, Option(help="Make tokens of the text less likely: 1.1 is mild, 1 is off (default: the model's).")
    ] = None
    presence_penalty: Annotated[float, Option(help="Make tokens of the answer less likely: -2 to 2, 0 is off.")] = 0
    seed: Annotated[int | None, Option(help="The same seed gives the same text.")] = None
    thinking_budget: Annotated[
        int | None, Option(help="Close the thinking after so many tokens, such as 256 (default: never).")
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """The parameters of a request. Raises ParameterError."""
        return SamplingParams(**asdict(self), **more)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: typer sees their fields, the command gets the dataclasses."""
    shown: list[Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))
            continue
        groups[parameter.name] = hint
        inner = get_type_hints(hint, include_extras=True)
        for f in fields(hint):
            shown.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=inner[f.name]))

    def call(**given: Any) -> None:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**given, **made)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    call.__signature__ = signature(command).replace(parameters=shown, return_annotation=None)  # type: ignore[attr-defined]
    return call


def utf8(data: bytes, source: str) -> str:
    """Bytes that were read as text, without a byte order mark. Raises QkvError that names their source."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QkvError(f"{source}: not UTF-8 text (byte {error.start + 1})") from None


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
