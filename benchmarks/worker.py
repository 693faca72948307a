"""An engine as a process that is told what to time: one JSON object a line in, one out.

`compare` keeps one such process for each engine and has them take turns. This file needs only the standard library, so
that it runs in whichever Python a peer is installed in. An engine has these methods; all times are in seconds:

    describe() -> {"version": str, "variants": {name: cache kind}, ...}
    open(model, threads, points) -> {...}               weights loaded; points ("decode:128") are what will be timed
    prepare(variant, kind, n)                           fill the cache as far as the point needs, and no timing yet
    burst(variant, kind, n, steps) -> seconds           of `steps` steps, after which the cache is as `prepare` left it
    first(n)                                            a prompt of n tokens in, one token out

and may have more, which answer with seconds or with a dictionary.

A point is "decode" at depth n (a step makes one token), "prefill" of n tokens (a step is the whole prompt), or "batch"
of n sequences at depth 128 (a step makes one token for each).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def serve(engine: object) -> None:
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


def _obey(engine: object, do: str, **order: Any) -> dict[str, Any]:
    if do == "memory":
        return {"peak_bytes": peak_bytes()}
    reply = getattr(engine, do)(**order)
    return {"seconds": reply} if isinstance(reply, float) else reply or {}


def peak_bytes() -> int | None:
    """The most memory this process has held, file pages included; None where the system does not tell."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
