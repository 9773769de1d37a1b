"""Offline generation, timed: `python -m paceline.bench.offline nano sweep --shape qwen3-0.6b`.

Needs nothing that the engine itself does not need, so that it runs on a bare GPU host. Every run ends in a line that
begins with `RESULT ` and holds one JSON object; a short table comes last. One part that fails prints why, the others
still run, and the exit status says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench.workloads import Offline, gsp_offline, nano, sampled, structured, sweep
from paceline.config import EngineConfig
from paceline.engine.build import assemble
from paceline.engine.cuda_device import CudaDevice, Stats
from paceline.llm import LLM
from paceline.model.decoder import Decoder
from paceline.model.registry import shape as named_shape
from paceline.model.weights import random_weights
from paceline.request import SamplingParams
from paceline.text.synthetic import synthetic_tokenizer

PARTS = ("check", "nano", "sweep", "gsp", "sampling", "grammar", "profile")
SWEEP = (1, 256)


class Bench:
    def __init__(self, shape: str, repeats: int, batches: Sequence[int], options: dict[str, Any]) -> None:
        self.shape, self.repeats, self.batches, self.options = shape, repeats, batches, options
        self.table: list[str] = []
        self.startup_s = math.nan
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        """The model, loaded at first use; from then on the process's startup time is known."""
        if self._llm is None:
            began = time.perf_counter()
            self._llm = LLM(load="random", shape=self.shape, **self.options)
            loaded = time.perf_counter()
            self._llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            self.startup_s = process_age_s()
            pages = self._llm.engine.scheduler.config.num_pages
            print(f"loaded in {loaded - began:.1f} s, first token {time.perf_counter() - loaded:.2f} s later, "
                  f"process is {self.startup_s:.1f} s old, {pages} pages", flush=True)  # fmt: skip
            # Everything once, briefly: prompts of every length, and every batch there will be.
            work = nano().shifted(40_000)
            self._llm.generate(work.prompts, [replace(each, max_tokens=4) for each in work.params])
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def timed(self, work: Offline, name: str) -> tuple[float, Stats, float]:
        """Seconds of one generate, what the device did meanwhile, and the hit rate of these prompts."""
        llm = self.llm
        device = device_of(llm)
        device.reset_stats()
        if (recorder := llm.engine.recorder) is not None:
            llm.engine.ask(lambda _: recorder.mark(name)).result()
        began = time.perf_counter()
        outputs = llm.generate(work.prompts, work.params)
        seconds = time.perf_counter() - began
        found = sum(len(output.token_ids) for output in outputs)
        if recorder is not None:
            llm.engine.ask(lambda _: recorder.mark(f"end of {name}")).result()
        assert found == work.num_output_tokens, f"{found} tokens came out, {work.num_output_tokens} were asked for"
        cached = sum(output.num_cached_tokens for output in outputs)
        return seconds, device.stats, cached / sum(map(len, work.prompts))

    def nano(self) -> None:
        self._throughput("nano", nano())

    def gsp(self) -> None:
        self._throughput("gsp", gsp_offline())

    def sampling(self) -> None:
        """nano with top-k, top-p and penalties on all rows, against plain."""
        self._against("nano-sampled", lambda by: nano().shifted(by), lambda by: sampled(nano().shifted(by)))

    def grammar(self) -> None:
        """64 prompts that obey a schema each, against the same unconstrained."""
        self._against(
            "grammar-64", lambda by: sweep(64, 256, 500 + by), lambda by: structured(64, 256, 500 + by)
        )  # fmt: skip

    def _against(self, name: str, plain: Callable[[int], Offline], full: Callable[[int], Offline]) -> None:
        """The best of both, run in turn, after a first time that compiles and captures what each needs."""
        began = time.perf_counter()
        self.timed(full(9_000), f"{name}, first")
        print(f"{name}: the first time took {time.perf_counter() - began:.2f} s", flush=True)
        self.timed(plain(9_001), f"{name} plain, first")
        fast, slow = (math.inf, Stats(), 0.0), (math.inf, Stats(), 0.0)
        for repeat in range(2 * self.repeats):
            fast = min(fast, self.timed(plain(2 * repeat), f"{name} plain"), key=lambda run: run[0])
            slow = min(slow, self.timed(full(2 * repeat + 1), name), key=lambda run: run[0])
            print(f"{name} run {repeat}: best so far {slow[0]:.3f} s, plain {fast[0]:.3f} s", flush=True)
        ratio = slow[0] / fast[0]
        passes = [run[1].device_s / max(run[1].passes, 1) * 1e3 for run in (slow, fast)]
        more = {"ratio": round(ratio, 4), "plain_seconds": round(fast[0], 4), "device_ms_per_pass": round(passes[0], 4),
                "plain_device_ms_per_pass": round(passes[1], 4)}  # fmt: skip
        self.result(name, slow[0], full(0).num_output_tokens, slow[1], slow[2], **more)
        self.table.append(
            f"{name:12} {slow[0]:8.3f} s, plain {fast[0]:.3f} s: {ratio:.3f}x; the device {passes[0]:.3f} ms a pass, "
            f"plain {passes[1]:.3f}; idle {idle_share(slow[1]):.2%}; host {host_us(slow[0], slow[1]):.0f} µs/step"
        )

    def _throughput(self, name: str, work: Offline) -> None:
        best: tuple[float, Stats, float] | None = None
        for repeat in range(self.repeats):
            run = self.timed(work.shifted(repeat), f"{name} {repeat}")
            seconds, stats, hit_rate = run
            print(f"{name} run {repeat}: {seconds:.3f} s; {describe(self.llm, seconds, stats)}", flush=True)
            best = run if best is None or seconds < best[0] else best
        assert best is not None, "there is at least one repeat"
        seconds, stats, hit_rate = best
        for bucket, of in sorted(stats.by_bucket.items()):
            what = f"graph of {bucket}" if bucket else "with prompts"
            each = of.device_s / of.passes
            print(f"  {what:14} {of.passes:5} passes {of.device_s * 1e3:9.1f} ms in all {each * 1e3:8.3f} each")
        self.result(name, seconds, work.num_output_tokens, stats, hit_rate)
        self.table.append(
            f"{name:10} {seconds:8.3f} s {work.num_output_tokens / seconds:10.0f} tok/s  "
            f"idle {idle_share(stats):6.2%}  host {host_us(seconds, stats):7.0f} µs/step"
        )

    def sweep(self) -> None:
        for batch in self.batches:
            # The best of each: the difference between a long run and a slow short one would flatter.
            seed = 1000 * batch
            short = min(self.timed(sweep(batch, 16, seed + i), f"sweep {batch} {i} short")[0] for i in range(2))
            runs = [self.timed(sweep(batch, 272, seed + 2 + i), f"sweep {batch} {i}") for i in range(2)]
            long, stats, hit_rate = min(runs, key=lambda run: run[0])
            best = (long - short) / 256
            self.result(f"sweep-{batch}", long, 272 * batch, stats, hit_rate, ms_per_token=round(best * 1e3, 3))
            self.table.append(
                f"sweep b{batch:<4} {best * 1e3:8.3f} ms/token  idle {idle_share(stats):6.2%}  "
                f"host {host_us(long, stats):7.0f} µs/step  {describe(self.llm, long, stats)}"
            )

    def result(self, workload: str, seconds: float, tokens: int, stats: Stats, hit_rate: float, **more: float) -> None:
        found = {
            "workload": workload, "shape": self.shape, "seconds": round(seconds, 4),
            "tokens_per_s": round(tokens / seconds, 1), "gpu_idle_share": round(idle_share(stats), 5),
            "host_us_per_step": round(host_us(seconds, stats), 1), "hit_rate": round(hit_rate, 4),
            "startup_s": round(self.startup_s, 2), **more,
        }  # fmt: skip
        print("RESULT " + json.dumps(found), flush=True)

    def profile(self) -> None:
        """Which kernels the time of decode passes goes to, with 256 rows and with 16."""
        from torch.profiler import ProfilerActivity, profile

        for batch in (256, 16):
            work = sweep(batch, 24, 77)
            self.llm.generate(work.prompts, work.params)
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                self.llm.generate(work.prompts, work.params)  # a cache hit: nearly all passes decode
            print(f"profile, {batch} rows, 24 tokens")
            print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=40))

    def check(self) -> None:
        """Greedy tokens in bfloat16 against float32 logits; and the same tokens with overlap on, off and sync."""
        spec = named_shape(self.shape)
        few = replace(spec, num_layers=4, windows=spec.windows[:4], rope_layers=spec.rope_layers[:4])
        # Big enough that no row is retracted, small enough for several engines.
        options = {"max_wait": math.inf, "context_tokens": 8192, "chunk_tokens": 512}
        rng = random.Random(3)
        shared = [rng.randint(0, 10_000) for _ in range(700)]
        prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(1, 900))] for _ in range(180)]
        prompts += [shared + [rng.randint(0, 10_000) for _ in range(rng.randint(1, 50))] for _ in range(20)]
        lengths = [rng.randint(8, 40) for _ in prompts]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in lengths]
        tokens: dict[str, list[list[int]]] = {}
        weights = {name: weight.float() for name, weight in self._weights(few).items()}
        reference = Decoder(few, weights, max_positions=8192)
        for mode in ("off", "on", "sync"):
            decoder = Decoder(few, self._weights(few), max_positions=8192)
            config = EngineConfig(device="cuda", overlap=mode, kv_tokens=400_000)
            tokenizer = synthetic_tokenizer(few.vocab_size)
            with LLM.from_engine(assemble(decoder, tokenizer, config, options)) as llm:
                tokens[mode] = [output.token_ids for output in llm.generate(prompts, params)]
                if mode == "on":
                    some = slice(0, 200, 20)
                    again = [output.token_ids for output in llm.generate(prompts[some], params[some])]
                    alone = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts[:4], params[:4], strict=True)]
            del decoder
        del llm
        gc.collect()  # engines and their threads refer to each other; their memory is needed below
        worst, wrong, count = margin(reference, prompts[::4], tokens["on"][::4])
        plain = Decoder(few, self._weights(few), max_positions=8192)
        their_worst, their_wrong, _ = margin(reference, prompts[::4], tokens["on"][::4], plain)
        worst_hits, _, _ = margin(reference, prompts[some], again)
        worst_alone, _, _ = margin(reference, prompts[:4], alone)
        same = {mode: sum(a == b for a, b in zip(tokens[mode], tokens["off"], strict=True)) for mode in ("on", "sync")}
        text = (
            f"check: {count} greedy tokens, {wrong} not the float32 argmax, worst margin {worst:.3f} "
            f"(hits {worst_hits:.3f}, alone {worst_alone:.3f}; plain torch in bfloat16: {their_wrong}, "
            f"{their_worst:.3f}); of {len(prompts)} outputs as with overlap off: {same}"
        )
        self.table.append(text)
        print(text, flush=True)
        bound = 1.5 * their_worst
        assert max(worst, worst_hits, worst_alone) < bound, f"a token lies more than {bound:.2f} below the best"
        assert set(same.values()) == {len(prompts)}, "overlap changed tokens"

    def _weights(self, spec: Any) -> dict[str, Tensor]:
        return random_weights(spec, seed=11, dtype="bfloat16", device="cuda")


@torch.inference_mode()
def margin(
    decoder: Decoder, prompts: Sequence[list[int]], outputs: Sequence[list[int]], chooser: Decoder | None = None
) -> tuple[float, int, int]:
    """How far below the best logit of `decoder` a chosen token lies at worst, how many were not the best, of how
    many. With a `chooser`, its choice after the same tokens is judged instead of the outputs'."""
    worst, wrong, count = 0.0, 0, 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor(prompt + output[:-1], device=decoder.device)
        hidden = decoder.forward(ids, torch.arange(len(ids), device=decoder.device), attend)
        logits = decoder.logits(hidden[len(prompt) - 1 :])
        choice = torch.tensor(output, device=decoder.device)
        if chooser is not None:
            theirs = chooser.forward(ids, torch.arange(len(ids), device=decoder.device), attend)
            choice = chooser.logits(theirs[len(prompt) - 1 :]).argmax(-1)
        chosen = logits.gather(1, choice[:, None])[:, 0]
        below = logits.amax(-1) - chosen
        worst = max(worst, float(below.max()))
        wrong += int((below > 0).sum())
        count += len(output)
    return worst, wrong, count


def device_of(llm: LLM) -> CudaDevice:
    device = llm.engine.executor
    assert isinstance(device, CudaDevice), f"this benchmark needs a GPU, and the engine runs on {type(device).__name__}"
    return device


def idle_share(stats: Stats) -> float:
    return stats.idle_s / max(stats.idle_s + stats.device_s, 1e-9)


def host_us(seconds: float, stats: Stats) -> float:
    """Microseconds of a step in which the host did not wait for the device."""
    return (seconds - stats.wait_s) / max(stats.passes, 1) * 1e6


def describe(llm: LLM, seconds: float, stats: Stats) -> str:
    model = device_of(llm).model
    decoding = sum(of.device_s for bucket, of in stats.by_bucket.items() if bucket)
    kv = stats.decode_context_tokens * model.spec.kv_bytes_per_token(model.dtype.itemsize)
    return (
        f"{stats.passes} passes, {stats.graphs} graphs; device {stats.device_s:.3f} s, decoding {decoding:.3f}, "
        f"idle {stats.idle_s * 1e3:.1f} ms, host launching {stats.launch_s:.3f} s, waiting {stats.wait_s:.3f} s; "
        f"KV addressed at {kv / max(decoding, 1e-9) / 1e12:.2f} TB/s of decoding time, "
        f"{stats.saved_tokens / max(stats.decode_context_tokens, 1):.1%} of it not read again"
    )


def process_age_s() -> float:
    """Seconds since this process began."""
    with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as uptime:
        began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - began


def main() -> int:
    parser = argparse.ArgumentParser(description="Offline generation on a GPU, timed.")
    parser.add_argument("parts", nargs="*", default=["nano", "sweep"], choices=PARTS, help="what to run, in order")
    parser.add_argument("--shape", default="qwen3-0.6b", help="named shape of the random weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=list(SWEEP), help="batch sizes of sweep")
    parser.add_argument("--overlap", choices=("on", "off", "sync"), default="on")
    parser.add_argument("--kv-tokens", type=int, default=None)
    parser.add_argument("--record", default=None, help="file to write every request and pass to, for `paceline sim`")
    given = parser.parse_args()
    options = {"device": "cuda", "overlap": given.overlap, "kv_tokens": given.kv_tokens, "record": given.record}
    bench = Bench(given.shape, given.repeats, given.batches, options)
    failed = []
    for name in given.parts:
        began = time.perf_counter()
        part: Callable[[], None] = getattr(bench, name)
        try:
            part()
        except Exception:  # the other parts still have something to say
            traceback.print_exc()
            failed.append(name)
            bench.close()
        print(f"[{name}: {time.perf_counter() - began:.1f} s]", flush=True)
    bench.close()
    print(f"{given.shape}, {torch.cuda.get_device_name()}, torch {torch.__version__}, overlap {given.overlap}")
    print("\n".join(bench.table))
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
