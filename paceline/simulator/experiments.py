"""Experiments that reproduce published effects of scheduling, on the real scheduler with a virtual GPU.

`paceline sim experiment` prints each as a table and writes its plot; the scenarios are in `scenarios.py`. Experiments
with several GPUs are in `cluster_experiments.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from paceline.simulator.cluster_experiments import CLUSTER_EXPERIMENTS
from paceline.simulator.compare import process_pool
from paceline.simulator.report import Experiment, Panel, Report
from paceline.simulator.scenarios import (
    CHAT_POOL,
    CONDITIONS,
    LARGE,
    MAX_WAITS,
    PREFIX_POLICIES,
    PREFIX_SHARES,
    SMALL,
    PrefixReuse,
    batching,
    cold_and_cached,
    host_memory,
    long_prompts,
    overlap,
    prefill_overload,
    shared_prefixes,
    small_behind_large,
    small_pool,
    speculation,
    two_prefixes,
    waiting_curve,
)


def run_experiments(names: Sequence[str]) -> Iterator[tuple[str, Report]]:
    """The reports in order, computed in as many processes as there are cores."""
    with process_pool(len(names)) as pool:
        yield from zip(names, pool.map(_report, names), strict=True)


def _report(name: str) -> Report:
    return EXPERIMENTS[name].run()


def _continuous_batching() -> Report:
    steps, copies, names = 500, 16, {"static": "static", "mixed": "continuous"}
    sets = {"1 long": 0, f"{copies} long": copies}
    found = {(text, mode): batching(mode, copies=sets[text]) for text in sets for mode in names}
    rows: list[list[str | float]] = []
    for (text, mode), run in found.items():
        summary = run.result.summary()
        rows.append(
            [
                text,
                names[mode],
                round(float(np.mean(run.utilization[:steps])), 4),
                run.finished_after(steps),
                round(summary["requests_per_s"], 2),
                round(summary["latency_mean_ms"] / 1e3, 2),
                round(summary["latency_p99_ms"] / 1e3, 2),
            ]
        )
    first = next(iter(sets))
    return Report(
        ["requests", "batching", "slots in use", "finished", "requests/s", "latency mean s", "p99 s"],
        rows,
        f"8 slots, all requests arrive at once, {LARGE}. 1 long: one request of 500 tokens, 350 of 10; {copies} long: "
        f"{copies} times one of 500 and seven of 10. Slots in use and finished requests: of the first {steps} forward "
        "passes; requests/s and latency: of the whole run.",
        [
            [
                Panel(
                    "lines",
                    [float(step) for step in range(1, steps + 1)],
                    [found[first, mode].utilization[:steps] for mode in names],
                    list(names.values()),
                    "forward pass",
                    "share of slots in use",
                    "1 x 500 and 350 x 10 tokens",
                ),
                Panel(
                    "bars",
                    ["1 x 500 and 350 x 10", f"{copies} x (1 x 500 and 7 x 10)"],
                    [[found[text, mode].result.summary()["requests_per_s"] for text in sets] for mode in names],
                    list(names.values()),
                    "output tokens of the requests",
                    "finished requests/s",
                ),
            ]
        ],
    )


def _chunked_prefill() -> Report:
    whole = {"chunk_tokens": 16_384, "max_batch_tokens": 16_384, "max_prefill_tokens": 16_384}
    cases: dict[str, Mapping[str, object]] = {
        "prefill-first": {"batching": "prefill-first", **whole},
        "whole prompts": whole,
        "chunks 8,192": {"chunk_tokens": 8192},
        "chunks 2,048": {"chunk_tokens": 2048},
        "chunks 512": {"chunk_tokens": 512},
        "batch of 512": {"max_batch_tokens": 512, "max_prefill_tokens": 512},
        "itl_target 30 ms": {"itl_target": 0.03},
    }
    found = {name: long_prompts(**{"itl_target": math.inf, **options}) for name, options in cases.items()}
    itl = {name: [float(np.percentile(run.itl, at)) * 1e3 for at in (50, 99, 100)] for name, run in found.items()}
    ttft = {name: float(run.ttft.mean()) for name, run in found.items()}
    return Report(
        ["prefill", "ITL p50 ms", "ITL p99 ms", "ITL max ms", "TTFT s", "total s"],
        [
            [name, *(round(value, 1) for value in itl[name]), round(ttft[name], 2), round(run.result.seconds, 2)]
            for name, run in found.items()
        ],
        f"32 requests decode; 8 prompts of 8,000 tokens arrive meanwhile, {LARGE}. ITL: of all requests that decode; "
        "TTFT: mean of the long prompts. All but the first: batching mixed; batch of 512: max_batch_tokens.",
        [
            [
                Panel("bars", list(cases), [[one[2] for one in itl.values()]], ["ITL"], "prefill", "longest ITL, ms"),
                Panel("bars", list(cases), [list(ttft.values())], ["TTFT"], "prefill", "TTFT, long prompts, s"),
            ]
        ],
    )


_PREFILL_FIRST = {"batching": "prefill-first", "chunk_tokens": 8192}


def _prefill_overload() -> Report:
    cases: dict[str, Mapping[str, object]] = {
        "prefill first": _PREFILL_FIRST,
        "no itl_target": {"itl_target": math.inf},
        "250 ms": {"itl_target": 0.25},
        "125 ms, default": {},
        "60 ms": {"itl_target": 0.06},
    }
    found = {name: prefill_overload(**options) for name, options in cases.items()}
    rows: list[list[str | float]] = []
    for name, run in found.items():
        itl = (round(float(np.percentile(run.itl, at)) * 1e3, 1) for at in (50, 99, 100))
        rows.append([name, *itl, round(float(run.ttft.mean()), 2), round(run.result.summary()["tokens_per_s"])])
    seconds = np.arange(0.0, 23.05, 0.1)
    streams = {
        name: [times for request, times in run.token_times.items() if request.startswith("stream")]
        for name, run in found.items()
    }
    shown, limited = ["prefill first", "no itl_target", "125 ms, default"], list(cases)[1:]
    return Report(
        ["prefill", "ITL p50 ms", "ITL p99 ms", "ITL max ms", "TTFT mean s", "tokens/s"],
        rows,
        f"190 requests decode; from 1 s on, 60 prompts of 3,000 to 6,000 tokens arrive within 10 s and decode, too, "
        f"{LARGE}. ITL: of all requests; TTFT: of the 60. Prefill first: prefill batches of 8,192 tokens run before "
        "decode batches; all others: mixed batches, by itl_target.",
        [
            [
                Panel(
                    "lines",
                    seconds.tolist(),
                    [
                        np.mean([np.searchsorted(times, seconds, side="right") for times in streams[name]], 0).tolist()
                        for name in shown
                    ],
                    shown,
                    "s",
                    "tokens so far",
                    "the 190 requests that decode, mean",
                ),
                Panel(
                    "bars",
                    limited,
                    [[float(found[name].itl.max()) * 1e3 for name in limited]],
                    ["ITL max"],
                    "itl_target, mixed batches",
                    "longest ITL, ms",
                    "all 250 requests",
                ),
            ]
        ],
    )


def _small_behind_large() -> Report:
    cases: dict[str, Mapping[str, object]] = {
        "prefill first": {**_PREFILL_FIRST, "policy": "fcfs"},
        "no itl_target": {"itl_target": math.inf},
        "default": {},
    }
    models = {"14B": LARGE, "0.6B": SMALL}
    found = {(model, name): small_behind_large(gpu, **cases[name]) for model, gpu in models.items() for name in cases}
    names = ["small, p50", "small, p99", "large, p50", "large, p99"]
    ttft = {
        key: [float(np.percentile(column, at)) for column in (run.small, run.large) for at in (50, 99)]
        for key, run in found.items()
    }
    return Report(
        ["model", "prefill", *(f"TTFT {name} s" for name in names), "total s"],
        [[*key, *(round(value, 3) for value in ttft[key]), round(run.result.seconds, 2)] for key, run in found.items()],
        f"18 prompts of 2,560 tokens and then 11 of 256 arrive within 191 ms, 64 output tokens each, {LARGE} and "
        f"{SMALL}. Prefill first: prefill batches of 8,192 tokens, first come, first served.",
        [
            [
                Panel(
                    "bars",
                    names,
                    [[round(value * scale, 2) for value in ttft[model, name]] for name in cases],
                    list(cases),
                    "prompts of 256 and of 2,560 tokens",
                    f"TTFT, {unit}",
                    f"Qwen3-{model}",
                )
                for model, unit, scale in (("14B", "s", 1), ("0.6B", "ms", 1e3))
            ]
        ],
    )


def _shared_prefixes() -> Report:
    found = {
        (name, policy, share): shared_prefixes(policy, share, **options)
        for name, options in CONDITIONS.items()
        for policy in PREFIX_POLICIES
        for share in PREFIX_SHARES
    }
    rows: list[list[str | float]] = []
    for name in CONDITIONS:
        for policy in PREFIX_POLICIES:
            usual = found[name, policy, 0.75]
            rows.append(
                [
                    name,
                    policy,
                    *(round(found[name, policy, share].hit_rate, 2) for share in PREFIX_SHARES),
                    round(usual.shared_hit_rate, 2),
                    round(float(usual.waits.mean()), 2),
                    round(float(np.percentile(usual.waits, 99)), 2),
                ]
            )

    titles = ("1 slot", "16 slots, prefix_wait off", "16 slots, prefix_wait on")

    def panel(name: str, value: Callable[[PrefixReuse], float], y_title: str, title: str) -> Panel:
        lines = [[value(found[name, policy, share]) for share in PREFIX_SHARES] for policy in PREFIX_POLICIES]
        x_title = "share of requests with the prefix"
        return Panel("lines", list(PREFIX_SHARES), lines, list(PREFIX_POLICIES), x_title, y_title, title)

    return Report(
        ["condition", "policy", *(f"{share:g}" for share in PREFIX_SHARES), "of prefix", "mean s", "p99 s"],
        rows,
        "Hit rate by share of requests that begin with the same 2,000 tokens; 32 requests of 2,040 tokens arrive at "
        f"once in an empty cache, mean of 8 orders, {LARGE}. At share 0.75: hit rate of the prefix tokens alone (at "
        "most 23/24), and waiting time. 1 slot: memory for one request; 16: ample memory, prefix_wait off and on.",
        [
            [
                panel(name, lambda reuse: reuse.hit_rate, "hit rate", title)
                for name, title in zip(CONDITIONS, titles, strict=True)
            ],
            [panel(name, lambda reuse: float(reuse.waits.mean()), "mean wait, s", "") for name in CONDITIONS],
        ],
    )


def _two_prefixes() -> Report:
    pools, policies = (8_000, 2_600), ("fcfs", "lpm", "dfs", "fair")
    whole = {policy: [two_prefixes(policy, pool, partial_eviction=False) for pool in pools] for policy in policies}
    partial = {policy: two_prefixes(policy, 2_600) for policy in policies}
    names = ["8,000 tokens", "2,600 tokens", "2,600 tokens, partial eviction"]
    rows = {policy: [*whole[policy], partial[policy]] for policy in policies}
    return Report(
        ["policy", *names],
        [[policy, *values] for policy, values in rows.items()],
        "Prefix tokens computed for A, B, A, B, A, B by size of the KV cache; the minimum is 3,500, each prefix once.",
        [
            [
                Panel(
                    "bars",
                    list(policies),
                    [[float(rows[policy][at]) for policy in policies] for at in range(3)],
                    [f"KV cache of {name}" for name in names],
                    "policy",
                    "prefix tokens computed",
                )
            ]
        ],
    )


_WAIT_NAMES = ["∞" if math.isinf(max_wait) else f"{max_wait:g} s" for max_wait in MAX_WAITS]


def _max_wait() -> Report:
    waits = [waiting_curve(max_wait).summary() for max_wait in MAX_WAITS]
    rows: list[list[str | float]] = [
        [
            name,
            round(found["hit_rate"], 4),
            round(found["wait_p50_ms"] / 1e3, 3),
            round(found["wait_p99_ms"] / 1e3, 3),
            round(found["tokens_per_s"]),
        ]
        for name, found in zip(_WAIT_NAMES, waits, strict=True)
    ]
    return Report(
        ["max_wait", "hit rate", "wait p50 s", "wait p99 s", "tokens/s"],
        rows,
        f"400 requests in 40 groups, policy fair, a KV cache of 16,000 tokens for ten of them, {SMALL}.",
        [
            [
                Panel("bars", _WAIT_NAMES, [[one["hit_rate"] for one in waits]], ["hit rate"], "max_wait", "hit rate"),
                Panel(
                    "bars",
                    _WAIT_NAMES,
                    [[one["wait_p50_ms"] / 1e3 for one in waits], [one["wait_p99_ms"] / 1e3 for one in waits]],
                    ["p50", "p99"],
                    "max_wait",
                    "waiting time, s",
                ),
            ]
        ],
    )


def _fairness_curve() -> Report:
    policies = ("lpm", "fair")
    rows: list[list[str | float]] = []
    panels = []
    for policy in policies:
        runs = [cold_and_cached(max_wait, policy) for max_wait in MAX_WAITS]
        found = [run.summary() for run in runs]
        for name, run, summary in zip(_WAIT_NAMES, runs, found, strict=True):
            waits = {
                kind: [one.admitted - one.arrival for one in run.served if one.id.startswith(kind)]
                for kind in ("popular", "rare")
            }
            rows.append(
                [
                    policy,
                    name,
                    round(summary["hit_rate"], 3),
                    round(summary["wait_p99_ms"] / 1e3, 2),
                    round(float(np.mean(waits["popular"])), 2),
                    round(float(np.mean(waits["rare"])), 2),
                    round(summary["seconds"], 1),
                ]
            )
        panels.append(
            Panel(
                "lines",
                [summary["wait_p99_ms"] / 1e3 for summary in found],
                [[summary["hit_rate"] for summary in found]],
                [policy],
                "waiting time p99, s",
                "hit rate",
                f"policy {policy}",
                points=[f"{name} (default)" if name == "0.2 s" else name for name in _WAIT_NAMES],
            )
        )
    return Report(
        ["policy", "max_wait", "hit rate", "wait p99 s", "popular mean s", "rare mean s", "total s"],
        rows,
        "500 requests at 22 a second, more than the GPU can serve without cache hits; 70% begin with a popular prefix, "
        f"the others with a rare one that is seldom cached, {LARGE}.",
        [panels],
    )


def _overlap() -> Report:
    sizes, models = (1, 16, 64, 256), {"0.6B": SMALL, "14B": LARGE}
    rows: list[list[str | float]] = []
    idle: dict[str, list[float]] = {f"{model}, {mode}": [] for model in models for mode in ("off", "on")}
    ratios: dict[str, list[float]] = {model: [] for model in models}
    for model, gpu in models.items():
        for size in sizes:
            off, on = (overlap(size, enabled, gpu).summary() for enabled in (False, True))
            idle[f"{model}, off"].append(round(100 * (1 - off["busy"]), 1))
            idle[f"{model}, on"].append(round(100 * (1 - on["busy"]), 1))
            speeds = off["tokens_per_s"], on["tokens_per_s"]
            ratios[model].append(speeds[1] / speeds[0])
            shares = (round(1 - one["busy"], 4) for one in (off, on))
            rows.append([model, size, *shares, *map(round, speeds), round(ratios[model][-1], 3)])
    x = [str(size) for size in sizes]
    return Report(
        ["model", "requests", "idle, off", "idle, on", "tokens/s, off", "tokens/s, on", "ratio"],
        rows,
        f"Prompts of 128 tokens, outputs of 256; share of time the GPU is idle with overlap off and on, {SMALL} and "
        f"{LARGE}.",
        [
            [
                Panel("bars", x, list(idle.values()), list(idle), "running requests", "GPU idle, % of the time"),
                Panel("bars", x, list(ratios.values()), list(ratios), "running requests", "tokens/s, overlap on / off"),
            ]
        ],
    )


def _speculation() -> Report:
    sizes, models = (1, 4, 16, 64, 128, 256), {"14B": LARGE, "0.6B": SMALL}
    usual, depth = 0.6, 4
    cases = [(depth, 0.2), (depth, 0.4), (depth, usual), (depth, 0.8), (2, usual), (7, usual)]
    speedups: dict[tuple[str, int, float], list[float]] = {}
    yields: dict[tuple[int, float], float] = {}  # tokens per row and pass, of the largest batch
    for model, gpu in models.items():
        plain = [float(speculation(size, 0, 0.0, gpu).tpot.mean()) for size in sizes]
        for drafts, acceptance in cases:
            runs = [speculation(size, drafts, acceptance, gpu) for size in sizes]
            found = [before / float(run.tpot.mean()) for before, run in zip(plain, runs, strict=True)]
            speedups[model, drafts, acceptance] = found
            yields[drafts, acceptance] = runs[-1].summary()["tokens_per_decode"]

    def panel(model: str, lines: dict[str, tuple[int, float]], title: str) -> Panel:
        return Panel(
            "lines",
            [str(size) for size in sizes],
            [speedups[model, *case] for case in lines.values()],
            list(lines),
            "running requests",
            "speed-up of decoding",
            title,
            baseline=(1.0, "no drafts"),
        )

    by_acceptance = {f"acceptance {case[1]:g}": case for case in cases[3::-1]}
    by_depth = {f"{case[0]} drafts": case for case in sorted(cases, reverse=True) if case[1] == usual}
    return Report(
        ["model", "drafts", "acceptance", "tokens/row", *map(str, sizes)],
        [
            [model, drafts, acceptance, round(yields[drafts, acceptance], 2), *(round(value, 2) for value in found)]
            for (model, drafts, acceptance), found in speedups.items()
        ],
        "Speed-up: time per output token without drafts over that with drafts, by number of running requests, "
        f"prompts of 64 tokens, {LARGE} and {SMALL}. Acceptance: probability that a draft is right if those before it "
        "are; tokens/row: output tokens of a decode row in a forward pass. Passes of more than 64 rows "
        "are an estimate; for more than 512 tokens an engine has no CUDA graph and verifies fewer drafts.",
        [
            [
                panel("14B", by_acceptance, f"Qwen3-14B, {depth} drafts"),
                panel("0.6B", by_acceptance, f"Qwen3-0.6B, {depth} drafts"),
                panel("14B", by_depth, f"Qwen3-14B, acceptance {usual:g}"),
            ]
        ],
    )


def _retraction() -> Report:
    ample = small_pool(4_000)
    lengths = {name: len(tokens) for name, tokens in ample.outputs.items()}
    expected = {"2 tokens": dict.fromkeys(lengths, 2), "learned": None, "exact": lengths}
    pools = (45, 60, 90, 150, 4_000)
    found = {name: [small_pool(pool, tokens) for pool in pools] for name, tokens in expected.items()}
    same = [all(runs[at].outputs == ample.outputs for runs in found.values()) for at in range(len(pools))]
    counts = {name: [float(run.retractions) for run in runs] for name, runs in found.items()}
    return Report(
        ["pages", *(f"expected: {name}" for name in expected), "outputs"],
        [
            [f"{pool:,}", *(int(values[at]) for values in counts.values()), "identical" if same[at] else "DIFFERENT"]
            for at, pool in enumerate(pools)
        ],
        "Retractions of 40 requests of up to 48 output tokens, by the output length that admission expects, on a toy "
        "model whose tokens depend on all KV before them. Outputs are compared with those of ample memory.",
        [
            [
                Panel(
                    "bars",
                    [f"{pool:,}" for pool in pools],
                    list(counts.values()),
                    [f"expected length: {name}" for name in expected],
                    "pages of KV cache",
                    "retractions",
                )
            ]
        ],
    )


def _host_memory() -> Report:
    sizes = [times * CHAT_POOL for times in (0, 1, 2, 4)]
    runs = {size: host_memory(size) for size in sizes}
    shares: dict[str, list[float]] = {"cached on the device": [], "fetched from the host": [], "computed": []}
    rows: list[list[str | float]] = []
    for size, run in runs.items():
        found, counters = run.summary(), run.counters
        parts = (counters.hit_tokens, counters.fetched_tokens, counters.computed_tokens)
        for name, part in zip(shares, parts, strict=True):
            shares[name].append(round(part / counters.prompt_tokens, 2))
        rows.append(
            [
                size,
                *(share[-1] for share in shares.values()),
                round(found["ttft_p50_ms"] / 1e3, 3),
                round(found["ttft_p99_ms"] / 1e3, 2),
                round(found["busy"], 3),
            ]
        )
    return Report(
        ["host memory, tokens", "cached", "fetched", "computed", "TTFT p50 s", "TTFT p99 s", "GPU busy"],
        rows,
        f"300 turns of conversations, a KV cache of {CHAT_POOL:,} tokens, {LARGE}; shares of all prompt tokens.",
        [
            [
                Panel(
                    "bars",
                    [f"{size:,}" for size in sizes],
                    list(shares.values()),
                    list(shares),
                    "host memory, tokens",
                    "share of prompt tokens",
                )
            ]
        ],
    )


EXPERIMENTS: dict[str, Experiment] = {
    "continuous-batching": Experiment(
        "Continuous and static batching: slots in use, requests per second",
        "nano-vLLM deep dive, chapter 5: GPU utilisation over 500 steps (static 23%, continuous 95%), 5-10x requests/s",
        _continuous_batching,
    ),
    "chunked-prefill": Experiment(
        "Chunked prefill: long prompts between decodes",
        "Sarathi-Serve: stall-free batching; Mini-SGLang docs: chunked prefill",
        _chunked_prefill,
    ),
    "prefill-overload": Experiment(
        "Decode starvation: more prompts than the GPU can compute",
        "SGLang issue 32549: prefill first, 360 prompts of 3,000-6,000 tokens a minute, one decode batch in 24 s",
        _prefill_overload,
    ),
    "small-behind-large": Experiment(
        "Head-of-line blocking: short prompts behind a burst of long ones",
        "SGLang pull request 22904: 18 prompts of 2,560 and 11 of 256 tokens; TTFT of the short ones 15.6 s (p50)",
        _small_behind_large,
    ),
    "shared-prefixes": Experiment(
        "Cache-aware order and in-batch prefix caching: hit rate by shared prefixes",
        "cache-aware scheduling lesson: LPM-first vs FCFS hit rate (FCFS and SJF about 50%, LPM above 95%)",
        _shared_prefixes,
    ),
    "two-prefixes": Experiment(
        "Cache thrashing: two prefixes in a KV cache for one",
        "cache-aware scheduling lesson: trace of A, B, A, B, A, B under FCFS and LPM-first",
        _two_prefixes,
    ),
    "max-wait": Experiment(
        "Aging in a cache for a quarter of the prefixes: hit rate and waiting time, by max_wait",
        "cache-aware scheduling lesson: first come, first served in a cache that is too small",
        _max_wait,
    ),
    "fairness-curve": Experiment(
        "Fairness curve: hit rate against p99 waiting time, by max_wait",
        "cache-aware scheduling lesson: hit rate vs p99 wait as FAIRNESS_T varies, best at 200 ms",
        _fairness_curve,
    ),
    "overlap": Experiment(
        "Overlap scheduling: GPU idle time and throughput, two model sizes",
        "SGLang v0.4 blog: zero-overhead scheduler, up to 1.3x; Mini-SGLang docs: overlap helps less with large models",
        _overlap,
    ),
    "speculation": Experiment(
        "Speculative decoding: speed-up by batch size, acceptance and number of drafts",
        "Leviathan et al.: (1 - a^(k+1)) / (1 - a) tokens per pass; SmartSpec (goodput): slower at high request rates",
        _speculation,
    ),
    "retraction": Experiment(
        "Retraction: a KV cache that is too small, by expected output length",
        "nano-vLLM deep dive, chapter 5: preemption does not change the output; SGLang: new_token_ratio",
        _retraction,
    ),
    "host-memory": Experiment(
        "KV offloading: conversations that do not fit into the KV cache",
        "nano-vLLM deep dive, chapter 5: swap vs recompute; SGLang HiCache",
        _host_memory,
    ),
    **CLUSTER_EXPERIMENTS,
}
