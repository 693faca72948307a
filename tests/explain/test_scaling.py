"""What `explain scaling` shows, against the formula, finite differences, and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkv.explain import model_scaling, scaling
from qkv.explain.scaling import compute, entropy, gradient_norm
from qkv.explain.trace import Heads, Traced
from qkv.model.attention import softmax
from tiny import random_tensors, tiny_config


@pytest.fixture(scope="module")
def result():
    return compute()


def test_every_size_and_sigma_is_there(result):
    assert result.sizes == (16, 32, 64, 128, 256, 512, 1024)
    assert result.sigmas == (0.5, 1.0, 2.0)
    assert result.variance.shape == result.mean.shape == (7, 3)


def test_the_variance_is_d_sigma_4_and_the_mean_0(result):
    """Relative deviation of the variance below 4 %, as a thousand vectors of each kind allow."""
    for i, d in enumerate(result.sizes):
        for j, sigma in enumerate(result.sigmas):
            assert result.predicted[i, j] == d * sigma**4
            assert result.variance[i, j] == pytest.approx(d * sigma**4, rel=0.04)
            assert abs(result.mean[i, j]) < 0.005 * math.sqrt(d) * sigma**2
            assert (
                result.lowest[i, j] < -4 * math.sqrt(d) * sigma**2 < 4 * math.sqrt(d) * sigma**2 < result.highest[i, j]
            )


def test_the_numbers_are_those_of_the_dots():
    """The same draws, dotted one by one."""
    rng = np.random.default_rng(5)
    q, k = rng.normal(0, 2.0, (2, scaling.VECTORS, 16))
    dots = np.array([[math.fsum(a * b for a, b in zip(x, y, strict=True)) for y in k[:20]] for x in q[:20]])
    assert np.allclose(dots, (q @ k.T)[:20, :20])
    every = np.einsum("ic,jc->ij", q, k)
    found = compute((16,), (2.0,), seed=5)
    assert found.mean[0, 0] == pytest.approx(every.sum() / every.size)
    assert found.variance[0, 0] == pytest.approx((every**2).mean() - every.mean() ** 2)
    assert (found.lowest[0, 0], found.highest[0, 0]) == pytest.approx((every.min(), every.max()))


def test_unscaled_saturates_and_1_over_d_flattens(result):
    one, root, full = (result.softmax.largest[:, j] for j in range(3))
    assert np.all(np.diff(one) > 0) and one[-1] > 0.9
    assert np.ptp(root) < 0.01
    assert full[-1] < 1.1 / scaling.KEYS
    gradient = result.softmax.gradient
    assert gradient[-1, 0] < gradient[-1, 1] / 100
    assert np.ptp(gradient[:, 1]) < 0.02


def test_entropy_by_hand():
    assert entropy(np.array([1.0, 0, 0])) == 0
    assert entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8))
    p = [0.5, 0.3, 0.2]
    assert entropy(np.array(p)) == pytest.approx(-sum(x * math.log(x) for x in p))


def test_gradient_norm_is_that_of_finite_differences():
    rng = np.random.default_rng(1)
    scores, step = rng.standard_normal((5, 9)) * 2, 1e-6
    for s, norm in zip(scores, gradient_norm(softmax(scores)), strict=True):
        columns = [(softmax(s + step * unit) - softmax(s - step * unit)) / (2 * step) for unit in np.eye(9)]
        assert norm == pytest.approx(np.linalg.norm(columns), rel=1e-6)
    assert gradient_norm(np.array([0.0, 1.0, 0.0])) == 0


def test_gradient_norm_of_an_almost_one_hot_row():
    """Two keys, one score ahead by s: the four entries of the Jacobian are ± p(1 - p), and p(1 - p) → e^-s."""
    for s in (5.0, 20.0, 60.0):
        p = softmax(np.array([0.0, -s]))
        small = math.exp(-s) / (1 + math.exp(-s))
        assert gradient_norm(p) == pytest.approx(2 * small / (1 + math.exp(-s)), rel=1e-12)


def heads_of(seed: int, T: int, heads: int, kv_heads: int, d: int) -> Heads:
    rng = np.random.default_rng(seed)
    q = [rng.standard_normal((T, heads, d)).astype(np.float32) * (1 + i) for i in range(3)]
    k = [rng.standard_normal((T, kv_heads, d)).astype(np.float32) + i for i in range(3)]
    return Heads(q[0], k[0], q[1], k[1], q[2], k[2], k[0])


def test_a_models_numbers_by_loops():
    layers = [heads_of(seed, 7, 4, 2, 6) for seed in range(3)]
    found = model_scaling.compute(layers)
    assert [stage.name for stage in found.stages] == ["projected", "after q/k norm", "after RoPE"]
    for index, (q_name, k_name) in enumerate([("q_projected", "k_projected"), ("q_normed", "k_normed"), ("q", "k")]):
        stage = found.stages[index]
        for layer, heads in enumerate(layers):
            q, k = getattr(heads, q_name).astype(float), getattr(heads, k_name).astype(float)
            rows = []
            for h in range(4):
                one, other = q[:, h], k[:, h // 2]
                dots = [one[i] @ other[j] for i in range(7) for j in range(i + 1)]
                square_q, square_k = (one**2).mean(), (other**2).mean()
                own, others = one - one.mean(axis=0), other - other.mean(axis=0)
                own_dots = [own[i] @ others[j] for i in range(7) for j in range(i + 1)]
                rows.append([square_q**0.5, square_k**0.5, 6 * square_q * square_k, np.var(dots), np.mean(dots)])
                rows[-1] += [np.var(own_dots), 6 * (own**2).mean() * (others**2).mean()]
            *expected, own_variance, own_predicted = np.mean(rows, axis=0)
            got = (stage.rms_q, stage.rms_k, stage.predicted, stage.variance, stage.mean)
            assert [x[layer] for x in got] == pytest.approx(expected)
            assert stage.own[layer] == pytest.approx(own_variance / own_predicted)


def test_a_models_softmax_by_loops():
    heads = heads_of(9, 5, 2, 1, 8)
    found = model_scaling.compute([heads]).softmax
    for j, scale in enumerate((1, 8**-0.5, 1 / 8)):
        shares, largest, norms = [], [], []
        for h in range(2):
            for i in range(1, 5):
                s = [float(heads.q[i, h].astype(float) @ heads.k[t, 0].astype(float)) * scale for t in range(i + 1)]
                e = [math.exp(x - max(s)) for x in s]
                p = np.array(e) / math.fsum(e)
                shares.append(-math.fsum(x * math.log(x) for x in p if x > 0) / math.log(i + 1))
                largest.append(p.max())
                norms.append(np.linalg.norm(np.diag(p) - np.outer(p, p)))
        assert found.entropy[0, j] == pytest.approx(np.mean(shares))
        assert found.largest[0, j] == pytest.approx(np.mean(largest))
        assert found.gradient[0, j] == pytest.approx(np.median(norms))


@pytest.mark.parametrize(("architecture", "stages"), [("qwen3", 3), ("llama", 2)])
def test_stages_of_a_decoder(architecture, stages):
    config = tiny_config(architecture=architecture)
    found = model_scaling.compute(Traced(config, random_tensors(config)).trace(range(20)))
    assert len(found.stages) == stages
    first, last = found.stages[-2], found.stages[-1]
    assert last.rms_q == pytest.approx(first.rms_q, rel=1e-5)  # a rotation keeps lengths


def test_depth_and_not_training_makes_the_ratio_fall():
    """Random weights as training begins with them: the ratio is 1 in the first layer, and of what is each position's
    own it is near 1 in all."""
    config = tiny_config(hidden_size=256, num_hidden_layers=12, head_dim=64, vocab_size=2048)
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.06, shape).astype(np.float32)
        for name, shape in config.parameter_shapes().items()
    }
    found = model_scaling.compute(Traced(config, tensors).trace(rng.integers(0, 2048, 256).tolist())).stages[0]
    assert found.ratio[0] == pytest.approx(1, abs=0.05)
    assert max(found.ratio[-4:]) < 0.75
    assert found.own == pytest.approx(np.ones(12), abs=0.2)


@pytest.mark.parametrize("width", [80, 120])
def test_reports_fit_and_show_the_numbers(result, width):
    text = scaling.report(result, "random", width)
    assert max(map(len, text.splitlines())) <= width
    for i, d in enumerate(result.sizes):
        rows = [line.split() for line in text.splitlines() if line.startswith("1 ") and f" {d} " in line]
        assert [row[2] for row in rows] == [f"{round(result.mean[i, 1], 3) + 0.0:.3f}"]
        assert float(rows[0][3].replace(",", "")) == pytest.approx(result.variance[i, 1], rel=1e-3)
    config = tiny_config()
    found = model_scaling.compute(Traced(config, random_tensors(config)).trace(range(20)))
    text = model_scaling.report(found, "a model", width)
    assert max(map(len, text.splitlines())) <= width
    assert sum(line.startswith("layer 1 ") and "▕" not in line for line in text.splitlines()) == 1
