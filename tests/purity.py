"""What a step's machine code must be free of: ways to raise (the other threads would wait) and reference counting."""

from __future__ import annotations

import re
from typing import Any

import numba
from numba.core.caching import NullCache

DEFINITION = re.compile(r'^define [^\n]*?@(?P<quote>"?)(?P<name>[\w.$-]+)(?P=quote)\(.*?^}', re.M | re.S)


def assert_pure(dispatcher: Any, *arguments: Any) -> None:
    """Compile `dispatcher` afresh for `arguments` and look at its optimized LLVM IR, with all it calls.

    AssertionError names the offending line: a status other than "returned" (0, or -2 for None), use of the exception
    record, or a call of Numba's runtime (reference counts, allocation).
    """
    options = {name: value for name, value in dispatcher.targetoptions.items() if name != "nopython"}
    fresh = numba.njit(pipeline_class=dispatcher._compiler.pipeline_class, **options)(dispatcher.py_func)
    assert isinstance(fresh._cache, NullCache)  # stored code cannot be inspected
    signature = tuple(numba.typeof(argument) for argument in arguments)
    fresh.compile(signature)
    compiled = fresh.overloads[signature]
    bodies = {match["name"]: match.group() for match in DEFINITION.finditer(fresh.inspect_llvm(signature))}
    seen: set[str] = set()
    pending = [compiled.fndesc.llvm_func_name]
    assert pending[0] in bodies, f"the IR has no function {pending[0]}"
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        _assert_body_pure(name, bodies[name])
        called = re.findall(r'\bcall [^\n]*?@"?([\w.$-]+)"?\(', bodies[name])
        pending += [other for other in called if other in bodies]


def _assert_body_pure(name: str, body: str) -> None:
    for line in body.splitlines()[1:]:
        words = line.strip()
        returned = re.fullmatch(r"ret i32 (\S+)", words.split(",")[0])
        problem = (
            "NRT_" in words
            or "Py" in re.sub(r'"[^"]*"', "", words)
            or "pickle" in words
            or (words.startswith("store") and "%excinfo" in words and not words.startswith("store ptr null"))
            or (returned is not None and returned[1] not in {"0", "-2"})
        )
        assert not problem, f"{name}: {words}"
