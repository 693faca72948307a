"""An engine as a process that is told what to time: one JSON object a line in, one out.

`compare` keeps one such process for each engine and has them take turns. This file needs only the standard library, so
that it runs in whichever Python a peer is installed in. An engine has these methods; all times are in seconds:

    describe() -> {"version": str, "variants": {name: cache kind}, ...}
    open(model, threads, context, sequences) -> {...}   weights loaded, ready to compute
    prepare(variant, kind, n)                           fill the cache as far as the point needs, and no timing yet
    burst(variant, kind, n, steps) -> seconds           of `steps` steps, after which the cache is as `prepare` left it
    first(n) -> None                                    a prompt of n tokens in, one token out

A point is "decode" at depth n (a step makes one token), "prefill" of n tokens (a step is the whole prompt), or "batch"
of n sequences at depth 128 (a step makes one token for each).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Protocol

BATCH_DEPTH = 128
"""How many positions each sequence of a batch holds."""


class Engine(Protocol):
    def describe(self) -> dict[str, Any]: ...

    def open(self, model: str, threads: int, context: int, sequences: int) -> dict[str, Any]: ...

    def prepare(self, variant: str, kind: str, n: int) -> None: ...

    def burst(self, variant: str, kind: str, n: int, steps: int) -> float: ...

    def first(self, n: int) -> None: ...


def serve(engine: Engine) -> None:
    """Answer orders until standard input ends. Whatever else prints to standard output goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = _obey(engine, **order)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _obey(engine: Engine, do: str, **order: Any) -> dict[str, Any]:
    if do == "burst":
        return {"seconds": engine.burst(**order)}
    if do == "memory":
        return {"peak_bytes": peak_bytes()}
    began = time.perf_counter()
    reply = getattr(engine, do)(**order) or {}
    return {"seconds": time.perf_counter() - began, **reply}


def peak_bytes() -> int | None:
    """The most memory this process has held, file pages included; None where the system does not tell."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
