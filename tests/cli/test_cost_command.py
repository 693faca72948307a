"""`qkv cost`: the table says what `qkv.model.cost` counts, for names, files and folders, without weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.cli.main import execute
from qkv.model.config import PRESETS
from qkv.model.cost import decode_cost, prefill_cost
from qkv.opened import open_model

GIVEN = ["--gbps", "20", "--gflops", "100"]
QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]
PREFIX = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def number(cell: str) -> float:
    """ "1.46 T" → 1.46e12."""
    value, _, unit = cell.partition(" ")
    return float(value.replace(",", "")) * PREFIX.get(unit[:1], 1)


def tables(text: str) -> list[dict[str, list[str]]]:
    """Both tables: the cells of each part."""
    found: list[dict[str, list[str]]] = []
    for line in text.splitlines():
        cells = re.split(r" {2,}", line)
        if cells[0] == "part":
            found.append({})
        elif found and len(cells) > 5:
            found[-1][cells[0]] = cells[1:]
    return found


def test_the_tables_are_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["cost", "--context", "1000", "--batch", "3", "--weights", "int4", *GIVEN]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^parameters +596,049,920$", out, re.MULTILINE)
    assert re.search(r"^token table +155,582,464, also the head$", out, re.MULTILINE)
    assert "114,688 bytes a token, 344 MB for 1,000 positions, 3 sequences" in out
    assert "8,192·T² FLOP a layer" in out
    assert "20.0 GB/s, 100 GFLOP/s (as given)" in out
    phases = tables(out)
    for table, parts in zip(
        phases, [f(QWEN3, 1000, 3, weights="int4") for f in (prefill_cost, decode_cost)], strict=True
    ):
        seconds = 0.0
        for part in parts:
            cells = table[part.name]
            memory, compute = part.bytes / 20e9, part.executed / 100e9
            seconds += max(memory, compute)
            shown = [number(cell) for cell in cells[:4]] + [number(cells[5])]
            assert shown == pytest.approx(
                [part.parameters, part.textbook, part.executed, part.bytes, max(memory, compute)], rel=0.006
            )
            assert float(cells[4].replace(",", "")) == pytest.approx(part.executed / part.bytes, rel=0.05)
            assert cells[6] == ("memory" if memory > compute else "compute")
        assert number(table["total"][5]) == pytest.approx(seconds, rel=0.006)
        assert len(table) == len(parts) + 1


@pytest.mark.parametrize("name", ["qwen3:8b", "Qwen/Qwen3-8B"])
def test_known_names_need_no_network(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert execute(["cost", "-m", name, *GIVEN]) == 0
    out = capsys.readouterr().out
    assert f"{PRESETS['Qwen/Qwen3-8B'].parameter_count:,}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_folder_needs_only_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert execute(["cost", "-m", str(tmp_path), *GIVEN]) == 0
    out = capsys.readouterr().out
    size = 2 * 320 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 64
    assert re.search(rf"^parameters +{size:,}$", out, re.MULTILINE)
    assert "at most 512 positions" in out  # 1,024 were asked for


@pytest.mark.parametrize(("options", "formats"), [([], "int4m + int8"), (["--weights", "int4"], "int4 + int4m")])
def test_files_are_counted_as_they_would_be_loaded(
    capsys: pytest.CaptureFixture[str], smollm2: Path, options: list[str], formats: str
) -> None:
    """SmolLM2's file has 4-bit matrices and a token table of another type: every byte of them, none estimated."""
    wanted = options[-1] if options else None
    loaded = open_model(str(smollm2)).load(wanted, threads=2)
    assert " + ".join(sorted(loaded.weights.formats)) == formats
    assert execute(["cost", "-m", str(smollm2), *options, *GIVEN]) == 0
    out = capsys.readouterr().out
    assert f"weights {formats}\n" in out
    decode = tables(out)[1]
    matrices = sum(number(decode[part][3]) for part in ("q, k, v", "o_proj", "MLP", "head"))
    assert matrices == pytest.approx(loaded.weights.bytes_per_token, rel=0.006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "context must be a whole number from 1 to 1,000,000,000, got 0"),
        (["--context", "-3"], "context must be"),
        (["--batch", "0"], "batch must be a whole number from 1"),
        (["--batch", "9" * 30], "batch must be"),
        (["--context", "many"], "'--context'"),
        (["--weights", "fp8"], "'fp8'; choose one of"),
        (["--cache", "fp8"], "'fp8'; choose one of"),
        (["--gbps", "0"], "--gbps must be a positive number, got 0"),
        (["--gflops", "nan"], "--gflops must be a positive number, got nan"),
        (["-m", "no-such-model"], "unknown model 'no-such-model'"),
        (["-m", "HuggingFaceTB/SmolLM2-135M-Instruct"], "qkv pull HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert execute(["cost", *GIVEN, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("verb", ["info", "cost"])
@pytest.mark.parametrize("downloaded", [True, False])
def test_shapes_alone_load_no_numba(smollm2: Path, verb: str, downloaded: bool) -> None:
    name = str(smollm2) if downloaded else "Qwen/Qwen3-0.6B"
    arguments = ["info", name] if verb == "info" else ["cost", "-m", name, *GIVEN]
    code = (
        "import sys; from qkv.cli.main import execute; code = execute(sys.argv[1:]); "
        "print('numba' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "False\n")
    assert "parameters" in result.stdout
