"""Scores against a NumPy decoder in float64 and against transformers; windows by what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_logprobs import log_softmax

from decoders import compiled, logits_of, packed
from qkv.engine.engine import Engine
from qkv.engine.scoring import Score, compare, perplexity, score, window_and_stride, windows
from qkv.engine.session import Session
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import ParameterError, QkvError
from qkv.model.compiled import CompiledDecoder
from qkv.model.reference import Decoder
from tiny import random_tensors, tiny_config

CONFIG = tiny_config()
CONTEXT = 128
VOCABULARY = Vocabulary(CONFIG.vocab_size)
IDS = np.random.default_rng(4).integers(0, CONFIG.vocab_size, 300).tolist()


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG)


@pytest.fixture(scope="module")
def decoder(tensors):
    made = compiled(CONFIG, packed(CONFIG, tensors), context=CONTEXT, outputs=40)
    yield made
    made.close()


@pytest.fixture
def session(decoder):
    return Session(decoder)


@pytest.fixture(scope="module")
def engine(tensors):
    made = compiled(CONFIG, packed(CONFIG, tensors), context=CONTEXT, outputs=24)
    engine = Engine(made, vocabulary=VOCABULARY, context=CONTEXT, end_ids=[])
    yield engine
    engine.close()
    made.close()


def by_definition(logits_of, ids, window: int, stride: int) -> list[float]:
    """Each token's log-probability from `logits_of(text)` [T, vocab], by going through the text token by token."""
    found, start = [], 0
    while len(found) < len(ids) - 1:
        end = min(start + window, len(ids))
        rows = log_softmax(logits_of(ids[start:end]))
        found += [rows[i - start - 1, ids[i]] for i in range(len(found) + 1, end)]
        start += stride
    return found


@given(st.integers(2, 500), st.integers(2, 80), st.data())
def test_windows_score_each_token_once_with_enough_before_it(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    found = windows(length, window, stride)
    assert [token for part in found for token in range(part.first, part.end)] == list(range(1, length))
    for number, part in enumerate(found):
        assert part.start == number * stride and 2 <= part.end - part.start <= window
        assert part.first - part.start >= (1 if number == 0 else window - stride)


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_to_predict(engine, length):
    with pytest.raises(ParameterError, match=f"^text has {length} token"):
        score(engine, [1] * length)


@pytest.mark.parametrize(
    ("window", "stride"), [(1, None), (CONTEXT, None), (True, None), (2.5, None), (50, 50), (50, 0)]
)
def test_impossible_windows(engine, window, stride):
    with pytest.raises(ParameterError, match=r"^(window|stride) must be"):
        score(engine, IDS, window=window, stride=stride)


def test_the_default_is_as_much_as_fits_and_half_of_it():
    assert window_and_stride(None, None, 127) == (127, 63)


@pytest.mark.parametrize("bad", [CONFIG.vocab_size, -1, True, 1.5, "a"])
def test_what_is_no_token_is_found_before_anything_runs(engine, bad):
    with pytest.raises(ParameterError, match="is not a token id"):
        score(engine, [*IDS[:290], bad])


@pytest.mark.parametrize(("window", "stride"), [(127, 63), (100, 99), (64, 10), (5, 2), (2, 1)])
def test_scores_equal_the_reference_in_float64(engine, tensors, window, stride):
    ids = IDS[:150]
    reference = Decoder(CONFIG, tensors, np.float64)
    found = score(engine, ids, window=window, stride=stride)
    expected = by_definition(reference, ids, window, stride)
    assert found.token_ids == ids and found.logprobs[0] is None
    np.testing.assert_allclose(found.logprobs[1:], expected, rtol=0, atol=1e-4)
    assert found.total == pytest.approx(sum(expected), abs=1e-2)
    assert found.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-4)


def test_a_text_that_fits_is_one_window(engine, tensors):
    ids = IDS[:120]
    expected = by_definition(Decoder(CONFIG, tensors, np.float64), ids, len(ids), 1)
    np.testing.assert_allclose(score(engine, ids).logprobs[1:], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(127, 63), (64, 10), (41, 40), (40, 1), (2, 1)])
def test_the_engine_and_a_decoder_of_ones_own_give_the_same_bits(engine, session, window, stride):
    """However many rows come together: 24 at a time in the engine, 40 here."""
    ids = IDS[:150]
    (quality,) = compare([session], ids, vocabulary=VOCABULARY, window=window, stride=stride)
    assert [None, *quality.logprobs] == score(engine, ids, window=window, stride=stride).logprobs
    assert quality.perplexity == score(engine, ids, window=window, stride=stride).perplexity


def test_scoring_leaves_nothing_taken(engine, session):
    score(engine, IDS)
    compare([session], IDS, vocabulary=VOCABULARY, window=100, stride=50)
    for pool in (engine.scheduler.pool, session.pool):
        assert pool.free == pool.size


def test_no_step_gives_more_rows_than_there_is_room_for(session, monkeypatch):
    """Memory stays flat: rows are asked for a few at a time, and not copied."""
    seen, step = [], CompiledDecoder.step

    def watched(self, feeds, *, copy=True):
        rows = step(self, feeds, copy=copy)
        seen.append((len(feeds[0].ids), len(rows), np.shares_memory(rows, self._buffers.logits)))
        return rows

    monkeypatch.setattr(CompiledDecoder, "step", watched)
    compare([session], IDS, vocabulary=VOCABULARY, window=100, stride=50)
    assert max(tokens for tokens, _, _ in seen) == 40 == max(rows for _, rows, _ in seen)
    assert all(shared for _, rows, shared in seen if rows)
    assert any(rows == 0 for _, rows, _ in seen)  # what an earlier window has scored needs no logits


def test_progress_ends_at_the_end(engine, session):
    for run in (
        lambda heard: score(engine, IDS, progress=heard),
        lambda heard: compare([session], IDS, vocabulary=VOCABULARY, window=100, stride=50, progress=heard),
    ):
        calls: list[tuple] = []
        run(lambda *call, calls=calls: calls.append(call))
        done = [call[1] for call in calls]
        assert done == sorted(done) and calls[-1] == ("scoring", 300, 300, "tokens") and len(calls) > 3


# ------------------------------------------------------------------------------------------ comparing


def log_distributions(decoder, window, stride) -> np.ndarray:
    """log p [T - 1, vocab] at the places that are scored, from all logits of each window."""
    rows = []
    for part in windows(len(IDS), window, stride):
        ids = IDS[part.start : part.end - 1]
        chunks = [min(40, len(ids) - done) for done in range(0, len(ids), 40)]
        rows.append(log_softmax(logits_of(decoder, ids, chunks)[part.first - part.start - 1 :]))
    return np.concatenate(rows)


def test_formats_against_the_first(decoder, tensors):
    int4 = compiled(CONFIG, packed(CONFIG, tensors, "int4"), context=CONTEXT, outputs=40)
    again = compiled(CONFIG, packed(CONFIG, tensors), context=CONTEXT, outputs=40, threads=1)
    try:
        sessions = [Session(one) for one in (decoder, int4, again)]
        first, second, same = compare(sessions, IDS, vocabulary=VOCABULARY, window=100, stride=50)
        p, q = log_distributions(decoder, 100, 50), log_distributions(int4, 100, 50)
    finally:
        int4.close()
        again.close()
    np.testing.assert_allclose(second.divergences, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert second.same_top == int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    assert 0 < second.agreement < 1 and second.divergence > 0.001
    assert first.divergence == same.divergence == 0 and first.agreement == same.agreement == 1
    assert first.logprobs == same.logprobs != second.logprobs
    assert first.tokens_run == second.tokens_run > 299 and first.seconds > 0


def test_only_tokens_of_the_vocabulary_count(decoder, tensors):
    """Rows behind the vocabulary, and in its middle those that no token has, are in no sum and are no top token."""
    unused = [7, 100, 299]
    vocabulary = Vocabulary(300, unused)
    tokens = [id for id in range(300) if id not in unused]
    ids = [id for id in IDS if id in vocabulary][:100]
    int4 = compiled(CONFIG, packed(CONFIG, tensors, "int4"), context=CONTEXT, outputs=40)
    try:
        sessions = [Session(decoder), Session(int4)]
        first, second = compare(sessions, ids, vocabulary=vocabulary, window=100, stride=50)
        p, q = (log_softmax(logits_of(one, ids[:-1], [40, 40, 19])[:, tokens]) for one in (decoder, int4))
    finally:
        int4.close()
    following = [tokens.index(id) for id in ids[1:]]
    np.testing.assert_allclose(first.logprobs, p[range(99), following], rtol=0, atol=1e-9)
    np.testing.assert_allclose(second.logprobs, q[range(99), following], rtol=0, atol=1e-9)
    np.testing.assert_allclose(second.divergences, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert second.same_top == int((p.argmax(axis=1) == q.argmax(axis=1)).sum())


@pytest.mark.parametrize("bad", [7, 300, -1])
def test_what_is_no_token_is_compared_by_nobody(session, bad):
    with pytest.raises(ParameterError, match=r"^text.* is not a token id"):
        compare([session], [1, 2, bad], vocabulary=Vocabulary(300, [7]), window=100, stride=50)


def test_damaged_weights_are_reported(tensors):
    damaged = compiled(CONFIG, packed(CONFIG, tensors), context=CONTEXT, outputs=40)
    try:
        damaged._weights.vectors[:] = np.nan
        session = Session(damaged)
        with pytest.raises(QkvError, match="damaged"):
            compare([session], IDS[:20], vocabulary=VOCABULARY, window=10, stride=5)
        assert session.pool.free == session.pool.size
    finally:
        damaged.close()


def test_perplexity_of_the_impossible_is_infinite():
    assert perplexity(-1e9, 3) == math.inf
    assert Score([1, 2, 3], [None, math.log(0.5), math.log(0.125)]).perplexity == pytest.approx(4)


@pytest.mark.oracle
@pytest.mark.parametrize(("window", "stride"), [(127, 63), (60, 20)])
def test_scores_equal_transformers(engine, tensors, window, stride):
    """Windows as its documentation has them for texts of any length: the mean of labels not masked with -100."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = hf_model(CONFIG, tensors)
    sums, count, previous = 0.0, 0, 1
    for start in range(0, len(IDS), stride):
        end = min(start + window, len(IDS))
        labels = torch.tensor([IDS[start:end]])
        labels[:, : previous - start] = -100
        with torch.no_grad():
            loss = model(torch.tensor([IDS[start:end]]), labels=labels).loss.item()
        sums, count, previous = sums + loss * (end - previous), count + end - previous, end
        if end == len(IDS):
            break
    assert count == len(IDS) - 1
    assert score(engine, IDS, window=window, stride=stride).perplexity == pytest.approx(
        math.exp(sums / count), rel=1e-4
    )


def hf_model(config, tensors):
    """The same weights in transformers' own Qwen3, float32."""
    import torch
    import transformers

    hf_config = transformers.Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3ForCausalLM(hf_config).float().eval()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
    return model
