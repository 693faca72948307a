"""The table of `cost`, part by part: against a hand count, the instrumented reference, packed weights, and loops."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from decoders import packed
from qkv.errors import ParameterError
from qkv.kernels.sizes import BLOCK, STEP_TOKENS
from qkv.model import reference
from qkv.model.config import PRESETS, ModelConfig
from qkv.model.cost import (
    MOST,
    NORM_FLOP,
    Limits,
    Part,
    cache_bytes_per_position,
    decode_bytes,
    decode_cost,
    prefill_cost,
    total,
)
from qkv.model.reference import Decoder
from tiny import random_tensors, tiny_config

QWEN3 = PRESETS["Qwen/Qwen3-0.6B"]
FAMILIES = [
    tiny_config(),
    tiny_config(tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=2),
    tiny_config(architecture="qwen2", num_key_value_heads=1),
    tiny_config(architecture="llama", num_key_value_heads=4),
]


def by_name(parts: list[Part]) -> dict[str, Part]:
    return {part.name: part for part in parts}


def test_qwen3_by_hand() -> None:
    """28 layers, hidden 1024, 16 heads of 128, 8 key/value heads, MLP 3072, a tied table of 151,936 rows."""
    T = 1000
    parts = by_name(prefill_cost(QWEN3, T))
    assert {name: part.parameters for name, part in parts.items()} == {
        "embedding": 155_582_464,
        "norms": 28 * (1024 + 1024 + 128 + 128) + 1024,
        "q, k, v": 28 * 1024 * (2048 + 1024 + 1024),
        "scores": 0,
        "values": 0,
        "o_proj": 28 * 2048 * 1024,
        "MLP": 28 * 3 * 1024 * 3072,
        "head": 0,
    }
    assert total(parts.values()).parameters == 596_049_920
    assert parts["scores"].textbook + parts["values"].textbook == 28 * 8192 * T**2
    assert parts["q, k, v"].textbook == 2 * T * 117_440_512
    assert parts["head"].textbook == 2 * T * 155_582_464
    assert parts["head"].executed == 2 * 155_582_464

    one = by_name(decode_cost(QWEN3, T))
    assert one["scores"].textbook + one["values"].textbook == 28 * 8192 * T
    assert one["scores"].cache_bytes + one["values"].cache_bytes == 114_688 * T
    assert one["MLP"].executed == 2 * 264_241_152
    assert one["MLP"].weight_bytes == 264_241_152 // 32 * 34  # int8: a float16 scale for each 32


@pytest.mark.parametrize("config", [*FAMILIES, *PRESETS.values()])
def test_parameters_are_all_there(config: ModelConfig) -> None:
    assert total(prefill_cost(config, 7)).parameters == config.parameter_count
    assert total(decode_cost(config, 7)).parameters == config.parameter_count


class Counted(np.ndarray):  # type: ignore[type-arg]
    """An array that adds the multiply-adds of every `@` it takes part in to `flops[part]`, 2 FLOP each."""

    flops: ClassVar[Counter[str]] = Counter()
    part = ""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
        if ufunc is np.matmul:
            a, b = plain
            Counted.flops[Counted.part] += 2 * a.size * b.shape[-1]
            if Counted.part in ("scores", "values"):
                Counted.part = "values" if Counted.part == "scores" else "scores"
        if "out" in options:
            options["out"] = tuple(x.view(np.ndarray) for x in options["out"])
        result = getattr(ufunc, method)(*plain, **options)
        return result.view(Counted) if isinstance(result, np.ndarray) else result


class Instrumented(Decoder):
    """The reference, counting the operations of each part as it computes."""

    PARTS: ClassVar = {
        "q": "q, k, v",
        "k": "q, k, v",
        "v": "q, k, v",
        "o": "o_proj",
        "gate": "MLP",
        "up": "MLP",
        "down": "MLP",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, random_tensors(config))
        self.tensors = {name: values.view(Counted) for name, values in self.tensors.items()}
        Counted.flops = Counter()

    def _linear(self, x: Any, name: str) -> Any:
        Counted.part = self.PARTS[name.rpartition(".")[2].removesuffix("_proj")]
        result = super()._linear(x, name)
        Counted.part = "scores"
        return result

    def _norm(self, x: Any, name: str) -> Any:
        Counted.flops["norms"] += NORM_FLOP * x.size
        return super()._norm(x, name)

    def logits(self, hidden: Any) -> Any:
        Counted.part = "head"
        return super().logits(hidden)


@pytest.mark.parametrize("config", FAMILIES)
def test_textbook_is_what_the_reference_computes(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = reference.attention  # it gets q and k from a concatenation, which forgets that they are `Counted`
    monkeypatch.setattr(reference, "attention", lambda *qkv: definition(*(x.view(Counted) for x in qkv)))
    decoder = Instrumented(config)
    cache = decoder.new_cache()
    decoder.logits(decoder.forward(range(41), cache))
    assert Counted.flops == {p.name: p.textbook for p in prefill_cost(config, 41) if p.textbook}
    Counted.flops = Counter()
    decoder.logits(decoder.forward([5], cache))
    assert Counted.flops == {p.name: p.textbook for p in decode_cost(config, 42) if p.textbook}


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 64, 100, 513])
@pytest.mark.parametrize("config", FAMILIES)
def test_executed_attention_is_what_the_kernels_loop_over(config: ModelConfig, T: int) -> None:
    """For each position the blocks that begin at or before it, all 32 keys of them, and the values it may see."""
    scores = values = 0
    for position in range(T):
        last_scores, last_values = scores, values
        for start in range(0, position + 1, BLOCK):
            scores += BLOCK
            values += min(BLOCK, position + 1 - start)
    group = config.num_attention_heads // config.num_key_value_heads
    heads = config.num_key_value_heads * (group + group % 2)
    flop = 2 * heads * config.head_dim * config.num_hidden_layers
    parts = by_name(prefill_cost(config, T, 3))
    assert (parts["scores"].executed, parts["values"].executed) == (3 * flop * scores, 3 * flop * values)
    one = by_name(decode_cost(config, T, 3))
    assert one["scores"].executed == 3 * flop * (scores - last_scores)
    assert one["values"].executed == 3 * flop * (values - last_values)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("config", FAMILIES)
def test_decoding_reads_what_the_packed_weights_say(config: ModelConfig, weights: str) -> None:
    parts = by_name(decode_cost(config, 1, weights=weights))
    biases = sum(4 * shape[0] for name, shape in config.parameter_shapes().items() if name.endswith("bias"))
    matrices = sum(parts[name].weight_bytes for name in ("q, k, v", "o_proj", "MLP", "head"))
    assert matrices - biases == packed(config, random_tensors(config), weights).bytes_per_token
    vectors = sum(shape[0] for name, shape in config.parameter_shapes().items() if name.endswith("norm.weight"))
    assert parts["norms"].weight_bytes == 4 * vectors


@pytest.mark.parametrize("kind", ["f16", "int8", "f32"])
def test_decoding_agrees_with_the_bytes_of_the_speed_line(kind: str) -> None:
    parts = decode_cost(QWEN3, 300, cache=kind)
    everything = total(parts)
    assert everything.bytes == decode_bytes(QWEN3, kind, everything.weight_bytes, 299, 1)
    assert everything.cache_bytes == 300 * cache_bytes_per_position(QWEN3, kind)


@pytest.mark.parametrize("T", [1, 511, 512, 513, 1024, 1500])
def test_prefill_reads_weights_and_cache_once_a_step(T: int) -> None:
    cached = steps = 0
    for start in range(0, T, STEP_TOKENS):
        cached += min(start + STEP_TOKENS, T)
        steps += 1
    parts, one = by_name(prefill_cost(QWEN3, T)), by_name(decode_cost(QWEN3, 1))
    assert parts["scores"].cache_bytes + parts["values"].cache_bytes == cached * 114_688
    for name in ("q, k, v", "o_proj", "MLP", "norms"):
        assert parts[name].weight_bytes == steps * one[name].weight_bytes
    assert parts["head"].weight_bytes == one["head"].weight_bytes  # the last step's only
    assert parts["embedding"].weight_bytes == T * one["embedding"].weight_bytes


@pytest.mark.parametrize(("T", "B"), [(1, 1000), (100, 17), (512, 3), (700, 4), (2000, 5)])
def test_a_batch_shares_its_steps(T: int, B: int) -> None:
    """Prompts follow each other in steps of 512 tokens: how many steps, and in how many of them a prompt ends."""
    ends = {((b + 1) * T - 1) // STEP_TOKENS for b in range(B)}
    parts, one = by_name(prefill_cost(QWEN3, T, B)), by_name(decode_cost(QWEN3, 1))
    assert parts["MLP"].weight_bytes == (max(ends) + 1) * one["MLP"].weight_bytes
    assert parts["head"].weight_bytes == len(ends) * one["head"].weight_bytes
    assert parts["head"].executed == B * one["head"].executed
    assert parts["MLP"].textbook == B * T * one["MLP"].textbook


def test_a_part_takes_as_long_as_its_slower_half() -> None:
    limits = Limits(bytes_per_second=10.0, flop_per_second=2.0, flop_per_second_int8=8.0)
    assert Part("", 0, 0, 16, 10, 20).seconds(limits) == (3.0, 8.0)
    assert Part("", 0, 0, 16, 10, 20, int8=True).seconds(limits) == (3.0, 2.0)
    assert Part("", 0, 0, 16, 10, 22).intensity == 0.5
    eight_bit = {
        weights: {p.name for p in decode_cost(QWEN3, 1, weights=weights) if p.int8} for weights in ("int4", "bf16")
    }
    assert eight_bit == {"int4": {"q, k, v", "o_proj", "MLP", "head"}, "bf16": set()}


@pytest.mark.parametrize("count", [0, -1, MOST + 1])
def test_impossible_sizes_are_named(count: int) -> None:
    for function in (prefill_cost, decode_cost):
        with pytest.raises(ParameterError, match=r"^context must be a whole number from 1 to 1,000,000,000, got"):
            function(QWEN3, count)
        with pytest.raises(ParameterError, match=r"^batch must be"):
            function(QWEN3, 1, count)
    with pytest.raises(ParameterError, match="fp8"):
        prefill_cost(QWEN3, 1, weights="fp8")
    assert total(prefill_cost(QWEN3, MOST, MOST)).textbook > 0  # counted, not looped over
