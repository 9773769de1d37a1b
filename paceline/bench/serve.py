"""A server under load, from outside: many streams at once, over real sockets, against anything that speaks OpenAI's
completions.

    paceline bench serve --url http://127.0.0.1:8000                     against a server that runs
    paceline bench serve --start "--load random --shape qwen3-0.6b"      starts one, and ends it
    ... --workload nano --offline                                        and compares with the same work offline

The client is raw sockets on an event loop, in as many processes as are asked for, so that it is not what is measured.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from paceline.bench.workloads import Offline, nano
from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.request import SamplingParams


@dataclass(slots=True)
class StreamResult:
    """What one stream brought, by the client's clock."""

    num_prompt_tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each event with a choice in it
    num_tokens: int = 0  # by the server's own count
    ended: float = 0.0
    error: str | None = None
    late: list[float] = field(default_factory=list)  # of each token, behind the end of its pass


class _SseProtocol(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, answer: StreamResult, clock: _ClockReader | None) -> None:
        self._request, self._answer, self._clock = request, answer, clock
        self._begun = False
        self._tail = self._partial = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._answer.sent = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._partial + data
        if not self._begun:
            self._begun = len(data) >= 12
            if self._begun and not data.startswith(b"HTTP/1.1 200"):
                self._fail(data.decode("utf-8", "replace"), now)
                return
        whole, _, self._partial = data.rpartition(b"\n\n")  # an event may end in the next packet
        count = whole.count(b'"finish_reason":')
        if count:
            self._answer.times += [now] * count
            if self._clock is not None:
                self._answer.late += self._clock.ages(whole, now)
        self._tail = (self._tail + whole)[-2048:]
        if b"data: [DONE]" in self._tail:
            usage = re.search(rb'"completion_tokens":(\d+)', self._tail)
            self._answer.num_tokens = int(usage[1]) if usage else 0
            self._end(now)
        elif b'data: {"error"' in self._tail:
            self._fail(self._tail[self._tail.index(b'data: {"error"') :].decode("utf-8", "replace"), now)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(f"the connection was closed ({error})", time.monotonic())

    def _fail(self, why: str, now: float) -> None:
        self._answer.error = why
        self._end(now)

    def _end(self, now: float) -> None:
        if not self.done.done():
            self._answer.ended = now
            self.done.set_result(None)
            self._transport.close()


class _ClockReader:
    """How old the tokens are that a virtual GPU made with `--virtual-tokens clock`."""

    def __init__(self) -> None:
        from paceline.engine.virtual.build import VOCAB_SIZE
        from paceline.engine.virtual.executor import ClockTokens
        from paceline.text.synthetic import MIN_VOCAB_SIZE, synthetic_tokenizer

        tokenizer = synthetic_tokenizer(VOCAB_SIZE)
        self._ids = {tokenizer.token_bytes(index): index for index in range(MIN_VOCAB_SIZE, VOCAB_SIZE)}
        self._clock = ClockTokens(MIN_VOCAB_SIZE, VOCAB_SIZE, time.monotonic)

    def ages(self, data: bytes, now: float) -> list[float]:
        texts = re.findall(rb'"text":"([^"]+)"', data)
        return [self._clock.age(self._ids[text], now) for text in texts if text in self._ids]


def _http(url: str, body: dict[str, Any], key: str | None) -> bytes:
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and when each is sent, in seconds from the start."""

    work: Offline
    starts: Sequence[float]

    def part(self, index: int, of: int) -> Load:
        return Load(Offline(self.work.prompts[index::of], self.work.params[index::of]), self.starts[index::of])


def send_all(url: str, model: str, load: Load, key: str | None, begins: float, read_clock: bool) -> list[StreamResult]:
    """Sends every request at its time and reads every answer. `begins` is on this machine's monotonic clock."""
    clock = _ClockReader() if read_clock else None
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80

    async def one(prompt: list[int], params: SamplingParams, start: float) -> StreamResult:
        answer = StreamResult(len(prompt))
        body = {
            "model": model, "prompt": prompt, "max_tokens": params.max_tokens, "temperature": params.temperature,
            "ignore_eos": params.ignore_eos, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        request = _http(url, body, key)
        await asyncio.sleep(max(0.0, begins + start - time.monotonic()))
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(lambda: _SseProtocol(request, answer, clock), host, port)
        except OSError as error:
            answer.error = str(error)
            return answer
        await stream.done
        return answer

    async def main() -> list[StreamResult]:
        jobs = zip(load.work.prompts, load.work.params, load.starts, strict=True)
        return list(await asyncio.gather(*(one(*job) for job in jobs)))

    return asyncio.run(main())


def run_load(
    url: str, model: str, load: Load, *, key: str | None, clients: int, read_clock: bool
) -> list[StreamResult]:
    """As `send_all`, from several processes."""
    lead = 1.0 + 0.5 * clients  # for the processes to start
    if clients == 1:
        return send_all(url, model, load, key, time.monotonic() + 0.2, read_clock)
    begins = time.monotonic() + lead
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(send_all, url, model, load.part(index, clients), key, begins, read_clock)
            for index in range(clients)
        ]
        return [answer for part in parts for answer in part.result()]


def summary(answers: Sequence[StreamResult], goodput: dict[str, float] | None = None) -> dict[str, Any]:
    """The figures under the names that `vllm bench serve` gives them."""
    good = [answer for answer in answers if answer.error is None]
    found: dict[str, Any] = {"completed": len(good), "failed": len(answers) - len(good)}
    if not good:
        return found
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in good)
    tokens = sum(answer.num_tokens for answer in good)
    prompts = sum(answer.num_prompt_tokens for answer in good)
    found |= {
        "duration": seconds, "total_input_tokens": prompts, "total_output_tokens": tokens,
        "events": sum(len(answer.times) for answer in good), "request_throughput": len(good) / seconds,
        "output_throughput": tokens / seconds, "total_token_throughput": (prompts + tokens) / seconds,
    }  # fmt: skip
    samples = {
        "ttft": [answer.times[0] - answer.sent for answer in good if answer.times],
        "tpot": [(answer.times[-1] - answer.times[0]) / (answer.num_tokens - 1) for answer in good
                 if answer.num_tokens > 1],
        "itl": [later - earlier for answer in good
                for earlier, later in zip(answer.times, answer.times[1:], strict=False)],
        "e2el": [answer.ended - answer.sent for answer in good],
        "late": [late for answer in good for late in answer.late],
    }  # fmt: skip
    for name, values in samples.items():
        if values:
            ordered = sorted(values)
            found |= {
                f"mean_{name}_ms": statistics.fmean(values) * 1e3, f"median_{name}_ms": _percentile(ordered, 50) * 1e3,
                f"std_{name}_ms": statistics.pstdev(values) * 1e3, f"p99_{name}_ms": _percentile(ordered, 99) * 1e3,
            }  # fmt: skip
    if goodput:
        kept = 0
        for answer in good:
            of = {"e2el": answer.ended - answer.sent, "ttft": (answer.times or [math.inf])[0] - answer.sent}
            of["tpot"] = (answer.times[-1] - answer.times[0]) / max(1, answer.num_tokens - 1) if answer.times else 0.0
            kept += all(of[name] * 1e3 <= most for name, most in goodput.items())
        found["request_goodput"] = kept / seconds
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@contextmanager
def started(arguments: str) -> Iterator[str]:
    """A server on a free port; its address."""
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", "--log-level", "warning",
               *shlex.split(arguments)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "asked for"
    try:
        url = None
        for line in process.stdout:
            url = url or next(iter(re.findall(r"http://[\d.]+:\d+", line)), None)
            if "Ctrl-C" in line:
                break
        if url is None:
            raise ConfigError("the server did not start: its own message says why.")
        yield url
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        process.stdout.close()


def served_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urlopen(Request(f"{url}/v1/models", headers=headers), timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name


def streams(count: int, prompt: int, output: int, seed: int) -> Offline:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    return Offline([[rng.randint(300, 10_000) for _ in range(prompt)] for _ in range(count)], [params] * count)


def bench(
    *,
    url: str | None,
    start: str | None,
    workload: str,
    count: int,
    prompt: int,
    output: int,
    rate: float | None,
    repeats: int,
    clients: int,
    key: str | None,
    late: bool,
    goodput: dict[str, float] | None,
    offline: bool,
) -> dict[str, Any]:
    if (url is None) == (start is None):
        raise ConfigError("url and start are both given, or neither: name a server, or how to start one.")
    if start is not None:
        with started(start) as address:
            best = _repeat(address, workload, count, prompt, output, rate, repeats, clients, key, late, goodput)
    else:
        assert url is not None, "one of them is given"
        best = _repeat(url, workload, count, prompt, output, rate, repeats, clients, key, late, goodput)
    if offline:
        if start is None:
            raise ConfigError("offline is asked for, and the server is not ours: use --start, whose options it takes.")
        best["offline_throughput"] = round(_offline(start, workload, count, prompt, output, repeats), 3)
        best["share_of_offline"] = round(best["output_throughput"] / best["offline_throughput"], 4)
        print(f"offline {best['offline_throughput']:.0f} tokens/s: over HTTP it is {best['share_of_offline']:.1%}")
    best |= {"workload": workload, "clients": clients, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    print(json.dumps(best))
    return best


def _work(workload: str, count: int, prompt: int, output: int, repeat: int) -> Offline:
    return nano(count).shifted(repeat) if workload == "nano" else streams(count, prompt, output, repeat)


def _repeat(url: str, workload: str, count: int, prompt: int, output: int, rate: float | None, repeats: int,
            clients: int, key: str | None, late: bool, goodput: dict[str, float] | None) -> dict[str, Any]:  # fmt: skip
    model = served_model(url, key)
    run_load(url, model, Load(streams(min(count, 32), 64, 8, 77), [0.0] * min(count, 32)), key=key, clients=1,
             read_clock=False)  # fmt: skip
    best: dict[str, Any] = {}
    for repeat in range(repeats):
        rng, at = random.Random(repeat), 0.0
        starts = []
        for _ in range(count):
            starts.append(at)
            at += rng.expovariate(rate) if rate else 0.0
        load = Load(_work(workload, count, prompt, output, repeat), starts)
        answers = run_load(url, model, load, key=key, clients=clients, read_clock=late)
        errors = [answer.error for answer in answers if answer.error is not None]
        found = summary(answers, goodput)
        found["asked_output_tokens"] = load.work.num_output_tokens
        print(
            f"{workload} run {repeat}: {found.get('duration', 0):.2f} s, "
            f"{found.get('output_throughput', 0):.0f} tokens/s, "
            f"{found['completed']} whole, {found['failed']} failed; TTFT p99 {found.get('p99_ttft_ms', 0):.1f} ms, "
            f"ITL p99 {found.get('p99_itl_ms', 0):.1f} ms"
            + (f", late median {found['median_late_ms']:.1f}, p99 {found['p99_late_ms']:.1f} ms" if late else ""),
            flush=True,
        )
        if errors:
            print(f"  first error: {errors[0]}", flush=True)
        if not best or found.get("output_throughput", 0) > best.get("output_throughput", 0):
            best = found
    return best


def _offline(start: str, workload: str, count: int, prompt: int, output: int, repeats: int) -> float:
    """Tokens a second of the same work without a server, with the options of the server that bear on it."""
    from paceline.llm import LLM

    with LLM(**_library_options(start)) as llm:
        warm = streams(min(count, 32), 64, 8, 77)
        llm.generate(warm.prompts, warm.params)
        best = math.inf
        for repeat in range(repeats):
            work = _work(workload, count, prompt, output, repeat)
            began = time.perf_counter()
            outputs = llm.generate(work.prompts, work.params)
            best = min(best, time.perf_counter() - began)
            assert sum(len(one.token_ids) for one in outputs) == work.num_output_tokens, "all of it was generated"
    return work.num_output_tokens / best


def _library_options(start: str) -> dict[str, Any]:
    """What `LLM` takes of a server's options."""
    known = {"model", "load", "shape"}
    known |= {item.name for kind in (EngineConfig, SchedulerConfig) for item in dataclasses.fields(kind)}
    words = shlex.split(start)
    found: dict[str, Any] = {}
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--no-") and name.removeprefix("no_") in known:
            found[name.removeprefix("no_")] = False
        elif flag.startswith("--") and name in known:
            found[name] = True if value.startswith("--") or not value else _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
