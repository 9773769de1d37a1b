"""Greedy tokens against float32, however passes overlap, and alone as in a batch."""

from __future__ import annotations

import random

from paceline.checks.harness import ROUNDING, Lab, Verdict, greedy, margin, random_prompts, tokens_of


def check_tokens(lab: Lab, *, count: int = 180, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)) -> Verdict:
    """Greedy tokens within the margin; and the same tokens with overlap on, off and sync. On four layers."""
    spec, rng = lab.spec(4), random.Random(3)
    shared = random_prompts(rng, spec.vocab_size, 1, longest)[0]
    prompts = random_prompts(rng, spec.vocab_size, count, longest)
    prompts += [shared + own for own in random_prompts(rng, spec.vocab_size, max(2, count // 9), max(2, longest // 18))]
    params = greedy([rng.randint(*num_tokens) for _ in prompts])
    options = {"context_tokens": min(8192, spec.context_tokens), "chunk_tokens": 512}
    tokens: dict[str, list[list[int]]] = {}
    some, few = slice(0, None, 20), slice(0, 4)
    for mode in ("off", "on", "sync"):
        with lab.llm(spec, overlap=mode, kv_tokens=400_000, **options) as llm:
            tokens[mode] = tokens_of(llm, prompts, params)
            if mode == "on":
                again = tokens_of(llm, prompts[some], params[some])
                alone = [tokens_of(llm, [p], [q])[0] for p, q in zip(prompts[few], params[few], strict=True)]
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    judged = slice(0, None, 4)
    ours = margin(reference, prompts[judged], tokens["on"][judged])
    theirs = margin(reference, prompts[judged], tokens["on"][judged], plain)
    hits, single = margin(reference, prompts[some], again), margin(reference, prompts[few], alone)
    same = {mode: sum(a == b for a, b in zip(tokens[mode], tokens["off"], strict=True)) for mode in ("on", "sync")}
    bound = 1.5 * theirs.worst + ROUNDING
    right = max(ours.worst, hits.worst, single.worst) < bound and set(same.values()) == {len(prompts)}
    return Verdict(
        right,
        f"{ours.judged} greedy tokens, {ours.wrong} not the float32 argmax, worst margin {ours.worst:.3f} (hits "
        f"{hits.worst:.3f}, alone {single.worst:.3f}; plain torch in {lab.dtype}: {theirs.wrong}, {theirs.worst:.3f}; "
        f"bound {bound:.3f}); of {len(prompts)} outputs as with overlap off: {same}",
    )


def check_alone(
    lab: Lab, *, batch: int = 256, some: int = 16, longest: int = 900, num_tokens: tuple[int, int] = (8, 40)
) -> Verdict:
    """The same request alone and in a full batch: both within the margin, with nothing cached between them."""
    spec, rng = lab.spec(), random.Random(5)
    prompts = random_prompts(rng, spec.vocab_size, batch, longest)
    params = greedy([rng.randint(*num_tokens) for _ in prompts])
    with lab.llm(spec, kv_tokens=400_000, prefix_cache=False) as llm:
        together = tokens_of(llm, prompts, params)
        single = [tokens_of(llm, [p], [q])[0] for p, q in zip(prompts[:some], params[:some], strict=True)]
    reference, plain = lab.decoder(spec, "float32"), lab.decoder(spec)
    prompts, together = prompts[:some], together[:some]
    ours, lonely = margin(reference, prompts, together), margin(reference, prompts, single)
    theirs = margin(reference, prompts, together, plain)
    same = sum(a == b for a, b in zip(together, single, strict=True))
    bound = 1.5 * theirs.worst + ROUNDING
    return Verdict(
        max(ours.worst, lonely.worst) < bound,
        f"{some} requests alone and among {batch}, {ours.judged} greedy tokens: worst margin alone {lonely.worst:.3f}, "
        f"in the batch {ours.worst:.3f} (plain torch in {lab.dtype}: {theirs.worst:.3f}; bound {bound:.3f}); not the "
        f"float32 argmax: {lonely.wrong}, {ours.wrong} (plain torch: {theirs.wrong}); {same} outputs equal",
    )
