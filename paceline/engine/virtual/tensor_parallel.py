"""Tensor parallelism on virtual GPUs: the time of a forward pass on N of them, predicted from that on one.

No machine with several GPUs was measured. What a pass does is divided by the sharding rule (`model/layout.py`), and the
rank with the largest part sets the pace:

    divided             weights that are read, GEMMs, attention by heads, KV that is read
    the same on a rank  launches, norms, the latency of the longest row, all of the host's work
    added               two all-reduces per layer, one for the embeddings, one all-gather of the logits
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from paceline.config import ConfigError
from paceline.engine.virtual.executor import PassTime
from paceline.model.layout import Shard, different_shards, target_shapes
from paceline.model.spec import ModelSpec
from paceline.scheduler.plan import Plan
from paceline.scheduler.step_time import StepTime

PREDICTED = "predicted, not measured"
_DTYPE_BYTES = 2  # bfloat16
# The residual stream of a layer: each of its two norms reads the stream and what is added, and writes both.
_NORM_PASSES = 8

# ---------------------------------------------------------------------- NVLink

# The constants by which NCCL predicts its own collectives on Hopper GPUs (NCCL 2.2x, src/graph/tuning.cc and topo.h).
NVLINK_BYTES_PER_S = 18 * 20.6e9  # 18 links
NVLINK_GPUS = 8  # of one machine
_NVLS_MIN_RANKS = 3  # fewer do not reduce in the switch


class _Protocol(NamedTuple):
    base_s: float
    step_s: float  # per step of the ring
    bandwidth: float  # as a fraction of NVLink's


_RING = (
    _Protocol(6.6e-6, 0.6e-6, 0.25),  # LL
    _Protocol(14.0e-6, 1.9e-6, 0.92),  # LL128
    _Protocol(8.4e-6, 3.4e-6, 1.0),  # Simple
)
_NVLS = _Protocol(23.0e-6, 0.0, 5 / 6)  # reduced in the NVSwitch: a rank sends and receives each byte once


def all_reduce_s(num_bytes: float, num_ranks: int) -> float:
    """An all-reduce of `num_bytes` on each rank, by the fastest of NCCL's protocols."""
    if num_ranks == 1:
        return 0.0
    times = [_ring_s(one, num_bytes, num_ranks, 2 * (num_ranks - 1)) for one in _RING]
    if num_ranks >= _NVLS_MIN_RANKS:
        times.append(_NVLS.base_s + num_bytes / (_NVLS.bandwidth * NVLINK_BYTES_PER_S))
    return min(times)


def all_gather_s(num_bytes: float, num_ranks: int) -> float:
    """An all-gather after which each rank has `num_bytes`."""
    if num_ranks == 1:
        return 0.0
    return min(_ring_s(one, num_bytes, num_ranks, num_ranks - 1) for one in _RING)


def _ring_s(protocol: _Protocol, num_bytes: float, num_ranks: int, num_steps: int) -> float:
    sent = num_bytes * num_steps / num_ranks
    return protocol.base_s + num_steps * protocol.step_s + sent / (protocol.bandwidth * NVLINK_BYTES_PER_S)


# ---------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class RankWork:
    """The work of one rank, given what one GPU takes for all of it. `bandwidth`: of the GPU's memory, bytes/s."""

    spec: ModelSpec
    num_ranks: int
    bandwidth: float

    def __post_init__(self) -> None:
        if self.num_ranks > NVLINK_GPUS:
            raise ConfigError(
                f"tp is {self.num_ranks}: the time of collectives is known for the {NVLINK_GPUS} GPUs of one machine; "
                f"choose tp {NVLINK_GPUS} or less."
            )
        Shard(0, self.num_ranks).spec(self.spec)  # raises if the model has fewer heads than that

    @cached_property
    def _shards(self) -> list[Shard]:
        return different_shards(self.spec, self.num_ranks)

    @cached_property
    def weights(self) -> float:
        """Largest part of the weights that a decode batch reads: all but an embedding that is not the head."""
        return max(map(self._num_read, self._shards)) / self._num_read(Shard())

    @cached_property
    def heads(self) -> float:
        """Largest part of the query heads."""
        return max(shard.spec(self.spec).position_macs for shard in self._shards) / self.spec.position_macs

    @cached_property
    def kv(self) -> float:
        """Largest part of the KV heads; does not fall below one head."""
        kv_bytes = [shard.spec(self.spec).kv_bytes_per_token(_DTYPE_BYTES) for shard in self._shards]
        return max(kv_bytes) / self.spec.kv_bytes_per_token(_DTYPE_BYTES)

    @cached_property
    def weights_s(self) -> float:
        """What one GPU takes to read the weights."""
        return self._num_read(Shard()) * _DTYPE_BYTES / self.bandwidth

    def _num_read(self, shard: Shard) -> int:
        skipped = set() if self.spec.tied else {"embedding"}
        return sum(prod(shape) for name, shape in target_shapes(self.spec, shard).items() if name not in skipped)

    def batch_s(self, seconds: float, fixed_s: float) -> float:
        """A pass that takes `seconds` on one GPU, of which `fixed_s` are not divided."""
        fixed_s = min(fixed_s, seconds)
        return fixed_s + (seconds - fixed_s) * self.weights

    def token_s(self, seconds: float) -> float:
        """A prompt token. Norms are those of one GPU: every rank has the whole residual stream."""
        num_bytes = _NORM_PASSES * self.spec.hidden_size * self.spec.num_layers * _DTYPE_BYTES
        return self.batch_s(seconds, num_bytes / self.bandwidth)

    def kv_tokens(self, tokens: int) -> int:
        """Tokens that the KV cache holds, given those beside the whole model on one GPU."""
        token_bytes = self.spec.kv_bytes_per_token(_DTYPE_BYTES)
        whole = self._num_stored(Shard())
        return min(
            int(
                (tokens * token_bytes + (whole - self._num_stored(shard)) * _DTYPE_BYTES)
                / shard.spec(self.spec).kv_bytes_per_token(_DTYPE_BYTES)
            )
            for shard in self._shards
        )

    def _num_stored(self, shard: Shard) -> int:
        return sum(map(prod, target_shapes(self.spec, shard).values()))

    def exchange_s(self, num_tokens: int, num_sampled: int) -> float:
        """The collectives of a pass: nothing else runs meanwhile."""
        states = num_tokens * self.spec.hidden_size * _DTYPE_BYTES
        logits = num_sampled * self.spec.vocab_size * _DTYPE_BYTES
        num_reduces = 2 * self.spec.num_layers + 1
        seconds = num_reduces * all_reduce_s(states, self.num_ranks)
        return seconds + (all_gather_s(logits, self.num_ranks) if num_sampled else 0.0)


class ShardedStepTime(PassTime):
    """The step time of one GPU, divided among ranks."""

    def __init__(self, step_time: StepTime, work: RankWork, slowdown: float = 1.0) -> None:
        self._work, self._slowdown = work, slowdown
        fixed_s = max(0.0, step_time.base - work.weights_s)
        self._step_time = StepTime(
            base=work.batch_s(step_time.base, fixed_s),
            per_prefill_token=work.token_s(step_time.per_prefill_token),
            per_decode=step_time.per_decode * work.weights,
            per_context_token=step_time.per_context_token * work.kv,
            per_draft_token=step_time.per_draft_token * work.weights,
        )

    def of(self, plan: Plan) -> float:
        num_tokens = plan.num_prefill_tokens + plan.num_decodes + plan.num_drafts
        num_sampled = int(plan.samples.sum()) + plan.num_drafts
        return self._slowdown * (self._step_time.of(plan) + self._work.exchange_s(num_tokens, num_sampled))
