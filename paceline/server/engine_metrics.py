"""Metrics of the engine process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.kv_publisher import KvEventPublisher
from paceline.engine.engine import Engine
from paceline.engine.output import OutputDelta
from paceline.scheduler import Scheduler
from paceline.scheduler.background import fair_tenants
from paceline.server.engine_kv_transfer import EngineKvTransfer
from paceline.server.metrics import TOKENS, Histogram, MetricFamily, counter, gauge


@dataclass(slots=True)
class EngineMetrics:
    """Counters and histograms of requests, updated from their output. Used by the engine thread alone."""

    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    end_to_end: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    refused: Counter[str] = field(default_factory=Counter)  # by tenant
    num_tokens: int = 0
    kv_events: KvEventPublisher | None = None
    kv_transfer: EngineKvTransfer | None = None
    num_open: Callable[[], int] = lambda: 0  # requests whose output a front end awaits

    def add_finished(self, output: OutputDelta) -> None:
        """Adds the last output of a request."""
        timings, usage = output.timings, output.usage
        if timings is not None:
            for histogram, seconds in (
                (self.first_token, timings.first_token_s),
                (self.queue, timings.admitted_s),
                (self.end_to_end, timings.finished_s),
            ):
                if seconds is not None:
                    histogram.observe(seconds)
        if usage is not None:
            self.prompt_tokens.observe(usage.prompt_tokens)
            self.output_tokens.observe(usage.completion_tokens)

    def collect(self, scheduler: Scheduler, engine: Engine) -> list[MetricFamily]:
        counters, memory, config = scheduler.counters, scheduler.memory, scheduler.config
        used = 1 - memory.num_available_pages / config.num_pages
        busy = min(1.0, counters.device_s / engine.work_s) if engine.work_s else 1.0
        service = {name: tenant.service * tenant.weight for name, tenant in fair_tenants(scheduler.policy).items()}

        def histogram(name: str, help: str, value: Histogram) -> MetricFamily:
            return MetricFamily(name, "histogram", help, [({}, value.state())])

        return [
            gauge("num_requests_running", "Requests that hold a slot.", scheduler.num_running),
            gauge("num_requests_waiting", "Requests in the queue.", scheduler.num_waiting),
            gauge("num_requests_open", "Requests whose output a front end awaits.", self.num_open()),
            gauge("num_waiting_tokens", "Prompt tokens of the requests in the queue.",
                  scheduler.admission.num_waiting_tokens),
            gauge("kv_cache_usage_ratio", "KV cache in use by running requests and pins, 0 to 1.", used),
            gauge("kv_cache_tokens", "Capacity of the KV cache, in tokens.", config.num_pages * config.page_size),
            gauge("cache_config_info", "Sizes of the KV cache, as labels; always 1.", 1,
                  {"block_size": str(config.page_size), "num_gpu_blocks": str(config.num_pages)}),
            gauge("pinned_pages", "KV cache pages protected by a pin.", memory.num_pinned_pages),
            gauge("device_idle_ratio", "Share of engine_active_seconds in which the device ran no forward pass.",
                  1 - busy),
            counter("device_busy_seconds", "Time in which the device ran forward passes.", counters.device_s),
            counter("engine_active_seconds", "Time in which the engine had requests.", engine.work_s),
            counter("prompt_tokens", "Prompt tokens computed.", counters.computed_tokens),
            counter("generation_tokens", "Tokens generated.", self.num_tokens),
            counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prompt_tokens),
            counter("prefix_cache_hits", "Prompt tokens found in the prefix cache on the device.", counters.hit_tokens),
            counter("prefix_cache_hit_bytes", "Size of the KV cache entries that hits avoided to compute.",
                    counters.hit_tokens * engine.info.kv_bytes_per_token),
            counter("prefix_cache_fetched_tokens", "Prompt tokens fetched from host memory, in addition to the hits.",
                    counters.fetched_tokens),
            gauge("host_kv_cache_tokens", "Capacity of the host KV cache, in tokens.",
                  config.num_host_pages * config.page_size),
            gauge("host_kv_cache_tokens_used", "Tokens in the host KV cache.",
                  0 if memory.host is None else memory.host.num_pages_used * config.page_size),
            counter("spilled_pages", "Evicted pages copied to host memory.", counters.spilled_pages),
            counter("host_evicted_pages", "Pages evicted from host memory.", counters.forgotten_pages),
            counter("evicted_pages", "Cached pages evicted from the device.", counters.evicted_pages),
            counter("retractions", "Running requests preempted to free memory.", counters.retractions),
            counter("steps", "Forward passes.", counters.steps),
            counter("drafted_tokens", "Draft tokens verified by speculative decoding.", counters.drafted_tokens),
            counter("accepted_draft_tokens", "Tokens drafted and accepted by speculative decoding.",
                    counters.accepted_tokens),
            counter("discarded_tokens", "Tokens computed for requests that had already finished, or lost KV with NaN.",
                    counters.discarded_tokens),
            counter("nan_dropped_pages", "Cached pages dropped because they may contain NaN.",
                    counters.nan_dropped_pages),
            counter("nan_recomputed_requests", "Requests computed again because they had read such pages.",
                    counters.nan_recomputations),
            gauge("engine_paused", "1 while the engine is paused.", int(engine.is_paused)),
            counter("weight_updates", "Times the weights were replaced.", engine.weights.num_updates),
            counter("kv_event_batches", "Batches of KV events published.",
                    0 if self.kv_events is None else self.kv_events.num_published),
            counter("kv_event_overflows", "Times the queue of KV events overflowed and a clear was published.",
                    0 if self.kv_events is None else self.kv_events.num_overflows),
            counter("scheduler_state_repairs", "Times the idle check found inconsistent scheduler state and reset it.",
                    counters.repairs),
            *_adapter_metrics(scheduler, engine),
            *_expert_metrics(engine.executor.expert_rows),
            MetricFamily("slow_launches", "counter", "Forward passes whose launch took over 50 ms, by cause.",
                   [({"cause": cause}, count) for cause, count in engine.executor.slow_launches.items()]),
            MetricFamily("request_success", "counter", "Finished requests, by finish reason.",
                   [({"finished_reason": reason.value}, count) for reason, count in counters.finished.items()]),
            MetricFamily("requests_refused", "counter", "Requests refused because of a limit, by tenant.",
                   [({"tenant": tenant}, count) for tenant, count in self.refused.items()]),
            MetricFamily("tenant_service_tokens", "counter", "Weighted tokens served, by tenant.",
                   [({"tenant": name}, value) for name, value in service.items()]),
            histogram("time_to_first_token_seconds", "From arrival to the first token (TTFT).", self.first_token),
            histogram("inter_token_latency_seconds",
                      "From one token to the next (ITL), every gap of streamed requests; others report at their end.",
                      self.inter_token),
            histogram("e2e_request_latency_seconds", "From arrival to the last token.", self.end_to_end),
            histogram("request_queue_time_seconds", "From arrival to admission.", self.queue),
            histogram("request_prompt_tokens", "Prompt tokens per request.", self.prompt_tokens),
            histogram("request_generation_tokens", "Generated tokens per request.", self.output_tokens),
            *([] if self.kv_transfer is None else self.kv_transfer.metrics(scheduler)),
        ]  # fmt: skip


def _adapter_metrics(scheduler: Scheduler, engine: Engine) -> list[MetricFamily]:
    """Of LoRA adapters, if some are loaded."""
    loaded = engine.adapters.loaded
    if not loaded:
        return []
    slots = scheduler.memory.adapters
    running = {one.name: slots.num_users.get(one.adapter, 0) for one in loaded}
    waiting = {one.name: scheduler.num_adapter_requests(one.adapter) - running[one.name] for one in loaded}
    # As vLLM has it: names as labels, and the time as the value.
    names = {
        "max_lora": str(scheduler.config.adapter_slots),
        "running_lora_adapters": ",".join(sorted(name for name, count in running.items() if count)),
        "waiting_lora_adapters": ",".join(sorted(name for name, count in waiting.items() if count)),
    }
    return [
        gauge("lora_requests_info", "LoRA adapters of running and of waiting requests, as labels; the time.",
              time.time(), names),
        gauge("lora_adapters", "LoRA adapters that are loaded.", len(loaded)),
        counter("lora_loads", "Times an adapter was copied into a slot of the device.", slots.num_loads),
        MetricFamily("lora_requests_running", "gauge", "Running requests, by LoRA adapter.",
               [({"adapter": one.name}, running[one.name]) for one in loaded]),
        MetricFamily("lora_requests_waiting", "gauge", "Waiting requests, by LoRA adapter.",
               [({"adapter": one.name}, waiting[one.name]) for one in loaded]),
    ]  # fmt: skip


def _expert_metrics(rows: Sequence[Sequence[int]]) -> list[MetricFamily]:
    """Of a mixture of experts. rows: by layer and expert."""
    if not rows:
        return []
    totals = [sum(column) for column in zip(*rows, strict=True)]
    shares = [max(layer) * len(layer) / max(sum(layer), 1) for layer in rows]
    return [
        MetricFamily("expert_tokens", "counter", "Tokens that an expert has computed, over all layers, by expert.",
               [({"expert": str(expert)}, count) for expert, count in enumerate(totals)]),
        MetricFamily("expert_imbalance", "gauge", "Tokens of the busiest expert of a layer over their mean, by layer.",
               [({"layer": str(layer)}, share) for layer, share in enumerate(shares)]),
    ]  # fmt: skip
