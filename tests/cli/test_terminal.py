"""Text on its way to a terminal, and progress bars on one."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen import Screen, Terminal

from qkv.cli import terminal
from qkv.cli.bars import Bars


@given(st.text())
def test_visible_text_has_no_control_character_and_loses_nothing(text: str) -> None:
    shown = terminal.visible(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\t\n"]
    if not any(unicodedata.category(c) == "Cc" for c in text):
        assert shown == text
    for piece in (text[:1], text[1:]):  # chunks may be cut anywhere
        assert terminal.visible(piece) in shown


@given(st.text(min_size=1))
def test_an_error_is_one_line(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        screen = Terminal()
        patch.setattr("sys.stderr", screen)
        terminal.print_error(text)
    printed = screen.getvalue()
    assert printed.startswith("qkv: ") and printed.endswith("\n")
    assert not [c for c in printed[:-1] if unicodedata.category(c) == "Cc"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1536, "1.54 kB"), (92_871_040, "92.9 MB"), (5 * 10**12, "5 TB")],
)
def test_bytes_text(count: int, text: str) -> None:
    assert terminal.bytes_text(count) == text


@pytest.mark.parametrize(("variables", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_only_where_it_is_understood(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colour: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal.has_colour(Terminal()) is colour


def test_where_nobody_looks_only_long_work_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("qkv.cli.bars.time.monotonic", lambda: now[0])
    with Bars() as bars:
        for done in range(4):
            bars("downloading a\x1b[31m", done, 2000)
            now[0] += 1
        for done in range(4):
            bars("loading", done, 3, "tensors")
            now[0] += 0.5
    assert capsys.readouterr() == ("", "downloading a\\x1b[31m (2 kB)\n")


def test_bars_on_a_terminal_show_units_and_are_gone_afterwards(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from qkv.cli.bars import Bars\n"
        "with Bars() as bars:\n"
        "    for step in ('asking', 0, None), ('downloading [x]', 10**6, 3 * 10**6), ('loading', 1, 3, 'tensors'):\n"
        "        bars(*step)\n"
        "        input()\n"
        "print('done')\n"
    )
    with Screen(program) as screen:
        for what, amount in [("asking", "0 bytes"), ("downloading [x]", "1 MB/3 MB"), ("loading", "1/3 tensors")]:
            screen.expect(what)
            screen.expect(amount)
            screen.send("\r")
        assert screen.end() == 0
        assert "\x1b[?25h" in screen.seen  # the cursor is back
        assert re.search(r"\x1b\[2K(\x1b\[\?25h)?\r?done\r\n$", screen.seen)  # on a line that has been emptied
