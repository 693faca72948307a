"""What a look shows: against the reference decoder on the same weights, and against what the engine does without it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tinyllm
from decoders import QuantizedReference, dequantized, packed
from hooked import Hooked
from qkv import SamplingParams
from qkv.errors import ContextLengthError, ParameterError, QkvError
from tinyllm import HELLO, opened, write_model

IDS = [(7 * i * i + 3) % 250 for i in range(45)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class QuantizedHooked(Hooked, QuantizedReference):
    """Rounds the products' inputs as the engine does where weights have 4 or 8 bits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder, cache="f32") as made:
        yield made


@pytest.fixture(scope="module")
def look(llm):
    return llm.look(IDS)


@pytest.fixture(scope="module")
def seen(llm):
    """The reference's numbers, float64, by name."""
    return reference_of(llm, "f32", Hooked).run(IDS)[1]


def reference_of(llm, weights, kind):
    tensors = tinyllm.tensors()
    values = dequantized(llm.config, packed(llm.config, tensors, weights), tensors)
    return kind(llm.config, values, np.float64)


NAMES = (
    "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_v", "attn.hook_z", "attn.hook_pattern", "hook_resid_pre",
)  # fmt: skip


def test_everything_equals_the_reference(look, seen):
    """float32 weights and cache: pattern and z to 1e-5, and all the rest to 1e-5 of its largest number."""
    points = [f"blocks.{layer}.{name}" for layer in look.layers for name in NAMES]
    for point in [*points, f"blocks.{look.layers[-1]}.hook_resid_post"]:
        assert look[point].shape == seen[point].shape
        largest = 1 if point.endswith(("hook_z", "hook_pattern")) else np.abs(seen[point]).max()
        assert np.abs(look[point] - seen[point]).max() < 1e-5 * largest, point


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_small_weights_and_a_half_precision_cache(folder, weights):
    """Dequantized weights, inputs of products and the cache rounded as the engine rounds them: to 1e-3.

    Each layer begins with the engine's stream: a number on the edge between two 8-bit ones may go either way.
    """
    with opened(folder, weights=weights, cache="f16") as llm:
        look = llm.look(IDS)
        reference = reference_of(llm, weights, QuantizedHooked)

    def change(name, x):
        rounded = x.astype(np.float16).astype(x.dtype) if name.endswith(("rot_k", "hook_v")) else x
        return look[name] if name.endswith("resid_pre") else rounded

    reference.change = change
    _, seen = reference.run(IDS)
    for layer in look.layers:
        for name in ("attn.hook_pattern", "attn.hook_z"):
            assert np.abs(look[f"blocks.{layer}.{name}"] - seen[f"blocks.{layer}.{name}"]).max() < 1e-3


@pytest.mark.parametrize("kind", ["f32", "f16", "int8"])
def test_the_weights_give_what_the_engine_gave(folder, kind):
    """Σ_j A_ij v_j is z, whatever the cache rounds: the weights shown are those that were used."""
    with opened(folder, cache=kind) as llm:
        look = llm.look(IDS)
    for layer in look.layers:
        for head in look.heads:
            z = look.pattern(layer, head).astype(np.float64) @ look.v(layer, head)
            assert np.abs(z - look.z(layer, head)).max() < 2e-6 * np.abs(z).max()


def test_rows_sum_to_one_and_the_future_is_exactly_zero(look):
    for layer in look.layers:
        weights = look.pattern(layer)
        assert np.abs(weights.sum(axis=-1, dtype=np.float64) - 1).max() < 1e-6
        assert not np.triu(weights, 1).any()
        assert np.abs(look.row(layer, 1, 20) - weights[1, 20, :21]).max() < 1e-6


def test_scores_are_before_the_mask(look):
    scores = look.scores(1, 2)
    q, k = look.q(1, 2).astype(np.float64), look.k(1, 2).astype(np.float64)
    assert np.abs(scores - q @ k.T / np.sqrt(32)).max() < 1e-5
    assert look.scores(1).shape == (4, 45, 45)


def test_answers_are_the_same_with_and_without_a_look_alone_and_in_company(folder):
    with opened(folder) as llm:
        alone = llm.generate(IDS, GREEDY).token_ids
        look = llm.look(IDS, generate=11)
        together: list = [None] * 6

        def work(i):
            together[i] = llm.look(IDS, generate=11) if i % 2 else llm.generate(IDS, GREEDY)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stop = next((i for i, token in enumerate(alone[:11]) if token in llm._engine.end_ids), 11)
    assert look.ids.tolist() == IDS + alone[:stop]
    assert all(together[i].token_ids == alone for i in (0, 2, 4))
    for other in together[1::2]:
        assert np.array_equal(other.ids, look.ids)
        assert all(
            np.array_equal(other[f"blocks.{at}.{name}"], look[f"blocks.{at}.{name}"]) for at in (0, 1) for name in NAMES
        )


def test_a_look_at_a_known_prompt_has_all_its_positions_and_leaves_them_to_others(folder):
    """It takes nothing from the prefix cache, for what is there was not looked at. What it computed is found there."""
    ids = [(5 * i) % 250 for i in range(100)]
    with opened(folder) as llm:
        first = llm.generate(ids, GREEDY)
        look = llm.look(ids)
        assert llm.cache_stats.tokens_reused == 0
        assert len(look) == 100
        other = [(11 * i) % 250 for i in range(100)]
        llm.look(other)
        assert llm.generate(other, GREEDY).timings.reused_tokens == 96
        assert llm.generate(ids, GREEDY).token_ids == first.token_ids


def test_prompts_longer_than_a_step_and_answers_that_wait_give_the_same(folder):
    ids = [(3 * i * i) % 250 for i in range(190)]
    with opened(folder, context=512) as llm:
        free = llm.look(ids)
    config = llm.config
    block = 2 * 32 * config.head_dim * 2 * config.num_key_value_heads * config.num_hidden_layers
    with opened(folder, context=320, cache_bytes=10 * block) as llm:
        looks: list = [None] * 3

        def work(i):
            looks[i] = llm.look(ids, generate=60)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert llm.stats().preemptions > 0 or llm.stats().waiting == 0
    for look in looks:
        for name in NAMES[:4]:
            ours, theirs = look[f"blocks.1.{name}"][: len(ids)], free[f"blocks.1.{name}"]
            assert np.array_equal(ours, theirs)


def test_chosen_layers_and_heads_are_those_of_a_whole_look(llm, look):
    few = llm.look(IDS, layers=[1], heads=[3, 0])
    assert (few.layers, few.heads) == ((1,), (3, 0))
    assert np.array_equal(few.pattern(-1), look.pattern(1)[[3, 0]])
    assert np.array_equal(few.z(1, 0), look.z(1, 0))
    assert few.statistics.entropy.shape == (1, 2)
    assert np.allclose(few.statistics.previous[0], look.statistics.previous[1, [3, 0]])
    for wrong in (lambda: few.z(0), lambda: few.pattern(1, 2), lambda: few["blocks.0.attn.hook_z"]):
        with pytest.raises(ParameterError, match="was not looked at; these were: "):
            wrong()


def test_statistics_are_those_of_the_weights(llm):
    ids = [*range(40, 60), *range(40, 60), 41, 41]
    look = llm.look(ids)
    T = len(ids)
    i = np.arange(1, T)
    copies = np.array([[j > 0 and j <= a and ids[j - 1] == ids[a] for j in range(T)] for a in range(T)])
    for layer in look.layers:
        for head in look.heads:
            weights = look.pattern(layer, head).astype(np.float64)
            entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(axis=1)
            expected = {
                "entropy": entropy[1:].mean(),
                "share": (entropy[1:] / np.log(i + 1)).mean(),
                "first": weights[i, 0].mean(),
                "previous": weights[i, i - 1].mean(),
                "itself": weights[i, i].mean(),
                "induction": weights[copies].sum() / copies.any(axis=1).sum(),
            }
            for name, value in expected.items():
                assert abs(getattr(look.statistics, name)[layer, head] - value) < 1e-5, name
            assert np.abs(look.entropy(layer, head) - entropy).max() < 1e-5
    assert len(look.statistics.kinds()) == len(look.layers)


def test_contributions_add_up(llm, look, seen):
    """Heads' contributions are attention's part of the stream; those to a logit are its change, with the norm kept."""
    config, tensors = llm.config, tinyllm.tensors()
    middle = seen["blocks.1.hook_resid_mid"] - seen["blocks.1.hook_resid_pre"]
    assert np.abs(look["blocks.1.attn.hook_result"].sum(axis=1) - middle).max() < 1e-5
    stream = seen["blocks.1.hook_resid_post"][-1]
    scale = np.sqrt(np.mean(stream**2) + config.rms_norm_eps)
    head = tensors["lm_head.weight"][17].astype(np.float64) * tensors["model.norm.weight"]
    for h in look.heads:
        expected = look.head_contribution(1, h)[-1].astype(np.float64) / scale @ head
        assert abs(look.logit_contribution(1, h, 17) - expected) < 1e-4


def test_the_lens_after_the_last_layer_gives_the_models_logits(llm, look):
    logits, seen = reference_of(llm, "f32", Hooked).run(IDS)
    assert np.abs(look.logit_lens(-1) - logits[-1]).max() < 1e-4
    assert np.abs(look.logit_lens(1, position=7) - logits[7]).max() < 1e-4
    reference = reference_of(llm, "f32", Hooked)
    early = reference.logits(reference._norm(seen["blocks.1.hook_resid_pre"], "model.norm"))
    assert np.abs(look.logit_lens(0) - early[-1]).max() < 1e-4


def test_top_keys_and_value_weighted(look):
    weights = look.pattern(0, 1)
    top = look.top_keys(30, 0, 1, 5)
    assert [weights[30, j] for j, _, _ in top] == sorted(weights[30], reverse=True)[:5]
    assert [token for _, token, _ in top] == [look.tokens[j] for j, _, _ in top]
    norms = np.linalg.norm(look.v(0, 1), axis=1)
    assert np.allclose(look.value_weighted(0, 1), weights * norms)


def test_a_conversation(llm):
    look = llm.look(HELLO, generate=3)
    assert len(look) <= look.prompt_tokens + 3
    assert "Hello" in "".join(look.tokens[: look.prompt_tokens])
    assert repr(look) == f"<Look at {len(look)} tokens, 2 layers, 4 heads>"
    page = look._repr_html_()
    assert page.count("<td") == 8
    assert "http" not in page


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (IDS, {"layers": 2}, r"^layers must be a whole number from -2 to 1, got 2$"),
        (IDS, {"layers": []}, r"^layers is empty"),
        (IDS, {"heads": [0, 4]}, r"^heads must be a whole number from -4 to 3, got 4$"),
        (IDS, {"heads": "all"}, r"^heads must be a whole number"),
        (IDS, {"generate": -1}, r"^generate must be a whole number"),
        (IDS, {"thinking": True}, r"^thinking is for conversations"),
        ([], {}, r"^prompt is empty"),
        ("", {}, r"^prompt is empty"),
        (5, {}, r"^prompt must be a text"),
        ([999], {}, r"^prompt: "),
    ],
)
def test_bad_input_is_one_line(llm, prompt, options, message):
    with pytest.raises(ParameterError, match=message) as caught:
        llm.look(prompt, **options)
    assert "\n" not in str(caught.value)


def test_too_long_a_prompt(llm):
    with pytest.raises(ContextLengthError, match="prompt has 300 tokens and the context holds 256"):
        llm.look([5] * 300)


def test_a_look_larger_than_memory(llm, monkeypatch):
    monkeypatch.setattr("qkv.look.recorder.free_memory", lambda: 1000)
    message = (
        r"^a look at 60 tokens takes 0.0 GB more and 0.0 GB are free: choose fewer layers or heads, or a shorter text$"
    )
    with pytest.raises(QkvError, match=message):
        llm.look(IDS, generate=15)
    assert len(llm.look(IDS)) == 45


@pytest.mark.parametrize("name", ["blocks.2.attn.hook_z", "blocks.0.hook_z", "hook_embed", "blocks.0.attn.hook_q", 7])
def test_names_that_lead_nowhere(look, name):
    with pytest.raises(ParameterError, match=r"^point: "):
        look[name]
