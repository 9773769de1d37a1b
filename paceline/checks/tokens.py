"""Greedy tokens compared with float32, in all overlap modes, alone and in a batch."""

from __future__ import annotations

import math
import random
from functools import partial

from paceline.checks.harness import ROUNDING, CheckResult, CheckSetup, greedy, margin, random_prompts, tokens_of


def check_tokens(
    setup: CheckSetup, *, count: int = 180, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)
) -> CheckResult:
    """Greedy tokens within the margin; and the same tokens with overlap on, off and sync. On four layers."""
    spec, rng = setup.spec(4), random.Random(3)
    shared = random_prompts(rng, spec.vocab_size, 1, longest)[0]
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    prompts += [shared + own for own in random_prompts(rng, spec.vocab_size, max(2, count // 9), max(2, longest // 18))]
    params = greedy([rng.randint(*num_tokens) for _ in prompts])
    # Without limits that depend on measured times, batches are the same in all modes, and so are the bits of a token.
    start = partial(setup.llm, spec, kv_tokens=400_000, max_wait=math.inf, itl_target=math.inf, chunk_tokens=512)
    context_tokens = min(8192, spec.context_tokens)
    tokens: dict[str, list[list[int]]] = {}
    some, few = slice(0, None, 20), slice(0, 4)
    for mode in ("off", "on", "sync"):
        with start(overlap=mode, context_tokens=context_tokens) as llm:
            tokens[mode] = tokens_of(llm, prompts, params)
            if mode == "on":
                again = tokens_of(llm, prompts[some], params[some])
                alone = [tokens_of(llm, [p], [q])[0] for p, q in zip(prompts[few], params[few], strict=True)]
    reference, plain = setup.decoder(spec, "float32"), setup.decoder(spec)
    judged = slice(0, None, 4)
    ours = margin(reference, prompts[judged], tokens["on"][judged])
    theirs = margin(reference, prompts[judged], tokens["on"][judged], plain)
    hits, single = margin(reference, prompts[some], again), margin(reference, prompts[few], alone)
    same = {mode: sum(a == b for a, b in zip(tokens[mode], tokens["off"], strict=True)) for mode in ("on", "sync")}
    bound = 1.5 * theirs.worst + ROUNDING
    right = max(ours.worst, hits.worst, single.worst) < bound and set(same.values()) == {len(prompts)}
    return CheckResult(
        right,
        f"{ours.judged} greedy tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (hits "
        f"{hits.worst:.3f}, alone {single.worst:.3f}; plain torch in {setup.dtype}: {theirs.wrong}, "
        f"{theirs.worst:.3f}; bound {bound:.3f}); outputs of {len(prompts)} equal to overlap off: {same}",
    )


def check_alone(
    setup: CheckSetup, *, batch: int = 256, some: int = 16, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)
) -> CheckResult:
    """The same request alone and in a full batch: both within the margin, without the prefix cache."""
    spec, rng = setup.spec(), random.Random(5)
    prompts = random_prompts(rng, spec.vocab_size, batch, longest)
    params = greedy([rng.randint(*num_tokens) for _ in prompts])
    with setup.llm(spec, kv_tokens=400_000, prefix_cache=False) as llm:
        together = tokens_of(llm, prompts, params)
        single = [tokens_of(llm, [p], [q])[0] for p, q in zip(prompts[:some], params[:some], strict=True)]
    reference, plain = setup.decoder(spec, "float32"), setup.decoder(spec)
    prompts, together = prompts[:some], together[:some]
    ours, alone = margin(reference, prompts, together), margin(reference, prompts, single)
    theirs = margin(reference, prompts, together, plain)
    same = sum(a == b for a, b in zip(together, single, strict=True))
    bound = 1.5 * theirs.worst + ROUNDING
    return CheckResult(
        max(ours.worst, alone.worst) < bound,
        f"{some} requests alone and among {batch}, {ours.judged} greedy tokens: worst margin alone {alone.worst:.3f}, "
        f"in the batch {ours.worst:.3f} (plain torch in {setup.dtype}: {theirs.worst:.3f}; bound {bound:.3f}); not the "
        f"float32 argmax: {alone.wrong}, {ours.wrong} (plain torch: {theirs.wrong}); {same} outputs equal",
    )
