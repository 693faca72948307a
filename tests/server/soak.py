"""Load on loopback: many clients for a while, some of which go away.

    python -m server.soak [--clients 64] [--seconds 60] [--model smollm2]      (make soak)

Each client sends seeded chat requests, one after the other, half of them as streams; of every three it leaves one, at
a random moment. Afterwards nothing runs, no block of the cache is taken, every answer that came to its end is what the
same request gives alone, and memory has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from qkv import LLM
from server.serving import Running, parse, running

WORDS = ["sea", "light", "rain", "tower", "keeper", "boat", "bird", "storm", "lamp", "night"]
CHAT = "/v1/chat/completions"


def body_of(number: int) -> dict[str, Any]:
    """One of 40 requests: short and long prompts, a few of them beginning alike."""
    draw = random.Random(number)
    words = " ".join(draw.choices(WORDS, k=draw.choice((3, 30, 300))))
    begin = "A story that all share. " * 8 if number % 4 == 0 else ""
    return {
        "messages": [{"role": "user", "content": begin + words}],
        "seed": number,
        "temperature": 0.9,
        "max_tokens": draw.choice((4, 16, 40)),
    }


class Soak:
    """What the clients share: how it went, and what they were told."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.end = url, time.monotonic() + seconds
        self.finished = self.left = 0
        self.answers: dict[int, set[str]] = {}

    async def client(self, number: int, http: httpx.AsyncClient) -> None:
        draw = random.Random(number)
        while time.monotonic() < self.end:
            request = draw.randrange(40)
            asked = self.ask(http, request, stream=draw.random() < 0.5)
            try:
                if draw.random() < 1 / 3:
                    await asyncio.wait_for(asked, draw.choice((0.05, 0.3, 1.0)))
                else:
                    await asked
                self.finished += 1
            except (TimeoutError, asyncio.TimeoutError):
                self.left += 1

    async def ask(self, http: httpx.AsyncClient, request: int, *, stream: bool) -> None:
        reply = await http.post(self.url + CHAT, json=body_of(request) | {"stream": stream})
        assert reply.status_code == 200, reply.text
        self.answers.setdefault(request, set()).add(text_of(reply, stream))


def text_of(reply: httpx.Response, stream: bool) -> str:
    if not stream:
        return json.dumps(reply.json()["choices"][0]["message"]["content"])
    events = parse(reply.content)
    assert events[-1] == (None, "[DONE]")
    assert not any("error" in data for _, data in events[:-1])
    return json.dumps("".join(data["choices"][0]["delta"].get("content", "") for _, data in events[:-1]))


async def load(server: Running, clients: int, seconds: float) -> Soak:
    soak = Soak(server.url, seconds)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        await asyncio.gather(*(soak.client(number, http) for number in range(clients)))
    return soak


def resident() -> int:
    """Bytes of this process that no file backs; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))}
    return 1024 * sum(kib.values())


def fill_cache(server: Running) -> None:
    """Use every block once: memory that has never been touched is not resident yet."""
    length = server.llm.context // 2  # numbers have a token and more for each
    for number in range(32 * server.llm.cache_stats.blocks // length + 1):
        numbers = " ".join(str(number * length + n) for n in range(length // 4))
        body = {"messages": [{"role": "user", "content": numbers[: 2 * length]}], "max_tokens": 1}
        assert server.post(CHAT, body).status_code == 200
    stats = server.llm.cache_stats
    assert stats.kept_blocks > 0.9 * stats.blocks


def soak(llm: LLM, clients: int, seconds: float) -> str:
    """Run it; a line that says how it went. Raises AssertionError."""
    with running(llm) as server:
        fill_cache(server)
        asyncio.run(load(server, clients, seconds / 4))  # so that whatever is made once has been made
        assert server.idle()
        gc.collect()
        before = resident()
        done = asyncio.run(load(server, clients, seconds))
        assert server.idle()
        gc.collect()
        grown = resident() - before
        for request, texts in done.answers.items():
            alone = text_of(server.post(CHAT, body_of(request)), stream=False)
            assert texts == {alone}, f"request {request}: {texts} are not {alone}"
    assert done.finished >= clients // 4
    assert grown < 32 << 20, f"memory grew by {grown >> 20} MiB"
    return f"{done.finished} answers, {done.left} left, memory {grown / 2**20:+.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    with LLM(options.model, context=2048, cache_bytes=128 << 20) as llm:
        sys.stdout.write(soak(llm, options.clients, options.seconds) + "\n")


if __name__ == "__main__":
    main()
