"""Rows: ratios, bars, fractions, and what the table, the plot, the READMEs and the JSON say about them."""

from __future__ import annotations

import json
import re

import pytest
from scripted_workers import Scripted

from benchmarks import plot, readme, report
from benchmarks.measure import Company, Contestant, Result
from benchmarks.peers import Peer
from benchmarks.points import BARS, bar_for
from benchmarks.workers import Launch
from qkv.errors import QkvError
from qkv.measure.speed import Need, Point

NEEDS = {"f16": Need(400e6, 2e9), "int8": Need(300e6, 2e9)}
ABOUT = {"processor": "A processor", "date": "2030-01-02", "qkv": "1.2.3"}
PEERS = [
    Peer("llama.cpp", Launch("llama.cpp", "python", "m"), "llama_cpp 9"),
    Peer("OpenVINO", None, hint="install it"),
]


def contestant(engine: str, variant: str, rates: list[float], failure: str | None = None) -> Contestant:
    cache = variant.split()[0]
    return Contestant(engine, variant, cache, Scripted(engine, {}, {}), rates, failure)


def result(point: str, *contestants: Contestant, reads: tuple[float, ...] = (40e9,)) -> Result:
    return Result(Point.parse(point), list(contestants), list(reads), Company(1.0, 0.0, 0.0))


def decode(depth: int = 128, own: float = 80.0, reads: tuple[float, ...] = (40e9,)) -> list[report.Row]:
    made = result(
        f"decode:{depth}",
        contestant("qkv", "f16", [own]),
        contestant("qkv", "int8", [2 * own]),
        contestant("llama.cpp", "f16", [30.0]),
        contestant("llama.cpp", "f16 flash", [40.0]),
        contestant("llama.cpp", "q8_0 flash", [50.0]),
        reads=reads,
    )
    return report.rows_of("q4_0", made, NEEDS, ["llama.cpp", "OpenVINO"])


def test_each_cache_meets_the_peer_it_should():
    f16, int8 = decode()
    assert (f16.cache, f16.peers, f16.ratios) == ("f16", {"llama.cpp": (40.0, "f16 flash")}, {"llama.cpp": 2.0})
    assert (int8.cache, int8.peers, int8.ratios) == ("int8", {"llama.cpp": (50.0, "q8_0 flash")}, {"llama.cpp": 3.2})


@pytest.mark.parametrize(("own", "met"), [(64.0, [True, False]), (63.9, [False, False]), (90.0, [True, True])])
def test_bars_of_decoding(own, met):
    f16, int8 = decode(own=own)
    assert f16.bars == {"llama.cpp": 1.6}
    assert f16.fraction == pytest.approx(400e6 * own / 40e9)
    assert f16.met() == met  # the ratio, and 0.90 of the read bandwidth
    assert int8.bars == {} and int8.met() == []


def test_the_fraction_is_of_the_median_of_the_same_rounds():
    assert decode(reads=(10e9, 64e9, 80e9))[0].fraction == pytest.approx(0.5)
    assert decode(reads=())[0].fraction is None


def test_prompts_and_batches_count_their_tokens():
    made = result("prefill:512", contestant("qkv", "f16", [256.0]))
    (row,) = report.rows_of("q4_0", made, NEEDS, ["llama.cpp"])
    assert row.seconds == 2
    assert row.as_json()["gb_per_s"] == 0.2 and row.as_json()["gop_per_s"] == 1
    assert row.peers == {} and row.bars == {} and row.as_json()["met"] is None


def test_each_bar_is_asked_once_and_found():
    keys = [(bar.model, bar.point, bar.cache, bar.peer) for bar in BARS]
    assert len(set(keys)) == len(keys)
    assert [bar_for(*key) for key in keys] == [bar.least for bar in BARS]
    assert min(bar.least for bar in BARS) >= 1  # nothing slower than a peer is asked for
    assert bar_for("q4_0", Point("decode", 2048), "int8", "llama.cpp") == 2.3  # written decode_2048_int8
    assert bar_for("q4_0", Point("decode", 512), "f16", "llama.cpp") is None


def test_the_table_says_it():
    names = ["llama.cpp", "OpenVINO"]
    columns = report.header(names)
    cells = [report.cells(row, names) for row in decode()]
    assert all(len(row) == len(columns) for row in cells)
    f16 = dict(zip(["point", "cache", "qkv", "llama.cpp", "ratio", "OpenVINO", "other ratio"], cells[0], strict=False))
    assert f16 == {
        "point": "decode:128",
        "cache": "f16",
        "qkv": "80.0",
        "llama.cpp": "40.0 f",
        "ratio": "2.00×",
        "OpenVINO": "–",
        "other ratio": "–",
    }
    assert cells[0][7:] == ["1.6× met", "400", "2.00", "32.0", "160", "0.80 of 0.90 NOT MET"]
    assert cells[1][3] == "50.0 qf"
    line = report.line(cells[0], columns)
    assert line.index("80.0") + 4 == report.line(columns, columns).index("qkv") + 3


def test_notes_name_who_failed_and_who_disturbed():
    made = result("decode:128", contestant("llama.cpp", "f16", [], failure="no memory"))
    assert report.notes(made) == ["llama.cpp, f16: no memory"]
    made.company = Company(timed=10, waiting=1, strangers=6)
    assert report.notes(made)[1:] == [
        "decode:128: other programs used 0.60 cores meanwhile; trust nothing of it",
        "decode:128: engines that had to wait used 0.10 cores meanwhile; trust nothing of it",
    ]


def test_json_has_every_figure():
    line = json.loads(json.dumps(decode()[0].as_json()))
    assert line == {
        "model": "q4_0",
        "point": "decode:128",
        "cache": "f16",
        "tokens_per_s": 80.0,
        "rounds": [80.0],
        "peers": {"llama.cpp": {"tokens_per_s": 40.0, "setting": "f16 flash"}},
        "ratios": {"llama.cpp": 2.0},
        "bars": {"llama.cpp": 1.6},
        "fraction_of_read": 0.8,
        "fraction_bar": 0.9,
        "met": False,
        "step_bytes": 400_000_000,
        "step_operations": 2_000_000_000,
        "gb_per_s": 32.0,
        "gop_per_s": 160.0,
        "read_gb_per_s": 40.0,
        "strangers_cores": 0.0,
    }


def test_the_plot_has_a_line_for_each_engine(tmp_path):
    rows = decode(2048, own=60.0) + decode(128)
    assert plot.lines(rows) == {
        "q4_0": {
            "qkv, f16 cache": [(128, 80.0), (2048, 60.0)],
            "qkv, int8 cache": [(128, 160.0), (2048, 120.0)],
            "llama.cpp, f16 cache": [(128, 40.0), (2048, 40.0)],
            "llama.cpp, its fastest cache": [(128, 50.0), (2048, 50.0)],
        }
    }
    pytest.importorskip("matplotlib")
    assert plot.save(rows, tmp_path / "new") == f"plot: {tmp_path / 'new' / 'compare.png'}"
    assert (tmp_path / "new" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in plot.save(decode(), tmp_path)
    assert plot.save([], tmp_path) == "no plot: no decode points"


def test_the_readme_gets_a_table_between_its_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", encoding="utf-8")
    rows = decode() + decode(2048)
    assert readme.update(rows, ABOUT, 2, PEERS, [path]) == f"written into {path}"
    once = path.read_text(encoding="utf-8")
    assert once.startswith(f"before\n{readme.BEGIN}\n") and once.endswith(f"{readme.END}\nafter\n")
    assert "old" not in once
    assert "| tokens/s | qkv | llama.cpp | ratio |" in once
    assert "| decode at 128 | 80.0 | 40.0 | 2.0× |" in once
    assert "| decode at 2,048, int8 cache | 160 | 50.0 | 3.2× |" in once
    assert "decode at 128, int8" not in once
    assert "A processor, 2 threads, 2030-01-02: qkv 1.2.3 beside llama.cpp (llama_cpp 9)." in once
    readme.update(rows, ABOUT, 2, PEERS, [path])
    assert path.read_text(encoding="utf-8") == once
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_without_markers_in_both_readmes_neither_changes(tmp_path):
    paths = [tmp_path / "README.md", tmp_path / "README.zh-CN.md"]
    texts = [f"{readme.BEGIN}\nold\n{readme.END}\n", f"no end\n{readme.BEGIN}\n"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    with pytest.raises(QkvError, match=r"README\.zh-CN\.md has no lines"):
        readme.update(decode(), ABOUT, 2, PEERS, paths)
    assert [path.read_text(encoding="utf-8") for path in paths] == texts
    paths[1].unlink()
    with pytest.raises(QkvError, match=r"README\.zh-CN\.md cannot be read"):
        readme.update(decode(), ABOUT, 2, PEERS, paths)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_the_projects_readmes_have_the_markers_and_the_same_table():
    tables = set()
    for path in readme.READMES:
        before, table, after = re.split(f"{re.escape(readme.BEGIN)}|{re.escape(readme.END)}", path.read_text("utf-8"))
        tables.add(table)
        assert before and after
    assert len(tables) == 1
