"""Prometheus metrics of the API and, read at the moment of the scrape, of the engine.

One Metrics per app with a registry of its own, so tests and restarts do not share counts. `api.py` records requests,
`generate.py` tells it of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.serve.generate import Run
from parallel import wire

FIRST_TOKEN_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counts and histograms. `engine` returns the latest Stats and Ready (None while there is no engine).

    `ranks` returns host and Stats of each rank.
    """

    def __init__(
        self,
        engine: Callable[[], tuple[wire.Stats, wire.Ready | None]],
        ranks: Callable[[], list[tuple[str, wire.Stats]]] = list,
    ) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "cluster_requests", "Requests by route and outcome.", ["route", "outcome"], registry=registry
        )
        self._prompt_tokens = Counter("cluster_prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._cached_tokens = Counter(
            "cluster_cached_prompt_tokens", "Prompt tokens that the prefix cache held.", registry=registry
        )
        self._output_tokens = Counter("cluster_output_tokens", "Tokens answered.", registry=registry)
        self._first = Histogram(
            "cluster_time_to_first_token_seconds",
            "From the request's submission to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._gap = Histogram(
            "cluster_inter_token_seconds",
            "Between two tokens of a request, as they reach the API.",
            buckets=GAP_BUCKETS,
            registry=registry,
        )
        self._whole = Histogram(
            "cluster_request_seconds",
            "From the request's submission to its end.",
            buckets=WHOLE_BUCKETS,
            registry=registry,
        )
        registry.register(_EngineCollector(engine))
        registry.register(_RankCollector(ranks))

    def tokens_came(self, run: Run, gap_s: float, first: bool) -> None:
        """A token of `run` came, `gap_s` after the one before it or, for the first, after the submission."""
        (self._first if first else self._gap).observe(gap_s)

    def request_ended(self, route: str, outcome: str, run: Run | None = None) -> None:
        """Count a request. `outcome`: ok, cancelled, refused (4xx), full (429), failed (5xx)."""
        self._requests.labels(route, outcome).inc()
        if run is not None:
            self._prompt_tokens.inc(run.prompt_tokens)
            self._cached_tokens.inc(run.cached_tokens)
            self._output_tokens.inc(run.output_tokens)
            self._whole.observe(max(0.0, run.timing.end_s - run.timing.begin_s))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, from its last beat."""

    def __init__(self, engine: Callable[[], tuple[wire.Stats, wire.Ready | None]]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, ready = self._engine()
        hits = stats.prefix_hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        gauges = (
            ("cluster_engine_up", "1 while the engine takes requests.", float(ready is not None)),
            ("cluster_queue", "Requests that wait for a slot.", stats.waiting),
            ("cluster_prefilling", "Requests whose prompt is being read.", stats.prefilling),
            ("cluster_running", "Sequences that decode.", stats.running),
            ("cluster_kv_buckets", "Batches of rows of similar length.", stats.buckets),
            ("cluster_kv_used_bytes", "KV cache of open sequences.", stats.kv_bytes),
            ("cluster_kv_limit_bytes", "The KV cache's limit.", ready.kv_limit_bytes if ready else 0),
            ("cluster_prefix_cache_bytes", "KV cache kept for later requests.", stats.prefix_bytes),
            ("cluster_prefix_cache_entries", "Prefixes kept for later requests.", stats.prefix_entries),
            ("cluster_prefix_hit_ratio", "Share of prompt tokens that the prefix cache held.", hits),
            ("cluster_step_mean_seconds", "Mean time of a step.", stats.step_s / stats.steps if stats.steps else 0.0),
            ("cluster_memory_active_bytes", "The engine's memory in use.", stats.active_bytes),
            ("cluster_memory_peak_bytes", "The engine's most memory in use so far.", stats.peak_bytes),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters = (
            ("cluster_engine_steps", "Steps that the engine ran.", stats.steps),
            ("cluster_engine_step_seconds", "Time that its steps took.", stats.step_s),
            ("cluster_engine_prompt_tokens", "Prompt tokens that it took in.", stats.prompt_tokens),
            ("cluster_engine_prefix_hit_tokens", "Of these, held by the prefix cache.", stats.prefix_hit_tokens),
            ("cluster_engine_output_tokens", "Tokens that it sampled.", stats.output_tokens),
            ("cluster_engine_preempted", "Sequences put back into the queue.", stats.preempted),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)


class _RankCollector(Collector):
    """What each rank says of itself. The idle share of a stage is 1 - rate(cluster_rank_busy_seconds_total)."""

    def __init__(self, ranks: Callable[[], list[tuple[str, wire.Stats]]]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        labels = ("rank", "host")
        busy = CounterMetricFamily("cluster_rank_busy_seconds", "Time in steps, waiting left out.", labels=labels)
        memory = GaugeMetricFamily("cluster_rank_memory_bytes", "MLX memory in use.", labels=labels)
        for rank, (host, stats) in enumerate(self._ranks()):
            busy.add_metric((str(rank), host), stats.busy_s)
            memory.add_metric((str(rank), host), stats.active_bytes)
        yield from (busy, memory)
