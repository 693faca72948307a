"""docs/structure.md against a real request: each function it names is entered, in the order it says."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import qkv.model.forward
from tinyllm import HELLO, opened, write_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "structure.md"
NAMES = re.findall(r"`(qkv\.[\w.]+)`", PAGE.read_text(encoding="utf-8"))
COMPILED = [name for name in NAMES if name.startswith("qkv.model.forward.")]
CALLED = [name for name in NAMES if name not in COMPILED]


def named(name: str) -> Any:
    """The object: the longest importable beginning is its module."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.fixture(scope="module")
def entered(tmp_path_factory) -> list[CodeType]:
    """The code of all functions that one short chat enters, in the order of their first time, whatever the thread."""
    order: dict[CodeType, None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            order.setdefault(frame.f_code)

    with opened(write_model(tmp_path_factory.mktemp("model") / "tiny"), context=256) as llm:
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            params = qkv.SamplingParams(temperature=0, max_tokens=40, stop=["never in it"])
            assert len(llm.chat(HELLO, params, tools=[{"name": "look"}]).token_ids) == 40
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return list(order)


def test_every_function_is_entered_in_this_order(entered):
    codes = [named(name).__code__ for name in CALLED]
    missing = [name for name, code in zip(CALLED, codes, strict=True) if code not in entered]
    assert missing == []
    places = [entered.index(code) for code in codes]
    assert [CALLED[i] for i in sorted(range(len(places)), key=places.__getitem__)] == CALLED


def test_compiled_phases_stand_in_the_step_in_this_order():
    source = inspect.getsource(qkv.model.forward.step_for)
    places = []
    for name in COMPILED:
        named(name)
        places.append(source.index(f"{name.rsplit('.', 1)[1]}("))
    assert places == sorted(places)
    assert len(places) == 7


def test_lines_are_numbered_and_every_room_is_passed():
    numbers = [int(n) for n in re.findall(r"^(\d+)\. `", PAGE.read_text(encoding="utf-8"), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {name.split(".")[1] for name in NAMES} >= {"llm", "text", "engine", "model", "runtime", "completion"}
