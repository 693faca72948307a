"""Random damage to model files: nothing but a `QkvError` may come out, in bounded memory and time.

The tests run a short sweep; `make fuzz` runs QKV_FUZZ_COUNT cases of each kind. Every case is reproducible from its
seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv.errors import QkvError
from qkv.kernels.packing import compile_all
from qkv.model.config import from_gguf, from_hf
from qkv.weights.checkpoint import open_checkpoint
from qkv.weights.gguf import open_gguf
from qkv.weights.load import load_weights
from tiny import random_tensors, tiny_config
from tinyfiles import hf_config, safetensors_bytes, write_gguf, write_hf

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
HANG_CPU_SECONDS, HANG_SECONDS = 2, 60
MEMORY_LIMIT_MB = 400
ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    "linear": {"factor": 4.0},
    "default": {},
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiling is not part of any case's time."""
    compile_all()


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
    extra = ["sliding_window", "use_sliding_window", "attention_bias", "mlp_bias", "layer_types", "quantization_config"]
    if rng.random() < 0.5:  # a block about RoPE, which may then lose a key or get an odd one
        block = {"rope_theta": 1e4, **damaged_block(rng)}
        values[rng.choice(["rope_scaling", "rope_parameters"])] = block
        if rng.random() < 0.3:
            return json.dumps(values).encode()
    else:
        extra += ["rope_scaling", "rope_parameters"]
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*values, *extra])
        if rng.random() < 0.15:
            values.pop(key, None)
        else:
            value = rng.choice(ODD_VALUES)
            values[key] = [value] if rng.random() < 0.1 else {"rope_type": value} if rng.random() < 0.1 else value
    return json.dumps(values).encode()


def damaged_block(rng: random.Random) -> dict[str, object]:
    kind = rng.choice(list(ROPE))
    block: dict[str, object] = {rng.choice(["type", "rope_type"]): kind, **ROPE[kind]}
    for _ in range(rng.randint(0, 2)):
        key = rng.choice([*block, *ROPE["yarn"], "mscale", "mscale_all_dim", "attention_factor", "rope_theta"])
        block[key] = rng.choice(ODD_VALUES)
    return block


def damaged_index(places: dict[str, str], rng: random.Random) -> bytes:
    """The index of two shards with some of its entries changed, or its text damaged."""
    if rng.random() < 0.4:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()
        return damaged(text, len(text), rng)
    places = dict(places)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*places, "model.extra", ""])
        odd = ["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "/etc/passwd", "config.json", "."]
        change = rng.random()
        if change < 0.3:
            places.pop(name, None)
        else:
            places[name] = rng.choice(odd if change < 0.8 else ODD_VALUES)  # type: ignore[assignment]
    return json.dumps({"weight_map": rng.choice([places, places, places, places, *ODD_VALUES])}).encode()


def gguf_value(value: object) -> bytes:
    """Type and bytes of a metadata value, in the format's encoding."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, max(-(2**63), min(value, 2**63 - 1)))
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    items = [gguf_value(item) for item in value if isinstance(item, int)] if isinstance(value, list) else []
    return struct.pack("<IIQ", 9, 11 if items else 4, len(items)) + b"".join(item[4:] for item in items)


def damaged_keys(metadata: dict[str, object], rng: random.Random) -> dict[str, object]:
    """GGUF metadata with keys about RoPE added, and some keys given odd values or removed."""
    metadata = dict(metadata)
    extra = {
        "rope.scaling.type": ["none", "linear", "yarn", "longrope"],
        "rope.scaling.factor": [1.0, 4.0, 0.0],
        "rope.scaling.original_context_length": [64],
        "rope.scaling.yarn_beta_fast": [32.0],
        "rope.scaling.attn_factor": [1.0, 0.5],
        "rope.scale_linear": [2.0],
        "attention.sliding_window": [0],
    }
    for key, choices in extra.items():
        if rng.random() < 0.3:
            metadata[f"{CONFIG.architecture}.{key}"] = rng.choice(choices)
    others = ["general.alignment", "split.count", "split.no", "tokenizer.chat_template"]
    for _ in range(rng.randint(0, 3)):
        key = rng.choice([*metadata, *others])
        if rng.random() < 0.2:
            metadata.pop(key, None)
        else:
            metadata[key] = rng.choice([value for value in ODD_VALUES if value is not None])
    return metadata


@contextmanager
def no_hang(seed: int):
    """Turn a hang into a failure that names its seed, where the system can: more than 2 s of work, or a long wait."""

    def stop(*_: object) -> None:
        raise AssertionError(f"seed {seed}: still busy after {HANG_CPU_SECONDS} s of computing or {HANG_SECONDS} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    timers = [
        (signal.ITIMER_PROF, signal.SIGPROF, HANG_CPU_SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, HANG_SECONDS),
    ]
    before = [signal.signal(number, stop) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def fuzz(path: Path, target: Path, make: Callable[[random.Random], bytes], count: int, first_seed: int = 0) -> int:
    """Write `count` damaged versions of `target` and open `path`; returns how many were refused."""
    refused = 0
    for seed in range(first_seed, first_seed + count):
        target.write_bytes(make(random.Random(seed)))
        try:
            with no_hang(seed):
                checkpoint = open_checkpoint(path)
                rope = checkpoint.config.rope()
                assert np.isfinite(rope.frequencies).all()
                assert np.isfinite(rope.attention_factor)
                load_weights(checkpoint.config, checkpoint.tensors)
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


def check(path: Path, target: Path, make: Callable[[random.Random], bytes], count: int = COUNT) -> None:
    before = peak_memory_mb()
    refused = fuzz(path, target, make, count)
    assert count // 4 < refused, "hardly any damage was noticed: the mutations miss what the reader reads"
    assert peak_memory_mb() - before < MEMORY_LIMIT_MB


def test_damaged_gguf_files(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, random_tensors(CONFIG), "Q8_0", chat_template="{{ x }}")
    whole = path.read_bytes()
    data = sum(tensor.data.size for tensor in open_checkpoint(path).tensors.values())
    check(path, path, lambda rng: damaged(whole, len(whole) - data, rng))


def test_damaged_safetensors_files(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    target = tmp_path / "model.safetensors"
    whole = target.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    check(tmp_path, target, lambda rng: damaged(whole, header, rng))


def test_damaged_configs(tmp_path):
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG))
    check(tmp_path, tmp_path / "config.json", lambda rng: damaged_config(hf_config(CONFIG), rng))


def test_damaged_indexes(tmp_path):
    tensors = random_tensors(CONFIG)
    write_hf(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    halves = {"a.safetensors": list(tensors)[:6], "b.safetensors": list(tensors)[6:]}
    for file, names in halves.items():
        (tmp_path / file).write_bytes(safetensors_bytes({name: tensors[name] for name in names}))
    places = {name: file for file, names in halves.items() for name in names}
    check(tmp_path, tmp_path / "model.safetensors.index.json", lambda rng: damaged_index(places, rng))


def test_damaged_gguf_metadata(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", CONFIG, random_tensors(CONFIG), chat_template="{{ x }}")
    file = open_gguf(path)
    infos, data = [], bytearray()
    for name, tensor in file.tensors.items():
        dims = tensor.shape[::-1]
        infos.append(
            struct.pack("<Q", len(name))
            + name.encode()
            + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(data))
        )
        data += tensor.rows().tobytes()
        data += bytes(-len(data) % 32)

    def make(rng: random.Random) -> bytes:
        keys = damaged_keys(file.metadata, rng)
        text = b"".join(struct.pack("<Q", len(key)) + key.encode() + gguf_value(value) for key, value in keys.items())
        header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + text + b"".join(infos)
        return header + bytes(-len(header) % 32) + data

    check(path, path, make)


def test_damaged_parts_of_a_split_gguf_file(tmp_path):
    write_gguf(tmp_path / "t.gguf", CONFIG, random_tensors(CONFIG), "Q8_0", tensors_per_file=7)
    first, second = sorted(tmp_path.glob("*.gguf"))
    whole = second.read_bytes()
    data = sum(tensor.data.size for tensor in open_gguf(second).tensors.values())
    check(first, second, lambda rng: damaged(whole, len(whole) - data, rng))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
CONFIG_KEYS = [*hf_config(CONFIG), "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "head_dim"]
BLOCK_KEYS = ["type", "rope_type", "rope_theta", "mscale", "mscale_all_dim", *ROPE["llama3"], *ROPE["yarn"]]
BLOCKS = st.dictionaries(
    st.sampled_from(BLOCK_KEYS), JSON | st.sampled_from(list(ROPE)) | st.floats(0.5, 100), max_size=5
)


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON | BLOCKS, min_size=1, max_size=4))
def test_any_value_in_a_config(changes):
    try:
        config = from_hf({**hf_config(CONFIG), **changes}, "config.json")
    except QkvError as error:
        assert str(error).startswith("config.json: ")
        assert "\n" not in str(error)
    else:
        assert np.isfinite(config.rope().frequencies).all()


GGUF_KEYS = {
    "general.architecture": "qwen3",
    "qwen3.embedding_length": 32,
    "qwen3.feed_forward_length": 32,
    "qwen3.block_count": 1,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 16,
    "qwen3.attention.value_length": 16,
    "qwen3.context_length": 512,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.rope.freq_base": 1e6,
    "qwen3.rope.dimension_count": 16,
    "qwen3.rope.scaling.type": "yarn",
    "qwen3.rope.scaling.factor": 4.0,
    "qwen3.rope.scaling.original_context_length": 64,
    "qwen3.rope.scaling.yarn_beta_fast": 32.0,
    "qwen3.rope.scaling.yarn_beta_slow": 1.0,
    "qwen3.rope.scaling.attn_factor": 1.0,
}


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.dictionaries(st.sampled_from([*GGUF_KEYS]), JSON, min_size=1, max_size=4))
def test_any_value_in_gguf_metadata(changes):
    values = {**GGUF_KEYS, **changes}
    try:
        config, _ = from_gguf(values, "x.gguf", vocab_size=64, tied=True, rope_divisors=None)
    except QkvError as error:
        assert str(error).startswith("x.gguf: ")
        assert "\n" not in str(error)
    else:
        assert np.isfinite(config.rope().frequencies).all()
