"""How large a result will be, before it is made: for the filters and methods whose results can outgrow their inputs."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

from jinja2.exceptions import SecurityError

from qkv.text.prompt.budget import STEP, Budget


def own_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The template's own keyword arguments, without those that Jinja's compiler passes along."""
    return {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}


def _number(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, default: Any) -> Any:
    """The argument at position `at` or of that name, if it is a number."""
    value = args[at] if len(args) > at else kwargs.get(name, default)
    return value if isinstance(value, (int, float)) else 0


def expect_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(value, str) and name in {"list", "sort", "unique", "reverse", "batch", "slice", "map", "groupby"}:
        budget.expect(STEP * len(value))  # becomes a list of characters
    if name == "center":
        budget.expect(_number(args, kwargs, 0, "width", 80))
    elif name == "indent":
        width = args[0] if args else kwargs.get("width", 4)
        size = len(width) if isinstance(width, str) else _number((width,), {}, 0, "", 0)
        budget.expect(len(str(value)) + size * (str(value).count("\n") + 1))
    elif name in {"batch", "slice"}:
        size = _number(args, kwargs, 0, "linecount" if name == "batch" else "slices", 0)
        fill = args[1] if len(args) > 1 else kwargs.get("fill_with")
        budget.expect(size * (STEP + budget.weigh(fill)))
    elif name == "replace":
        _expect_replace(budget, str(value), *(str(item) for item in (*args, *kwargs.values())))
    elif name == "join":
        items = list(value) if isinstance(value, (list, tuple, dict, str)) else []
        separator = args[0] if args else kwargs.get("d", "")
        budget.expect(budget.weigh(value) + len(items) * len(str(separator)))
    elif name == "format":
        expect_percent_format(budget, str(value), kwargs or args)
    elif name == "round" and abs(_number(args, kwargs, 0, "precision", 0)) > 300:
        raise SecurityError("round takes at most 300 digits")
    elif name == "sum" and not isinstance(args[1] if len(args) > 1 else kwargs.get("start", 0), (int, float)):
        raise SecurityError("sum adds numbers only")


def expect_method(budget: Budget, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    first = args[0] if args else None
    if name in {"center", "ljust", "rjust", "zfill"}:
        budget.expect(_number(args, kwargs, 0, "width", 0))
    elif name == "expandtabs":
        budget.expect(len(owner) + owner.count("\t") * _number(args, kwargs, 0, "tabsize", 8))
    elif name == "replace":
        _expect_replace(budget, owner, *(str(item) for item in args))
    elif name == "join" and isinstance(first, (list, tuple, dict, str)):
        budget.expect(budget.weigh(first) + len(first) * len(owner))
    elif name in {"split", "rsplit"} and isinstance(first, str) and first:
        budget.expect(len(owner) + STEP * (owner.count(first) + 1))
    elif name in {"split", "rsplit"}:
        budget.expect(len(owner) + STEP * sum(map(str.isspace, owner)))
    elif name == "splitlines":
        budget.expect(len(owner) + STEP * sum(char in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029" for char in owner))


def _expect_replace(budget: Budget, text: str, old: str = "", new: str = "", *rest: str) -> None:
    budget.expect(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def expect_json(budget: Budget, value: Any, width: int) -> None:
    """Indented JSON: every element may start with `width` characters per level around it."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for item in level for child in _children(item)]
    budget.expect(budget.weigh(value) // STEP * depth * width)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


def expect_percent_format(budget: Budget, text: str, values: Any) -> None:
    size, largest = len(text), budget.weigh(values)
    for width, precision in _PERCENT.findall(text):
        if "*" in (width, precision):
            raise SecurityError("a width of * has no place in a chat template")
        size += largest + _width(width) + _width(precision)
    budget.expect(size)


def expect_format(budget: Budget, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    size, largest = len(text), budget.weigh([*args, *own_arguments(kwargs).values()])
    for _, field, spec, _ in string.Formatter().parse(text):
        if field is None:
            continue
        if spec and "{" in spec:
            raise SecurityError("a format inside a format has no place in a chat template")
        size += largest + sum(_width(digits) for digits in re.findall(r"\d+", spec or ""))
    budget.expect(size)


def _width(digits: str) -> int:
    return int(digits or 0) if len(digits) < 12 else 10**12
