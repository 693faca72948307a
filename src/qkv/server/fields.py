"""Reading a request: strict JSON, the fields that an API knows, and what happens to those it does not know."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from qkv.engine.params import LARGEST, MAX_SEED, MAX_STOPS, SamplingParams
from qkv.server.errors import ApiError

log = logging.getLogger("qkv.server")
MOST_CHOICES = 16
MOST_CHARACTERS = 1 << 16
"""Of a regular expression or a grammar."""


def _whole(value: object) -> object:
    """5.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=4096)]


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Fields(BaseModel):
    """A request's fields. None, and a field that is not there, mean the same."""

    model_config = ConfigDict(extra="allow", strict=True)

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients send and that change nothing here."""
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer and cannot, with the values that are harmless."""

    model: str | None = None
    stream: bool | None = None


class Sampled(Fields):
    """What all APIs have of sampling."""

    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=LARGEST)] | None = None


class Sampling(Sampled):
    """The fields that go to `SamplingParams` under their own names."""

    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[Number, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[Whole, Field(ge=0, le=MAX_SEED)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=LARGEST)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: list[Annotated[Whole, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    end_repetition: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] | None = None
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None


_SAMPLING = set(Sampling.model_fields) - set(Fields.model_fields)


def sampling_params(asked: Fields, **more: Any) -> SamplingParams:
    """What is asked of sampling; `more` goes before the fields of that name. None is as if it were not there."""
    given = {name: getattr(asked, name) for name in _SAMPLING & set(type(asked).model_fields)} | more
    given = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    if "max_tokens" in given:
        given["max_tokens"] = min(given["max_tokens"], LARGEST)
    return SamplingParams(**given)


F = TypeVar("F", bound=Fields)


async def read(request: Request, kind: type[F]) -> F:
    """The body of a request. Raises `ApiError`, naming the field."""
    value = _object(await request.body())
    try:
        asked = kind.model_validate(value)
    except ValidationError as error:
        raise _first(error) from None
    for name, harmless in kind.REFUSED.items():
        if (asked.model_extra or {}).get(name) not in (None, *harmless):
            raise ApiError(f"{name}: is not supported; leave it out", param=name, code="unsupported_value")
    unknown = set(asked.model_extra or ()) - kind.WITHOUT_EFFECT - set(kind.REFUSED)
    if unknown:
        listed = ", ".join(sorted(name[:40] for name in unknown)[:20])
        if request.app.state.settings.strict:
            raise ApiError(f"{listed}: not a field of this request; leave it out", param=listed, code="unknown_field")
        log.info("%s fields without effect: %s", request.scope["qkv.id"], listed.encode("unicode_escape").decode())
    return asked


def _object(raw: bytes) -> dict[str, Any]:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(raw, parse_constant=refuse)
        if b"\\u" in raw:  # an escape may be half of a pair, which no text can hold
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def _first(error: ValidationError) -> ApiError:
    """The first thing that is wrong, with the path to it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    missing = first["type"] == "missing"
    return ApiError(
        f"{path}: is missing" if missing else f"{path}: {first['msg'][:200]}", param=path, code="invalid_value"
    )
