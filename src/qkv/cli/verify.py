"""`qkv verify`: the promise of equal answers, tried over HTTP on a server that runs."""

from __future__ import annotations

import hashlib
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from qkv.cli import terminal
from qkv.cli.serve import KEY_VARIABLE
from qkv.errors import QkvError

Body = dict[str, Any]
OTHERS = 7


def verify(
    url: Annotated[str, typer.Option("--url", help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="The server's key.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The length of the answer.")] = 48,
) -> None:
    """Ask a running server the same thing in four ways, and compare every bit of the answers.

    \b
    qkv serve -m smollm2 &
    qkv verify

    A seeded request is sent alone, again (now the cache has its prompt), as a stream, and among seven others. Each
    line has the hash of the answer's text and of all its log-probabilities. Exit code 1: they differ.
    """
    caller = Caller(url.rstrip("/"), api_key)
    hashes = {}
    for way, answer in ways(caller, request(max_tokens)):
        hashes[way] = answer
        terminal.write(f"{way:<22} {answer}\n")
    if len(set(hashes.values())) > 1:
        terminal.write("The answers differ: this server breaks its promise.\n")
        raise typer.Exit(1)
    terminal.write("All the same.\n")


def request(max_tokens: int) -> Body:
    """A request whose prompt no cache can know yet."""
    story = f"Number {secrets.randbelow(10**9)}. " + "The keeper of the lighthouse writes down what he sees. " * 8
    return {
        "messages": [{"role": "user", "content": f"{story}Tell how it goes on."}],
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 5,
    }


def ways(caller: Caller, body: Body) -> Iterator[tuple[str, str]]:
    """How the request was sent, and the hash of its answer."""
    yield "alone", _hash(*caller.whole(body))
    yield "cached", _hash(*caller.whole(body))
    yield "streamed", _hash(*caller.streamed(body))
    others = [body | {"messages": [{"role": "user", "content": f"Count from {n}."}], "seed": n} for n in range(OTHERS)]
    with ThreadPoolExecutor(OTHERS + 1) as pool:
        answers = list(pool.map(caller.whole, [*others[:3], body, *others[3:]]))
    yield f"among {OTHERS + 1}", _hash(*answers[3])


def _hash(text: str, thinking: str, logprobs: list[Any]) -> str:
    told = json.dumps([text, thinking, logprobs], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


class Caller:
    """Sends chat requests to a server. Raises QkvError with the server's words, or why there are none."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise QkvError(f"--url must start with http:// or https://, got {url!r}")
        self._url, self._key = url, api_key

    def whole(self, body: Body) -> tuple[str, str, list[Any]]:
        """The answer's text, its thinking and its log-probabilities."""
        choice = json.loads(b"".join(self._send(body)))["choices"][0]
        message = choice["message"]
        return message["content"] or "", message.get("reasoning_content") or "", choice["logprobs"]["content"]

    def streamed(self, body: Body) -> tuple[str, str, list[Any]]:
        """The same, put together from a stream."""
        text, thinking = "", ""
        logprobs: list[Any] = []
        for line in self._send(body | {"stream": True}):
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise QkvError(f"{self._url}: {data['error']['message']}")
            for choice in data["choices"]:
                text += choice["delta"].get("content") or ""
                thinking += choice["delta"].get("reasoning_content") or ""
                logprobs += (choice["logprobs"] or {}).get("content") or []
        return text, thinking, logprobs

    def _send(self, body: Body) -> Iterator[bytes]:
        """The lines of the reply."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        sent = urllib.request.Request(f"{self._url}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(sent, timeout=600) as reply:
                yield from reply
        except urllib.error.HTTPError as error:
            raise QkvError(f"{self._url}: {error.code} {error.read(500).decode('utf-8', 'replace')}") from None
        except (OSError, ValueError) as error:
            raise QkvError(f"{self._url}: no answer ({error}); start a server with qkv serve") from None
