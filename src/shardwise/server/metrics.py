"""Prometheus metrics of one server, under the names that dashboards of the field know, with our prefix.

Latencies and tokens are counted here, as a client sees them; gauges and preemptions come from the engine's Stats.
"""

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.server.backend import Engine

PREFIX = "shardwise_"
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
NEXT_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "preemptions": ("num_preemptions", "Requests that gave up their room."),
        "pictures_encoded": ("pictures_encoded", "Pictures, or pairs of frames, that the vision tower encoded."),
        "pictures_reused": ("pictures_reused", "Those that it had encoded before."),
        "looked_up_tokens": ("prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache."),
        "cached_tokens": ("prefix_cache_hits", "Tokens of prompts that were found there."),
        "host_cached_tokens": ("prefix_cache_host_hits", "Of those, the ones that only host memory had."),
        "expert_hits": ("expert_cache_hits", "Experts that a step wanted of a layer and found on the device."),
        "expert_misses": ("expert_cache_misses", "Experts that it did not find there."),
        "expert_copied_bytes": ("expert_copied_bytes", "Of experts, copied to the first rank's device."),
        "snapshot_evictions": ("prefix_cache_evictions", "Recurrent states that made room for others."),
    }
)


class _EngineCollector(Collector):
    """The engine's own figures at the time of a scrape; zero while it restarts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._totals = dict.fromkeys(COUNTERS, 0)  # of engines that are gone and this one
        self._seen = dict.fromkeys(COUNTERS, 0)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        if stats is not None:
            # A restarted engine counts from zero again, and a counter may not fall.
            for name in COUNTERS:
                count, seen = getattr(stats, name), self._seen[name]
                self._totals[name] += count - (seen if count >= seen else 0)
                self._seen[name] = count
        gauges = (
            ("num_requests_running", "Requests in the engine's steps.", stats.running if stats else 0),
            ("num_requests_waiting", "Requests that wait for room.", stats.waiting if stats else 0),
            (
                "kv_cache_usage_perc",
                "Share of the KV cache in use; 1 is all.",
                stats.kv_tokens_used / max(1, stats.kv_tokens) if stats else 0.0,
            ),
            ("state_rows_used", "Rows of recurrent state in use.", stats.state_rows_used if stats else 0),
            (
                "picture_tokens_held",
                "Tokens of encoded pictures that are kept.",
                stats.picture_tokens_held if stats else 0,
            ),
            (
                "prefix_cache_usage_perc",
                "Share of the KV cache that only the prefix cache holds; it is given up when needed.",
                stats.kv_tokens_cached / max(1, stats.kv_tokens) if stats else 0.0,
            ),
            ("snapshots", "Recurrent states in the prefix cache.", stats.snapshots if stats else 0),
            (
                "prefix_cache_host_usage_perc",
                "Share of the host tier's room for pages that is in use.",
                stats.host_kv_tokens_used / max(1, stats.host_kv_tokens) if stats else 0.0,
            ),
            ("host_snapshots", "Recurrent states in the host tier.", stats.host_snapshots if stats else 0),
            ("expert_slots", "Experts of a layer that are on the device; 0: all.", stats.expert_slots if stats else 0),
            ("engine_ready", "1 if a step has run on every rank.", int(self._engine.ready is not None)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, (public, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + public, text, value=self._totals[name])


class Metrics:
    """All metrics of one app, in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.next_token = histogram("inter_token_latency_seconds", "Between two tokens.", NEXT_TOKEN_BUCKETS)
        self.request = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prompt_tokens_cached", "Tokens of prompts that were not computed again.")
        self.generated_tokens = counter("generation_tokens", "Tokens of answers.")
        self.finished = counter("request_success", "Answers that ended, by reason.", ("finished_reason",))
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(reason)


class Meter:
    """Measures one answer: `tokens` with each message of the engine's, `end` once."""

    def __init__(self, metrics: Metrics, arrival_s: float) -> None:
        """arrival_s: by time.monotonic."""
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_s: float | None = None

    def tokens(self, count: int, prompt_tokens: int, cached_tokens: int) -> None:
        """`count` new tokens; the prompt's are counted with the first."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._metrics.first_token.observe(now_s - self._arrival_s)
            self._metrics.prompt_tokens.inc(prompt_tokens)
            self._metrics.cached_tokens.inc(cached_tokens)
            self._last_s, count_before = now_s, 1
        else:
            count_before = 0
        self._metrics.generated_tokens.inc(count)
        gaps = count - count_before
        for _ in range(gaps):
            self._metrics.next_token.observe((now_s - self._last_s) / gaps)
        if count:
            self._last_s = now_s

    def end(self, reason: str) -> None:
        """reason: stop, length, abort (the client left) or error."""
        self._metrics.finished.labels(reason).inc()
        self._metrics.request.observe(time.monotonic() - self._arrival_s)
