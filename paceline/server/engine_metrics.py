"""What is measured in the engine's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta
from paceline.scheduler import Scheduler
from paceline.scheduler.fair import Fair
from paceline.server.metrics import TOKENS, Histogram, MetricFamily


@dataclass(slots=True)
class EngineMetrics:
    """What is seen of each request as its pieces go by. On the engine's thread alone."""

    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    refused: Counter[str] = field(default_factory=Counter)  # by tenant
    num_tokens: int = 0
    num_open: Callable[[], int] = lambda: 0  # requests that a front end waits for

    def took(self, piece: OutputDelta) -> None:
        """A request's last piece."""
        timings, usage = piece.timings, piece.usage
        if timings is not None:
            for histogram, seconds in ((self.first_token, timings.first_token_s), (self.queue, timings.admitted_s),
                                       (self.end_to_end, timings.finished_s)):  # fmt: skip
                if seconds is not None:
                    histogram.observe(seconds)
        if usage is not None:
            self.prompt_tokens.observe(usage.prompt_tokens)
            self.output_tokens.observe(usage.completion_tokens)

    def collect(self, scheduler: Scheduler, engine: Engine) -> list[MetricFamily]:
        counters, memory, config = scheduler.counters, scheduler.memory, scheduler.config
        used = 1 - memory.num_available_pages / config.num_pages
        busy = min(1.0, counters.device_s / engine.work_s) if engine.work_s else 1.0
        service: dict[str, float] = {}
        if isinstance(scheduler.order, Fair):
            service = {name: tenant.service * tenant.weight for name, tenant in scheduler.order.tenants.items()}

        def gauge(name: str, help: str, value: float) -> MetricFamily:
            return MetricFamily(name, "gauge", help, [({}, value)])

        def counter(name: str, help: str, value: float) -> MetricFamily:
            return MetricFamily(name, "counter", help, [({}, value)])

        def histogram(name: str, help: str, value: Histogram) -> MetricFamily:
            return MetricFamily(name, "histogram", help, [({}, value.state())])

        return [
            gauge("num_requests_running", "Requests that hold a slot.", scheduler.num_running),
            gauge("num_requests_waiting", "Requests that wait for one.", scheduler.num_waiting),
            gauge("num_requests_open", "Requests that a front end waits for.", self.num_open()),
            gauge("num_waiting_tokens", "Prompt tokens that wait.", scheduler.admission.num_waiting_tokens),
            gauge("kv_cache_usage_ratio", "KV memory in use by running requests and pins, 0 to 1.", used),
            gauge("kv_cache_tokens", "KV memory, in tokens.", config.num_pages * config.page_size),
            gauge("pinned_pages", "Pages under a pin.", memory.num_pinned_pages),
            gauge("device_idle_ratio", "Share of the time with work in which the device ran no pass.", 1 - busy),
            counter("device_busy_seconds", "Time in which the device ran passes.", counters.device_s),
            counter("work_seconds", "Time in which there was something to do.", engine.work_s),
            counter("prompt_tokens", "Prompt tokens computed.", counters.computed_tokens),
            counter("generation_tokens", "Tokens generated.", self.num_tokens),
            counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", counters.prompt_tokens),
            counter("prefix_cache_hits", "Prompt tokens found there.", counters.hit_tokens),
            counter("prefix_cache_hit_bytes", "KV memory that was not computed again.",
                    counters.hit_tokens * engine.info.kv_bytes_per_token),
            counter("prefix_cache_fetched", "Prompt tokens brought back from host memory, beside the hits.",
                    counters.fetched_tokens),
            gauge("host_kv_tokens", "Host memory for evicted KV, in tokens.", config.num_host_pages * config.page_size),
            gauge("host_kv_tokens_used", "Of it, filled.",
                  0 if memory.host is None else memory.host.num_pages_used * config.page_size),
            counter("spilled_pages", "Evicted pages copied to host memory.", counters.spilled_pages),
            counter("forgotten_pages", "Pages given up there for others.", counters.forgotten_pages),
            counter("evicted_pages", "Cached pages given up for others.", counters.evicted_pages),
            counter("retractions", "Running requests whose memory was taken away.", counters.retractions),
            counter("steps", "Forward passes.", counters.steps),
            counter("discarded_tokens", "Tokens of requests that had ended meanwhile.", counters.discarded_tokens),
            counter("repairs", "Times the books did not add up when idle.", counters.repairs),
            MetricFamily("request_success", "counter", "Requests that ended, by reason.",
                   [({"finished_reason": reason.value}, count) for reason, count in counters.finished.items()]),
            MetricFamily("requests_refused", "counter", "Requests refused because of a limit, by tenant.",
                   [({"tenant": tenant}, count) for tenant, count in self.refused.items()]),
            MetricFamily("tenant_service_tokens", "counter", "Weighted tokens a tenant was served.",
                   [({"tenant": name}, value) for name, value in service.items()]),
            histogram("time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
            histogram("inter_token_latency_seconds", "From one token to the next.", self.between_tokens),
            histogram("e2e_request_latency_seconds", "From arrival to the end.", self.end_to_end),
            histogram("request_queue_time_seconds", "From arrival to admission.", self.queue),
            histogram("request_prompt_tokens", "Prompt tokens of a request.", self.prompt_tokens),
            histogram("request_generation_tokens", "Tokens generated for a request.", self.output_tokens),
        ]  # fmt: skip
