"""Sampling: greedy, temperature by Gumbel-max, top-k, top-p and min-p, without sorting the vocabulary.

With noise that is a hash (noise.py), sampling is an argmax, which can be split over programs and merged exactly.

The filters keep an upper set of the logits, so no threshold is needed beforehand. The winner without filters is found
first. If the filters keep it, it is also the winner among the tokens they keep. If not, nothing at or below its logit
is kept, and the search continues above it. The first round is the ordinary argmax; later rounds skip all blocks below
the bound; two or three rounds are typical. Rows without filters never enter the loop of that kernel.

A row with a small top-k is sampled from its few best logits instead. The row is divided into a thousand groups or more;
the k-th largest of the groups' maxima is a bound that at least k logits reach, and rarely many more. These candidates
are collected, and all filters run on them in registers. A row with too many candidates (for example, all logits equal)
takes the general path.

The order of filters is the usual one: temperature, then top-k, then top-p within what top-k kept, then min-p. Ties at a
threshold are kept.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels._triton import UNSPECIALIZED, cdiv, launched, tl, triton
from paceline.kernels.layouts import SAMPLING_WORDS, SamplingWord
from paceline.kernels.noise import gumbel, gumbel_reference, noise_keys
from paceline.kernels.slot_state import SlotState

_TEMPERATURE = tl.constexpr(SamplingWord.TEMPERATURE.value)
_TOP_K = tl.constexpr(SamplingWord.TOP_K.value)
_TOP_P = tl.constexpr(SamplingWord.TOP_P.value)
_MIN_P = tl.constexpr(SamplingWord.MIN_P.value)
_CANDIDATES = 2048  # groups of a row whose maxima bound its best logits, and places for these
_MIN_GROUPS = 32  # of a program, which has as many places: with fewer, one block with many candidates overflows them
_MAX_NARROW_TOP_K = tl.constexpr(128)
# `winner` of a row between the kernels: -1 too many candidates to collect, -2 the row has its token.
_NOT_COLLECTED = tl.constexpr(-1)
_SAMPLED = tl.constexpr(-2)


def sample_reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """One row. logits [V]."""
    if temperature == 0:
        return int(logits.double().argmax())
    scaled = logits.double().cpu() / temperature
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < top_k < len(scaled):
        kept &= scaled >= scaled.topk(top_k).values[-1]
    if top_p < 1:
        probs = torch.where(kept, scaled, -torch.inf).softmax(-1)
        ordered, order = probs.sort(descending=True)
        above = ordered.cumsum(-1) - ordered
        threshold = scaled[order[above < top_p]].min()
        kept &= scaled >= threshold
    if min_p > 0:
        kept &= scaled >= scaled.max() + torch.tensor(min_p).double().log()
    noisy = scaled + gumbel_reference(seed, position, len(scaled))
    return int(torch.where(kept, noisy, -torch.inf).argmax())


@triton.jit
def _float_param(params, word):
    return tl.load(params + word).to(tl.float32, bitcast=True)


@triton.jit
def _has_filters(params):
    filtered = (tl.load(params + _TOP_K) > 0) | (_float_param(params, _TOP_P) < 1.0)
    filtered = filtered | (_float_param(params, _MIN_P) > 0.0)
    return filtered & (_float_param(params, _TEMPERATURE) > 0.0)


@triton.jit
def _is_narrow(params):
    """Whether a row's top-k is so small that its best logits can be collected."""
    top_k = tl.load(params + _TOP_K)
    return (top_k > 0) & (top_k <= _MAX_NARROW_TOP_K) & (_float_param(params, _TEMPERATURE) > 0.0)


@triton.jit
def _best_of(value, index):
    """The largest value and, among equals, its smallest index."""
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF), axis=0)


@triton.jit
def _finish(token, row, slot, position, token_pool, num_computed, results, step, pool_stride, max_rows, depth, vocab):
    """Stores the token. If all logits are NaN or -inf there is none: the host gets -1, and the row continues with 0."""
    exists = token < vocab
    tl.store(token_pool + slot * pool_stride + position + 1, tl.where(exists, token, 0))
    tl.store(num_computed + slot, position + 1)
    tl.store(results + (tl.load(step) % depth) * max_rows + row, tl.where(exists, token, -1))


@triton.jit
def order_key(value):
    """Integers in the order of the floats. Zeros of both signs are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(keys, k):
    """The k-th largest of order keys [N], k <= N."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _sample_kernel(
    logits,
    index,
    slots,
    positions,
    num_rows,
    sampling,
    part_value,
    part_token,
    part_top,
    part_sum,
    arrived,
    winner,
    candidates,
    bound,
    token_pool,
    num_computed,
    results,
    step,
    logits_stride,
    pool_stride,
    max_rows,
    depth,
    vocab,
    WORDS: tl.constexpr,
    APPROX: tl.constexpr,
    FILTERS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row >= tl.load(num_rows):
        return
    source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    position = tl.load(positions + source)
    params = sampling + slot * WORDS
    temperature = _float_param(params, _TEMPERATURE)
    line = logits + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)
    first, second = noise_keys(params, position + 1)
    random = temperature > 0.0
    inverse = tl.where(random, 1.0 / tl.where(random, temperature, 1.0), 1.0)

    place = row * SPLITS + split
    narrow = False
    filtered = False
    if FILTERS:
        narrow = _is_narrow(params)
        filtered = _has_filters(params)
    if narrow:
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, vocab), BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
            highest = tl.maximum(highest, value)
        groups = tl.max(tl.reshape(highest, [GROUPS, BLOCK // GROUPS]), axis=1)
        tl.store(candidates + place.to(tl.int64) * GROUPS + tl.arange(0, GROUPS), groups)
    else:
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, vocab), BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
            if random:
                value += gumbel(column, first, second, APPROX)
            better = value > best
            best = tl.where(better, value, best)
            token = tl.where(better, column, token)
        top_value, top_token = _best_of(best, token)
        tl.store(part_value + place, top_value)
        tl.store(part_token + place, top_token)
        if filtered:
            top = tl.full([BLOCK], -1.0e30, tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, vocab), BLOCK):
                column = start + lane
                value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
                higher = tl.maximum(top, value)
                total = total * tl.exp(top - higher) + tl.exp(value - higher)
                top = higher
            largest = tl.max(top, axis=0)
            tl.store(part_top + place, largest)
            tl.store(part_sum + place, tl.sum(total * tl.exp(top - largest), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + row, 0)
        if narrow:
            all_groups = row.to(tl.int64) * (SPLITS * GROUPS) + tl.arange(0, SPLITS * GROUPS)
            keys = order_key(tl.load(candidates + all_groups, cache_modifier=".cg"))
            tl.store(bound + row, _kth_largest(keys, tl.load(params + _TOP_K)).to(tl.int32))
        else:
            part = row * SPLITS + tl.arange(0, SPLITS)
            _, chosen = _best_of(
                tl.load(part_value + part, cache_modifier=".cg"), tl.load(part_token + part, cache_modifier=".cg")
            )
            if filtered:
                tl.store(winner + row, chosen)
            else:
                _finish(
                    chosen,
                    row,
                    slot,
                    position,
                    token_pool,
                    num_computed,
                    results,
                    step,
                    pool_stride,
                    max_rows,
                    depth,
                    vocab,
                )


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _collect_kernel(
    logits,
    index,
    slots,
    positions,
    num_rows,
    sampling,
    arrived,
    winner,
    candidates,
    candidate_ids,
    counts,
    bound,
    token_pool,
    num_computed,
    results,
    step,
    logits_stride,
    pool_stride,
    max_rows,
    depth,
    vocab,
    WORDS: tl.constexpr,
    APPROX: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For rows with a small top-k: collects the logits that reach the bound, and samples from them."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row >= tl.load(num_rows):
        return
    source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    params = sampling + slot * WORDS
    if not _is_narrow(params):
        return
    least_key = tl.load(bound + row)
    line = logits + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)
    place = row * SPLITS + split
    # Each program has its own places, so that the order of candidates, and with it every sum, is always the same.
    mine = place.to(tl.int64) * GROUPS
    count = split * 0
    for start in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, vocab), BLOCK):
        column = start + lane
        value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        found = (order_key(value) >= least_key) & (value > -float("inf"))
        number = tl.sum(found.to(tl.int32), axis=0)
        if number > 0:
            to = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
            fits = found & (to < GROUPS)
            tl.store(candidates + mine + to, value, mask=fits)
            tl.store(candidate_ids + mine + to, column, mask=fits)
        count += number
    tl.store(counts + place, count)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + row, 0)
        most = tl.max(tl.load(counts + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg"), axis=0)
        # With too many candidates, the filter kernel starts from the whole row.
        tl.store(winner + row, _NOT_COLLECTED)
        if most <= GROUPS:
            item = tl.arange(0, SPLITS * GROUPS)
            within = item % GROUPS < tl.load(counts + row * SPLITS + item // GROUPS, cache_modifier=".cg")
            at = row.to(tl.int64) * (SPLITS * GROUPS) + item
            inverse = 1.0 / _float_param(params, _TEMPERATURE)
            value = tl.load(candidates + at, mask=within, other=-float("inf"), cache_modifier=".cg") * inverse
            token = tl.load(candidate_ids + at, mask=within, other=0x7FFFFFFF, cache_modifier=".cg")
            highest = tl.max(value, axis=0)
            # Fewer than k finite logits may be left; then all are kept.
            top_k = tl.minimum(tl.load(params + _TOP_K), tl.sum(within.to(tl.int32), axis=0))
            kept = within & (order_key(value) >= _kth_largest(order_key(value), top_k))
            mass = tl.where(kept, tl.exp(value - highest), 0.0)
            top_p = _float_param(params, _TOP_P)
            allowed = tl.where(top_p < 1.0, top_p * tl.sum(mass, axis=0), float("inf"))
            min_p = _float_param(params, _MIN_P)
            least = tl.where(min_p > 0.0, highest + tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
            position = tl.load(positions + source)
            first, second = noise_keys(params, position + 1)
            noisy = tl.where(kept, value + gumbel(token, first, second, APPROX), -float("inf"))
            done = False
            chosen = least_key
            while not done:
                _, chosen = _best_of(noisy, token)
                reached = tl.max(tl.where(token == chosen, value, -float("inf")), axis=0)
                above = value > reached
                done = (tl.sum(tl.where(above, mass, 0.0), axis=0) < allowed) & (reached >= least)
                # Nothing is above the largest: rounding errors must not cause an endless loop.
                done = done | (tl.sum((kept & above).to(tl.int32), axis=0) == 0)
                noisy = tl.where(above, noisy, -float("inf"))
            _finish(
                chosen,
                row,
                slot,
                position,
                token_pool,
                num_computed,
                results,
                step,
                pool_stride,
                max_rows,
                depth,
                vocab,
            )
            tl.store(winner + row, _SAMPLED)


@triton.jit
def _kth_key(line, inverse, highest, k, vocab, BLOCK: tl.constexpr):
    """A bound on order keys that keeps the k largest scaled logits and their ties, by four-way search.

    Each pass over the (cached) row counts the keys above three bounds and quarters the interval. The search ends when a
    bound keeps exactly k, or when the interval is empty.
    """
    lane = tl.arange(0, BLOCK)
    high = order_key(highest).to(tl.int64)
    low = high * 0 - 2147483648
    while low < high:
        quarter = (high - low + 3) // 4
        one = low + quarter
        two = tl.minimum(one + quarter, high)
        three = tl.minimum(two + quarter, high)
        ones = tl.zeros([BLOCK], tl.int32)
        twos = tl.zeros([BLOCK], tl.int32)
        threes = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab, BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
            key = tl.where(column < vocab, order_key(value), -2147483648)
            ones += (key >= one).to(tl.int32)
            twos += (key >= two).to(tl.int32)
            threes += (key >= three).to(tl.int32)
        num_one = tl.sum(ones, axis=0)
        num_two = tl.sum(twos, axis=0)
        num_three = tl.sum(threes, axis=0)
        high = tl.where(
            num_three >= k, high, tl.where(num_two >= k, three - 1, tl.where(num_one >= k, two - 1, one - 1))
        )
        low = tl.where(num_three >= k, three, tl.where(num_two >= k, two, tl.where(num_one >= k, one, low)))
        kept = tl.where(num_three >= k, num_three, tl.where(num_two >= k, num_two, num_one))
        high = tl.where(kept == k, low, high)
    return low


@launched
@triton.jit(do_not_specialize=UNSPECIALIZED)
def _filter_kernel(
    logits,
    index,
    slots,
    positions,
    num_rows,
    sampling,
    part_top,
    part_sum,
    winner,
    token_pool,
    num_computed,
    results,
    step,
    logits_stride,
    pool_stride,
    max_rows,
    depth,
    vocab,
    splits,
    WORDS: tl.constexpr,
    APPROX: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows):
        return
    source = tl.load(index + row)
    slot = tl.load(slots + source).to(tl.int64)
    params = sampling + slot * WORDS
    if not _has_filters(params):
        return
    chosen = tl.load(winner + row)
    if chosen == _SAMPLED:
        return
    position = tl.load(positions + source)
    if chosen >= vocab:
        _finish(
            chosen, row, slot, position, token_pool, num_computed, results, step, pool_stride, max_rows, depth, vocab
        )
        return
    inverse = 1.0 / _float_param(params, _TEMPERATURE)
    top_k = tl.load(params + _TOP_K)
    top_k = tl.where(top_k > 0, tl.minimum(top_k, vocab), vocab)
    top_p = _float_param(params, _TOP_P)
    min_p = _float_param(params, _MIN_P)
    first, second = noise_keys(params, position + 1)
    line = logits + row.to(tl.int64) * logits_stride
    lane = tl.arange(0, BLOCK)

    if chosen >= 0:
        split = tl.arange(0, MAX_SPLITS)
        part = row * splits + split
        tops = tl.load(part_top + part, mask=split < splits, other=-float("inf"))
        highest = tl.max(tops, axis=0)
        mass = tl.sum(tl.load(part_sum + part, mask=split < splits, other=0.0) * tl.exp(tops - highest), axis=0)
    else:
        top = tl.full([BLOCK], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
            higher = tl.maximum(top, value)
            total = total * tl.exp(top - higher) + tl.exp(value - higher)
            top = higher
        highest = tl.max(top, axis=0)
        mass = tl.sum(total * tl.exp(top - highest), axis=0)
    if (top_k < vocab) & (top_p < 1.0):
        bound_key = _kth_key(line, inverse, highest, top_k, vocab, BLOCK)
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
            kept += tl.where(order_key(value) >= bound_key, tl.exp(value - highest), 0.0)
        mass = tl.sum(kept, axis=0)
    allowed_mass = tl.where(top_p < 1.0, top_p * mass, float("inf"))
    least = tl.where(min_p > 0.0, highest + tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))

    done = False
    while not done:
        bound = tl.load(line + chosen, mask=chosen >= 0, other=-float("inf")).to(tl.float32) * inverse
        count = tl.zeros([BLOCK], tl.int32)
        above = tl.zeros([BLOCK], tl.float32)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, vocab, BLOCK):
            column = start + lane
            value = tl.load(line + column, mask=column < vocab, other=-float("inf")).to(tl.float32) * inverse
            over = value > bound
            if tl.max(value, axis=0) > bound:
                count += over.to(tl.int32)
                above += tl.where(over, tl.exp(value - highest), 0.0)
                noisy = tl.where(over, value + gumbel(column, first, second, APPROX), -float("inf"))
                better = noisy > best
                best = tl.where(better, noisy, best)
                token = tl.where(better, column, token)
        number = tl.sum(count, axis=0)
        done = (number < top_k) & (tl.sum(above, axis=0) < allowed_mass) & (bound >= least)
        # Nothing is above the row's largest logit: rounding errors must not cause an endless loop.
        done = done | (number == 0)
        _, next_token = _best_of(best, token)
        chosen = tl.where(done, chosen, next_token)
    _finish(chosen, row, slot, position, token_pool, num_computed, results, step, pool_stride, max_rows, depth, vocab)


@dataclass(frozen=True, slots=True, eq=False)
class SampleWorkspace:
    """Counts are zero between launches."""

    part_value: torch.Tensor  # [R, splits] float32, likewise part_top and part_sum
    part_token: torch.Tensor  # [R, splits] int32
    part_top: torch.Tensor
    part_sum: torch.Tensor
    arrived: torch.Tensor  # [R] int32
    winner: torch.Tensor  # [R] int32
    candidates: torch.Tensor  # [R, places] float32, likewise candidate_ids int32
    candidate_ids: torch.Tensor
    counts: torch.Tensor  # [R, splits] int32
    bound: torch.Tensor  # [R] int32
    order: torch.Tensor  # [R] int32: 0, 1, ...; used as the index where none is given, so that kernels have one case

    @classmethod
    def empty(cls, rows: int, device: torch.device | str, splits: int = 128) -> SampleWorkspace:
        def floats() -> torch.Tensor:
            return torch.empty(rows, splits, device=device)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        places = max(_CANDIDATES, _MIN_GROUPS * splits)
        return cls(
            part_value=floats(),
            part_token=torch.empty(rows, splits, dtype=torch.int32, device=device),
            part_top=floats(),
            part_sum=floats(),
            arrived=ints(rows),
            winner=ints(rows),
            candidates=torch.empty(rows, places, device=device),
            candidate_ids=ints(rows, places),
            counts=ints(rows, splits),
            bound=ints(rows),
            order=torch.arange(rows, dtype=torch.int32, device=device),
        )


def split_rows(rows: int, vocab: int, max_splits: int, block: int) -> tuple[int, int]:
    """How many programs share a row of logits, and how many groups each of them has where top-k is small."""
    splits = 1
    while splits < max_splits and rows * splits < 4096 and vocab > block * splits:
        splits *= 2
    return splits, min(max(_CANDIDATES // splits, _MIN_GROUPS), block)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_rows: torch.Tensor,
    state: SlotState,
    results: torch.Tensor,
    step: torch.Tensor,
    workspace: SampleWorkspace,
    index: torch.Tensor | None = None,
    filters: bool = True,
    block: int = 1024,
) -> None:
    """One token per row of logits [R, V] (strided rows, any float type), for the first num_rows [1] rows.

    Row i belongs to token j = index[i] (or i) of the pass: it is stored at token_pool[slots[j], positions[j] + 1],
    num_computed[slots[j]] becomes positions[j] + 1, and results[step % depth, i] [depth, max_rows] gets a copy for
    the host, or -1 (NO_TOKEN) for a row whose logits are all NaN or -inf. `filters=False` leaves out the launches that
    top-k, top-p and min-p need; no row may use them then.
    """
    rows, vocab = logits.shape
    splits, groups = split_rows(rows, vocab, workspace.part_value.shape[1], block)
    per_split = cdiv(cdiv(vocab, splits), block) * block
    assert groups * splits >= 128, f"{groups * splits} groups are too few for the largest narrow top-k"
    assert rows * groups * splits <= workspace.candidates.numel(), (
        f"{rows} rows of {groups * splits} candidates do not fit {tuple(workspace.candidates.shape)} places"
    )
    common = (
        state.token_pool,
        state.num_computed,
        results,
        step,
        logits.stride(0),
        state.token_pool.stride(0),
        results.shape[1],
        results.shape[0],
        vocab,
    )
    which = workspace.order if index is None else index
    _sample_kernel[(rows, splits)](
        logits,
        which,
        slots,
        positions,
        num_rows,
        state.sampling,
        workspace.part_value,
        workspace.part_token,
        workspace.part_top,
        workspace.part_sum,
        workspace.arrived,
        workspace.winner,
        workspace.candidates,
        workspace.bound,
        *common,
        WORDS=SAMPLING_WORDS,
        APPROX=not logits.is_cpu,  # the interpreter has no inline assembly
        FILTERS=filters,
        SPLITS=splits,
        GROUPS=groups,
        PER_SPLIT=per_split,
        BLOCK=block,
        num_warps=4,
    )
    if filters:
        _collect_kernel[(rows, splits)](
            logits,
            which,
            slots,
            positions,
            num_rows,
            state.sampling,
            workspace.arrived,
            workspace.winner,
            workspace.candidates,
            workspace.candidate_ids,
            workspace.counts,
            workspace.bound,
            *common,
            WORDS=SAMPLING_WORDS,
            APPROX=not logits.is_cpu,
            SPLITS=splits,
            GROUPS=groups,
            PER_SPLIT=per_split,
            BLOCK=block,
            num_warps=4,
        )
        _filter_kernel[(rows,)](
            logits,
            which,
            slots,
            positions,
            num_rows,
            state.sampling,
            workspace.part_top,
            workspace.part_sum,
            workspace.winner,
            *common,
            splits,
            WORDS=SAMPLING_WORDS,
            APPROX=not logits.is_cpu,
            MAX_SPLITS=workspace.part_top.shape[1],
            BLOCK=8 * block,
            num_warps=16,
        )
