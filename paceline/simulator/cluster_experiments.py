"""Experiments with several virtual GPUs: replicas behind a router, and tensor parallelism."""

from __future__ import annotations

from paceline.config import ROUTERS
from paceline.engine.virtual.tensor_parallel import PREDICTED
from paceline.simulator.report import Experiment, Panel, Report
from paceline.simulator.scenarios import CHAT_POOL, LARGE, REPLICAS, SMALL, routing, tensor_parallel


def _routing() -> Report:
    found = {router: routing(router).summary() for router in ROUTERS}
    rows: list[list[str | float]] = [
        [
            router,
            round(run["hit_rate"], 3),
            round(run["ttft_p50_ms"] / 1e3, 3),
            round(run["ttft_p90_ms"] / 1e3, 3),
            round(run["tpot_p50_ms"], 1),
            round(run["tokens_per_s"]),
        ]
        for router, run in found.items()
    ]
    return Report(
        ["router", "hit rate", "TTFT p50 s", "TTFT p90 s", "TPOT p50 ms", "tokens/s"],
        rows,
        f"{REPLICAS} replicas with a KV cache of {CHAT_POOL:,} tokens each, {LARGE}; 1,500 requests, 90 a second; 200 "
        "system prompts of 1,840 tokens, their popularity follows Zipf's law, and 200 tokens of their own.",
        [
            [
                Panel("bars", list(found), [[run["hit_rate"] for run in found.values()]], ["hit rate"], "router",
                      "prefix cache hit rate"),
                Panel("bars", list(found), [[run["ttft_p90_ms"] / 1e3 for run in found.values()]], ["TTFT p90"],
                      "router", "TTFT p90, s"),
            ]
        ],
    )  # fmt: skip


def _tensor_parallel() -> Report:
    sizes, counts, models = (1, 32, 256), (1, 2, 4, 8), {"0.6B": SMALL, "14B": LARGE}
    found = {
        (model, size, count): tensor_parallel(size, count, gpu)
        for model, gpu in models.items()
        for size in sizes
        for count in counts
    }
    rows: list[list[str | float]] = []
    for (model, size, count), run in found.items():
        summary, alone = run.result.summary(), found[model, size, 1].result.summary()
        rows.append(
            [
                model,
                size,
                count,
                round(run.itl * 1e3, 2),
                round(run.exchange_s / run.itl, 2),
                round(summary["ttft_mean_ms"]),
                round(summary["tokens_per_s"]),
                round(summary["tokens_per_s"] / alone["tokens_per_s"], 2),
            ]
        )

    def panel(model: str) -> Panel:
        speedups = [[found[model, size, 1].itl / found[model, size, count].itl for count in counts] for size in sizes]
        labels = [f"{size} request{'s' if size > 1 else ''}" for size in sizes]
        x, title = [str(count) for count in counts], f"Qwen3-{model}, {PREDICTED}"
        return Panel("lines", x, speedups, labels, "GPUs", "speed-up of decoding", title, baseline=(1.0, "one GPU"))

    return Report(
        ["model", "requests", "GPUs", "ITL p50 ms", "exchange", "TTFT ms", "tokens/s", "speed-up"],
        rows,
        f"Several GPUs are {PREDICTED}: {SMALL} and {LARGE} divided by the sharding rule, and collectives by NCCL's "
        "own model of NVLink. Prompts of 1,024 tokens and outputs of 128, all at once. Exchange: share of a decode "
        "batch that is collectives; tokens/s and speed-up: of the whole run.",
        [[panel(model) for model in models]],
    )


CLUSTER_EXPERIMENTS: dict[str, Experiment] = {
    "routing": Experiment(
        "Routing between replicas: hit rate and time to first token",
        "SGLang v0.4 blog: cache-aware load balancer, up to 1.9x throughput and 3.8x hit rate against round-robin",
        _routing,
    ),
    "tensor-parallel": Experiment(
        "Tensor parallelism: time per token and throughput by number of GPUs and batch size (predicted, not measured)",
        "Megatron-LM: two all-reduces per layer in the forward pass",
        _tensor_parallel,
    ),
}
