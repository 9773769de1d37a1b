"""Metrics in Prometheus' form. They are counted where things happen, in the engine's process and in each front end, and
put together when somebody asks; a token costs a few additions and nothing else.

Names and meanings follow what dashboards of other engines expect; `docs/serving.md` lists them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Distribution:
    bounds: Sequence[float]
    counts: Sequence[int]  # one more than bounds: the last is for what lies above
    total: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric: for each set of labels its value, or its distribution."""

    name: str
    kind: str
    help: str
    values: list[tuple[dict[str, str], float | Distribution]]


class Histogram:
    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def state(self) -> Distribution:
        return Distribution(tuple(self._bounds), tuple(self._counts), self._total)


class ServerCounters:
    """What a front end counts."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # route and status
        self.disconnects = 0
        self.slow_clients = 0
        self.connections = 0  # open now
        self.streams = 0  # being answered now

    def families(self, worker: str) -> list[MetricFamily]:
        label = {"worker": worker}
        return [
            MetricFamily("http_responses", "counter", "Answers, by route and status.",
                   [({**label, "route": route, "status": str(status)}, count)
                    for (route, status), count in sorted(self.responses.items())]),
            MetricFamily("http_disconnects", "counter", "Clients that went away.", [(label, self.disconnects)]),
            MetricFamily("http_slow_clients", "counter", "Clients given up as too slow.", [(label, self.slow_clients)]),
            MetricFamily("http_connections", "gauge", "Open connections.", [(label, self.connections)]),
            MetricFamily("http_requests_in_progress", "gauge", "Requests being answered.", [(label, self.streams)]),
        ]  # fmt: skip


class _RegistryCollector:
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for family in self._families:
            names = sorted({label for labels, _ in family.values for label in labels})
            name = f"paceline_{family.name}"
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(name, family.help, labels=names)
                for labels, value in family.values:
                    assert isinstance(value, Distribution), f"{name} is a histogram"
                    histogram.add_metric(_in_order(labels, names), _cumulative(value), value.total)
                yield histogram
                continue
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            plain = kind(name, family.help, labels=names)
            for labels, value in family.values:
                assert isinstance(value, int | float), f"{name} is a number"
                plain.add_metric(_in_order(labels, names), value)
            yield plain


def _in_order(labels: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [labels[name] for name in names]


def _cumulative(value: Distribution) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    count = 0
    for bound, here in zip((*value.bounds, "+Inf"), value.counts, strict=True):
        count += here
        found.append((str(bound), count))
    return found


def render(families: Iterable[MetricFamily], *, engine_up: bool) -> bytes:
    """The text that Prometheus reads."""
    up = MetricFamily("engine_up", "gauge", "Whether the engine answers.", [({}, int(engine_up))])
    registry = CollectorRegistry()
    registry.register(_RegistryCollector([up, *families]))
    return generate_latest(registry)
