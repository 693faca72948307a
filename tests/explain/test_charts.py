"""Tables and plots of characters: every cell is where it belongs, nothing is wider than asked for."""

from __future__ import annotations

import math

import pytest

from qkv.explain.charts import bars, bars_beside, beside, paragraph, shades, si, table


def test_si():
    assert [si(x) for x in (0, 1, 12.34, 999.4, 999.6, 1234, 8_589_934_592, 1.5e-3, 2.5e-7)] == [
        "0", "1.00", "12.3", "999", "1.00 k", "1.23 k", "8.59 G", "1.50 m", "250 n",
    ]  # fmt: skip
    assert si(0.00325, "s") == "3.25 ms"
    assert si(-4e6, "B") == "-4.00 MB"
    assert si(math.inf, "B") == "inf B"
    assert (si(1e30), si(1e-15, "s")) == ("1.00e+30", "1.00e-15 s")


def test_table_aligns():
    text = table([("part", "n"), ("a", "1"), ("long", "1,000")])
    assert text.splitlines() == ["part      n", "───────────", "a         1", "long  1,000"]
    grouped = table([("", "a", "b", "c"), ("x", "100", "200", "3")], groups=[("", 1), ("two", 2), ("", 1)])
    assert grouped.splitlines() == ["    ─ two ──", "     a    b  c", "─" * 14, "x  100  200  3"]


def test_bars():
    lines = bars(["a", "bb"], [1, 2], 20, text=["one", "two"]).splitlines()
    assert lines == [" a ▕██████ one", "bb ▕████████████ two"]
    assert bars(["a", "b"], [1, 8], 13, text=["", ""]).splitlines()[0] == "a ▕█▏ "  # 9 eighths of a character
    assert bars(["a"], [0.0], 20) == "a ▕ 0\n"
    assert bars(["a", "b"], [-1.0, math.nan], 20) == "a ▕ -1\nb ▕ nan\n"


def test_logarithmic_bars_grow_by_the_same_for_each_factor():
    lines = bars(["a", "b", "c", "d"], [1, 10, 100, 0], 17, text=[""] * 4, log=True).splitlines()
    assert [line.count("█") for line in lines] == [13 // 3, 2 * 13 // 3, 13, 0]
    assert bars(["a"], [0.0], 20, log=True) == "a ▕ 0\n"


@pytest.mark.parametrize("width", [80, 120])
def test_bars_beside_each_other_have_one_scale(width):
    text = bars_beside(["low", "high"], ["a", "b"], [[1, 10], [100, 1000]], width)
    title, first, second, end = text.split("\n")[:4]
    assert title.split() == ["low", "high"] and end == ""
    lengths = [part.count("█") for line in (first, second) for part in line.split("▕")[1:]]
    assert lengths[0] < lengths[2] < lengths[1] < lengths[3]  # 1, 10, 100, 1000
    assert max(map(len, text.splitlines())) <= width


def test_shades():
    assert shades([[0, 0.1, 0.3, 0.6, 1.0, math.nan]]) == ["· ░░▒▒▓▓██??"]
    assert shades([[1.0, 5.0]], largest=10) == ["░░▓▓"]


def test_beside_wraps_into_bands():
    panel = ("title", ["12345678"])
    assert beside([panel, panel], 19).splitlines() == ["title      title", "12345678   12345678", ""]
    assert beside([panel, panel], 18).splitlines() == ["title", "12345678", "", "title", "12345678", ""]


@pytest.mark.parametrize("width", [40, 80])
def test_paragraph(width):
    text = paragraph("word " * 50, width)
    assert text.endswith("\n\n")
    assert max(map(len, text.splitlines())) <= width
