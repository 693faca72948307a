"""Heads of a real model, SmolLM2: what they do is what is known of such heads, and they are needed for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkv import LLM, SamplingParams
from qkv.look import silence

START = 1
"""SmolLM2's <|im_start|>: texts begin with it."""


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, threads=2, context=1024) as made:
        yield made


@pytest.fixture(scope="module")
def repeated(llm):
    """Fifty random tokens, twice: nothing but copying tells how the second half goes on."""
    ids = np.random.default_rng(0).integers(1000, 40000, 50).tolist()
    return [START, *ids, *ids]


@pytest.fixture(scope="module")
def look(llm, repeated):
    return llm.look(repeated)


def test_there_are_heads_that_look_at_the_first_token_the_previous_and_what_came_after_a_copy(look):
    statistics = look.statistics
    assert statistics.first.max() > 0.95
    assert statistics.previous.max() > 0.7
    assert statistics.induction.max() > 0.4
    kinds = {kind for row in statistics.kinds() for kind in row}
    assert kinds >= {"first", "previous", "induction"}


def test_their_weights_say_the_same(look):
    """The best of each kind, by the definition of its weights."""
    s, T = look.statistics, len(look)
    i = np.arange(1, T)
    for means, of in ((s.first, lambda a: a[i, 0]), (s.previous, lambda a: a[i, i - 1])):
        layer, head = np.unravel_index(means.argmax(), means.shape)
        assert abs(of(look.pattern(int(layer), int(head))).mean() - means.max()) < 1e-4
    layer, head = np.unravel_index(s.induction.argmax(), s.induction.shape)
    second = np.arange(51, T)
    assert look.pattern(int(layer), int(head))[second, second - 49].mean() > 0.4


def test_silencing_the_induction_heads_destroys_copying(llm, look, repeated):
    """The mean log-probability of the second half: with all heads, without the best six, without six others."""
    best = np.argsort(-look.statistics.induction.ravel())[:6]
    others = np.random.default_rng(1).choice(np.setdiff1d(np.arange(look.statistics.induction.size), best), 6, False)

    def copied(chosen):
        edits = [silence(f"blocks.{at // 9}.attn.hook_z", int(at % 9)) for at in chosen]
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=True)
        return np.mean(llm.generate(repeated, asked, edit=edits).prompt_logprobs[55:])

    assert copied([]) > -4
    assert copied(others) > -4
    assert copied(best) < -9  # a token out of e^9 = 8,000: random ones are of 39,000


def test_the_readmes_example_runs_and_shows_an_induction_head(smollm2):
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "llm.look(" in block)
    run = code.replace('LLM("smollm2")', f"LLM({str(smollm2)!r})").replace(", edit=edit)", ", LITTLE, edit=edit)")
    run = f"import qkv\nLITTLE = qkv.SamplingParams(max_tokens=4)\n{run}"
    result = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    kinds, links = result.stdout.splitlines()[:2]
    assert "induction" in kinds
    assert "mango" in links  # what came after "violet" before


LONG = """
import resource, sys
from qkv import LLM
with LLM(sys.argv[1], threads=2, context=4608) as llm:
    ids = [(7 * i * i + 11 * i) % 40000 + 500 for i in range(4096)]
    look = llm.look(ids)
    assert look.statistics.first.shape == (30, 9)
    assert look.pattern(18, 6, "float16").shape == (4096, 4096)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in kilobytes on Linux alone")
def test_4096_tokens_take_less_than_one_and_a_half_gigabytes(smollm2):
    result = subprocess.run([sys.executable, "-c", LONG, smollm2], capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) * 1024 < 1.5e9
