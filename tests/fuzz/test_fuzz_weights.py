"""Random damage to model files: nothing but a `QkvError` may come out, in bounded memory and time.

`fuzz` may be called with any count; the tests run a short sweep. Every case is reproducible from its seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from qkv.errors import QkvError
from qkv.weights.checkpoint import open_checkpoint
from tiny import random_tensors, tiny_config
from tinyfiles import hf_config, write_gguf, write_hf

CONFIG = tiny_config(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16, vocab_size=64)
EDGES = [0, 1, 2, 3, 31, 32, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
ODD_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**70,
    0.5,
    -1e308,
    1e308,
    "",
    "x",
    "default",
    [],
    [1],
    {},
    {"a": 1},
]
COUNT = int(os.environ.get("QKV_FUZZ_COUNT", "2000"))
HANG_SECONDS = 60
MEMORY_LIMIT_MB = 400


def damaged(content: bytes, header: int, rng: random.Random) -> bytes:
    """One to four random edits, most of them in the first `header` bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        end = min(header, len(data)) if rng.random() < 0.9 else len(data)
        at = rng.randrange(max(end, 1))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ (1 << rng.randrange(8))]) if data else b""
            case 2:
                width = rng.choice([4, 8])
                value = rng.choice(EDGES) % (1 << (8 * width))
                data[at : at + width] = value.to_bytes(width, "little")
            case 3:
                del data[at : at + rng.randint(1, 64)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 64)]
            case 5 if rng.random() < 0.2:
                del data[at:]
    return bytes(data)


def damaged_config(values: dict[str, object], rng: random.Random) -> bytes:
    """config.json with a key or two removed or given an odd value; now and then its text is damaged instead."""
    values = json.loads(json.dumps(values))
    if rng.random() < 0.2:
        text = json.dumps(values).encode()
        return damaged(text, len(text), rng)
    extra = [
        "rope_scaling",
        "rope_parameters",
        "sliding_window",
        "use_sliding_window",
        "attention_bias",
        "mlp_bias",
        "layer_types",
    ]
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*values, *extra])
        if rng.random() < 0.15:
            values.pop(key, None)
        else:
            value = rng.choice(ODD_VALUES)
            values[key] = [value] if rng.random() < 0.1 else {"rope_type": value} if rng.random() < 0.1 else value
    return json.dumps(values).encode()


@contextmanager
def no_hang(seed: int):
    """Turn a hang into a failure that names its seed, where the system can."""

    def stop(*_: object) -> None:
        raise AssertionError(f"seed {seed}: still busy after {HANG_SECONDS} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(path: Path, target: Path, make: Callable[[random.Random], bytes], count: int, first_seed: int = 0) -> int:
    """Write `count` damaged versions of `target` and open `path`; returns how many were refused."""
    refused = 0
    for seed in range(first_seed, first_seed + count):
        target.write_bytes(make(random.Random(seed)))
        try:
            with no_hang(seed):
                checkpoint = open_checkpoint(path)
                for tensor in checkpoint.tensors.values():
                    assert tensor.to_float32().shape == tensor.shape
        except QkvError as error:
            refused += 1
            assert "\n" not in str(error), f"seed {seed}: more than one line"
            assert len(str(error)) < 2000, f"seed {seed}: a message of {len(str(error))} characters"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return refused


def peak_memory_mb() -> float:
    resource = pytest.importorskip("resource")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def check(path: Path, target: Path, make: Callable[[random.Random], bytes], count: int) -> None:
    before = peak_memory_mb()
    refused = fuzz(path, target, make, count)
    assert count // 4 < refused, "hardly any damage was noticed: the mutations miss what the reader reads"
    assert peak_memory_mb() - before < MEMORY_LIMIT_MB


def test_damaged_gguf_files(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, random_tensors(CONFIG), "Q8_0", chat_template="{{ x }}")
    whole = path.read_bytes()
    data = sum(tensor.data.size for tensor in open_checkpoint(path).tensors.values())
    check(path, path, lambda rng: damaged(whole, len(whole) - data, rng), COUNT)


def test_damaged_safetensors_files(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    target = tmp_path / "model.safetensors"
    whole = target.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    check(tmp_path, target, lambda rng: damaged(whole, header, rng), COUNT)


def test_damaged_configs(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    check(tmp_path, tmp_path / "config.json", lambda rng: damaged_config(hf_config(CONFIG), rng), COUNT)
