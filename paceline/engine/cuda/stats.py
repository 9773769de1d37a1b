"""Counters of the CUDA executor, for benchmarks and tests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BucketStats:
    passes: int = 0
    device_s: float = 0.0


@dataclass(slots=True, eq=False)
class ExecutorStats:
    """Counts since the last reset."""

    passes: int = 0
    graphs: int = 0  # passes that ran as a CUDA graph
    decode_context_tokens: int = 0  # KV positions that decode batches attend to
    saved_tokens: int = 0  # those of them that were read together with another row's
    device_s: float = 0.0
    idle_s: float = 0.0  # between the end of a pass and the beginning of the next, by the device's clock
    by_bucket: dict[int, BucketStats] = field(default_factory=dict)  # rows of the graph; 0: prefill and mixed batches
    fetched_pages: int = 0
    fetch_s: float = 0.0  # copying them from host memory
    launch_s: float = 0.0  # host time for launching
    wait_s: float = 0.0  # host time waiting for results

    def add_pass(self, bucket: int, device_s: float) -> None:
        self.device_s += device_s
        stats = self.by_bucket.setdefault(bucket, BucketStats())
        stats.passes += 1
        stats.device_s += device_s
