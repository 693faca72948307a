"""What `/metrics` tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from qkv.engine.engine import Stats
from qkv.llm import Completion

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.replies = Counter("qkv_http_replies", "Replies by path and status", ["path", "status"], registry=own)
        self.answers = Counter("qkv_answers", "Requests to the model, by how they ended", ["outcome"], registry=own)
        self.first_token = self._seconds("time_to_first_token", "From request to first text")
        self.per_token = self._seconds("time_per_output_token", "Mean of an answer", _TOKEN_SECONDS)
        self.queued = self._seconds("queue", "From request to its first step")
        self.duration = self._seconds("request", "From request to the end of its answer")
        self.prompt = Counter("qkv_prompt_tokens", "Tokens of prompts", registry=own)
        self.cached = Counter("qkv_prompt_tokens_cached", "Tokens of prompts that the cache had", registry=own)
        self.generated = Counter("qkv_generated_tokens", "Tokens of answers", registry=own)
        self.open = Gauge("qkv_requests_open", "Requests that wait or run", registry=own)

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"qkv_{name}_seconds", what, buckets=buckets, registry=self.registry)

    def watch(self, open_requests: Callable[[], int], engine: Callable[[], Stats]) -> None:
        """Read these whenever the metrics are read."""
        self.open.set_function(open_requests)
        self.registry.register(_Engine(engine))

    def count(self, completions: Sequence[Completion], outcome: str, seconds: float) -> None:
        """Note how a request ended. Each completion stands for all choices of its prompt."""
        self.answers.labels(outcome).inc()
        self.duration.observe(seconds)
        for completion in completions:
            timings = completion.timings
            self.prompt.inc(timings.prompt_tokens)
            self.cached.inc(timings.reused_tokens)
            self.queued.observe(timings.queued_seconds)
            self.generated.inc(sum(len(choice.token_ids) for choice in completion.choices))
            if timings.decode_steps:
                self.per_token.observe(timings.decode_seconds / timings.decode_steps)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _Engine(Collector):
    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        engine = self._stats()
        yield GaugeMetricFamily("qkv_answers_running", "Answers that take part in the steps", engine.running)
        yield GaugeMetricFamily("qkv_answers_waiting", "Answers that wait for their turn", engine.waiting)
        yield CounterMetricFamily("qkv_preemptions", "Answers that gave their blocks up", engine.preemptions)
        stats = engine.cache
        yield GaugeMetricFamily("qkv_cache_blocks", "Blocks of the prefix cache", stats.blocks)
        yield GaugeMetricFamily("qkv_cache_blocks_used", "… of running requests", stats.blocks - stats.free_blocks)
        yield GaugeMetricFamily("qkv_cache_blocks_kept", "… kept for later requests", stats.kept_blocks)
        yield CounterMetricFamily("qkv_cache_queries", "Prompts looked up", stats.queries)
        yield CounterMetricFamily("qkv_cache_hits", "Prompts of which a part was found", stats.hits)
        yield CounterMetricFamily("qkv_cache_evictions", "Blocks overwritten though kept", stats.evictions)
