"""Tables and plots of characters: every cell is where it belongs, nothing is wider than asked for."""

from __future__ import annotations

import math

import pytest

from qkv.explain.charts import Series, bars, beside, chart, paragraph, plain, shades, si, table


def test_si():
    assert [si(x) for x in (0, 1, 12.34, 999.4, 999.6, 1234, 8_589_934_592, 1.5e-3, 2.5e-7)] == [
        "0", "1.00", "12.3", "999", "1.00 k", "1.23 k", "8.59 G", "1.50 m", "250 n",
    ]  # fmt: skip
    assert si(0.00325, "s") == "3.25 ms"
    assert si(-4e6, "B") == "-4.00 MB"
    assert si(math.inf, "B") == "inf B"
    assert (si(1e30), si(1e-15, "s")) == ("1.00e+30", "1.00e-15 s")


def test_plain():
    assert [plain(x) for x in (0, 0.00325, 3.2e-5, 12.55, 100.4, 16_384, 2e6)] == [
        "0", "0.00325", "3e-05", "12.6", "100", "16,384", "2e+06",
    ]  # fmt: skip


def test_table_aligns():
    text = table([("part", "n"), ("a", "1"), ("long", "1,000")])
    assert text.splitlines() == ["part      n", "───────────", "a         1", "long  1,000"]
    grouped = table([("", "a", "b", "c"), ("x", "100", "200", "3")], groups=[("", 1), ("two", 2), ("", 1)])
    assert grouped.splitlines() == ["    ─ two ──", "     a    b  c", "─" * 14, "x  100  200  3"]


def test_chart_puts_points_where_they_are():
    text = chart([Series("p", [1, 10, 100], [1, 10, 100])], 41, height=11, x_name="x", y_name="y")
    rows = [line[10:] for line in text.splitlines()[1:12]]
    assert [(row.index("●"), i) for i, row in enumerate(rows) if "●" in row] == [(29, 0), (14, 5), (0, 10)]
    assert text.splitlines()[1].startswith("     100 ┤")
    assert text.splitlines()[11].startswith("       1 ┤")


def test_chart_survives_what_cannot_be_drawn():
    for series in ([], [Series("p", [], [])], [Series("p", [0, math.nan], [1, 1])], [Series("p", [5], [7])]):
        assert max(map(len, chart(series, 60, x_name="x", y_name="y").splitlines())) <= 60


def test_a_line_is_drawn_below_points():
    text = chart([Series("l", [0, 4], [0, 4], line=True), Series("p", [2], [2])], 60, x_name="x", y_name="y", log="")
    assert text.count("●") == 2  # the point, and the legend
    assert "· l   ● p" in text


def test_bars():
    lines = bars(["a", "bb"], [1, 2], 20, text=["one", "two"]).splitlines()
    assert lines == [" a ▕██████ one", "bb ▕████████████ two"]
    assert bars(["a", "b"], [1, 8], 13, text=["", ""]).splitlines()[0] == "a ▕█▏ "  # 9 eighths of a character
    assert bars(["a"], [0.0], 20) == "a ▕ 0\n"


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
