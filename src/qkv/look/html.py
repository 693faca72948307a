"""A look as one HTML file: every head a cell, one head's weights between tokens, and the formula with its numbers.

The file needs no other, and fetches nothing. It holds text, so numbers are base64 of little-endian arrays.

Short texts: of every head ln A_ij, float16, for j ≤ i, row after row. Near 1, where it matters, ln A is most exact.
Long texts:  of every head a picture of at most SIDE × SIDE cells; a cell is the largest weight of its block, uint8 of
             255·√A. Of the chosen head, and of others while there is room, q and k in float32, whence exact weights.
Both, of heads whose weights are exact: ln Σ_j e^s_ij, ‖v_j‖ and ‖z_i‖, float32.
"""

from __future__ import annotations

import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.look.look import ROWS, Look
from qkv.look.view import LETTERS, label
from qkv.model.attention import attention_scores, attention_weights, future
from qkv.runtime.cores import available_cores

Array = NDArray[Any]

NUMBERS_BYTES = 10_000_000
"""What the arrays may take; base64 makes a third more of it. The chosen head is there whatever it takes."""
SIDE = 128


def page(look: Look, layer: int, head: int) -> str:
    """The page, which opens with one head's weights."""
    style, script = _part("look.css"), _part("look.js")
    parts = {"style": style, "script": script, "style-hash": _hash(style), "script-hash": _hash(script)}
    text = _part("look.html")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text.replace("<!--data-->", _harmless(contents(look, layer, head)))


def contents(look: Look, layer: int, head: int) -> dict[str, Any]:
    """What the page shows, for JSON: see the top of this file."""
    statistics = look.statistics
    chosen = look.layers.index(layer), look.heads.index(head)
    places = [(i, j) for i in range(len(look.layers)) for j in range(len(look.heads))]
    T, d = len(look), look.q(layer, head).shape[1]
    short = len(places) * (T * (T + 1) + 12 * T) <= NUMBERS_BYTES
    block = 1 if short else -(-T // SIDE)
    with ThreadPoolExecutor(available_cores()) as pool:
        pictures = [] if short else list(pool.map(partial(_picture, look, block), places))
    room = (NUMBERS_BYTES - sum(map(len, pictures)) * 3 // 4) // (4 * T * (2 * d + 3))
    wanted = sorted(places, key=lambda place: (place != chosen, -statistics.induction[place]))
    exact = places if short else wanted[: max(1, room)]
    return {
        "tokens": [label(token) for token in look.tokens],
        "prompt": look.prompt_tokens,
        "layers": look.layers,
        "heads": look.heads,
        "size": d,
        "chosen": chosen,
        "kinds": statistics.kinds(),
        "letters": LETTERS,
        "statistics": {name: np.round(numbers, 4).tolist() for name, numbers in vars(statistics).items()},
        "block": block,
        "pictures": pictures,
        "exact": {f"{i},{j}": _exact(look, i, j, short) for i, j in exact},
    }


def _exact(look: Look, i: int, j: int, short: bool) -> dict[str, str]:
    """What one head's weights are computed from, by name."""
    layer, head = look.layers[i], look.heads[j]
    q, k = look.q(layer, head), look.k(layer, head).astype(np.float32)
    logs, parts = _row_logs(q, k), {}
    if short:
        scores = attention_scores(q, k) - logs[:, None]
        parts["weights"] = _base64(scores[~future(*scores.shape)].clip(-6e4), "<f2")
    else:
        parts |= {"q": _base64(q), "k": _base64(k)}
    v, z = (np.linalg.norm(array.astype(np.float32), axis=1) for array in (look.v(layer, head), look.z(layer, head)))
    return parts | {"logs": _base64(logs), "v": _base64(v), "z": _base64(z)}


def _row_logs(q: Array, k: Array) -> Array:
    """ln Σ_{j ≤ i} e^s_ij of each row: [T]."""
    logs = np.empty(len(q), np.float32)
    for first in range(0, len(q), ROWS):
        end = min(len(q), first + ROWS)
        scores = attention_scores(q[first:end], k[:end])
        scores[future(*scores.shape)] = -np.inf
        most = scores.max(axis=1)
        logs[first:end] = most + np.log(np.exp(scores - most[:, None]).sum(axis=1))
    return logs


def _picture(look: Look, block: int, place: tuple[int, int]) -> str:
    """[side, side] of 255·√(the largest weight of block × block ones)."""
    layer, head = look.layers[place[0]], look.heads[place[1]]
    q, k = look.q(layer, head), look.k(layer, head).astype(np.float32)
    starts = np.arange(0, len(q), block)
    picture = np.zeros((len(starts), len(starts)), np.float32)
    for row, first in enumerate(starts):
        end = min(len(q), first + block)
        largest = attention_weights(q[first:end], k[:end]).max(axis=0)
        picture[row, : row + 1] = np.maximum.reduceat(largest, starts[: row + 1])
    return _base64(np.round(255 * np.sqrt(picture)), "u1")


def _base64(array: Array, dtype: str = "<f4") -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def _part(name: str) -> str:
    return (resources.files("qkv.look") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a Content-Security-Policy names a script or a style that may be used."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _harmless(given: Any) -> str:
    """JSON that no HTML parser takes for the end of its element."""
    return json.dumps(given, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
