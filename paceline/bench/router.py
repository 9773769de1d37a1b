"""`paceline bench router`: the time of a routing decision, with 64 replicas and a million cached pages.

Nothing else runs: prompts are hashed, looked up and routed on one core. A prompt begins with part of one that some
replicas hold. The hit rate is what the router expects; that of random routing is the mean over all replicas. A second
table has the requests that a replica gets which is stopped most of the time, on a virtual clock.
"""

from __future__ import annotations

import gc
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench import stalling
from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.cluster.load import LoadReport
from paceline.cluster.router import Router, RouteRequest
from paceline.config import ROUTERS
from paceline.engine.virtual.executor import SMALL_MODEL_H200

NUM_REPLICAS = 64
NUM_PAGES = 1_000_000
PROMPT_TOKENS = 2048
PAGE_SIZE = 16
NAMESPACE = ("default", "", "")
CASES = {"all of the prompt is cached": 1.0, "half": 0.5, "none": 0.0}


class _BusyCluster:
    """A router whose replicas hold a million pages: half of the prompts at one of them, half at eight."""

    def __init__(self) -> None:
        self.rng, self.now, self._count = np.random.default_rng(0), 0.0, 0
        self.router = Router(NUM_REPLICAS, PAGE_SIZE)
        self._load = LoadReport(NUM_PAGES, 100, 0, 50_000, 0.0, SMALL_MODEL_H200)
        for replica in range(NUM_REPLICAS):
            self.router.start(replica, self.now)
            self.router.report(replica, self._load, self.now, 0)
        count = -(-NUM_PAGES // (PROMPT_TOKENS // PAGE_SIZE))
        self._prompts = self.rng.integers(0, 50_000, (count, PROMPT_TOKENS), dtype=np.int32)
        started = time.perf_counter()
        for number, prompt in enumerate(self._prompts):
            hashes = block_hashes(prompt, PAGE_SIZE, root_hash(NAMESPACE)).tolist()
            for copy in range(8 if number % 2 else 1):
                self.router.stored((number + 7 * copy) % NUM_REPLICAS, hashes)
        num_events = count * PROMPT_TOKENS // PAGE_SIZE * 4.5
        self.stored_us = (time.perf_counter() - started) / num_events * 1e6

    def decide(self, cached: float) -> tuple[float, float]:
        """Routes one request, of whose prompt this fraction is cached somewhere. Returns the time in µs and the
        fraction that is cached at the chosen replica."""
        prompt = self._prompts[self.rng.integers(len(self._prompts))].copy()
        kept = round(cached * PROMPT_TOKENS)
        prompt[kept:] = self.rng.integers(0, 50_000, PROMPT_TOKENS - kept)
        self.now += 1e-3
        self._count += 1
        tenant = f"tenant-{self._count % 16}"
        started = time.perf_counter()
        decision = self.router.choose(RouteRequest(str(self._count), prompt, NAMESPACE, tenant, 256), self.now)
        spent = (time.perf_counter() - started) * 1e6
        # The engine computes and stores the rest of the prompt, evicts as much, and reports.
        new = block_hashes(prompt, PAGE_SIZE, root_hash(NAMESPACE)).tolist()[decision.num_cached_tokens // PAGE_SIZE :]
        self.router.stored(decision.replica, new)
        self.router.removed(decision.replica, new)
        self.router.report(decision.replica, self._load, self.now, decision.number)
        self.router.finished(str(self._count - 512), 100)
        return spent, decision.num_cached_tokens / PROMPT_TOKENS


def main(num_decisions: int = 3000) -> None:
    console = Console()
    cluster = _BusyCluster()
    gc.collect()
    gc.freeze()  # as a front end does after startup
    gc.disable()
    table = Table(
        title=f"a decision for {PROMPT_TOKENS:,} prompt tokens, {NUM_REPLICAS} replicas, {NUM_PAGES:,} pages, in µs"
    )
    for title in ("prompt", "p50", "p99", "hit rate", "random"):
        table.add_column(title, justify="left" if title == "prompt" else "right")
    figures: dict[str, float] = {}
    for title, cached in CASES.items():
        found = np.array([cluster.decide(cached) for _ in range(num_decisions)])
        p50, p99 = np.percentile(found[:, 0], [50, 99])
        table.add_row(title, f"{p50:.0f}", f"{p99:.0f}", f"{found[:, 1].mean():.2f}", f"{cached * 4.5 / 64:.2f}")
        name = title.split()[0]
        figures |= {f"decision_us_{name}_p50": round(p50, 1), f"decision_us_{name}_p99": round(p99, 1)}
        figures[f"hit_rate_{name}"] = round(float(found[:, 1].mean()), 3)
    gc.enable()
    gc.unfreeze()
    console.print(table)
    console.print(f"one stored page of a KV event: {cluster.stored_us:.2f} µs")
    figures["stored_us"] = round(cluster.stored_us, 3)
    table = Table(title="three replicas, one of them stopped for 90% of the time")
    for title in ("router", "its share of requests", "mean latency, ms"):
        table.add_column(title, justify="left" if title == "router" else "right")
    for name in ROUTERS:
        share, latency_s = stalling.run(name)
        table.add_row(name, f"{share:.1%}", f"{latency_s * 1e3:,.0f}")
        figures |= {f"stopped_share_{name}": round(share, 4), f"stopped_latency_ms_{name}": round(latency_s * 1e3, 1)}
    console.print(table)
    print(json.dumps(figures))
