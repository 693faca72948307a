"""A real model, SmolLM2-135M-Instruct in 4 bits (Q4_1 and Q8_0), from its file to its answers.

The prose is the repository's own licence, the Apache License 2.0.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from decoders import compiled, logits_of
from qkv import LLM, SamplingParams
from qkv.model.compiled import CompiledDecoder
from qkv.model.reference import Decoder
from qkv.text.tokens.tokenizer import Tokenizer
from qkv.weights.checkpoint import Checkpoint, open_checkpoint
from qkv.weights.load import load_weights

ROOT = Path(__file__).resolve().parent.parent
POSITIONS = 256
QUESTION = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Checkpoint:
    return open_checkpoint(smollm2)


@pytest.fixture(scope="module")
def prose(checkpoint: Checkpoint) -> list[int]:
    """256 tokens of English that the model has no reason to know by heart less than any other."""
    text = " ".join((ROOT / "LICENSE").read_text().split())
    return Tokenizer.from_gguf(checkpoint.tokenizer, "SmolLM2").encode(text)[:POSITIONS]


@pytest.fixture(scope="module")
def tensors(checkpoint: Checkpoint):
    """The file's weights as float32, exactly."""
    return {name: tensor.to_float32() for name, tensor in checkpoint.tensors.items()}


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint, tensors, prose: list[int]) -> np.ndarray:
    """The reference's logits, float32."""
    return Decoder(checkpoint.config, tensors)(prose)


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> CompiledDecoder:
    weights = load_weights(checkpoint.config, checkpoint.tensors, threads=2)
    return compiled(checkpoint.config, weights, cache="f16", context=512, outputs=POSITIONS)


@pytest.fixture(scope="module")
def llm(smollm2: Path):
    with LLM(smollm2, threads=2, context=1024) as made:
        yield made
    gc.collect()


def test_the_file_is_what_it_is_thought_to_be(checkpoint):
    config = checkpoint.config
    assert (config.architecture, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.parameter_count == 134_515_008


def test_the_top_token_is_the_references(decoder, reference, prose):
    """Kept as the file has them, with 8-bit activations (outliers 16-bit) and a half-precision cache."""
    logits = logits_of(decoder, prose)
    agreement = np.mean(logits.argmax(axis=-1) == reference.argmax(axis=-1))
    assert agreement >= 0.95
    p, q = (softmax(rows) for rows in (reference, logits))
    assert np.mean((p * (np.log(p) - np.log(q))).sum(axis=-1)) < 0.005  # KL divergence in nats


def softmax(logits):
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def test_the_reference_knows_english(reference, prose):
    """Guards the test above: chance is 1 in 49,152."""
    assert np.mean(reference[:-1].argmax(axis=-1) == prose[1:]) > 0.4


def test_chunks_of_real_text_give_the_same_bits(decoder, prose):
    whole = logits_of(decoder, prose)
    assert np.array_equal(logits_of(decoder, prose, [1, 33, 64, 1, 1, 156]), whole)


def test_float32_weights_and_cache_equal_the_reference(checkpoint, reference, prose):
    """Logits go up to about 40 here; float32 sums of some thousand terms keep five digits of them."""
    weights = load_weights(checkpoint.config, checkpoint.tensors, wanted="f32", threads=2)
    short = prose[:64]
    logits = logits_of(compiled(checkpoint.config, weights, context=64, outputs=64), short)
    assert np.abs(logits - reference[:64]).max() < 1e-3


def test_it_knows_the_capital_of_france(llm):
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_threads_change_no_token(llm, smollm2):
    answer = llm.chat(QUESTION, GREEDY)
    assert len(answer.token_ids) >= 32
    with LLM(smollm2, threads=1, context=1024) as other:
        assert other.chat(QUESTION, GREEDY).token_ids == answer.token_ids


def test_a_list_answers_each_as_alone(llm):
    prompts = ["The capital of France is", "One, two, three,", "Water boils at"]
    short = SamplingParams(temperature=0, max_tokens=8)
    answers = llm.generate(prompts, short)
    assert [answer.text for answer in answers] == [llm.generate(prompt, short).text for prompt in prompts]
    assert "Paris" in answers[0].text
    assert "four" in answers[1].text


MODES = {
    "portable": {"QKV_SIMD": "portable"},
    "checked": {"QKV_SIMD": "checked"},
    "generic processor": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}
ASK = """
import sys, json
from qkv import LLM, SamplingParams
messages, path = json.loads(sys.argv[1]), sys.argv[2]
with LLM(path, threads=2, context=1024) as llm:
    print(json.dumps(llm.chat(messages, SamplingParams(temperature=0, max_tokens=64)).token_ids))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_answer(llm, smollm2, mode):
    """Each mode compiles kernels of its own."""
    import json

    import qkv

    paths = [str(Path(qkv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(QUESTION), str(smollm2)],
        env={**os.environ, **MODES[mode], "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == llm.chat(QUESTION, GREEDY).token_ids


@pytest.mark.oracle
def test_the_reference_equals_transformers(checkpoint, tensors, reference, prose):
    """Fed with the same dequantized weights. Two float32 computations differ in the order of their sums: by some 1e-6
    of the logits' size (about 40) at most positions."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        expected = model(torch.tensor([prose])).logits[0].numpy()
    difference = np.abs(reference - expected).max()
    assert difference < 1e-3
    assert np.array_equal(reference.argmax(axis=-1), expected.argmax(axis=-1))
