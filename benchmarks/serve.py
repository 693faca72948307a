"""qkv's server beside llama.cpp's (llama-cpp-python), under 1, 8 and 32 clients; and what a long prompt does to others.

    python -m benchmarks.serve [--model smollm2] [--clients 1 8 32] [--llama-python llama/bin/python] [--repeats 3]
    python -m benchmarks.serve --pause

Each client streams one chat answer after the other: a prompt of about 100 tokens, different each time, and an answer
of 64. Both servers are processes of their own with the same file and threads; they are measured by turns, in one run.
Reported, at the median of the repeats: tokens per second of all clients, and the time from a request to its first
text, at the median and the 95th percentile of its answers. `qkv without HTTP` is as many coroutines that call
`LLM.achat` with the same conversations. Tokens are those of the answers' texts, counted alike for all.

The clients run on the same cores as the server. So they do as little as they can: a socket each, and lines.

--pause: 8 clients stream; then a prompt of 4,000 tokens arrives. Reported: the longest time between two pieces that
any of the 8 had before it came and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import machine
from qkv import LLM, SamplingParams
from qkv.runtime.cores import available_cores
from qkv.weights.names import resolve

OUTPUT, ROUNDS = 64, 3
Body = dict[str, Any]
CHAT = "/v1/chat/completions"
WORDS = Path(__file__).resolve().parent.parent.joinpath("LICENSE").read_text().split()


def messages(draw: random.Random, words: int = 70) -> list[dict[str, str]]:
    start = draw.randrange(len(WORDS) - 100)
    text = " ".join((WORDS[start:] + WORDS * 10)[:words])
    return [{"role": "user", "content": f"{draw.randrange(10**6)} {text}"}]


def body(draw: random.Random, tokens: int = OUTPUT) -> Body:
    return {"messages": messages(draw), "max_tokens": tokens, "temperature": 0.8, "seed": 1, "stream": True}


@contextmanager
def serving(command: list[str], port: int) -> Iterator[str]:
    """A server in a process of its own; its address."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers; the first time it may have kernels to compile."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).read()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{process.args!r} does not answer; its exit code is {process.poll()}")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def qkv_command(model: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "qkv", "serve", "-q", "-m", str(model), "--port", str(port)]


def llama_command(python: str, model: Path, port: int, threads: int) -> list[str]:
    command = [python, "-m", "llama_cpp.server", "--model", str(model), "--port", str(port), "--n_ctx", "8192"]
    return [*command, "--n_threads", str(threads), "--n_threads_batch", str(threads), "--interrupt_requests", "false"]


class Heard(NamedTuple):
    """An answer as its client had it: when it was asked, when each piece of text came, and the whole text."""

    times: list[float]
    text: str


class Run(NamedTuple):
    """The answers of some clients, and how long all took."""

    seconds: float
    answers: list[Heard]


Client = Callable[[Body], Coroutine[None, None, Heard]]


async def stream(url: str, asked: Body) -> Heard:
    """Ask a server. HTTP/1.0, so that the reply's lines are the stream's."""
    where = urlsplit(url)
    times, pieces = [time.perf_counter()], []
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    content = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{url}: {status!r} {await reader.read()!r}")
    async for line in reader:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"{url}: {event['error']}")
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece:
                times.append(time.perf_counter())
                pieces.append(piece)
    writer.close()
    return Heard(times, "".join(pieces))


async def call(llm: LLM, asked: Body) -> Heard:
    """The same without a server, and not in pieces."""
    params = SamplingParams(temperature=asked["temperature"], seed=asked["seed"], max_tokens=asked["max_tokens"])
    started = time.perf_counter()
    return Heard([started], (await llm.achat(asked["messages"], params)).text)


async def load(client: Client, clients: int, seed: int) -> Run:
    """Each client sends one request after the other."""
    draw = random.Random(seed)
    asked = [[body(draw) for _ in range(ROUNDS)] for _ in range(clients)]
    answers: list[Heard] = []

    async def one(bodies: list[Body]) -> None:
        answers.extend([await client(body) for body in bodies])

    started = time.perf_counter()
    await asyncio.gather(*map(one, asked))
    return Run(time.perf_counter() - started, answers)


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def compare(model: Path, options: argparse.Namespace) -> None:
    threads = available_cores()
    ports = free_port(), free_port()
    commands = {"qkv": (qkv_command(model, ports[0]), ports[0])}
    if options.llama_python:
        commands["llama.cpp"] = llama_command(options.llama_python, model, ports[1], threads), ports[1]
    found: dict[tuple[int, str], list[Run]] = defaultdict(list)
    for repeat in range(options.repeats):
        seeds = {clients: 100 * repeat + clients for clients in options.clients}
        for name, (command, port) in commands.items():
            with serving(command, port) as url:
                measure(partial(stream, url), name, seeds, found)
        with LLM(model) as llm:
            measure(partial(call, llm), "qkv without HTTP", seeds, found)
            count = partial(tokens_of, llm)
    report(found, count)


def measure(client: Client, name: str, seeds: dict[int, int], found: dict[tuple[int, str], list[Run]]) -> None:
    """Add the runs with each number of clients."""
    asyncio.run(load(client, 1, 99))  # the first request loads what is loaded once
    for clients, seed in seeds.items():
        found[clients, name].append(asyncio.run(load(client, clients, seed)))


def tokens_of(llm: LLM, run: Run) -> int:
    return sum(len(llm.tokenizer.encode(answer.text)) for answer in run.answers)


def report(found: dict[tuple[int, str], list[Run]], count: Callable[[Run], int]) -> None:
    print(machine.text(machine.machine()))
    print("| clients | server | tokens/s | first text, median | 95 % |\n|---|---|---|---|---|")
    speeds = {key: [count(run) / run.seconds for run in runs] for key, runs in found.items()}
    for (clients, name), runs in sorted(found.items()):
        firsts = [times[1] - times[0] for run in runs for times, _ in run.answers if len(times) > 1]
        shown = f"{median(firsts):.2f} s | {percentile(firsts, 95):.2f} s" if firsts else "– | –"
        print(f"| {clients} | {name} | {median(speeds[clients, name]):.1f} | {shown} |")
    print(json.dumps({f"{name} {clients}": values for (clients, name), values in speeds.items()}))


async def pauses(url: str, long_words: int) -> tuple[float, float, float]:
    """The longest pause of 8 streams without and with a long prompt beside them, and the time to its first text."""
    draw = random.Random(1)
    streams = [asyncio.create_task(stream(url, body(draw, 600))) for _ in range(8)]
    await asyncio.sleep(5)
    arrived = time.perf_counter()
    first = (await stream(url, body(draw, 8) | {"messages": messages(draw, long_words)})).times[1]
    answers = await asyncio.gather(*streams)
    gaps = [(a, b - a) for times, _ in answers for a, b in pairwise(times[1:])]
    calm = [gap for at, gap in gaps if arrived - 2 < at < arrived - 0.5]
    beside = [gap for at, gap in gaps if arrived - 0.2 < at < first]
    return max(calm), max(beside), first - arrived


def pause(model: Path, options: argparse.Namespace) -> None:
    port = free_port()
    with serving(qkv_command(model, port), port) as url:
        asked = {"prompt": messages(random.Random(1), 2800)[0]["content"]}
        request = urllib.request.Request(f"{url}/tokenize", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as reply:
            tokens = json.load(reply)["count"]
        runs = [asyncio.run(pauses(url, 2800 * 4000 // tokens)) for _ in range(options.repeats)]
    for calm, beside, first in runs:
        print(
            f"longest pause: {1000 * calm:.0f} ms before, {1000 * beside:.0f} ms beside; first text after {first:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", action="store_true")
    options = parser.parse_args()
    (pause if options.pause else compare)(resolve(options.model), options)


if __name__ == "__main__":
    main()
