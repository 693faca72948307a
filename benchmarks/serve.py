"""qkv's server beside llama.cpp's (llama-cpp-python), under 1, 8 and 32 clients; and what a long prompt does to others.

    python -m benchmarks.serve [--model smollm2] [--clients 1 8 32] [--llama-python llama/bin/python] [--repeats 3]
    python -m benchmarks.serve --pause

Each client streams one chat answer after the other: a prompt of about 100 tokens, different each time, and an answer
of 64. Both servers are processes of their own with the same file and threads; they are measured by turns, in one run.
Reported, at the median of the repeats: tokens per second of all clients, and the time from a request to its first
text, at the median and the 95th percentile of its answers. `qkv without HTTP` is `LLM.generate` on as many prompts.

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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from qkv import LLM, SamplingParams
from qkv.runtime.cores import available_cores
from qkv.weights.names import resolve

OUTPUT, ROUNDS = 64, 3
CHAT = "/v1/chat/completions"
WORDS = Path(__file__).resolve().parent.parent.joinpath("LICENSE").read_text().split()


def messages(draw: random.Random, words: int = 70) -> list[dict[str, str]]:
    start = draw.randrange(len(WORDS) - 100)
    text = " ".join((WORDS[start:] + WORDS * 10)[:words])
    return [{"role": "user", "content": f"{draw.randrange(10**6)} {text}"}]


def body(draw: random.Random, tokens: int = OUTPUT) -> dict[str, Any]:
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


async def stream(http: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> list[float]:
    """When the request was sent, and when each piece of text came."""
    times = [time.perf_counter()]
    async with http.stream("POST", url + CHAT, json=asked) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and '"content":"' in line.replace(": ", ":"):
                piece = json.loads(line[6:])
                if any(choice["delta"].get("content") for choice in piece["choices"]):
                    times.append(time.perf_counter())
    return times


async def load(url: str, clients: int, seed: int) -> tuple[float, list[float]]:
    """Pieces of text per second of all clients, and each answer's time to its first."""
    draw = random.Random(seed)
    asked = [[body(draw) for _ in range(ROUNDS)] for _ in range(clients)]
    answers: list[list[float]] = []

    async def client(bodies: list[dict[str, Any]]) -> None:
        for one in bodies:
            answers.append(await stream(http, url, one))

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client(bodies) for bodies in asked))
        seconds = time.perf_counter() - started
    return sum(len(times) - 1 for times in answers) / seconds, [times[1] - times[0] for times in answers]


def bare(llm: LLM, clients: int, seed: int) -> float:
    """Tokens per second of the same requests without a server."""
    draw = random.Random(seed)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=OUTPUT)
    started, tokens = time.perf_counter(), 0
    for _ in range(ROUNDS):
        prompts = [messages(draw)[0]["content"] for _ in range(clients)]
        tokens += sum(len(answer.token_ids) for answer in llm.generate(prompts, params))
    return tokens / (time.perf_counter() - started)


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def compare(model: Path, options: argparse.Namespace) -> None:
    threads = available_cores()
    ports = free_port(), free_port()
    commands = {"qkv": (qkv_command(model, ports[0]), ports[0])}
    if options.llama_python:
        commands["llama.cpp"] = llama_command(options.llama_python, model, ports[1], threads), ports[1]
    found: dict[tuple[str, int], list[tuple[float, list[float]]]] = {}
    for repeat in range(options.repeats):
        for name, (command, port) in commands.items():
            with serving(command, port) as url:
                asyncio.run(load(url, 1, 99))  # the first request loads what is loaded once
                for clients in options.clients:
                    found.setdefault((name, clients), []).append(
                        asyncio.run(load(url, clients, 100 * repeat + clients))
                    )
        with LLM(model) as llm:
            for clients in options.clients:
                speed = bare(llm, clients, 100 * repeat + clients)
                found.setdefault(("qkv without HTTP", clients), []).append((speed, []))
    print("| clients | server | tokens/s | first text, median | 95 % |\n|---|---|---|---|---|")
    for (name, clients), runs in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        firsts = [value for _, values in runs for value in values]
        shown = f"{median(firsts):.2f} s | {percentile(firsts, 95):.2f} s" if firsts else "– | –"
        print(f"| {clients} | {name} | {median(speed for speed, _ in runs):.1f} | {shown} |")
    print(json.dumps({f"{name} {clients}": [speed for speed, _ in runs] for (name, clients), runs in found.items()}))


async def pauses(url: str, long_words: int) -> tuple[float, float, float]:
    """The longest pause of 8 streams without and with a long prompt beside them, and the time to its first text."""
    draw = random.Random(1)
    async with httpx.AsyncClient(timeout=600) as http:
        streams = [asyncio.create_task(stream(http, url, body(draw, 600))) for _ in range(8)]
        await asyncio.sleep(5)
        arrived = time.perf_counter()
        long = body(draw, 8) | {"messages": messages(draw, long_words)}
        first = (await stream(http, url, long))[1]
        answers = await asyncio.gather(*streams)
    gaps = [(a, b - a) for times in answers for a, b in pairwise(times[1:])]
    calm = [gap for at, gap in gaps if arrived - 2 < at < arrived - 0.5]
    beside = [gap for at, gap in gaps if arrived - 0.2 < at < first]
    return max(calm), max(beside), first - arrived


def pause(model: Path, options: argparse.Namespace) -> None:
    port = free_port()
    with serving(qkv_command(model, port), port) as url:
        asked = {"prompt": messages(random.Random(1), 2800)[0]["content"]}
        tokens = httpx.post(f"{url}/tokenize", json=asked).json()["count"]
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
