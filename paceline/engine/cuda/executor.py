"""The executor for CUDA: launches passes and never waits for one.

    host    pack N+1 ─▶ pinned buffer            wait for the event of N ─▶ tokens of N
    copy            └─▶ staging N+1 (event) ┐
    engine  ── pass N ──────────────────────┴─ pass N+1 ───┬─ …
    results ── pinned results of N - 1 (event) ────────────┴─▶ pinned results of N + 1 (event)

The engine stream runs passes and applies every change of device state; the copy stream brings each pass's packed
upload into a staging buffer, the results stream its results out. On one stream the upload of N+1 stood behind the
results of N, and so behind N itself, and N+1 began a copy late. A pass uses one of a few `_InFlight`s: its buffers are
not touched again before its results have been read. Pages that go to host memory or come back do so on two streams more
(cuda_swap.py). Tokens chain on the device: sampling writes them into `token_pool`,
where the next pass finds them. What a pass does follows from its plan alone.

A decode pass is one small kernel that applies the upload, and one graph. A pass with many prompt tokens is launched
kernel by kernel, which takes the host a few milliseconds; they are hidden behind the pass before. With few of them they
would not be: such a pass is a graph, too, up to the logits, as soon as it has been seen a few times. What changes from
one to the next lies in the upload, and is copied to where the graph reads it.

Noise is keyed by seed, position and token, as on the CPU, but by another hash (kernels/sampling.py): a seed gives the
same tokens on every run of one kind of device, not across kinds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.engine.cuda.graphs import CudaGraphs, GraphKey, GraphStage, kind_of
from paceline.engine.cuda.inputs import PROMPT_SIZES, SHARED_CHUNKS, Packed, PlanPacker, ShareRule, UploadSpan
from paceline.engine.cuda.model import AttendKernel, CudaModel
from paceline.engine.cuda.prefill import PrefillRunner
from paceline.engine.cuda.sampling import CudaSampling, Told, told_columns
from paceline.engine.cuda.streams import CudaEvent, Graph, Streams
from paceline.engine.cuda.swap import CudaSwap
from paceline.engine.executor import Capabilities, Executor, Result
from paceline.kernels._triton import cdiv
from paceline.kernels.adjust import write_runs
from paceline.kernels.decode_attention import (
    ALL_UNITS,
    NONE_SHARED,
    OWN_UNITS,
    SHARED_UNITS,
    DecodeTuning,
    DecodeWorkspace,
    decode_attention,
    decode_attention_tuning,
    tiles_fit,
)
from paceline.kernels.decode_units import Chunks, DecodeUnits, decode_chunks, decode_units
from paceline.kernels.extend_tiles import SplitRule
from paceline.kernels.gather_tokens import gather_tokens
from paceline.kernels.logprobs import TOLD_WORDS
from paceline.kernels.slot_state import SlotState, apply_diff
from paceline.sampling.logprobs import LogprobRequest
from paceline.sampling.types import Bits, Masks
from paceline.scheduler.plan import NO_TOKENS, Plan, Swap

# rows, query heads per KV head, query heads in a unit that rows share or 0, whether contexts are short -> for units of
# one row, and for those that rows share
AttentionTuning = Callable[[int, int, int, bool], tuple[DecodeTuning, DecodeTuning]]
ChunkChoice = Callable[[int], Chunks]  # rows
SplitChoice = Callable[[int, int], SplitRule]  # KV heads, the widest window where every layer has one

_DEPTH = 4  # passes whose buffers exist; two are in flight at most
_FIRST_WORDS = 1 << 18  # of an upload buffer; it grows when a pass brings more
_MAX_SHARED_UNITS = 1 << 14  # of all rows together, where rows share: longer ones are cut into longer chunks


@dataclass(slots=True, eq=False)
class BucketStats:
    passes: int = 0
    device_s: float = 0.0


@dataclass(slots=True, eq=False)
class ExecutorStats:
    """Since the last reset. Idle: from the end of a pass to the beginning of the next, as the device's clock has it."""

    passes: int = 0
    graphs: int = 0
    decode_context_tokens: int = 0  # KV positions that decode passes address
    saved_tokens: int = 0  # of these, not read because another row's reading serves this one too
    device_s: float = 0.0
    idle_s: float = 0.0
    by_bucket: dict[int, BucketStats] = field(default_factory=dict)  # rows of the graph; 0: passes with prompts
    fetched_pages: int = 0
    fetch_s: float = 0.0  # that they were on their way from host memory
    launch_s: float = 0.0  # the host, launching
    wait_s: float = 0.0  # the host, waiting for results

    def note(self, bucket: int, device_s: float) -> None:
        self.device_s += device_s
        of = self.by_bucket.setdefault(bucket, BucketStats())
        of.passes += 1
        of.device_s += device_s


class _InFlight:
    """The buffers and events of one pass at a time."""

    def __init__(self, streams: Streams, max_rows: int, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self.uploaded, self.began, self.ended, self.copied = (streams.event() for _ in range(4))
        self.fetch_began, self.fetched = (streams.event() for _ in range(2))
        self.results = streams.pinned(max_rows)
        self.told = streams.pinned(max_rows * TOLD_WORDS).view(max_rows, TOLD_WORDS)
        self.pending: _CudaPending | None = None
        self._grow(_FIRST_WORDS)

    def _grow(self, num_words: int) -> None:
        self._upload = self._streams.pinned(num_words)
        self._words = self._upload.numpy()
        self._staging = torch.empty(num_words, dtype=torch.int32, device=self._device)

    def send(self, packed: Packed) -> None:
        """Puts the upload on its way to the staging buffer. The pass before last that used this flight is over."""
        if packed.num_words > len(self._words):
            self._grow(1 << (packed.num_words - 1).bit_length())
        packed.write(self._words)
        with self._streams.use(self._streams.copy):
            self._staging[: packed.num_words].copy_(self._upload[: packed.num_words], non_blocking=True)
        self.uploaded.record(self._streams.copy)

    def part(self, span: UploadSpan) -> Tensor:
        return self._staging[span.first : span.first + span.count]

    @property
    def diff(self) -> Tensor:
        return self._staging


def max_units(sizes: Sequence[int], max_length: int, chunks: ChunkChoice) -> int:
    """Most work units that a decode pass of any bucket can have. Where rows share, the host looks that they suffice."""
    shared = sizes[-1] * (cdiv(max_length, SHARED_CHUNKS[-1]) + 1)
    return max(min(shared, _MAX_SHARED_UNITS), *(chunks(size).capacity(size, max_length) for size in sizes))


class _CudaPending:
    __slots__ = ("_before", "_bucket", "_device", "_flight", "_packed", "_result", "delayed", "told_prompts")

    def __init__(
        self,
        device: CudaExecutor,
        flight: _InFlight,
        before: CudaEvent | None,
        packed: Packed,
        bucket: int,
        told: list[Told],
    ) -> None:
        self._device, self._flight, self._before = device, flight, before
        self._packed, self._bucket = packed, bucket
        self._result: Result | None = None
        self.told_prompts = told  # kept until the copies are there
        self.delayed: Callable[[Masks], None] | None = None

    def mask_buffer(self, num_rows: int, num_words: int) -> Bits:
        return self._device.mask_buffer(self, num_rows, num_words)

    def sample(self, masks: Masks) -> None:
        assert self.delayed is not None, "this pass was not delayed, or has its masks already"
        finish, self.delayed = self.delayed, None
        finish(masks)

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def wait(self) -> Result:
        assert self.delayed is None, "a delayed pass was waited for before its masks came"
        if self._result is None:
            began = time.perf_counter()
            flight, stats = self._flight, self._device.stats
            flight.copied.synchronize()
            device_s = flight.began.elapsed_time(flight.ended) / 1e3
            stats.wait_s += time.perf_counter() - began
            stats.note(self._bucket, device_s)
            idle_s = self._before.elapsed_time(flight.began) / 1e3 if self._before is not None else 0.0
            stats.idle_s += idle_s
            fetch_s = flight.fetch_began.elapsed_time(flight.fetched) / 1e3 if self._packed.fetched.count else None
            stats.fetch_s += fetch_s or 0.0
            # Copies: the flight's buffers belong to a later pass soon.
            count, width = self._packed.num_sampled, self._packed.logprobs
            tokens = flight.results[:count].numpy().copy() if count else NO_TOKENS
            logprobs = None if width is None else told_columns(flight.told[:count].numpy().copy(), width)
            runs = tuple(told.run() for told in self.told_prompts)
            self.told_prompts = []
            self._result = Result(
                tokens, device_s, idle_s=idle_s, logprobs=logprobs, prompt_logprobs=runs, fetch_s=fetch_s
            )
        return self._result


class CudaExecutor(Executor):
    """An executor. On a CPU device it runs in Triton's interpreter: for tests only."""

    capabilities = Capabilities(logits=True)

    def __init__(
        self,
        model: CudaModel,
        streams: Streams,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_row_tokens: int,
        num_host_pages: int = 0,
        max_swap_pages: int = 0,
        chunks: ChunkChoice = decode_chunks,
        attention_tuning: AttentionTuning = decode_attention_tuning,
        share_rule: Callable[[int, int], ShareRule] = ShareRule,
        split_rule: SplitChoice = SplitRule,
        prompt_sizes: Sequence[int] = PROMPT_SIZES,
    ) -> None:
        spec, device = model.spec, model.device
        self.model = model
        self.stats = ExecutorStats()
        self._streams = streams
        self._chunks, self._attention_tuning = chunks, attention_tuning
        # The interpreter runs programs one after the other, and idle ones cost it as much as others.
        self._few_programs = None if device.type == "cuda" else 2
        windows = {layer.window for layer in model.layers}
        splits = split_rule(spec.num_kv_heads, 0 if 0 in windows else max(windows))
        group = spec.num_heads // spec.num_kv_heads
        # One more than a row can have, since the last sampled token is stored and never fed.
        self.state = SlotState.empty(max_running, max_row_tokens + 1, page_size, max_running, device)
        # One piece for all layers, keys and values, so that a kernel finds all parts of a page.
        shape = (2 * spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=model.dtype, device=device)
        self.caches = [(self.kv[2 * layer], self.kv[2 * layer + 1]) for layer in range(spec.num_layers)]
        self.swap = CudaSwap(streams, self.kv, num_host_pages, max_swap_pages) if num_host_pages else None

        self.graphs = CudaGraphs(streams, max_running, self._run, self._run_nothing)
        capacity = max_units(self.graphs.sizes, max_row_tokens + 1, chunks)
        # Layers with a window share nothing: the others' units are the only ones with room for it.
        self._units = {
            layer.window: DecodeUnits.empty(max_running, capacity, 0 if layer.window else capacity, device)
            for layer in model.layers
        }
        self._attention = DecodeWorkspace.empty(
            max_running, capacity, spec.num_heads, spec.num_kv_heads, spec.head_dim, device
        )
        self._sampling = CudaSampling(streams, self.state, max_running, max_row_tokens + 1, spec.vocab_size, _DEPTH)
        tokens = len(model._x)
        self._slots, self._positions = (torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2))
        sizes = [size for size in prompt_sizes if size <= tokens]
        self._prompts = PrefillRunner(
            model, streams, self.state, self.caches, self._slots, self._positions, self._decode_attention,
            splits.room, max_running, sizes,
        )  # fmt: skip
        self._packer = PlanPacker(
            max_running, spec.vocab_size, self._prompts.tokens_per_tile,
            replace(share_rule(group, capacity), prompts=set(self._units) == {0}) if 0 in self._units else None,
            max_row_tokens + 1, splits, sizes,
        )  # fmt: skip
        self._num_steps = 0  # what the device's counter will stand at when all that was launched has run

        self._ring = [_InFlight(streams, max_running, device) for _ in range(_DEPTH)]
        self._count = 0
        self._prepared: tuple[Plan, _InFlight, Packed] | None = None  # what the next launch finds done
        self._last_end: CudaEvent | None = None
        streams.synchronize()  # what was filled on the default stream is there before the engine stream begins

    @property
    def num_buffer_tokens(self) -> int:
        return len(self._slots)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every graph and compiles what moves pages, so that no request waits for it."""
        with self._streams.use(self._streams.engine):
            if self.swap is not None:
                self.swap.warm_up()
            self.graphs.capture_all()

    @torch.inference_mode()
    def run_background_work(self) -> bool:
        """Captures one of the graphs with prompts, so that no such pass waits for it later."""
        with self._streams.use(self._streams.engine):
            return self.graphs.capture_one(GraphKey(room=room) for room in self._prompts.rooms)

    def reset_stats(self) -> None:
        self.stats = ExecutorStats()
        self._last_end = None

    def launch(self, plan: Plan) -> _CudaPending:
        """Starts a pass and returns at once. Passes run in launch order."""
        return self._start(plan, delayed=False)

    @torch.inference_mode()
    def prepare(self, plan: Plan) -> None:
        """Packs the plan and sends it ahead; the next launch is of this plan."""
        assert self._prepared is None, "a plan was prepared and not launched"
        began = time.perf_counter()
        self._prepared = plan, *self._send(plan)
        self.stats.launch_s += time.perf_counter() - began

    def launch_delayed(self, plan: Plan) -> _CudaPending:
        """As `launch`, up to the logits; `sample` goes on."""
        return self._start(plan, delayed=True)

    def _send(self, plan: Plan) -> tuple[_InFlight, Packed]:
        """Puts a plan on its way, in the flight of the next launch. Passes before may still be running, or wait for
        their masks: what they need is in flights of their own."""
        flight = self._ring[self._count % _DEPTH]
        if flight.pending is not None:
            flight.pending.wait()  # long over; only a caller that launches and does not wait finds it unread
        packed = self._packer.pack(plan)
        flight.send(packed)
        return flight, packed

    @torch.inference_mode()
    def _start(self, plan: Plan, *, delayed: bool) -> _CudaPending:
        began = time.perf_counter()
        streams, stats = self._streams, self.stats
        prepared, flight, packed = self._prepared or (plan, *self._send(plan))
        assert prepared.step == plan.step, "another plan was prepared than is launched"
        self._prepared = None
        self._count += 1
        logits = index = choose = graph = None
        told: list[Told] = []
        with streams.use(streams.engine):
            flight.uploaded.wait(streams.engine)
            if plan.swap is not None:
                self._move(plan.swap, flight, packed)  # before it counts as begun: it may wait for the link
            flight.began.record(streams.engine)
            if packed.is_decode:
                # Before the diff: a graph that is captured now must not see its rows.
                kind = kind_of(packed.num_rows, packed.num_own_tokens, packed.tile)
                behind = GraphKey(packed.has_filters, adjusts=packed.adjusts, logprobs=packed.logprobs is not None)
                kind = (
                    kind._replace(part=GraphStage.LOGITS)
                    if delayed
                    else behind._replace(short=kind.short, tile=kind.tile)
                )
                bucket = self.graphs.bucket(packed.num_rows, kind)
                graph = self.graphs.graph(bucket, kind)
                if delayed:
                    choose = self.graphs.graph(bucket, behind._replace(part=GraphStage.TOKENS))
                self._apply(flight, packed)
                graph.replay()
            else:
                bucket = 0
                asks = self._packer.logprobs.of_prompts(plan)
                index = flight.part(packed.sampled)[: packed.num_sampled]
                if packed.room is not None and packed.num_sampled and not asks:
                    graph, logits = self._run_padded(flight, packed, GraphKey(tile=packed.tile, room=packed.room))
                else:
                    self._apply(flight, packed)
                    rows = (
                        self.graphs.bucket(packed.num_decodes, GraphKey(tile=packed.tile)) if packed.num_decodes else 0
                    )
                    hidden = self._prompts.run(packed, flight.part, rows, None if asks else index)
                    if asks:
                        told = self._tell_prompts(asks, plan, hidden)
                        hidden = self.model.pick(hidden, index)
                    logits = self.model.logits(hidden) if packed.num_sampled else None
                if packed.num_sampled:
                    self._sampling.step.add_(1)
        pending = _CudaPending(self, flight, self._last_end, packed, bucket, told)
        flight.pending, self._last_end = pending, flight.ended
        if delayed:
            pending.delayed = lambda masks: self._finish(pending, flight, packed, logits, index, masks, choose)
        else:
            self._finish(pending, flight, packed, logits, index)
        stats.passes += 1
        stats.graphs += graph is not None
        if packed.is_decode:
            stats.decode_context_tokens += plan.num_context_tokens
            stats.saved_tokens += packed.num_saved_tokens
        stats.launch_s += time.perf_counter() - began
        return pending

    def _run_padded(self, flight: _InFlight, packed: Packed, kind: GraphKey) -> tuple[Graph | None, Tensor]:
        """A pass with prompts that a graph could run: by that graph, if there is one, and its logits."""
        graph = self.graphs.with_prompts(kind)  # before the diff, as above
        self._apply(flight, packed)
        self._prompts.place(packed, flight.part)
        if graph is not None:
            graph.replay()
        else:
            self._run(self.graphs.sizes[-1], kind)  # what the graph will be, to the last bit
        return graph, self.model.last_logits(packed.num_sampled)

    @torch.inference_mode()
    def _finish(
        self, pending: _CudaPending, flight: _InFlight, packed: Packed, logits: Tensor | None, index: Tensor | None,
        masks: Masks | None = None, choose: Graph | None = None,
    ) -> None:  # fmt: skip
        """The end of a pass: tokens are chosen, by `choose` if there is one, unless its graph has done that; and
        brought to the host."""
        streams, sampling = self._streams, self._sampling
        if masks is not None:
            sampling.masks.send(masks)
        self._num_steps += bool(packed.num_sampled)
        at, count = self._num_steps % _DEPTH, packed.num_sampled
        with streams.use(streams.engine):
            if choose is not None:
                sampling.masks.arrived.wait(streams.engine)
                choose.replay()
            elif logits is not None:
                if masks is not None:
                    sampling.masks.arrived.wait(streams.engine)
                sampling.choose(
                    logits, self._slots, self._positions, index, adjusts=packed.adjusts, filters=packed.has_filters,
                    logprobs=packed.logprobs is not None, masked=masks is not None,
                )  # fmt: skip
            flight.ended.record(streams.engine)
        with streams.use(streams.results):
            flight.ended.wait(streams.results)
            if count:
                flight.results[:count].copy_(sampling.results[at, :count], non_blocking=True)
            if packed.logprobs is not None:
                flight.told[:count].copy_(sampling.told[at, :count], non_blocking=True)
            for told in pending.told_prompts:
                told.copy()
            flight.copied.record(streams.results)

    def mask_buffer(self, pending: _CudaPending, num_rows: int, num_words: int) -> Bits:
        before, last = (self._ring[(self._count - back) % _DEPTH].pending for back in (2, 1))
        assert pending is last, "masks are those of the pass that was launched last"
        assert before is None or before.is_over, "the pass before may still read its masks"
        return self._sampling.masks.room(num_rows, num_words)

    def close(self) -> None:
        self._streams.synchronize()

    def _move(self, swap: Swap, flight: _InFlight, packed: Packed) -> None:
        assert self.swap is not None, "a plan moves pages to host memory and there is none"
        if packed.spilled.count:
            self.swap.spill(flight.part(packed.spilled), swap.spill_hosts)
        if packed.fetched.count:
            self.swap.fetch(flight.part(packed.fetched), swap.fetch_hosts, flight.fetch_began, flight.fetched)
            self.stats.fetched_pages += packed.fetched.count

    def _apply(self, flight: _InFlight, packed: Packed) -> None:
        apply_diff(flight.diff, self.state, self._units.get(0), num_programs=self._few_programs or 64)
        if packed.adjust.count:
            write_runs(flight.part(packed.adjust), self._sampling.adjust, self._few_programs or 128)

    # ------------------------------------------------------------------ what a graph holds

    def _run(self, rows: int, kind: GraphKey) -> None:
        if kind.room is not None:
            self.model.logits(self._prompts.run_placed(rows, kind.tile, kind.room))
        else:
            self._decode(rows, kind)

    def _run_nothing(self, rows: int, kind: GraphKey) -> None:
        """A pass without live rows: compiles what there is to compile and leaves no trace."""
        # What the pass before shared is still there: its units would be read, and counted as arrived, without the rest
        # of their rows.
        masks = self._sampling.masks.num_masks
        counts = [self.state.num_rows, masks, *(units.num_shared for units in self._units.values())]
        before = [count.clone() for count in counts]
        for count in counts:
            count.zero_()
        if kind.room is not None:
            self._prompts.place_nothing(kind.room)
        self._run(rows, kind)
        if kind.part is not GraphStage.TOKENS and kind.room is None:
            self._sampling.step.sub_(1)
        for count, value in zip(counts, before, strict=True):
            count.copy_(value)

    def _decode(self, rows: int, kind: GraphKey) -> None:
        model, state = self.model, self.state
        slots, positions = self._slots[:rows], self._positions[:rows]
        if kind.part is GraphStage.TOKENS:
            self._sampling.choose(
                model.last_logits(rows), slots, positions, None, adjusts=kind.adjusts, filters=kind.filters,
                logprobs=kind.logprobs, masked=True,
            )  # fmt: skip
            return
        pdl = not kind.tile and model.uses_pdl(rows)
        raw = not kind.tile and model.takes_raw(rows, fused=True)
        attend = self._decode_attention(rows, state.num_rows, kind, self._sampling.step, raw=raw)
        gather_tokens(state, model.embedding, model.input(rows), slots, positions, squares=model.squares(rows))
        logits = model.logits(model.forward(rows, attend, fused=True, raw=raw, pdl=pdl))
        if kind.part is GraphStage.ALL:
            self._sampling.choose(
                logits, slots, positions, None, adjusts=kind.adjusts, filters=kind.filters, logprobs=kind.logprobs
            )

    def _decode_attention(
        self,
        rows: int,
        num_rows: Tensor,
        kind: GraphKey,
        step: Tensor | None = None,
        *,
        raw: bool,
        at_once: bool = False,
    ) -> AttendKernel:
        """Cuts the KV of the first `num_rows` rows, of `rows` at most, into units; what is returned reads them. raw: it
        is given products of the stream as it is.

        Where rows share, what they share and what each has of its own are two launches side by side, since their tiles
        differ in size; with `at_once` it is one, slower on the device and quicker to launch.
        """
        model, state, spec, streams = self.model, self.state, self.model.spec, self._streams
        chunks, pdl = self._chunks(rows), not kind.tile and model.uses_pdl(rows)
        for window, units in self._units.items():
            decode_units(units, state.row_slots[:rows], num_rows, state.num_computed, chunks, window, step)
            step = None  # counted once, by whichever cut comes first
        group = spec.num_heads // spec.num_kv_heads
        stream = model.input(rows) if raw else None
        own, shared = self._attention_tuning(rows, group, kind.tile, kind.short)
        page_size = self.kv.shape[-3]
        assert all(tiles_fit(chunks.min_tokens, page_size, one) for one in (own, shared)), f"no tiles fit: {chunks}"
        if self._few_programs is not None:
            own, shared = (replace(one, num_programs=self._few_programs) for one in (own, shared))

        def launch(index: int, qkv: Tensor, out: Tensor, tuning: DecodeTuning, part: int) -> None:
            layer, cache = model.layers[index], self.caches[index]
            decode_attention(
                qkv, cache[0], cache[1], state.page_table, layer.cos_sin, layer.q_norm, layer.k_norm, spec.rms_eps,
                self._units[layer.window], self._attention, out, window=layer.window, tuning=tuning, pdl=pdl, part=part,
                stream=stream,
            )  # fmt: skip

        def attend(index: int, qkv: Tensor, out: Tensor) -> None:
            if not kind.tile or model.layers[index].window:
                launch(index, qkv, out, own, NONE_SHARED)
                return
            if at_once:
                launch(index, qkv, out, shared, ALL_UNITS)
                return
            streams.follow(streams.side, streams.engine)
            with streams.use(streams.side):
                launch(index, qkv, out, shared, SHARED_UNITS)
            launch(index, qkv, out, own, OWN_UNITS)
            streams.follow(streams.engine, streams.side)

        return attend

    def _tell_prompts(self, asks: Sequence[LogprobRequest], plan: Plan, hidden: Tensor) -> list[Told]:
        slots = [int(plan.slots[ask.row]) for ask in asks]
        return self._sampling.tell_prompts(
            asks, slots, lambda first, count: self.model.logits(hidden[first : first + count])
        )
