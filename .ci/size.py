"""Lines of Python in each room of src/qkv. Fails when the sum, or one file, is over its budget.

Every line counts: code, comments, docstrings and empty lines. So nothing is gained by packing lines.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

BUDGET = 21_686
"""It only goes down: the aim is 16,500 without server/ and the two verbs that serve."""
FILE_BUDGET = 450
SOURCE = Path(__file__).resolve().parent.parent / "src" / "qkv"


def lines_of(source: Path) -> dict[str, int]:
    """File, relative to `source` → lines."""
    files = sorted(source.rglob("*.py"))
    return {file.relative_to(source).as_posix(): len(file.read_bytes().splitlines()) for file in files}


def rooms_of(lines: dict[str, int]) -> dict[str, int]:
    """Room → lines, the largest first. A folder is a room; the files beside the folders are one together."""
    rooms = Counter[str]()
    for file, count in lines.items():
        rooms[file.split("/")[0] + "/" if "/" in file else "top files"] += count
    return dict(rooms.most_common())


def complaints(lines: dict[str, int]) -> list[str]:
    """What is over its budget, one line each."""
    total = sum(lines.values())
    found = [
        f"{file} has {n} lines, {FILE_BUDGET} are allowed: split it" for file, n in lines.items() if n > FILE_BUDGET
    ]
    if total > BUDGET:
        found.append(f"src/qkv has {total:,} lines, {total - BUDGET:,} over its budget of {BUDGET:,}: subtract first")
    return found


def main() -> int:
    lines = lines_of(SOURCE)
    rooms = rooms_of(lines)
    width = max(map(len, rooms))
    for room, count in rooms.items():
        print(f"{room:{width}} {count:7,}")
    print(f"{'together':{width}} {sum(lines.values()):7,}  (budget {BUDGET:,})")
    found = complaints(lines)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
