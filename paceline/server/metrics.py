"""Prometheus metrics.

Counters are kept where events happen, in the engine process and in each front end, and are combined when /metrics is
read; a token costs a few additions. Names follow vLLM's where it has the same metric; docs/serving.md lists them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

# What the Gateway API inference extension reads, by vLLM's names.
VLLM_NAMES: Mapping[str, str] = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "cache_config_info": "vllm:cache_config_info",
    "lora_requests_info": "vllm:lora_requests_info",
}
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Distribution:
    bounds: Sequence[float]
    counts: Sequence[int]  # one more than bounds: the last counts values above all of them
    total: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric: a value or a distribution for each set of labels."""

    name: str
    kind: str
    help: str
    values: list[tuple[dict[str, str], float | Distribution]]


def gauge(name: str, help: str, value: float, labels: dict[str, str] | None = None) -> MetricFamily:
    return MetricFamily(name, "gauge", help, [(labels or {}, value)])


def counter(name: str, help: str, value: float, labels: dict[str, str] | None = None) -> MetricFamily:
    return MetricFamily(name, "counter", help, [(labels or {}, value)])


class Histogram:
    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def state(self) -> Distribution:
        return Distribution(tuple(self._bounds), tuple(self._counts), self._total)


class ServerCounters:
    """Counters of one front end."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # route and status
        self.disconnects = 0
        self.slow_clients = 0
        self.connections = 0  # open now
        self.in_progress = 0  # generation requests
        self.refused: Counter[str] = Counter()  # before tokenizing, by tenant
        self.uploads: Counter[str] = Counter()  # in progress, by tenant
        self.batches_running = 0
        self.batch_requests: Counter[str] = Counter()  # completed and failed

    def families(self, worker: str) -> list[MetricFamily]:
        label = {"worker": worker}
        responses = [
            ({**label, "route": route, "status": str(status)}, count)
            for (route, status), count in sorted(self.responses.items())
        ]
        return [
            MetricFamily("http_responses", "counter", "HTTP responses, by route and status.", list(responses)),
            counter(
                "http_disconnects",
                "Clients that disconnected before the end of their response.",
                self.disconnects,
                label,
            ),
            counter(
                "http_slow_clients",
                "Clients disconnected because they sent or read too slowly.",
                self.slow_clients,
                label,
            ),
            MetricFamily(
                "http_requests_refused",
                "counter",
                "Requests refused before they were tokenized, because of a limit of their tenant.",
                [({**label, "tenant": tenant}, count) for tenant, count in sorted(self.refused.items())],
            ),
            gauge("http_connections", "Open connections.", self.connections, label),
            gauge("http_requests_in_progress", "Generation requests in progress.", self.in_progress, label),
            gauge("batches_running", "Batches that this front end runs.", self.batches_running, label),
            MetricFamily(
                "batch_requests",
                "counter",
                "Requests of batches, by result: completed or failed.",
                [({**label, "result": result}, count) for result, count in sorted(self.batch_requests.items())],
            ),
        ]


class _RegistryCollector:
    def __init__(self, families: Iterable[MetricFamily], names: str) -> None:
        self._families, self._names = families, names

    def _named_families(self) -> Iterable[tuple[str, MetricFamily]]:
        for family in self._families:
            alias = VLLM_NAMES.get(family.name)
            if alias is None or self._names != "vllm":
                yield f"paceline_{family.name}", family
            if alias is not None and self._names != "paceline":
                yield alias, family

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for name, family in self._named_families():
            names = sorted({label for labels, _ in family.values for label in labels})
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(name, family.help, labels=names)
                for labels, value in family.values:
                    assert isinstance(value, Distribution), f"{name} is a histogram"
                    histogram.add_metric(_label_values(labels, names), _cumulative(value), value.total)
                yield histogram
                continue
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            simple = kind(name, family.help, labels=names)
            for labels, value in family.values:
                assert isinstance(value, int | float), f"{name} is a number"
                simple.add_metric(_label_values(labels, names), value)
            yield simple


def _label_values(labels: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [labels[name] for name in names]


def _cumulative(value: Distribution) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    count = 0
    for bound, in_bucket in zip((*value.bounds, "+Inf"), value.counts, strict=True):
        count += in_bucket
        found.append((str(bound), count))
    return found


def render(families: Iterable[MetricFamily], *, engine_up: bool, names: str = "paceline") -> bytes:
    """The Prometheus text format; `names` is one of METRIC_NAMES."""
    up = gauge("engine_up", "1 if the engine responds, else 0.", int(engine_up))
    registry = CollectorRegistry()
    registry.register(_RegistryCollector([up, *families], names))
    return generate_latest(registry)
