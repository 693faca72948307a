"""The book in docs/: no page, number or figure outlives what it was made from."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import math
import platform
import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv.llm
import qkv.weights.checkpoint
import qkv.weights.names
from qkv.model.config import PRESETS
from qkv.weights.tensor import StoredTensor

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _load(name: str) -> Any:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the scripts import each other
    spec.loader.exec_module(module)
    return module


sync, drawings, make_figures = _load("sync"), _load("drawings"), _load("make_figures")
PAGES = sync.pages()
FIGURES = json.loads(sync.FIGURES.read_text(encoding="utf-8"))


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


@dataclass(frozen=True, eq=False)
class KeptTensor(StoredTensor):
    """A tensor that is converted once for all pages."""

    @cached_property
    def values(self) -> NDArray[np.float32]:
        return super().to_float32()

    def to_float32(self) -> NDArray[np.float32]:
        return self.values


@pytest.fixture(scope="session")
def kept(smollm2):
    """SmolLM2's checkpoint, its tensors converted once."""
    checkpoint = qkv.weights.checkpoint.open_checkpoint(smollm2)
    checkpoint.tensors = {name: KeptTensor(**vars(tensor)) for name, tensor in checkpoint.tensors.items()}
    return checkpoint


@pytest.fixture
def model_at_hand(kept, smollm2, monkeypatch):
    """What pages ask for by name is the test suite's SmolLM2."""
    monkeypatch.setattr(qkv.weights.names, "resolve", lambda name, **_: smollm2)
    monkeypatch.setattr(qkv.weights.names, "find", lambda name: smollm2)
    monkeypatch.setattr(qkv.weights.checkpoint, "open_checkpoint", lambda path: kept)


# ------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_included_source_and_captions_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == sync.synced(page, text), "stale: run `python docs/sync.py`"


def test_a_changed_function_makes_its_page_stale(tmp_path, monkeypatch):
    """The check can fail: the same page against a source with one character more."""
    page = DOCS / "06-attention.md"
    text = page.read_text(encoding="utf-8")
    copy = tmp_path / "src/qkv/model/attention.py"
    copy.parent.mkdir(parents=True)
    (tmp_path / "src/qkv/kernels").symlink_to(ROOT / "src/qkv/kernels")
    source = (ROOT / "src/qkv/model/attention.py").read_text(encoding="utf-8")
    copy.write_text(source.replace("scores[future(", "scores[ future("), encoding="utf-8")
    monkeypatch.setattr(sync, "ROOT", tmp_path)
    assert text != sync.synced(page, text)
    with pytest.raises(LookupError, match="expected one"):
        sync.included("src/qkv/model/attention.py::no_such_function")
    with pytest.raises(LookupError, match="no line"):
        sync.included("src/qkv/model/attention.py::softmax ~ no such text")


def test_a_changed_number_makes_its_page_stale():
    page = DOCS / "03-rmsnorm.md"
    text = page.read_text(encoding="utf-8")
    assert "RMS: 1.0\n" in text and "grows from 0.11" in text
    wrong = text.replace("RMS: 1.0\n", "RMS: 1.1\n").replace("grows from 0.11", "grows from 0.12")
    assert sync.synced(page, wrong) == text.replace("RMS: 1.0\n", "RMS: 1.1\n")
    assert sync.ran(wrong, page.name) == text.replace("grows from 0.11", "grows from 0.12")


def test_every_block_is_included_or_run():
    """A fence that the runner's pattern misses would be a block that nobody checks."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = list(sync.BLOCK.finditer(text))
        assert len(blocks) == text.count("```python\n"), page.name
        assert sum(bool(block["output"]) for block in blocks) == text.count("```text\n"), page.name
        assert sum(bool(block["include"]) for block in blocks) == text.count("<!-- include: "), page.name
        assert len(list(sync.FIGURE.finditer(text))) == text.count("<!-- figure: "), page.name


# A page in Chinese has the English page's blocks and output: tests/test_languages.py.
RUN = [page for page in PAGES if page.parent == DOCS and "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", RUN, ids=page_id)
def test_blocks_print_what_the_page_says(page, request):
    text = page.read_text(encoding="utf-8")
    if page.name == "12-simd.md" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("prints x86 machine code: not on x86")
    if sync.needs_model(text):
        request.getfixturevalue("model_at_hand")
    assert text == sync.ran(text, page.name), "printed something else: run `python docs/sync.py --run`"


def test_every_chapter_has_its_parts():
    chapters = [page for page in PAGES if page.parent == DOCS and re.match(r"\d\d-", page.name)]
    assert [int(page.name[:2]) for page in chapters] == list(range(1, len(chapters) + 1)) and len(chapters) >= 10
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in chapters:
        text = page.read_text(encoding="utf-8")
        assert f"]({page.name})" in index and f": {page.name}\n" in navigation
        assert "<!-- include: src/" in text and "```text\n" in text, page.name
        fast = text[max(text.find("## The fast version"), text.find("## Where the fast version lives")) :]
        assert re.search(r"\]\(\.\./src/qkv/[\w/]+\.py\)", fast), page.name


def test_numbers_in_the_prose():
    """The few that no block prints."""
    qwen = PRESETS["Qwen/Qwen3-0.6B"]
    table = qwen.vocab_size * qwen.hidden_size
    assert table / qwen.parameter_count == pytest.approx(1 / 4, abs=0.02)
    prose = {
        "06-attention.md": [f"a factor {math.exp(10):,.0f}", f"‖∂A/∂s‖ is {math.sqrt(63) / 64:.3f}", "√128 ≈ 11"],
        "zh/06-attention.md": [f"{math.exp(10):,.0f} 倍", f"‖∂A/∂s‖ 为 {math.sqrt(63) / 64:.3f}", "√128 ≈ 11"],
        "07-mlp.md": [f"{qwen.intermediate_size} per layer", f"{qwen.num_hidden_layers} layers"],
        "zh/07-mlp.md": [f"每层 {qwen.intermediate_size} 个", f"{qwen.num_hidden_layers} 层"],
        "08-logits.md": ["a quarter of all weights"],
        "zh/08-logits.md": ["全部权重的四分之一"],
    }
    for name, phrases in prose.items():
        text = (DOCS / name).read_text(encoding="utf-8").replace("\n", " ")
        assert [phrase for phrase in phrases if phrase not in text] == [], name


def test_the_table_of_models(smollm2):
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    small = qkv.weights.checkpoint.open_checkpoint(smollm2).config
    for name, c in (("Qwen3-0.6B", PRESETS["Qwen/Qwen3-0.6B"]), ("SmolLM2-135M", small)):
        heads = f"{c.num_attention_heads} | {c.num_key_value_heads} | {c.head_dim}"
        sizes = f"{c.num_hidden_layers} | {c.hidden_size} | {heads} | {c.intermediate_size} | {c.vocab_size:,}"
        assert f"| {name} | {sizes} |" in index


def test_what_chapter_1_says_about_qwen3(shared):
    from qkv.text.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(shared / "data/qwen3-tokenizer/tokenizer.json")
    assert len(tokenizer.encode("注意力")) == 1


# ------------------------------------------------------------------------------------------ figures


def test_every_figure_is_recorded_and_shown():
    assert set(FIGURES) == set(make_figures.RECIPES) == {png.stem for png in (DOCS / "figures").glob("*.png")}
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"<!-- figure: {name} -->" in shown for name in FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_of_the_current_source(name):
    assert FIGURES[name]["source"] == make_figures.source_hash(name), f"run `python docs/make_figures.py {name}`"
    data = (DOCS / "figures" / f"{name}.png").read_bytes()
    assert FIGURES[name]["png"] == hashlib.sha256(data).hexdigest()[:16]
    assert data.startswith(b"\x89PNG") and len(data) < 60_000


def test_a_changed_function_makes_its_figures_stale(monkeypatch):
    definition = sync.definition
    before = {name: make_figures.source_hash(name) for name in FIGURES}

    def changed(what: str) -> str:
        return definition(what) + (" + 0" if what.endswith("::silu") else "")

    monkeypatch.setattr(sync, "definition", changed)
    assert [name for name in FIGURES if make_figures.source_hash(name) != before[name]] == ["mlp", "outliers"]


class Independent:
    """A decoder in float64, written down again from the formulas: no code shared with the reference."""

    def __init__(self, checkpoint: Any, ids: list[int]) -> None:
        c = checkpoint.config
        self.queries, self.keys, self.values, self.inner, self.streams = [], [], [], [], []
        self.projected = []  # q and k as the matrices make them

        def weight(name: str) -> NDArray[np.float64]:
            return checkpoint.tensors[name].to_float32().astype(np.float64)

        def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
            return x * (np.einsum("ti,ti->t", x, x) / x.shape[1] + c.rms_norm_eps)[:, None] ** -0.5 * weight(name)

        T, d, half = len(ids), c.head_dim, c.head_dim // 2
        turn = np.exp(1j * np.outer(np.arange(T), c.rope_theta ** (-np.arange(half) / half)))

        def turned(x: NDArray[Any]) -> NDArray[Any]:
            pairs = (x[..., :half] + 1j * x[..., half:]) * turn[:, None]
            return np.concatenate([pairs.real, pairs.imag], axis=2)

        table = checkpoint.tensors["model.embed_tokens.weight"].to_float32()
        x = table[ids].astype(np.float64)
        allowed = np.tri(T)
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}."
            self.streams.append(x)
            h = norm(x, name + "input_layernorm.weight")
            q, k, v = ((h @ weight(f"{name}self_attn.{p}_proj.weight").T).reshape(T, -1, d) for p in "qkv")
            self.projected.append((q, k))
            if c.qk_norm:
                q, k = (np.stack([norm(x[:, h], f"{name}self_attn.{p}_norm.weight") for h in range(x.shape[1])], 1)
                        for p, x in (("q", q), ("k", k)))  # fmt: skip
            q, k = turned(q), np.repeat(turned(k), c.heads_per_kv_head, axis=1)
            v = np.repeat(v, c.heads_per_kv_head, axis=1)
            e = np.exp(np.einsum("ihd,jhd->hij", q, k) / d**0.5) * allowed  # scores are far from overflow in float64
            o = np.einsum("hij,jhd->ihd", e / e.sum(axis=2, keepdims=True), v)
            x = x + o.reshape(T, -1) @ weight(name + "self_attn.o_proj.weight").T
            h = norm(x, name + "post_attention_layernorm.weight")
            gate, up = (h @ weight(f"{name}mlp.{p}_proj.weight").T for p in ("gate", "up"))
            inner = up * gate * (0.5 + 0.5 * np.tanh(gate / 2))
            x = x + inner @ weight(name + "mlp.down_proj.weight").T
            self.queries.append(q)
            self.keys.append(k)
            self.values.append(v)
            self.inner.append(inner)
        self.streams.append(x)
        self.weights = lambda layer, head: _attend(self.queries[layer][:, head], self.keys[layer][:, head], allowed)
        self.logits_of = lambda streams: norm(streams, "model.norm.weight") @ table.astype(np.float64).T


def _attend(q: NDArray[Any], k: NDArray[Any], allowed: NDArray[Any]) -> NDArray[Any]:
    e = np.exp(q @ k.T / q.shape[1] ** 0.5) * allowed
    return e / e.sum(axis=1, keepdims=True)


@pytest.fixture(scope="session")
def look(kept):
    """The independent computation of a text, once per text."""
    from qkv.text.tokens.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(kept.tokenizer, "smollm2")
    seen: dict[str, Independent] = {}

    def of(text: str) -> Independent:
        if text not in seen:
            seen[text] = Independent(kept, tokenizer.encode(text))
        return seen[text]

    return of


def rms(x: NDArray[Any]) -> float:
    return float((x * x).mean() ** 0.5)


def test_numbers_of_the_stream_and_of_q_k_v(look):
    model = look(drawings.TEXT)
    n = FIGURES["norm"]["numbers"]
    assert n["start"] == pytest.approx(rms(model.streams[0][1:]), abs=0.006)
    assert n["end"] == pytest.approx(rms(model.streams[-1][1:]), abs=0.06)
    peak = max((x[0] for x in model.streams), key=rms)
    assert n["first"] == pytest.approx(rms(peak), abs=0.6)
    assert n["three"] == pytest.approx(sum(sorted(peak**2)[-3:]) / (peak @ peak), abs=0.0006)
    n = FIGURES["qkv"]["numbers"]
    for name, layers in (("q", model.queries), ("k", model.keys), ("v", model.values)):
        assert n[f"{name}_first"] == pytest.approx(rms(layers[0]), abs=0.006)
        assert n[f"{name}_last"] == pytest.approx(rms(layers[-1]), abs=0.006)


def test_numbers_of_the_scores(look):
    model = look(drawings.TEXT)
    n, T = FIGURES["scores"]["numbers"], len(model.queries[0])
    pairs = np.tril_indices(T)
    spread, mean, assumed = [], [], []
    for q, k in zip(model.queries, model.keys, strict=True):
        dots = [(q[:, h] @ k[:, h].T)[pairs] for h in range(q.shape[1])]
        spread += [x.std() for x in dots]
        mean += [abs(x.mean()) for x in dots]
        assumed.append(q.shape[2] ** 0.5 * rms(q) * rms(k))
    for name, values in (("spread", spread), ("mean", mean), ("assumed", assumed)):
        assert n[name] == pytest.approx(np.mean(values), abs=0.06), name


def ratios(q: NDArray[np.float64], k: NDArray[np.float64]) -> tuple[float, float]:
    """Var<q, k> / (d σ_q² σ_k²) of one layer, by loops over heads; and without the means over the positions."""
    T, heads, d = q.shape
    past, group, found = np.tril_indices(T), heads // k.shape[1], []
    for without in (0, 1):
        numbers = []
        for h in range(heads):
            one, other = (x - without * x.mean(axis=0) for x in (q[:, h], k[:, h // group]))
            numbers.append(((one @ other.T)[past].var(), d * rms(one) ** 2 * rms(other) ** 2))
        variance, predicted = np.mean(numbers, axis=0)
        found.append(variance / predicted)
    return found[0], found[1]


def test_numbers_of_the_ratio_in_a_trained_model(look):
    n = FIGURES["depth"]["numbers"]
    found = [ratios(q, k) for q, k in look(drawings.TEXT).projected]
    assert [n["trained"], n["trained_own"]] == pytest.approx(np.mean(found, axis=0), abs=0.006)
    assert n["trained"] < 0.8 < 1.2 < n["trained_own"]


@pytest.mark.slow
def test_numbers_of_the_ratio_without_training():
    """The chapter's point: it is 1 in layer 0, falls with depth, and is near 1 everywhere without what is shared."""
    n, c = FIGURES["depth"]["numbers"], replace(PRESETS["Qwen/Qwen3-0.6B"], vocab_size=4096)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in c.parameter_shapes().items():
        x = np.ones(shape, np.float32) if "norm" in name else 0.02 * rng.standard_normal(shape, np.float32)
        tensors[name] = SimpleNamespace(to_float32=lambda x=x: x)
    model = Independent(SimpleNamespace(config=c, tensors=tensors), rng.integers(0, 4096, 256).tolist())
    found = [ratios(q, k) for q, k in model.projected]
    whole, own = (list(column) for column in zip(*found, strict=True))
    assert [n["first"], n["fourth"], n["last"]] == pytest.approx([whole[0], whole[4], whole[-1]], abs=0.006)
    assert [n["own_low"], n["own_high"]] == pytest.approx([min(own), max(own)], abs=0.006)
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (model.streams[0], model.streams[-2])]
    cosines = [(x @ x.T)[np.triu_indices(256, 1)].mean() for x in units]
    assert [n["like_first"], n["like_last"]] == pytest.approx(cosines, abs=0.006)
    assert n["first"] == pytest.approx(1, abs=0.02) and n["last"] < n["fourth"] < 0.8 and n["own_low"] > 0.8


def test_numbers_of_the_heads(look):
    model = look(drawings.REPEATED)
    n = FIGURES["heads"]["numbers"]
    assert len(model.queries[0]) == 15
    entropies = [-(row[row > 0] * np.log(row[row > 0])).sum() for row in model.weights(0, 1)[-5:]]
    assert n["broad"] == pytest.approx(np.mean(np.exp(entropies)), abs=0.06)
    assert n["previous"] == pytest.approx(np.mean(np.diag(model.weights(16, 0), -1)[1:]), abs=0.006)
    # "The small cat sat on the red mat. The small cat sat on the": the second half copies from the first, from where
    # token 9 + m repeats token m.
    induction = model.weights(18, 6)
    assert n["induction"] == pytest.approx(np.mean([induction[9 + m, m + 1] for m in range(1, 6)]), abs=0.006)
    assert n["first"] == pytest.approx(model.weights(18, 8)[1:, 0].mean(), abs=0.0006)
    lengths = [np.linalg.norm(v) for v in model.values[18][:, 8]]
    assert n["first_value"] == pytest.approx(lengths[0] / np.mean(lengths[1:]), abs=0.006)


def test_numbers_of_the_outputs(look):
    model = look(drawings.TEXT)
    n, (T, H, _) = FIGURES["hull"]["numbers"], model.values[0].shape
    ratios, outside = [], 0
    for layer, values in enumerate(model.values):
        for head in range(H):
            A, v = model.weights(layer, head), values[:, head]
            for i in range(1, T):
                o, seen = A[i, : i + 1] @ v[: i + 1], v[: i + 1]
                slack = 1e-9 * (seen.max(axis=0) - seen.min(axis=0))
                outside += int(np.sum((o < seen.min(axis=0) - slack) | (o > seen.max(axis=0) + slack)))
                ratios.append((o @ o / (seen * seen).sum(axis=1).max()) ** 0.5)
    assert (n["outputs"], n["outside"]) == (len(ratios), outside)
    assert n["median_ratio"] == pytest.approx(np.median(ratios), abs=0.006)
    assert n["longest"] == pytest.approx(max(ratios), abs=0.006)


def test_numbers_of_the_mlp(look):
    model = look(drawings.TEXT)
    n, shares, ever = FIGURES["mlp"]["numbers"], [], []
    for inner in model.inner:
        counts, carriers = [], set()
        for row in inner[1:] ** 2:
            total, needed, order = 0.0, [], np.argsort(row)[::-1].tolist()
            while total < 0.9 * row.sum():
                needed.append(order[len(needed)])
                total += row[needed[-1]]
            counts.append(len(needed))
            carriers.update(needed)
        shares.append(100 * np.mean(counts) / inner.shape[1])
        ever.append(100 * len(carriers) / inner.shape[1])
    expected = {"least": min(shares), "most": max(shares), "mean": np.mean(shares), "ever": np.mean(ever)}
    for name, value in expected.items():
        assert n[name] == pytest.approx(value, abs=0.6), name


def test_numbers_of_the_outliers(look):
    model = look(drawings.TEXT)
    groups = np.abs(np.concatenate([inner[1:] for inner in model.inner]).reshape(-1, 32))
    second, largest = np.partition(groups, 30, axis=1)[:, 30:].T
    ratios = np.sort(largest / second)
    n = FIGURES["outliers"]["numbers"]
    assert n["groups"] == len(ratios)
    assert n["median"] == pytest.approx(np.median(ratios), abs=0.006)
    assert n["double"] == pytest.approx(100 * np.mean(ratios > 2), abs=0.6)
    assert n["shown"] == pytest.approx(ratios[99 * len(ratios) // 100], abs=0.06)


def test_numbers_of_logits_and_sampling(look):
    model = look(drawings.QUESTION)
    rows = model.logits_of(np.array([x[-1] for x in model.streams]))
    final = int(rows[-1].argmax())
    n = FIGURES["logits"]["numbers"]
    ranks = [int(np.flatnonzero(np.argsort(-row, kind="stable") == final)[0]) + 1 for row in rows]
    # Two tokens of almost equal score may change places between float32 and float64.
    assert np.all(np.abs(np.array(n["ranks"]) - ranks) <= 0.001 * np.array(ranks) + 1)
    assert n["ranks"][-1] == 1 and n["start"] == n["ranks"][0]
    assert all(rank <= 10 for rank in n["ranks"][n["top_ten"] :]) and n["ranks"][n["top_ten"] - 1] > 10
    assert all(rank == 1 for rank in n["ranks"][n["settled"] :]) and n["ranks"][n["settled"] - 1] > 1
    n = FIGURES["sampling"]["numbers"]
    for name, temperature in (("low", 0.5), ("one", 1.0), ("high", 1.5)):
        assert n[name] == pytest.approx(1 / np.exp((rows[-1] - rows[-1].max()) / temperature).sum(), abs=0.006)
    p = np.sort(np.exp((rows[-1] - rows[-1].max()) / 1.5))
    assert n["tail"] == pytest.approx(p[:-12].sum() / p.sum(), abs=0.006)


def test_numbers_of_the_shapes():
    """Qwen3-0.6B by hand: hidden 1024, 16 and 8 heads of 128, MLP 3072, 28 layers."""
    per_layer = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072
    n = FIGURES["cost"]["numbers"]
    assert n == {"linear": 2 * per_layer, "crossing": 2 * per_layer // (4 * 16 * 128)}
    weights = (151_936 * 1024 + 28 * (per_layer + 2 * 1024 + 2 * 128) + 1024) * 4.5 / 8
    n = FIGURES["cache"]["numbers"]
    # f16: two bytes; int8: one byte, and a float32 scale for 32 of them.
    assert n["f16"] == 2 * 28 * 8 * 128 * 2 and n["int8"] == 2 * 28 * 8 * (128 + 4 * 4)
    assert n["equal_f16"] == round(weights / n["f16"]) and n["full"] == round(n["f16"] * 40_960 / 1e9, 1)
    for T in (128, 2048, 8192):
        cache = 114_688 * T
        alone, together = FIGURES["batch"]["numbers"][f"one_{T}"], FIGURES["batch"]["numbers"][f"eight_{T}"]
        assert (alone, together) == (round((weights + cache) / 1e6), round((weights + 8 * cache) / 8e6))
    assert FIGURES["batch"]["numbers"]["weights"] == round(weights / 1e6)


def test_numbers_of_the_drafts():
    """A step of k guesses gives j + 1 tokens when j are right and the next is wrong, k + 1 when all are right."""
    for name, p in (("half", 0.5), ("most", 0.9)):
        for k in (3, 7):
            expected = sum((j + 1) * p**j * (1 - p) for j in range(k)) + (k + 1) * p**k
            assert FIGURES["drafts"]["numbers"][f"{name}_{k}"] == round(expected, 1)


def test_numbers_of_rope():
    angles = 1e6 ** (-np.arange(64) / 64)
    n = FIGURES["rope"]["numbers"]
    # A flat vector's score with itself at distance t is the mean of the cosines.
    assert n["at_1"] == pytest.approx(np.cos(angles).mean(), abs=0.006)
    assert n["at_100"] == pytest.approx(np.cos(100 * angles).mean(), abs=0.006)
    assert n["millions"] == pytest.approx(2 * np.pi / angles[-1] / 1e6, abs=0.06)


# ------------------------------------------------------------------------------------------ the notebook and the site


def notebook_cells() -> list[str]:
    book = json.loads((ROOT / "examples/attention.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "commit it without outputs"
    return ["".join(cell["source"]) for cell in cells]


def run_cells(cells: list[str]) -> dict[str, Any]:
    session: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(cells):
        exec(compile(code, f"<cell {number}>", "exec"), session)
    return session


def test_the_notebook_runs_on_the_model(model_at_hand, capsys):
    session = run_cells(notebook_cells())
    assert session["source"] == "SmolLM2-135M" and "Paris" not in session["tokens"]
    assert "induction" in capsys.readouterr().out


def test_the_notebook_runs_without_a_model(monkeypatch, capsys):
    monkeypatch.setattr(qkv.weights.names, "find", lambda name: None)
    session = run_cells(notebook_cells())
    assert session["source"] == "random numbers"
    assert capsys.readouterr().out


def test_scripts_and_notebook_parse_on_python_3_10():
    sources = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.py")]
    for source in [*sources, *notebook_cells()]:
        ast.parse(source, feature_version=(3, 10))


def test_the_site_builds_and_needs_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason="needs qkv[docs]")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)  # the book, and the source files it links to
    for page in pages:
        assert ('<html lang="zh-Hans"' in page.read_text(encoding="utf-8")) == (page.parent.name == "zh"), page.name
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]*)|<link rel=\"(?:stylesheet|preconnect)\"[^>]*href=\"([^\"]*)",
            page.read_text(encoding="utf-8"),
        )
        assert loaded and not [url for pair in loaded for url in pair if "//" in url], page.name
