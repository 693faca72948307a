"""One tiny model that says what it is told, and a server around it, for all tests of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

pytest.importorskip("fastapi", reason='needs the extra "server"')
pytest.importorskip("httpx", reason='needs the extra "test"')

from qkv import LLM
from server.serving import Running, running
from test_llm_dictated import dictated, ids_of, write_dictated
from tinyllm import opened


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with opened(write_dictated(tmp_path_factory.mktemp("served") / "tiny"), context=2000) as made:
        yield made


@pytest.fixture(scope="session")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm) as started:
        yield started


@pytest.fixture
def says(llm: LLM) -> Callable[..., AbstractContextManager[object]]:
    """`with says("text"):` every answer wants to be this text."""
    return lambda *said: dictated(llm, ids_of(llm, *said))
