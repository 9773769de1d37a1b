"""Mutation tests: each planted fault must make a test fail. Run by `make mutants`.

Every mutation is applied alone to a copy of the package, and the tests named for it run against the copy. A mutation
that survives shows behaviour that no test checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ("tests/scheduler", "tests/simulator", "tests/test_request.py")
PIPELINE = ("tests/scheduler/test_overlap.py", "tests/scheduler/test_state_machine.py")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str] = TESTS


MUTANTS = [
    Mutant(
        "a page that is evicted is not reported",
        "scheduler/prefix_tree.py",
        "            listener.removed(node, Medium.GPU)\n",
        "            pass\n",
        ("tests/scheduler/test_kv_events.py",),
    ),
    Mutant(
        "the hashes of a split node are exchanged",
        "cluster/kv_events.py",
        "upper._hashes, lower._hashes = hashes[:num_upper], hashes[num_upper:]",
        "lower._hashes, upper._hashes = hashes[:num_upper], hashes[num_upper:]",
        ("tests/cluster/test_kv_events.py",),
    ),
    Mutant(
        "pages are freed twice",
        "scheduler/memory.py",
        "        self.unlock_prefix(request)\n        assert request.exclusive_pages",
        "        self.pool._is_free[:] = False\n        self.pool.free(self.slots.row(slot)"
        "[self.locked_nodes[request].depth // self.page_size :])\n        self.unlock_prefix(request)\n"
        "        assert request.exclusive_pages",
    ),
    Mutant(
        "available pages are counted before the prefix is locked",
        "scheduler/admission.py",
        "        memory.lock_prefix(request, hit)\n        missing = self._missing_pages(request)\n",
        "        memory.lock_prefix(request, tree.root)\n        missing = self._missing_pages(request)\n"
        "        memory.unlock_prefix(request)\n        memory.lock_prefix(request, hit)\n",
    ),
    Mutant(
        "a slot is reused while it is taken",
        "scheduler/slots.py",
        "        slot = self._free.pop()\n        assert self.requests[slot] is None",
        "        slot = self._free[-1] if len(self._free) == 1 else self._free.pop()\n"
        "        assert True or self.requests[slot] is None",
    ),
    Mutant(
        "a page is counted as a token",
        "scheduler/memory.py",
        "        return -(-num_tokens // self.page_size)",
        "        return num_tokens // self.page_size",
    ),
    Mutant(
        "a reservation outlives its owner",
        "scheduler/admission.py",
        "        if self.reserved is request:\n            self.reserved = None\n",
        "",
    ),
    Mutant(
        "a locked path is evicted",
        "scheduler/eviction.py",
        "and node.locks == 0 ",
        "",
    ),
    Mutant(
        "the duplicate's row is not remapped",
        "scheduler/memory.py",
        "            self.slots.write_pages(slot, start, child.pages)\n",
        "",
    ),
    Mutant(
        "a prefix is read in the pass that computes it",
        "scheduler/prefix_tree.py",
        "        while not node.resident or node.computed_step == step:",
        "        while not node.resident:",
    ),
    Mutant(
        "the whole prompt may come from the cache",
        "scheduler/memory.py",
        "        end = request.num_tokens - 1\n",
        "        end = request.num_tokens\n",
    ),
    Mutant(
        "a discarded row is cached",
        "scheduler/scheduler.py",
        "            self._release(request, request.num_tokens - 1, now)",
        "            self._release(request, request.num_tokens, now)",
    ),
    Mutant(
        "a discarded token is reported",
        "scheduler/scheduler.py",
        "                discarded.add(row)\n                continue\n",
        "                continue\n",
    ),
    Mutant(
        "finished requests are not detected at commit",
        "scheduler/scheduler.py",
        "        if self._departures == one.departures and counts is None and min(values, default=0) >= 0:",
        "        if counts is None and min(values, default=0) >= 0:",
    ),
    Mutant(
        "the token in flight of a retracted request is lost",
        "scheduler/scheduler.py",
        "        self.admission.dequeue(request)\n        request.output.append(token)\n",
        "        self.admission.dequeue(request)\n",
    ),
    Mutant(
        "a retracted request is readmitted before its token in flight is committed",
        "scheduler/admission.py",
        "        if request.num_in_flight:\n",
        "        if request.num_in_flight > 5:\n",
    ),
    Mutant(
        "retraction has no bound",
        "scheduler/retraction.py",
        "    return request.retractions >= MAX_RETRACTIONS",
        "    return False",
    ),
    Mutant(
        "retracted requests go to the tail of the queue",
        "scheduler/admission.py",
        "        if request.was_admitted and not self._by_priority:",
        "        if False:",
    ),
    Mutant(
        "a reservation keeps out higher priorities",
        "scheduler/admission.py",
        "return self.reserved is None or (self._by_priority and request.priority > self.reserved.priority)",
        "return self.reserved is None",
    ),
    Mutant(
        "a reserved request is tried before higher priorities",
        "scheduler/admission.py",
        "            return first if first is not None and self._outranks_reserved(first) else self.reserved\n",
        "            return self.reserved\n",
    ),
    Mutant(
        "requests admitted beside a reservation do not count",
        "scheduler/admission.py",
        "            self._beside.add(request)\n",
        "            pass\n",
    ),
    Mutant(
        "requests that delay a reserved one are admitted",
        "scheduler/admission.py",
        "            missing = memory.full_pages(request) - self._pages_beside(self.reserved)\n",
        "            missing = 0\n",
    ),
    Mutant(
        "protected requests do not fit together",
        "scheduler/admission.py",
        "            missing = min(shared - limit, alone - self._config.num_pages)\n",
        "            missing = 0\n",
    ),
    Mutant(
        "prompt tokens are not given to higher priorities first",
        "scheduler/admission.py",
        "        if not (self._by_priority or background_runs or self.num_waiting > num_foreground):\n"
        "            self._plan_level(None, now)",
        "        if True:\n            self._plan_level(None, now)",
    ),
    Mutant(
        "sharers wait only for the next chunk of their prefix",
        "scheduler/admission.py",
        "        if node is not None and (not node.resident or node.computed_step == now.step):",
        "        if node is not None and node.resident and node.computed_step == now.step:",
    ),
    Mutant(
        "KV of replaced weights stays in host memory",
        "scheduler/memory.py",
        "            self.host.clear()\n",
        "            pass\n",
    ),
    Mutant(
        "KV of a request that failed with NaN stays cached",
        "scheduler/scheduler.py",
        "            num_pages = self.memory.drop(node)",
        "            num_pages = 0",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "a copy of dropped KV stays in host memory",
        "scheduler/prefix_tree.py",
        "                self.host.drop(node)",
        "                pass",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "a copy in host memory is proven by KV that was computed again",
        "scheduler/prefix_tree.py",
        "                if child.unproven and self.host is not None and",
        "                if False and self.host is not None and",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "a pass in flight counts for a request whose KV was dropped",
        "scheduler/scheduler.py",
        "            one.void.add(request)",
        "            pass",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "a failed prompt flushes a prefix from which others sample",
        "scheduler/scheduler.py",
        "                if token >= 0:\n                    self.memory.tree.prove",
        "                if False:\n                    self.memory.tree.prove",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "failed prompts make another request start over for ever",
        "scheduler/scheduler.py",
        "            if any(request.recomputations >= MAX_RECOMPUTATIONS for request in recomputed):",
        "            if False:",
        ["tests/scheduler/test_nan.py"],
    ),
    Mutant(
        "new requests are admitted while they are held",
        "scheduler/admission.py",
        "        if self.holds_new:\n",
        "        if False:\n",
    ),
    Mutant(
        "waiting requests do not age",
        "scheduler/aging.py",
        "                return overdue\n",
        "                return chosen\n",
    ),
    Mutant(
        "a wrong prediction of device time is never corrected",
        "scheduler/aging.py",
        "            self._charge(request, seconds - predicted, last)\n",
        "",
        ("tests/scheduler/test_aging.py",),
    ),
    Mutant(
        "device time from before its arrival delays a request",
        "scheduler/aging.py",
        "        self._limits.move(last, (1 - _FACTOR) * seconds)",
        "        self._limits.move(last, 0.0)",
        ("tests/scheduler/test_aging.py",),
    ),
    Mutant(
        "idle time earns credit",
        "scheduler/fair.py",
        "            # Idle time earns no credit: a returning tenant starts level with the least served active one.\n"
        "            tenant.service = max(tenant.service, self._least_active())\n",
        "",
    ),
    Mutant(
        "output is not charged",
        "scheduler/scheduler.py",
        "                self.policy.charge(tenant, count * self.config.output_weight)",
        "                self.policy.charge(tenant, 0)",
    ),
    Mutant(
        "overtaking is not counted",
        "scheduler/admission.py",
        "            request.overtaken += 1\n",
        "",
    ),
    Mutant(
        "an adapter in use is replaced",
        "scheduler/adapter_slots.py",
        "next((one for one in self.slots if one not in self.num_users), None)",
        "next(iter(self.slots), None)",
    ),
    Mutant(
        "no adapter slot is drained for a waiting request",
        "scheduler/admission.py",
        "        return adapters.num_available == 0 and request.adapter != self._draining_adapter()",
        "        return True",
    ),
    Mutant(
        "the slot of a reserved request's adapter is given away",
        "scheduler/admission.py",
        "            return adapters.num_available > is_kept",
        "            return adapters.num_available > 0",
    ),
    Mutant(
        "namespaces are shared",
        "scheduler/prefix_tree.py",
        "        for name in (request.tenant, (request.cache_salt, request.adapter)):",
        '        for name in (request.tenant, ("", "")):',
    ),
    Mutant(
        "a shared prefix is charged to every sharer",
        "scheduler/admission.py",
        "        return request.num_tokens - depth + request.exclusive_pages * self._memory.page_size",
        "        return request.num_tokens",
    ),
    Mutant(
        "decodes stall behind prompts",
        "scheduler/scheduler.py",
        "        decode = len(self._decode_rows) > 0 and not (prefill_first and admission.chunks)",
        "        decode = len(self._decode_rows) > 0 and not admission.chunks",
    ),
    Mutant(
        "stop ids are ignored when no request has left",
        "scheduler/scheduler.py",
        "            if self._stop_ids and not self._stop_ids.keys().isdisjoint(values):",
        "            if False:",
    ),
    Mutant(
        "a plan's arrays change after it is launched",
        "scheduler/scheduler.py",
        "        slots.computed[rows] = starts + 1\n",
        "        slots.computed[rows] = starts + 1\n"
        "        if self._in_flight:\n            self._in_flight[-1].plan.starts[:] = 0\n",
    ),
    Mutant(
        "the slots of decoding requests are cached too long",
        "scheduler/running_set.py",
        "        self._decode_slots = None\n        self._decode_sharing.clear()",
        "        self._decode_sharing.clear()",
    ),
    Mutant(
        "the sharing of decoding requests is cached too long",
        "scheduler/running_set.py",
        "        self._decode_slots = None\n        self._decode_sharing.clear()",
        "        self._decode_slots = None",
    ),
    Mutant(
        "any phase may follow any other",
        "request.py",
        "        if phase not in _NEXT[self.phase]:",
        "        if False:",
    ),
    Mutant(
        "masks are computed before the last token is known",
        "engine/loop.py",
        "        if self._launched and (not is_pipeline or self._samples_again(launched.sampled)):\n",
        "        if False:\n",
        ["tests/sampling/test_grammar.py"],
    ),
    Mutant(
        "a pass is launched before the previous one has its masks",
        "engine/loop.py",
        "                self._prepare(plan)\n            self._sample_delayed()\n",
        "                self._prepare(plan)\n",
        ["tests/engine/test_loop.py"],
    ),
    Mutant(
        "masks of a row begin behind its drafts",
        "sampling/grammar.py",
        "            index += 1 + len(mine)\n        masks",
        "            index += 1\n        masks",
        ["tests/sampling/test_matcher.py"],
    ),
    Mutant(
        "anything may follow an EOS that is drafted",
        "sampling/matcher.py",
        "        if not eos_ids.isdisjoint(row.drafts):",
        "        if False:",
        ["tests/sampling/test_matcher.py"],
    ),
    Mutant(
        "a draft that exceeds the cost limit ends its request",
        "sampling/matcher.py",
        "            _fill_one_by_one(row, ",
        "            (lambda *_: None)(row, ",
        ["tests/sampling/test_matcher.py"],
    ),
    Mutant(
        "an exception of the mask worker is lost",
        "sampling/mask_worker.py",
        "            raise error\n",
        "            pass\n",
        ["tests/sampling/test_mask_worker.py"],
    ),
    Mutant(
        "drafts that a pass in flight may accept need no pages",
        "scheduler/scheduler.py",
        "np.minimum(reach + slots.ahead[rows] + draft,",
        "np.minimum(reach + draft,",
    ),
    Mutant(
        "drafts count as in flight for ever",
        "scheduler/scheduler.py",
        "            slots.ahead[slot] -= num_drafts\n",
        "",
    ),
    Mutant(
        "a new request inherits the drafts of its slot",
        "scheduler/slots.py",
        "self.capacity[slot] = self.ahead[slot] = 0",
        "self.capacity[slot] = 0",
    ),
    Mutant(
        "a request that ends by drafts is planned again",
        "scheduler/scheduler.py",
        "            if 0 < remaining <= more:\n",
        "            if False:\n",
    ),
    Mutant(
        "accepted drafts are not counted as computed",
        "scheduler/scheduler.py",
        "            slots.computed[slot] += more\n",
        "",
    ),
    Mutant(
        "accepted drafts are free of charge",
        "scheduler/scheduler.py",
        "            self.policy.charge(request.tenant, more * self.config.output_weight)\n",
        "",
    ),
    Mutant(
        "a pass without drafts behind one with drafts has inexact positions",
        "scheduler/scheduler.py",
        "if self._num_drafts or (self.config.draft_tokens and slots.ahead[rows].any()):",
        "if self._num_drafts:",
        ["tests/scheduler/test_draft_depth.py", "tests/scheduler/test_state_machine.py"],
    ),
    Mutant(
        "a mixed batch has adaptive drafts",
        "scheduler/scheduler.py",
        "        if self.draft_depth is not None and admission.chunks:\n            self._num_drafts = 0\n",
        "",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "passes with drafts change the step time",
        "scheduler/scheduler.py",
        "        if self.draft_depth is None or not depth:\n",
        "        if True:\n",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "drafts that are chosen for a pass need no pages",
        "scheduler/scheduler.py",
        "self.memory, self.memory.slots, self._num_drafts\n",
        "self.memory, self.memory.slots, 0\n",
        ["tests/scheduler/test_state_machine.py"],
    ),
    Mutant(
        "a token without a prediction counts as predicted",
        "scheduler/draft_depth.py",
        "            is_right = index.get(key) == token\n",
        "            is_right = index.get(key, token) == token\n",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "rejected drafts do not count",
        "scheduler/draft_depth.py",
        "        self._accepted += (num_accepted / num_tried - self._accepted) * weight\n",
        "",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "a depth that was slow once is never tried again",
        "scheduler/draft_depth.py",
        "            times.expire(self._num_passes)\n",
        "",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "a slow depth is tried again at a fixed interval",
        "scheduler/draft_depth.py",
        "            self._retry_passes = min(2 * self._retry_passes, _LAST_RETRY)\n",
        "            self._retry_passes = 16\n",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "one slow pass ends drafts",
        "scheduler/draft_depth.py",
        "        self.ratio = statistics.median(self._recent)\n",
        "        self.ratio = max(self._recent)\n",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "passes with drafts are compared with a step time that may be wrong",
        "scheduler/draft_depth.py",
        "                expected *= self._times_of(plan.num_decodes, 0, has_grammar).ratio\n",
        "                pass\n",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "the draft depth has no hysteresis",
        "scheduler/draft_depth.py",
        "gains[best] < _CHANGE * present",
        "gains[best] < present",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "a batch around the limit of rows is indexed again and again",
        "scheduler/draft_depth.py",
        "            return 0  # matchers stay",
        "            return self._matchers.clear() or 0  # matchers stay",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "the tokens before a backlog are not the context of its first token",
        "scheduler/draft_depth.py",
        "        wide = tokens[max(0, begin - 2) : end]",
        "        wide = tokens[begin:end]",
        ["tests/scheduler/test_draft_depth.py"],
    ),
    Mutant(
        "drafts after a stop token count as accepted",
        "scheduler/scheduler.py",
        "                request.num_accepted += num_tokens - 1\n",
        "                request.num_accepted += num\n",
        ["tests/scheduler/test_overlap.py"],
    ),
    Mutant(
        "recent outputs of one tenant are drafted for another",
        "engine/recent_outputs.py",
        "        tenant = self._tenants.get(request.tenant)\n",
        "        tenant = next(iter(self._tenants.values()), None)\n",
        ["tests/engine/test_recent_outputs.py"],
    ),
    Mutant(
        "recent outputs of one cache salt are drafted for another",
        "engine/recent_outputs.py",
        "    _, salt, adapter = request.namespace\n",
        "    salt, adapter = '', request.adapter\n",
        ["tests/engine/test_recent_outputs.py"],
    ),
    Mutant(
        "a new request inherits the draft source of its slot",
        "engine/cpu/drafts.py",
        "        self._sources.pop(slot, None)\n",
        "",
        ["tests/engine/cpu/test_drafts.py"],
    ),
    Mutant(
        "a retracted request waits for every token of its drafts",
        "scheduler/scheduler.py",
        "                    request.num_in_flight -= 1\n",
        "                    request.num_in_flight -= 2\n",
    ),
    Mutant(
        "a frequency penalty counts the prompt",
        "sampling/adjust.py",
        "np.unique(tokens[by.num_prompt_tokens :], return_counts=True)",
        "np.unique(tokens, return_counts=True)",
        ["tests/sampling/test_adjust.py"],
    ),
    Mutant(
        "a penalty kernel counts a token more than once",
        "kernels/adjust.py",
        "        fresh = position >= counted\n",
        "        fresh = position >= 0\n",
        ["tests/kernels/test_adjust.py"],
    ),
    Mutant(
        "a draft kernel: penalties count rejected drafts",
        "kernels/adjust.py",
        "    end = tl.load(num_computed + slot) + 1\n",
        "    end = tl.load(num_computed + slot) + 2\n",
        ["tests/kernels/test_adjust.py"],
    ),
    Mutant(
        "a draft kernel accepts a wrong draft",
        "kernels/drafts.py",
        "        right = token == draft\n",
        "        right = token >= 0\n",
        ["tests/kernels/test_drafts.py"],
    ),
    Mutant(
        "a draft kernel writes behind the pages of a row",
        "kernels/drafts.py",
        "+ _MAX_LENGTH) - 2 - position, DRAFTS)\n        if limit > 0:",
        "+ _MAX_LENGTH) + 2 - position, DRAFTS)\n        if limit > 0:",
        ["tests/kernels/test_drafts.py"],
    ),
    Mutant(
        "a draft model: the last token of a row is not computed again",
        "kernels/drafts.py",
        "fed += tl.minimum(position + 1, FIRST)",
        "fed += tl.minimum(position + 1, 1)",
        ["tests/engine/cuda/test_draft_model.py"],
    ),
    Mutant(
        "a draft model computes no prompts",
        "engine/cuda/prefill.py",
        "        if self._compute_draft_kv is not None:",
        "        if self._compute_draft_kv is not None and False:",
        ["tests/engine/cuda/test_draft_model.py"],
    ),
    Mutant(
        "a draft model runs behind the end of a row",
        "engine/cuda/draft_model.py",
        "                torch.minimum(state.num_computed, buffers.last_positions, out=state.num_computed)\n",
        "",
        ["tests/engine/cuda/test_draft_model.py"],
    ),
    Mutant(
        "a draft model on the CPU computes no prompts",
        "engine/cpu/executor.py",
        "            self._draft_model.compute_kv(inputs)",
        "            pass",
        ["tests/engine/cpu/test_draft_model.py"],
    ),
    Mutant(
        "a draft kernel: a token sees the drafts behind it",
        "kernels/decode_attention.py",
        "            visible = (before >= 0) & is_new[None, :]\n",
        "            visible = (before >= -1) & is_new[None, :]\n",
        ["tests/kernels/test_decode_attention.py"],
    ),
    Mutant(
        "a draft kernel: the host overwrites where a row is",
        "engine/cuda/inputs.py",
        "            stale[: plan.num_decodes] = False",
        "            stale[: plan.num_decodes] |= False",
        ["tests/engine/cuda/test_drafts.py"],
    ),
    Mutant(
        "a draft kernel: a slot keeps the draft source of its last request",
        "engine/cuda/inputs.py",
        "            if len(source) or self._has_source[join.slot]:\n",
        "            if len(source):\n",
        ["tests/engine/cuda/test_drafts.py"],
    ),
    Mutant(
        "prompt logprobs are of the wrong position",
        "sampling/logprobs.py",
        "requests.append(LogprobRequest(row, index, end - first, first,",
        "requests.append(LogprobRequest(row, index, end - first, first - 1,",
        ["tests/oracle/test_sampling.py"],
    ),
    Mutant(
        "prompt logprobs from a start position begin one token late",
        "request.py",
        "        return max(start - 1, 0)",
        "        return start",
        ["tests/oracle/test_sampling.py"],
    ),
    Mutant(
        "mean pooling on a GPU returns the last token's states",
        "engine/cuda/inputs.py",
        'join.pooling is not None, join.pooling == "last"',
        "join.pooling is not None, join.pooling is not None",
        ["tests/engine/cuda/test_pooling.py"],
    ),
    Mutant(
        "a lane that won reports no further candidates",
        "kernels/logprobs.py",
        "keys = tl.where(lane == its_lane, left, keys)",
        "keys = tl.where(lane == its_lane, nothing, keys)",
        ["tests/kernels/test_logprobs.py"],
    ),
    Mutant(
        "logprobs of a biased token are those of the bias",
        "engine/cuda/sampling.py",
        "unadjusted = logits.clone() if adjusts else logits",
        "unadjusted = logits",
        ["tests/engine/cuda/test_sampling.py"],
    ),
    Mutant(
        "logprobs of a discarded row go to the next request",
        "engine/loop.py",
        "if row not in discarded]",
        "][: len(logprobs.chosen) - len(discarded)]",
        ["tests/engine/test_engine.py"],
    ),
    Mutant(
        "a small top-k drops ties of its last token",
        "kernels/sampling.py",
        "        if most <= GROUPS:",
        "        if most <= 2 * GROUPS:",
        ["tests/kernels/test_sampling.py"],
    ),
    Mutant(
        "half a tool call is shown as text",
        "text/tool_calls.py",
        "end -= overlap_of_any(self._text, self._openings)",
        "end -= 0",
        ["tests/text/test_tool_calls.py"],
    ),
    Mutant(
        "a host page is forgotten by the plan that spills it",
        "scheduler/host_tier.py",
        "            if node.swap_step == step:\n                swapping",
        "            if False:\n                swapping",
        ["tests/scheduler/test_host_tier.py"],
    ),
    Mutant(
        "a page is fetched with the plan that spills it",
        "scheduler/host_tier.py",
        " or child.swap_step == step:",
        ":",
        ["tests/scheduler/test_host_tier.py"],
    ),
    Mutant(
        "a fetch does not wait for the copy that fills its host pages",
        "engine/cuda/swap.py",
        "            if last > self._num_spills - _RECENT:",
        "            if last > self._num_spills:",
        ["tests/engine/cuda/test_swap.py"],
    ),
    Mutant(
        "a buffer is filled while its copy leaves",
        "engine/cuda/swap.py",
        "            self._copied[(number - 2) % _RECENT].wait(streams.engine)  # it read this buffer",
        "            pass",
        ["tests/engine/cuda/test_swap.py"],
    ),
    Mutant(
        "no prior of output lengths is blended in",
        "scheduler/memory_forecast.py",
        "_PRIOR_SCALE = 600.0\n",
        "_PRIOR_SCALE = 60_000.0\n",
        ("tests/scheduler/test_memory_forecast.py",),
    ),
    Mutant(
        "prefill-first counts batches that delay no decode",
        "scheduler/scheduler.py",
        "self._num_prefill_batches + 1 if can_decode and not decode else 0",
        "self._num_prefill_batches + 1 if not decode else 0",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "requests that need evicted prefixes starve the overdue ones",
        "scheduler/aging.py",
        "        if self._num_passed < _MAX_PASSED and ",
        "        if ",
        ("tests/scheduler/test_aging.py",),
    ),
    Mutant(
        "a long prompt that lacked memory is overtaken uncounted",
        "scheduler/admission.py",
        "            if request.num_missing_pages:  #",
        "            if False:  #",
        ("tests/scheduler/test_admission.py",),
    ),
    Mutant(
        "hrrn takes the turn of the oldest request away when it does not fit",
        "scheduler/policies.py",
        "            self._num_overtakes = 0 if request is self._oldest else self._num_overtakes + 1",
        "            self._num_overtakes = (self._num_overtakes + 1) % (MAX_OVERTAKES_BY_RATIO + 1)",
        ("tests/scheduler/test_policy.py",),
    ),
    Mutant(
        "an evicted prefix keeps its priority",
        "scheduler/prefix_tree.py",
        "        node.priority = -math.inf\n",
        "",
        ("tests/scheduler/test_prefix_tree.py",),
    ),
    Mutant(
        "a request that was admitted before is displaced from the queue",
        "scheduler/validation.py",
        "request.phase is Phase.WAITING and not request.was_admitted",
        "request.phase is Phase.WAITING",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "requests are displaced although they are not enough",
        "scheduler/validation.py",
        "                for one in leaving:\n                    self.add(one)\n",
        "",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "a queue timeout ends a running request",
        "scheduler/scheduler.py",
        "        return was_in_time or self.request.is_finished",
        "        return self.request.is_finished",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "a request can raise the queue timeout of the scheduler",
        "scheduler/scheduler.py",
        "        timeout_s = min(request.queue_timeout_s, limit_s)",
        "        timeout_s = request.queue_timeout_s",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "itl_target does not limit mixed batches",
        "scheduler/scheduler.py",
        "        if num_decodes and not math.isinf(config.itl_target):",
        "        if num_decodes < 0 and not math.isinf(config.itl_target):",
        ("tests/simulator/test_experiments.py", "tests/scheduler/test_scheduler.py"),
    ),
    Mutant(
        "a prompt token takes the same part of the budget after any context",
        "scheduler/admission.py",
        "        cost = max(1.0, self.token_cost * (1 + done / self._config.chunk_context))",
        "        cost = 1.0",
        ("tests/scheduler/test_scheduler.py",),
    ),
    Mutant(
        "long prompts take half of a small pass before the short ones that wait",
        "scheduler/admission.py",
        "        self._room = min(self._config.chunk_tokens, self._budget * 3 // 4) if others_wait else 0",
        "        self._room = min(self._config.chunk_tokens, self._budget // 2) if others_wait else 0",
        ("tests/scheduler/test_admission.py",),
    ),
    Mutant(
        "the context of prompt tokens does not count in measured batches",
        "scheduler/step_time.py",
        "            recent.append(_Batch(num_tokens + pairs / self._double_cost_context, num_tokens, seconds))",
        "            recent.append(_Batch(num_tokens + pairs * 0, num_tokens, seconds))",
        ("tests/scheduler/test_step_time.py",),
    ),
    Mutant(
        "a slow pass lowers the prefill budget",
        "scheduler/step_time.py",
        "            del large[0]  # the slowest",
        "            del large[-1]",
        ("tests/scheduler/test_step_time.py",),
    ),
    Mutant(
        "prompts make no progress beside slow decodes",
        "scheduler/step_time.py",
        "        seconds = max(seconds, min(half_s, _MAX_STRETCH * seconds))\n",
        "",
        ("tests/scheduler/test_step_time.py",),
    ),
    Mutant(
        "small batches decide the prefill budget as large ones do",
        "scheduler/step_time.py",
        "        similar = max(one.weighted for one in recent) / 2",
        "        similar = 0.0",
        ("tests/scheduler/test_step_time.py",),
    ),
    Mutant(
        "a new server has no prefill budget",
        "scheduler/step_time.py",
        "            return _FIRST_TOKENS, _FIRST_TOKENS",
        "            return 1e9, 1e9",
        ("tests/scheduler/test_step_time.py", "tests/simulator/test_experiments.py"),
    ),
    Mutant(
        "background requests are admitted when foreground requests are only skipped",
        "scheduler/background.py",
        "        return self.foreground.next(now)",
        "        return self.foreground.next(now) or self.background.next(now)",
        ("tests/scheduler/test_background.py",),
    ),
    Mutant(
        "a retracted background request is tried before waiting foreground requests",
        "scheduler/admission.py",
        "            if request.background and self._memory.tree.num_foreground:\n                break",
        "            if False:\n                break",
        ("tests/scheduler/test_background.py",),
    ),
    Mutant(
        "longest prefix match finds background requests below a hidden tenant",
        "scheduler/policies.py",
        " or tree.is_below_hidden(node):",
        ":",
        ("tests/scheduler/test_background.py",),
    ),
    Mutant(
        "background requests are retracted like others",
        "scheduler/retraction.py",
        "        return (not request.background, request.priority,",
        "        return (False, request.priority,",
        ("tests/scheduler/test_background.py",),
    ),
    Mutant(
        "completed lines of an interrupted batch run again",
        "server/batches/running_batch.py",
        "            yield [line for line in group if line.custom_id not in self._done.custom_ids]",
        "            yield group",
        ("tests/server/test_batch_runner.py",),
    ),
    Mutant(
        "a result that a crash has cut stays",
        "server/batches/lines.py",
        "                file.truncate(num_bytes)",
        "                pass",
        ("tests/server/test_batch_runner.py",),
    ),
    Mutant(
        "two processes run the batches of a folder",
        "server/batches/runner.py",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        pass",
        ("tests/server/test_batch_runner.py",),
    ),
    Mutant(
        "a tenant reads the files of another",
        "server/batches/store.py",
        "        if found is None or tenant not in (None, found.tenant) or found.file.expires_at",
        "        if found is None or found.file.expires_at",
        ("tests/server/test_batches.py",),
    ),
    Mutant(
        "a row of a pipeline is planned in every pass",
        "scheduler/scheduler.py",
        "max(self.step - self.config.num_stages, oldest - 1)",
        "self.step",
        PIPELINE,
    ),
    Mutant(
        "a row of a pipeline is planned only when its token is known",
        "scheduler/scheduler.py",
        "max(self.step - self.config.num_stages, oldest - 1)",
        "oldest - 1",
        PIPELINE,
    ),
    Mutant(
        "a pass of a pipeline has all rows that are ready",
        "scheduler/running_set.py",
        "        num_rows = -(-len(rows) // self._num_stages)\n",
        "        num_rows = len(rows)\n",
        PIPELINE,
    ),
    Mutant(
        "a pass of a pipeline has rows that were retracted",
        "scheduler/scheduler.py",
        "        return self._due[np.isin(self._due, self.running.decode_slots)]\n",
        "        return self._due\n",
        PIPELINE,
    ),
    Mutant(
        "a pass of a pipeline is charged to the tenants of all rows",
        "scheduler/scheduler.py",
        "            if num_decodes < len(self.running.decoding):\n                tenants",
        "            if False:\n                tenants",
        PIPELINE,
    ),
    Mutant(
        "a pipeline has two passes in flight",
        "scheduler/scheduler.py",
        "        self.max_in_flight = config.num_stages + 1 ",
        "        self.max_in_flight = 2 ",
        PIPELINE,
    ),
    Mutant(
        "a pipeline computes masks before the last token is known",
        "engine/loop.py",
        "        return any(not wanted.isdisjoint(one.sampled) for one in self._launched)\n",
        "        return False\n",
        ("tests/parallel/test_pipeline.py",),
    ),
    Mutant(
        "the first stage of a pipeline does not wait for tokens",
        "engine/late_tokens.py",
        "wait=self._stored_step < needed",
        "wait=False",
        ("tests/parallel/test_pipeline.py",),
    ),
    Mutant(
        "the first stage of a pipeline stores late tokens in slots of other requests",
        "engine/late_tokens.py",
        "        is_same = self._joined_step[plan.slots[rows]] <= plan.step\n",
        "        is_same = self._joined_step[plan.slots[rows]] >= 0\n",
        ("tests/parallel/test_pipeline.py",),
    ),
    Mutant(
        "a GPU that is not the last stage assumes that its rows advance by themselves",
        "engine/cuda/inputs.py",
        "np.where(samples & self._samples, lengths, 0)",
        "np.where(samples, lengths, 0)",
        ("tests/parallel/test_cuda_pipeline.py",),
    ),
    Mutant(
        "a GPU reads sums of squares of hidden states that another stage has sent",
        "engine/cuda/model.py",
        "self.square_columns = 1 if model.shard.is_first else 0",
        "self.square_columns = 1",
        ("tests/parallel/test_cuda_pipeline.py",),
    ),
    Mutant(
        "late tokens are not uploaded to the GPU of the first stage",
        "engine/cuda/inputs.py",
        "for join in joins), *late_runs]",
        "for join in joins)]",
        ("tests/parallel/test_cuda_pipeline.py",),
    ),
    Mutant(
        "new pages of a decode batch that repeats are not uploaded",
        "engine/cuda/inputs.py",
        "            or len(plan.page_slots)\n",
        "",
        ("tests/engine/cuda/test_executor.py",),
    ),
    Mutant(
        "a tile that was loaded before the wait is added twice",
        "kernels/decode_attention.py",
        "            masked = begin + BLOCK_N\n",
        "            masked = begin\n",
        ("tests/kernels/test_decode_attention.py",),
    ),
    Mutant(
        "kernels for older GPUs use programmatic dependent launch",
        "kernels/_triton.py",
        "    if not INTERPRETED and tl.target_info.cuda_capability_geq(9):\n        tl.extra.cuda.gdc_wait()",
        "    if not INTERPRETED:\n        tl.extra.cuda.gdc_wait()",
        ("tests/kernels/test_variants.py",),
    ),
    Mutant(
        "the kernels of a stage are those of all layers",
        "engine/cuda/variants.py",
        "(specs[0].with_layers(shard.layers(specs[0])), *specs[1:])",
        "specs",
        ("tests/kernels/test_variants.py",),
    ),
    Mutant(
        "the stages of a pipeline have the windows of the first layers",
        "model/layout.py",
        "spec.with_layers(self.layers(spec))",
        "replace(spec.with_layers(self.layers(spec)), windows=spec.windows[: len(self.layers(spec))])",
        ("tests/parallel/test_pipeline.py",),
    ),
    Mutant(
        "the stages of a pipeline rotate as the first layers do",
        "model/layout.py",
        "spec.with_layers(self.layers(spec))",
        "replace(spec.with_layers(self.layers(spec)), layer_ropes=spec.layer_ropes[: len(self.layers(spec))])",
        ("tests/parallel/test_pipeline.py",),
    ),
    Mutant(
        "gate and up of an expert are those of the next one",
        "model/layout.py",
        'names, row = f"{stored}mlp.experts.{expert}.", 2 * expert * num_rows',
        'names, row = f"{stored}mlp.experts.{(expert + 1) % spec.num_experts}.", 2 * expert * num_rows',
        ("tests/model/test_oracle.py",),
    ),
    Mutant(
        "the blocks of experts overlap",
        "kernels/route_experts.py",
        "block = offset // BLOCK_M + column\n",
        "block = offset // BLOCK_M\n",
        ("tests/kernels/test_experts.py",),
    ),
    Mutant(
        "padding rows choose experts",
        "kernels/route_experts.py",
        "is_live = is_live & (m < tl.load(live))",
        "is_live = is_live",
        ("tests/kernels/test_experts.py",),
    ),
    Mutant(
        "the beginning of a marker of gpt-oss is streamed as text",
        "text/harmony.py",
        "len(self._text) if at_end else len(self._text) - overlap_of_any(self._text, _MESSAGE_ENDS)",
        "len(self._text)",
        ("tests/text/test_harmony.py",),
    ),
    Mutant(
        "the sink of a head is counted with every chunk of its keys",
        "kernels/decode_attention.py",
        "divisor += tl.where(num_chunks == 1, sink_weight(sinks, head, inside, top), 0.0)",
        "divisor += sink_weight(sinks, head, inside, top)",
        ("tests/kernels/test_decode_attention.py",),
    ),
    Mutant(
        "a sink is compared with the scores of a part of the keys",
        "engine/cpu/attention.py",
        "return torch.lerp(out, other, weight), torch.logaddexp(lse, other_lse)",
        "return torch.lerp(out, other, weight), lse",
        ("tests/engine/cpu/test_attention.py",),
    ),
    Mutant(
        "the second tile of a LoRA matrix is the first again",
        "kernels/lora.py",
        "        if start + BLOCK_N < SPAN:",
        "        if False:",
        ("tests/kernels/test_lora.py",),
    ),
    Mutant(
        "padding of the tokens that are sampled from uses experts",
        "engine/cuda/model.py",
        "        self.live = live\n        self.x = torch.index_select",
        "        self.live = None\n        self.x = torch.index_select",
        ("tests/engine/cuda/test_executor.py::test_padding_uses_no_expert",),
    ),
    Mutant(
        "sums of a block of FP8 experts are not scaled",
        "kernels/expert_weights.py",
        "acc += tl.dot(a, tl.trans(w.to(a.dtype))) * scale[None, :]",
        "acc += tl.dot(a, tl.trans(w.to(a.dtype)))",
        ("tests/kernels/test_experts.py",),
    ),
    Mutant(
        "a rank gets the FP8 blocks of the whole matrix",
        "model/fp8_tensors.py",
        "return math.gcd(BLOCK, *sizes)",
        "return BLOCK",
        ("tests/model/test_fp8_tensors.py",),
    ),
    Mutant(
        "the third group of MXFP4 numbers has the scale of the second",
        "kernels/expert_weights.py",
        "* _scale(word, 2)",
        "* _scale(word, 1)",
        ("tests/kernels/test_experts.py",),
    ),
    Mutant(
        "the norm before quantised experts has no weight",
        "engine/cuda/experts.py",
        "rms_norm(x, self.norm, eps, inputs)",
        "rms_norm(x, torch.ones_like(self.norm), eps, inputs)",
        ("tests/engine/cuda/test_quantised_experts.py",),
    ),
    Mutant(
        "the weights of experts are not multiplied in",
        "kernels/experts.py",
        "* up * weight[:, None]",
        "* up",
        ("tests/kernels/test_experts.py",),
    ),
    Mutant(
        "host pages that are dropped are still copied",
        "scheduler/host_tier.py",
        "        if self._is_copied[node.host_pages].any():",
        "        if False:",
        ("tests/scheduler/test_nan.py",),
    ),
    Mutant(
        "attention reads the output of an FP8 GEMM without its scales",
        "engine/cuda/quantised.py",
        "        if weights.bias is not None or not weights.gated:  # attention does not apply them\n",
        "        if weights.bias is not None:\n",
        ("tests/engine/cuda/test_quantised.py",),
    ),
    Mutant(
        "the output of an FP8 GEMM is rounded without the scales of its columns",
        "kernels/quantise_rows.py",
        "        value = value * row_scale * tl.load(factors + column, mask=inside, other=0.0)\n",
        "        value = value * row_scale\n",
        ("tests/engine/cuda/test_quantised.py",),
    ),
    Mutant(
        "draft attention of an FP8 cache has the stages that ptxas compiles wrongly",
        "kernels/decode_attention.py",
        "    num_stages = 3 if fp8 and heads == 64 else 2\n",
        "    num_stages = 2\n",
        ("tests/kernels/test_variants.py",),
    ),
    Mutant(
        "the end of a row does not count for its FP8 scale",
        "kernels/quantise_rows.py",
        "        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=0))\n",
        "        pass\n",
        ("tests/engine/cuda/test_quantised.py",),
    ),
    Mutant(
        "a fused GEMM reads hidden states without their norm where outputs of blocks are normed",
        "engine/cuda/model.py",
        "self.x if norms_row else self._input(),",
        "self.x,",
        ("tests/engine/cuda/test_executor.py",),
    ),
    Mutant(
        "requests of a replica of Ray Serve that is being stopped are aborted after 30 s",
        "server/ray_engine.py",
        "(self._lease_s if has_jobs else _LEASE_S)",
        "_LEASE_S",
        ("tests/server/test_ray_engine.py",),
    ),
    Mutant(
        "the first of three recorded runs is part of the fit",
        "simulator/fit.py",
        "counts[run.workload] < _WARMS_UP or run != first[run.workload]",
        "True",
        ("tests/simulator/test_fit.py",),
    ),
]


def survives(mutant: Mutant) -> bool:
    """Whether the tests stay green with the fault planted."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("paceline", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "paceline" / mutant.file
        text = target.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: the code to mutate occurs {text.count(mutant.old)} times"
        target.write_text(text.replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--timeout",
            "120",
            "-p",
            "no:cacheprovider",
            *mutant.tests,
        ]
        path = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        red = next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        print(f"{'SURVIVES' if run.returncode == 0 else 'killed  '}  {mutant.name}  {red[:110]}", flush=True)
        assert run.returncode in (0, 1), f"{mutant.name}: the tests could not run: {run.stdout[-500:]}"
        return run.returncode == 0


def main() -> int:
    wanted = [mutant for mutant in MUTANTS if not sys.argv[1:] or any(word in mutant.name for word in sys.argv[1:])]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        alive = list(workers.map(survives, wanted))
    print(f"{len(wanted)} planted faults, {sum(alive)} survive")
    return 1 if any(alive) else 0


if __name__ == "__main__":
    sys.exit(main())
