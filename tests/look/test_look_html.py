"""The page of a look: its numbers are the look's, its text cannot become HTML, its size has a bound."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest

from qkv.look import html
from tinyllm import opened, write_model

EVIL = "</script><img src=x onerror=alert(1)><!--style--> ab\n你好"


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    with opened(write_model(tmp_path_factory.mktemp("model") / "tiny"), cache="f32") as llm:
        yield llm.look(EVIL + " ab" * 20, generate=6)


def contents_of(page: str) -> dict:
    """The numbers, found as a browser finds them: up to the first end of the element."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    return json.loads(found)


def numbers(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(np.float64)


def weights_of(parts: dict, T: int, d: int) -> np.ndarray:
    """A head's weights as the page computes them: [T, T]."""
    logs = np.full((T, T), -np.inf)
    below = np.tri(T, dtype=bool)
    if "weights" in parts:
        logs[below] = numbers(parts["weights"], "<f2")
    else:
        q, k = (numbers(parts[name], "<f4").reshape(T, d) for name in "qk")
        logs[below] = (q @ k.T / np.sqrt(d) - numbers(parts["logs"], "<f4")[:, None])[below]
    return np.exp(logs)


def test_every_heads_numbers_are_the_looks(look):
    contents = contents_of(html.page(look, 1, 2))
    T, d = len(look), contents["size"]
    assert len(contents["exact"]) == 8 and contents["chosen"] == [1, 2]
    assert contents["prompt"] == look.prompt_tokens == T - 6
    for place, parts in contents["exact"].items():
        layer, head = map(int, place.split(","))
        assert np.abs(weights_of(parts, T, d) - look.pattern(layer, head)).max() < 5e-4
        scores = look.scores(layer, head)[np.tri(T, dtype=bool)]
        given = numbers(parts["weights"], "<f2") + np.repeat(numbers(parts["logs"], "<f4"), np.arange(1, T + 1))
        assert np.abs(given - scores).max() < 5e-3
        for name, array in (("v", look.v(layer, head)), ("z", look.z(layer, head))):
            assert np.allclose(numbers(parts[name], "<f4"), np.linalg.norm(array, axis=1), rtol=1e-6)
    for name in ("entropy", "first", "previous", "itself", "induction"):
        assert np.abs(np.array(contents["statistics"][name]) - getattr(look.statistics, name)).max() <= 5.1e-5


def test_of_long_texts_there_are_pictures_and_some_heads(look, monkeypatch):
    """Long is what takes too many bytes: here 40 kB, and pictures have 16 × 16 cells at most."""
    monkeypatch.setattr(html, "NUMBERS_BYTES", 40_000)
    monkeypatch.setattr(html, "SIDE", 16)
    contents = contents_of(html.page(look, 1, 2))
    T, d, block = len(look), contents["size"], contents["block"]
    assert block == -(-T // 16)
    assert len(contents["pictures"]) == 8
    assert 1 <= len(contents["exact"]) < 8 and next(iter(contents["exact"])) == "1,2"
    for place, parts in contents["exact"].items():
        layer, head = map(int, place.split(","))
        assert np.abs(weights_of(parts, T, d) - look.pattern(layer, head)).max() < 1e-5
    for n, picture in enumerate(contents["pictures"]):
        side = -(-T // block)
        pattern = np.pad(look.pattern(*divmod(n, 4)), (0, side * block - T))
        largest = pattern.reshape(side, block, side, block).max(axis=(1, 3))
        drawn = numbers(picture, "u1").reshape(side, side)
        assert np.abs(drawn - 255 * np.sqrt(largest)).max() <= 0.51


def test_text_cannot_end_the_data_or_become_html(look):
    page = html.page(look, 0, 0)
    assert page.count("</script>") == 2 and "<img" not in page
    tokens = contents_of(page)["tokens"]
    assert "".join(tokens[: len("</script>")]) == "</script>"
    assert "␣" in tokens and "↵" in tokens
    assert not re.search(r"https?:|@import|url\(", page)


def test_the_policy_lets_only_this_pages_script_run(look):
    page = html.page(look, 0, 0)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("text", ["a", "ab"])
def test_a_text_of_one_token_has_a_page(tmp_path, text):
    with opened(write_model(tmp_path / "tiny"), cache="f32") as llm:
        look = llm.look(text)
    contents = contents_of(html.page(look, 0, 0))
    assert np.allclose(weights_of(contents["exact"]["0,0"], len(look), contents["size"]), look.pattern(0, 0), atol=5e-4)


@pytest.mark.slow
def test_4096_tokens_of_a_real_model_take_15_megabytes_at_most(smollm2):
    from qkv import LLM

    with LLM(smollm2) as llm:
        look = llm.look([(7 * i * i + 3) % 40_000 for i in range(4096)])
    page = html.page(look, 18, 6)
    assert len(page.encode()) <= 15_000_000
    contents = contents_of(page)
    assert len(contents["pictures"]) == 270 and contents["block"] == 32
    assert np.abs(weights_of(contents["exact"]["18,6"], 4096, 64) - look.pattern(18, 6)).max() < 1e-4
