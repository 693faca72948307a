"""qkv beside other engines on the same cores and files, in one run in which they take turns."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import models, report
from benchmarks.measure import Idleness, opened, results
from benchmarks.peers import Peer, find_peers
from benchmarks.points import Point, need, parse
from benchmarks.workers import Launch, Worker, WorkerError
from qkv.cli.bars import Bars
from qkv.errors import QkvError
from qkv.inspect.plain import table
from qkv.kernels.cores import available_cores
from qkv.kernels.team import MAX_THREADS
from qkv.weights.checkpoint import open_checkpoint

EXAMPLES = """\
examples:
  python -m benchmarks.compare --llama-python ~/llama/bin/python
  python -m benchmarks.compare --quick --models q4_0
  python -m benchmarks.compare --models smollm2 --points decode:128 prefill:512 batch:8 --rounds 7
  python -m benchmarks.compare --models q4_0=my-qwen3-q4_0.gguf --points decode:128
"""


def options(arguments: list[str]) -> argparse.Namespace:
    keys = [model.key for model in models.MODELS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=keys, metavar="M", help=f"{', '.join(keys)}; KEY=FILE.gguf; or a file")
    add("--points", nargs="+", type=_point, metavar="P", help="decode:DEPTH, prefill:TOKENS, batch:SEQUENCES")
    add("--quick", action="store_true", help="four points only, to a depth of 512")
    add("--rounds", type=_count, default=5, metavar="N", help="turns of every engine at every point (default 5)")
    add(
        "--threads", type=_count, default=available_cores(), metavar="N", help="default: the cores this process may use"
    )
    add("--llama-python", metavar="PYTHON", help="a Python that has llama-cpp-python (or set QKV_BENCH_LLAMA_PYTHON)")
    chosen = parser.parse_args(arguments)
    if chosen.threads > MAX_THREADS:
        parser.error(f"--threads must be at most {MAX_THREADS}")
    return chosen


def _point(text: str) -> Point:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)


def compare(chosen: argparse.Namespace, bars: Bars) -> list[report.Row]:
    peers = find_peers(chosen)
    for peer in peers:
        print(f"{peer.name}: {peer.version if peer.present else f'absent; {peer.hint}'}")
    rows: list[report.Row] = []
    for model, file in models.chosen(chosen.models):
        path = file or models.file_of(model, bars)
        points = chosen.points or models.default_points(model, chosen.quick)
        rows += measure(model, path, points, peers, chosen, bars)
    return rows


def measure(
    model: models.BenchModel,
    path: Path,
    points: list[Point],
    peers: list[Peer],
    chosen: argparse.Namespace,
    bars: Bars,
) -> list[report.Row]:
    """One model: start everyone, let them take turns, print a line for each point as it is done."""
    launches = [Launch(report.HOME, sys.executable, "benchmarks.worker_qkv")]
    launches += [peer.launch for peer in peers if peer.launch is not None]
    failures: dict[str, str] = {}
    workers = [Worker(launch) for launch in launches]
    idleness = Idleness()
    rows: list[report.Row] = []
    try:
        said = opened(workers, str(path), chosen.threads, points, failures)
        if report.HOME in failures:
            raise QkvError(f"qkv cannot measure {path}: {failures[report.HOME]}")
        for name, reason in failures.items():
            print(f"{name} is left out: {reason}")
        workers = [worker for worker in workers if worker.name in said]
        names = [worker.name for worker in workers if worker.name != report.HOME]
        config = open_checkpoint(path).config
        print(f"\n{model.title}: {path.name}")
        lines = [report.header(names)]
        notes: list[str] = []
        for result in results(workers, said, points, chosen.rounds, idleness=idleness, progress=bars, what=model.key):
            own = said[report.HOME]
            needs = {
                cache: need(result.point, config, cache, own["weight_bytes"], own["head_bytes"])
                for cache in report.CACHES
            }
            new = report.rows_of(model.key, result, needs, names)
            rows += new
            lines += [report.cells(row, names) for row in new]
            notes += report.settings_text(result.contestants)
        print(table(lines, left=2), end="")
        print("".join(f"{note}\n" for note in notes), end="")
        print(f"engines that waited used {idleness.share:.1%} of a core")
    finally:
        for worker in workers:
            worker.close()
    return rows


def main(arguments: list[str] | None = None) -> int:
    chosen = options(sys.argv[1:] if arguments is None else arguments)
    try:
        with Bars() as bars:
            rows = compare(chosen, bars)
    except (QkvError, WorkerError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    summary: dict[str, Any] = {"benchmark": "compare", "rows": [row.as_json() for row in rows]}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
