"""The engine on the compiled decoder: whatever runs beside a request, before it or instead of it, its tokens are those
of a loop that has the decoder to itself.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from decoders import packed
from qkv.engine.engine import Engine
from qkv.engine.params import SamplingParams
from qkv.engine.sampling import Sampler
from qkv.engine.session import Session
from qkv.engine.vocabulary import Vocabulary
from qkv.errors import QkvError, RequestCancelledError
from qkv.kernels.sizes import blocks_for
from qkv.model.compiled import CompiledDecoder, kv_block_bytes
from qkv.model.feed import PagedCache
from tiny import random_tensors, tiny_config

CONFIG = tiny_config(num_hidden_layers=1)
CONTEXT = 256
END = 5


@cache
def weights(kind="mixed"):
    return packed(CONFIG, random_tensors(CONFIG), kind)


def decoder(contexts=4):
    size = contexts * blocks_for(CONTEXT) * kv_block_bytes(CONFIG, "f16")
    return CompiledDecoder(CONFIG, weights(), context=CONTEXT, threads=2, outputs=48, cache_bytes=size)


@cache
def lonely():
    return decoder()


def alone(prompt, params, choice=0):
    """(tokens, reason), by the simplest loop: a cache of its own, one token a step."""
    session, held = Session(lonely()), PagedCache()
    ids = list(prompt)
    sampler = Sampler(params, choice=choice, prompt_ids=prompt, vocab_size=CONFIG.vocab_size, end_ids=[END])
    limit = min(CONTEXT - len(prompt), params.max_tokens or CONTEXT)
    new = ids
    while len(ids) - len(prompt) < limit:
        token = sampler.choose(session.run(new, held), position=len(ids)).token
        if token in params.ending_ids([END]):
            return ids[len(prompt) :], "stop"
        ids.append(token)
        new = [token]
    return ids[len(prompt) :], "length"


def engine_on(model, **options):
    return Engine(model, vocabulary=Vocabulary(CONFIG.vocab_size), context=CONTEXT, end_ids=[END], **options)


def random_request(rng):
    """A prompt, often one that begins like others, and params of every kind."""
    family = [(rng.randrange(3) * 50 + i * 7) % CONFIG.vocab_size for i in range(150)]
    prompt = family[: rng.choice([1, 5, 31, 32, 33, 64, 65, 100, 128])]
    prompt += [rng.randrange(CONFIG.vocab_size) for _ in range(rng.choice([0, 0, 1, 3, 32, 80]))]
    params = SamplingParams(
        temperature=rng.choice([0, 0.7, 1.0]),
        top_k=rng.choice([None, 20]),
        top_p=rng.choice([None, 0.9]),
        min_p=rng.choice([None, 0.05]),
        repetition_penalty=rng.choice([None, 1.2]),
        frequency_penalty=rng.choice([0, 0.3]),
        logit_bias=rng.choice([{}, {7: 3.0, 9: -100}]),
        seed=rng.randrange(1000),
        n=rng.choice([1, 1, 1, 3]),
        max_tokens=rng.choice([1, 5, 33, 60, None]),
        logprobs=rng.random() < 0.2,
        top_logprobs=0,
    )
    return prompt, params


@pytest.mark.parametrize("speculation", [False, True])
def test_sixty_four_requests_at_random_times_with_cancels_and_preemptions(speculation):
    """The cache has room for two contexts; each finished answer equals its solo run, and all blocks come back."""
    rng = random.Random(11)
    model = decoder(contexts=2)
    engine = engine_on(model, speculation=speculation)
    preemptions, preempt = [], engine.scheduler._preempt
    engine.scheduler._preempt = lambda: preemptions.append(1) or preempt()
    cancelled, handles = set(), []
    for i in range(64):
        prompt, params = random_request(rng)
        handles.append(engine.submit(prompt, params))
        if rng.random() < 0.25:
            cancelled.add(handles[rng.randrange(max(0, i - 8), i + 1)])
            for handle in cancelled:
                handle.cancel()
        time.sleep(rng.choice([0, 0, 0.001, 0.02]))
    finished = 0
    for handle in handles:
        try:
            made = handle.wait(60)
        except RequestCancelledError:
            assert handle in cancelled
            continue
        finished += 1
        for one in made:
            assert (one.token_ids, one.finish_reason) == alone(one.prompt_ids, one.params, one.choice)
    assert finished >= 40
    assert preemptions
    assert engine.stats().cache.tokens_reused > 0
    assert engine.scheduler.pool.free == model.blocks
    engine.close()
    model.close()


def test_sixteen_threads_each_get_their_solo_run():
    model = decoder()
    engine = engine_on(model)
    right, wrong = [], []
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=20)
    prompts = [[i * 3 + 1, i, 7] for i in range(16)]
    expected = [alone(prompt, params)[0] for prompt in prompts]

    def use(i):
        (made,) = engine.submit(prompts[i], params).wait(60)
        (right if made.token_ids == expected[i] else wrong).append(i)

    for count in (2, 16):
        threads = [threading.Thread(target=use, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert len(right) == 18
    engine.close()
    model.close()


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 128])
def test_a_warm_prompt_gives_the_bits_of_a_cold_one(length):
    """Not the tokens alone: the log-probabilities, which hang on every bit of the logits."""
    prompt = [(3 * i) % CONFIG.vocab_size for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=True, top_logprobs=5)
    model = decoder()
    engine = engine_on(model)
    (cold,) = engine.submit(prompt, params).wait(60)
    (warm,) = engine.submit(prompt, params).wait(60)
    assert (cold.reused, warm.reused) == (0, (length - 1) // 32 * 32)
    assert warm.choices == cold.choices
    (scored,) = engine.submit(prompt, replace(params, prompt_logprobs=True)).wait(60)
    assert scored.choices == cold.choices
    assert len(scored.prompt_logprobs) == length - 1
    engine.close()
    model.close()


def test_recycled_blocks_may_hold_anything():
    """Blocks full of NaN: nothing that was not written is read."""
    model = decoder(contexts=1)
    model._buffers.pool.floats[:] = np.nan
    engine = engine_on(model)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    handles = [engine.submit([i, i + 1, i + 2], params) for i in range(10)]
    for handle in handles:
        (made,) = handle.wait(60)
        assert made.token_ids == alone(made.prompt_ids, params)[0]
    engine.close()
    model.close()


def test_close_breaks_off_a_step_that_runs():
    model = decoder()
    engine = engine_on(model)
    handles = [engine.submit([i], SamplingParams(temperature=0, ignore_eos=True)) for i in range(8)]
    time.sleep(0.02)
    engine.close()
    model.close()
    for handle in handles:
        with pytest.raises(QkvError, match="closed"):
            handle.wait(10)


def memory():
    """Anonymous memory of this process, swapped out or not, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_flat_over_two_thousand_requests():
    rng = random.Random(5)
    model = decoder()
    engine = engine_on(model, speculation=True)

    def serve(count):
        for _ in range(count // 25):
            handles = []
            for _ in range(25):
                prompt, params = random_request(rng)
                handles.append(engine.submit(prompt, replace(params, n=1, max_tokens=8)))
                if rng.random() < 0.1:
                    handles[-1].cancel()
            for handle in handles:
                with contextlib.suppress(RequestCancelledError):
                    handle.wait(60)

    serve(2000)  # until the allocator has what it needs
    before = memory()
    serve(2000)
    assert memory() - before < 4_000_000
    assert engine.scheduler.pool.free == model.blocks
    engine.close()
    model.close()
