"""Seconds to make ids of a line of a million characters, for every kind of text, beside the `tokenizers` library alone.

    python benchmarks/tokenizer.py [MODEL or tokenizer.json ...] [--rounds 3]

Prints a table (the best of the rounds; the library's column is processor time) and one JSON line. Wall clock says
something only on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from qkv.text.tokens.tokenizer import Tokenizer
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.names import resolve

LENGTH = 10**6
UNITS = {
    "letter": "a",
    "words": "the quick brown fox ",
    "code": "for (int i = 0; i < 10; ++i) { a[i] &= ~1; } ",
    "digits": "1",
    "spaces": " ",
    "chinese": "中文没有空格，所以分词很难。",
    "arabic": "اللغة العربية جميلة ",
    "emoji": "😀",
    "marks": "e\u0301q\u0308",
}


def load(name: str) -> Tokenizer:
    if name.endswith("tokenizer.json"):
        return Tokenizer.from_file(Path(name))
    checkpoint = open_checkpoint(resolve(name))
    if isinstance(checkpoint.tokenizer, Path):
        return Tokenizer.from_file(checkpoint.tokenizer, checkpoint.tokenizer_config)
    if checkpoint.tokenizer is None:
        raise SystemExit(f"{name} has no tokenizer")
    return Tokenizer.from_gguf(checkpoint.tokenizer, checkpoint.path.name)


def seconds(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(wall clock, processor time), each the best of the rounds."""
    wall, processor = [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return min(wall), min(processor)


def measure(name: str, rounds: int) -> None:
    tokenizer = load(name)
    results = {}
    print(f"{name}: seconds per {LENGTH:,} characters")
    print(f"  {'text':8} {'ids':>9} {'wall':>6} {'processor':>9} {'library':>8}")
    for kind, unit in UNITS.items():
        text = (unit * (LENGTH // len(unit) + 1))[:LENGTH]
        ids = tokenizer.encode(text)
        wall, processor = seconds(partial(tokenizer.encode, text), rounds)
        _, library = seconds(lambda text=text: tokenizer._plain.encode(text, add_special_tokens=False).ids, rounds)
        results[kind] = {"wall": round(wall, 3), "processor": round(processor, 3), "library": round(library, 3)}
        print(f"  {kind:8} {len(ids):9,} {wall:6.2f} {processor:9.2f} {library:8.2f}")
    load_average = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    print(json.dumps({"benchmark": "tokenizer", "model": name, "load": load_average, "seconds": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"], help="names, .gguf files, folders or tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, help="how often each text is encoded")
    options = parser.parse_args()
    for name in options.models:
        measure(name, options.rounds)


if __name__ == "__main__":
    main()
