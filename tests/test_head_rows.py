"""Rows of the head that no token has: they change nothing, and no request reaches them.

A model is compared with the same one whose head and table have more rows: noise that would win everywhere, behind the
vocabulary (as Qwen3's are) and in its middle (ids that a tokenizer lacks).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qkv import SamplingParams
from qkv.errors import ParameterError
from tiny import tiny_config
from tinyllm import CONFIG, HELLO, MARKERS, PRINTABLE, TEMPLATE, VOCABULARY, come_back, opened, tensors, write_model

HOLES, BEHIND = [100, 101, 200], 40
ROWS = len(VOCABULARY) + len(HOLES) + BEHIND
IDS = [id for id in range(ROWS) if id not in HOLES][: len(VOCABULARY)]
"""Of each token of the small model: its id in the large one."""
NOT_TOKENS = [id for id in range(ROWS) if id not in IDS]
END = VOCABULARY.index("<|im_end|>")
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=20)


def write_padded(folder: Path) -> Path:
    def insert(made):
        noise = np.random.default_rng(1)
        made |= tensors()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = made[name]
            made[name] = noise.normal(0, 5, (ROWS, rows.shape[1])).astype(np.float32)
            made[name][IDS] = rows

    config = tiny_config(vocab_size=ROWS, max_position_embeddings=CONFIG.max_position_embeddings)
    write_model(folder, config, tokenizer=False, change=insert, eos=[IDS[END], ROWS - 1])
    bpe = tokenizers.Tokenizer(models.BPE(dict(zip(VOCABULARY, IDS, strict=True)), []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(text, special="think" not in text, normalized=False) for text in MARKERS])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module", params=[None, "prompt"])
def pair(request, tmp_path_factory):
    """The small model and the large one."""
    folder = tmp_path_factory.mktemp("model")
    with (
        opened(write_model(folder / "small", eos=END), speculation=request.param) as small,
        opened(write_padded(folder / "large"), speculation=request.param) as large,
    ):
        assert large.tokenizer.unused_ids == set(HOLES)
        yield small, large
        assert come_back(small) and come_back(large)


def same(small, large) -> None:
    assert [IDS[id] for id in small.token_ids] == large.token_ids
    assert (small.text, small.finish_reason) == (large.text, large.finish_reason)
    for one, other in zip(small.logprobs or [], large.logprobs or [], strict=True):
        assert (IDS[one.token], [IDS[id] for id, _ in one.top]) == (other.token, [id for id, _ in other.top])
        assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(
            [other.logprob, *(value for _, value in other.top)], abs=1e-12
        )
    assert small.prompt_logprobs == pytest.approx(large.prompt_logprobs, abs=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"temperature": 0, "logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 20},
        {"prompt_logprobs": True},
        {"repetition_penalty": 1.5, "presence_penalty": 1},
        {"regex": "[a-z]{9}"},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"choices": ["yes", "no"], "temperature": 0},
        {"min_tokens": 5, "stop": ["e"]},
    ],
    ids=lambda fields: "-".join(fields) or "sampled",
)
def test_they_change_nothing(pair, fields):
    params = replace(PARAMS, **fields)
    for prompt in ("Hello", "abcabcabcabc"):
        same(*(llm.generate(prompt, params) for llm in pair))
    same(*(llm.chat(HELLO, params) for llm in pair))


def test_with_several_answers_and_a_bias(pair):
    small, large = pair
    bias = dict.fromkeys(PRINTABLE[:9], 4.0)
    one = small.generate("Hello", replace(PARAMS, n=4, logit_bias=bias))
    other = large.generate("Hello", replace(PARAMS, n=4, logit_bias={IDS[id]: value for id, value in bias.items()}))
    for pair_of_answers in zip(one.choices, other.choices, strict=True):
        same(*pair_of_answers)


def test_scores_are_relative_to_the_tokens(pair):
    one, other = (llm.score("Hello, you there. Hello!") for llm in pair)
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


@pytest.mark.parametrize("id", [*HOLES, NOT_TOKENS[len(HOLES)], ROWS - 1, ROWS])
def test_no_request_may_name_one(pair, id):
    _, large = pair
    calls = {
        "prompt": lambda: large.generate([IDS[5], id]),
        "stop_token_ids": lambda: large.generate("Hello", SamplingParams(stop_token_ids=[id])),
        "logit_bias": lambda: large.chat(HELLO, SamplingParams(logit_bias={id: 100})),
    }
    for field, call in calls.items():
        with pytest.raises(ParameterError, match=rf"^{field}: {id} is not a token id; "):
            call()
    with pytest.raises(ParameterError, match=rf"^prompt: {id} is not a token id; "):
        large.score([IDS[5], IDS[6], id])
