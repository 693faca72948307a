"""What goes wrong around a step, each as a function that test_faults.py runs in a process of its own.

They print nothing when all is well; an assertion ends them otherwise.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import numpy as np

from decoders import compiled, logits_of, packed
from qkv.engine.session import Session
from qkv.errors import QkvError
from qkv.model.compiled import CompiledDecoder
from qkv.model.feed import Feed, PagedCache
from qkv.runtime.aside import aside
from qkv.runtime.team import StepFailedError, team
from tiny import random_tensors, tiny_config

LAYERS = 150
TOKENS = 512


def deep(threads: int = 2, seed: int = 0) -> CompiledDecoder:
    """A tiny model with so many layers that somebody can act in the middle of a step."""
    config = tiny_config(num_hidden_layers=LAYERS, max_position_embeddings=1024)
    weights = packed(config, random_tensors(config, seed))
    return compiled(config, weights, threads=threads, context=1024, outputs=1)


def prompt(count: int = TOKENS, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()


def solo(decoder: CompiledDecoder, ids: list[int]) -> np.ndarray:
    return Session(decoder).run(ids, PagedCache())


def in_the_middle(action, *arguments) -> threading.Thread:
    """Call `action` as soon as a step runs."""

    def wait() -> None:
        while team()._running is None:
            time.sleep(0.0005)
        time.sleep(0.005)
        action(*arguments)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def interrupted() -> None:
    """Ctrl-C leaves the step before its end, the sequence as it was, and the decoder as good as new."""
    decoder, ids = deep(), prompt()
    expected, session = solo(decoder, ids), Session(decoder)
    for _ in range(5):
        cache = PagedCache()
        decoder._buffers.logits[:] = np.nan
        in_the_middle(os.kill, os.getpid(), signal.SIGINT)
        try:
            aside(lambda: session.run(ids, cache))  # noqa: B023 - it is over before the next round
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("not interrupted")
        assert np.isnan(decoder._buffers.logits).all()  # it never came to the head
        assert cache.length == 0
        assert np.array_equal(session.run(ids, cache), expected)
        session.release(cache)
        assert session.pool.free == session.pool.size


def closed() -> None:
    """`close` from another thread ends the step with an error, and other decoders go on."""
    other = deep(seed=1)
    expected = solo(other, prompt())
    decoder = deep()
    closer = in_the_middle(decoder.close)
    try:
        solo(decoder, prompt())
    except QkvError as error:
        assert "closed while it was computing" in str(error)
    else:
        raise AssertionError("not broken off")
    closer.join()
    assert np.array_equal(solo(other, prompt()), expected)


def check_in_child(decoder: CompiledDecoder, ids: list[int], expected: np.ndarray) -> None:
    signal.alarm(60)  # the test that waits for the parent cannot end a child that hangs
    os._exit(0 if np.array_equal(solo(decoder, ids), expected) else 1)


def forked() -> None:
    """A child made after loading computes the same, and so does its parent while the child lives."""
    decoder, ids = deep(), prompt()
    expected = solo(decoder, ids)
    child = os.fork()
    if child == 0:
        check_in_child(decoder, ids, expected)
    assert np.array_equal(solo(decoder, ids), expected)
    assert os.waitpid(child, 0)[1] == 0


def forked_in_the_middle() -> None:
    """A child made while another thread of the parent is in a step: it has a decoder that no step is running on."""
    decoder, ids = deep(), prompt()
    expected = solo(decoder, ids)
    worker = threading.Thread(target=solo, args=(decoder, ids))
    worker.start()
    while team()._running is None:
        time.sleep(0.0005)
    child = os.fork()
    if child == 0:
        check_in_child(decoder, ids, expected)
    worker.join()
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(solo(decoder, ids), expected)


def two_at_once() -> None:
    """Two decoders with different numbers of threads in two Python threads, many steps each."""
    sessions = [Session(deep(threads=2)), Session(deep(threads=3, seed=1))]
    ids = prompt(40)
    expected = [logits_by_one(session, ids) for session in sessions]
    results: list[np.ndarray | None] = [None, None]

    def use(k: int) -> None:
        results[k] = logits_by_one(sessions[k], ids)

    threads = [threading.Thread(target=use, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(results[0], expected[0])
    assert np.array_equal(results[1], expected[1])
    assert not np.array_equal(*expected)


def logits_by_one(session: Session, ids: list[int]) -> np.ndarray:
    cache = PagedCache()
    session.pool.grow(cache, len(ids))
    return np.stack([session.run([token], cache) for token in ids])


def one_decoder_in_two_threads() -> None:
    """The same decoder from two Python threads: their steps take turns."""
    session = Session(deep())
    prompts = [prompt(40, seed) for seed in (0, 1)]
    expected = [logits_by_one(session, ids) for ids in prompts]
    results: list[np.ndarray | None] = [None, None]

    def use(k: int) -> None:
        results[k] = logits_by_one(session, prompts[k])

    threads = [threading.Thread(target=use, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(got, want) for got, want in zip(results, expected, strict=True))


def more_threads_than_cores() -> None:
    threads = 4 * (os.cpu_count() or 1)
    one, many = deep(threads=1), deep(threads=threads)
    ids = prompt(70)
    assert np.array_equal(solo(one, ids), solo(many, ids))
    assert np.array_equal(*(logits_by_one(Session(each), ids[:5]) for each in (one, many)))


def failing_thread() -> None:
    """An exception in a worker's Python part reaches the caller, and the next step has new threads."""
    decoder, ids = deep(threads=3), prompt(70)
    expected = solo(decoder, ids)
    serve = team()._serve

    def broken(tid: int) -> int:
        if tid == 2:
            raise MemoryError("no room")
        return serve(tid)

    session = Session(decoder)
    time.sleep(0.1)  # the workers park: the next step calls them through Python
    team()._serve = broken  # type: ignore[method-assign]
    cache = PagedCache()
    try:
        session.run(ids, cache)
    except StepFailedError as error:
        assert "MemoryError: no room" in str(error)
    else:
        raise AssertionError("the failure went unnoticed")
    team()._serve = serve  # type: ignore[method-assign]
    assert cache.length == 0
    assert np.array_equal(session.run(ids, cache), expected)


def digest() -> str:
    """A hash of logits from batches of every shape, of models whose rows need padding and models whose rows don't."""
    everything = hashlib.sha256()
    shapes = [{"head_dim": 48, "intermediate_size": 160}, {"num_key_value_heads": 4}, {"architecture": "qwen2"}]
    for changes, kind in zip(shapes, ("f16", "int8", "f32"), strict=True):
        config = tiny_config(max_position_embeddings=2048, **changes)
        decoder = compiled(config, packed(config, random_tensors(config), "mixed"), cache=kind, context=700, outputs=64)
        everything.update(logits_of(decoder, prompt(64), [1, 9, 33, 1, 20]).tobytes())
        session = Session(decoder)
        long, short = PagedCache(), PagedCache()
        session.run(prompt(600), long)
        everything.update(session.step([Feed(long, [5]), Feed(short, prompt(3), "all"), Feed(PagedCache(), [1])]))
    return everything.hexdigest()
