"""The protocol between `compare` and its engines, with real processes; and qkv as one of them."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest

from benchmarks.worker import peak_bytes
from benchmarks.workers import ROOT, Launch, Worker, WorkerError
from decoders import packed
from tiny import random_tensors, tiny_config
from tinyfiles import write_hf

CONFIG = tiny_config()


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A process of the engine whose class body is given, which other programs' noise surrounds."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def start(body: str) -> Worker:
        source = f"import os, sys, time\nfrom benchmarks.worker import serve\nclass Engine:\n{body}\nserve(Engine())\n"
        (tmp_path / "scripted_engine.py").write_text(source)
        return Worker(Launch("scripted", sys.executable, "scripted_engine"))

    return start


def test_orders_and_answers(engine):
    body = """
    def describe(self): print('noise'); os.system('echo more'); return {'version': 'x'}
    def open(self, model, threads): self.model = model; return {'said': [model, threads]}
    def burst(self, steps): return 0.25 * steps
    def first(self, n): pass
    """
    with closing(engine(body)) as worker:
        assert worker.ask("describe") == {"version": "x"}
        assert worker.ask("open", model="ü.gguf", threads=2) == {"said": ["ü.gguf", 2]}
        assert worker.ask("burst", steps=3) == {"seconds": 0.75}
        assert worker.ask("first", n=1) == {}
        assert worker.ask("memory")["peak_bytes"] > 1 << 20


def test_an_error_is_one_line_and_the_engine_lives_on(engine):
    with closing(engine("    def burst(self): raise ValueError('bad\\nworse')")) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"^ValueError: bad$"):
                worker.ask("burst")
        with pytest.raises(WorkerError, match="AttributeError"):
            worker.ask("dance")


def test_an_engine_that_dies_says_why(engine):
    with closing(engine("    def burst(self): print('last words', file=sys.stderr); os._exit(3)")) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError, match="ended with code 3: last words"):
                worker.ask("burst")


def test_what_cannot_start():
    with pytest.raises(WorkerError, match="no-such-python cannot be started"):
        Worker(Launch("x", "no-such-python", "benchmarks.worker_qkv"))
    with (
        closing(Worker(Launch("x", sys.executable, "no_such_module"))) as worker,
        pytest.raises(WorkerError, match=r"ended with code 1: .*no_such_module"),
    ):
        worker.ask("describe")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_processor_time_of_another_process(engine):
    body = """
    def burst(self):
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        return 0.1
    """
    with closing(engine(body)) as worker:
        worker.ask("memory")
        before = worker.cpu_seconds()
        worker.ask("burst")
        assert worker.cpu_seconds() - before >= 0.08  # counted in steps of 10 ms
        rested = worker.cpu_seconds()
        assert worker.cpu_seconds() - rested <= 0.02
    assert peak_bytes() > 1 << 20


def test_closing_ends_the_process(engine):
    worker = engine("    pass")
    worker.close()
    assert worker._process.returncode == 0


def test_qkv_as_an_engine(tmp_path, monkeypatch):
    """All orders that `compare` gives, on a tiny model in float32."""
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), "F32")
    from benchmarks import worker_qkv

    engine = worker_qkv.Qkv()
    monkeypatch.setattr(worker_qkv, "load_weights", lambda *_, **__: packed(CONFIG, random_tensors(CONFIG)))
    monkeypatch.setattr(worker_qkv, "matrix_formats", lambda *_: {"table": "f32"})
    points = ["prefill:20", "decode:30", "decode:128", "batch:2"]
    assert engine.describe()["variants"] == {"f16": "f16", "int8": "int8"}
    said = engine.open(str(tmp_path), 2, points)
    weights = packed(CONFIG, random_tensors(CONFIG))
    assert said["weight_bytes"] == weights.bytes_per_token
    assert said["head_bytes"] == CONFIG.vocab_size * CONFIG.hidden_size * 4
    for point in points:
        kind, n = point.split(":")
        for variant in ("f16", "int8"):
            engine.prepare(variant, kind, int(n))
            assert engine.burst(variant, kind, int(n), 8) > 0
    engine.first(20)
    engine.open(str(tmp_path), 2, ["decode:300"])
    times = engine.overhead(20)
    assert 0 < times["outside"] < times["step"]
