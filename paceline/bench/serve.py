"""`paceline bench serve`: throughput and latency of a server under load, over HTTP.

Works with every server that has OpenAI's /v1/completions, or another API named by `--api`:

    paceline bench serve --url http://127.0.0.1:8000                     a running server
    paceline bench serve --start "--load random --shape qwen3-0.6b"      starts a server and stops it
    ... --workload nano --offline                                        compares with the same workload offline
    ... --api all                                                        compares the streaming APIs, in turns

The client uses raw sockets on an event loop, in several processes if asked to, so that it is not the bottleneck.
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
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, cast
from urllib.parse import urlsplit

from paceline.bench.apis import APIS, StreamingApi
from paceline.bench.target import ServerUnavailable, served_model, started
from paceline.bench.workloads import OfflineWorkload, nano
from paceline.config import ConfigError, EngineConfig, SchedulerConfig
from paceline.request import SamplingParams

_ERROR = re.compile(rb'"error":[{"]')


@dataclass(slots=True)
class StreamResult:
    """One streamed response, timed by the client's clock."""

    num_prompt_tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of each event with output
    num_tokens: int = 0  # as reported in `usage`
    ended: float = 0.0
    error: str | None = None
    late: list[float] = field(default_factory=list)  # seconds from the end of its forward pass, for each token


class SseProtocol(asyncio.Protocol):
    """One streaming request on its own connection."""

    def __init__(self, api: StreamingApi, request: bytes, result: StreamResult, clock: _ClockReader | None) -> None:
        self._api, self._request, self._result, self._clock = api, request, result, clock
        self._has_status = False
        self._tail = self._partial = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._result.sent = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._partial + data
        if not self._has_status:
            self._has_status = len(data) >= 12
            if self._has_status and not data.startswith(b"HTTP/1.1 200"):
                self._fail(data.decode("utf-8", "replace"), now)
                return
        whole, _, self._partial = data.rpartition(self._api.separator)  # an event may end in the next packet
        count = whole.count(self._api.output)
        if count:
            self._result.times += [now] * count
            if self._clock is not None:
                self._result.late += self._clock.ages(whole, now)
        self._tail = (self._tail + whole)[-2048:]
        if self._api.end in whole:
            usage = self._api.usage.findall(self._tail)
            self._result.num_tokens = int(usage[-1]) if usage else 0
            self._end(now)
        elif error := _ERROR.search(whole):
            self._fail(whole[error.start() :].decode("utf-8", "replace"), now)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail(f"the connection was closed ({error})", time.monotonic())

    def _fail(self, why: str, now: float) -> None:
        self._result.error = why
        self._end(now)

    def _end(self, now: float) -> None:
        if not self.done.done():
            self._result.ended = now
            self.done.set_result(None)
            self._transport.close()


class _ClockReader:
    """Reads the age of tokens that a virtual GPU made with `--virtual-tokens clock`."""

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


def post_bytes(url: str, path: str, body: dict[str, object], key: str | None) -> bytes:
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass(frozen=True, slots=True)
class TimedWorkload:
    """A workload with the start time of each request, in seconds from the beginning."""

    work: OfflineWorkload
    starts: Sequence[float]

    def part(self, index: int, of: int) -> TimedWorkload:
        work = OfflineWorkload(self.work.prompts[index::of], self.work.params[index::of])
        return TimedWorkload(work, self.starts[index::of])


def send_all(
    url: str, api: StreamingApi, model: str, load: TimedWorkload, key: str | None, begins: float, read_clock: bool
) -> list[StreamResult]:
    """Sends every request at its time and reads every response. `begins` is a time of `time.monotonic()`."""
    clock = _ClockReader() if read_clock else None
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80

    async def one(prompt: list[int], params: SamplingParams, start: float) -> StreamResult:
        result = StreamResult(len(prompt))
        request = post_bytes(url, api.path, api.body(model, prompt, params), key)
        await asyncio.sleep(max(0.0, begins + start - time.monotonic()))
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(lambda: SseProtocol(api, request, result, clock), host, port)
        except OSError as error:
            result.error = str(error)
            return result
        await stream.done
        return result

    async def main() -> list[StreamResult]:
        jobs = zip(load.work.prompts, load.work.params, load.starts, strict=True)
        return list(await asyncio.gather(*(one(*job) for job in jobs)))

    return asyncio.run(main())


def run_load(
    url: str, api: StreamingApi, model: str, load: TimedWorkload, *, key: str | None, clients: int, read_clock: bool
) -> list[StreamResult]:
    """`send_all` from `clients` processes."""
    if clients == 1:
        return send_all(url, api, model, load, key, time.monotonic() + 0.2, read_clock)
    begins = time.monotonic() + 1.0 + 0.5 * clients  # after all processes have started
    with ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(send_all, url, api, model, load.part(index, clients), key, begins, read_clock)
            for index in range(clients)
        ]
        return [result for part in parts for result in part.result()]


def summary(results: Sequence[StreamResult], goodput: Mapping[str, float] | None = None) -> dict[str, float]:
    """Metrics under the names of `vllm bench serve`."""
    good = [result for result in results if result.error is None]
    found: dict[str, float] = {"completed": len(good), "failed": len(results) - len(good)}
    if not good:
        return found
    seconds = max(result.ended for result in good) - min(result.sent for result in good)
    tokens = sum(result.num_tokens for result in good)
    prompts = sum(result.num_prompt_tokens for result in good)
    found |= {
        "duration": seconds, "total_input_tokens": prompts, "total_output_tokens": tokens,
        "events": sum(len(result.times) for result in good), "request_throughput": len(good) / seconds,
        "output_throughput": tokens / seconds, "total_token_throughput": (prompts + tokens) / seconds,
    }  # fmt: skip
    samples = {
        "ttft": [result.times[0] - result.sent for result in good if result.times],
        "tpot": [(result.times[-1] - result.times[0]) / (result.num_tokens - 1) for result in good
                 if result.num_tokens > 1],
        "itl": [later - earlier for result in good
                for earlier, later in zip(result.times, result.times[1:], strict=False)],
        "e2el": [result.ended - result.sent for result in good],
        "late": [late for result in good for late in result.late],
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
        for result in good:
            of = {"e2el": result.ended - result.sent, "ttft": (result.times or [math.inf])[0] - result.sent}
            of["tpot"] = (result.times[-1] - result.times[0]) / max(1, result.num_tokens - 1) if result.times else 0.0
            kept += all(of[name] * 1e3 <= most for name, most in goodput.items())
        found["request_goodput"] = kept / seconds
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def streams(count: int, prompt: int, output: int, seed: int) -> OfflineWorkload:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output)
    return OfflineWorkload([[rng.randint(300, 10_000) for _ in range(prompt)] for _ in range(count)], [params] * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """Options of `paceline bench serve`."""

    apis: Sequence[str] = ("completions",)  # measured in turns; the first is what others are compared with
    workload: str = "streams"
    count: int = 256  # requests
    prompt: int = 64  # tokens of each prompt, workload streams
    output: int = 512  # tokens of each output, workload streams
    rate: float | None = None  # requests per second, Poisson; None: all at once
    repeats: int = 3
    clients: int = 1  # processes
    key: str | None = None
    late: bool = False
    goodput: Mapping[str, float] = field(default_factory=dict)  # upper bounds in ms by metric

    def work(self, repeat: int) -> OfflineWorkload:
        if self.workload == "nano":
            return nano(self.count).shifted(repeat)
        return streams(self.count, self.prompt, self.output, repeat)

    def starts(self, repeat: int) -> list[float]:
        rng, at, starts = random.Random(repeat), 0.0, []
        for _ in range(self.count):
            starts.append(at)
            at += rng.expovariate(self.rate) if self.rate else 0.0
        return starts

    @property
    def warm_up(self) -> OfflineWorkload:
        return streams(min(self.count, 32), 64, 8, 77)


def bench(config: ServeBenchConfig, *, url: str | None, start: str | None, offline: bool) -> dict[str, object]:
    """Runs the benchmark against `url`, or a server started with the options `start`, and prints the best run."""
    if (url is None) == (start is None):
        raise ConfigError("give either --url or --start: the address of a server, or the options to start one.")
    if offline and start is None:
        raise ConfigError("--offline needs --start, whose options it uses to load the same model.")
    if start is not None:
        with started(start) as address:
            runs = _repeat(address, config)
    else:
        assert url is not None, "one of them is given"
        runs = _repeat(url, config)
    first = runs[config.apis[0]]
    best: dict[str, object] = {**first}
    if len(runs) > 1:
        best["apis"] = {name: found["output_throughput"] for name, found in runs.items()}
    if offline:
        assert start is not None, "checked above"
        throughput = round(_offline(start, config), 3)
        share = round(first["output_throughput"] / throughput, 4)
        best |= {"offline_throughput": throughput, "share_of_offline": share}
        print(f"offline: {throughput:.0f} tokens/s; over HTTP {share:.1%} of that")
    best |= {
        "workload": config.workload,
        "clients": config.clients,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(best))
    return best


def _repeat(url: str, config: ServeBenchConfig) -> dict[str, dict[str, float]]:
    """The run with the highest output throughput of each API."""
    model = served_model(url, config.key)
    url = url.rstrip("/")
    warm_up = TimedWorkload(config.warm_up, [0.0] * len(config.warm_up.prompts))
    for name in config.apis:
        run_load(url, APIS[name], model, warm_up, key=config.key, clients=1, read_clock=False)
    best: dict[str, dict[str, float]] = {}
    first_error: str | None = None
    for repeat in range(config.repeats):
        load = TimedWorkload(config.work(repeat), config.starts(repeat))
        for name in config.apis:
            found, error = _run(url, name, model, load, repeat, config)
            first_error = first_error or error
            if name not in best or found.get("output_throughput", 0) > best[name].get("output_throughput", 0):
                best[name] = found
    for name, found in best.items():
        if not found["completed"]:
            raise ServerUnavailable(f"no request of {name} was completed; the first error: {first_error}")
    if len(best) > 1:
        for name, found in best.items():
            throughput = found["output_throughput"]
            ratio = throughput / best[config.apis[0]]["output_throughput"]
            print(f"{name}: {throughput:.0f} tokens/s, {ratio:.2f}x of {config.apis[0]}", flush=True)
    return best


def _run(
    url: str, name: str, model: str, load: TimedWorkload, repeat: int, config: ServeBenchConfig
) -> tuple[dict[str, float], str | None]:
    """Metrics of one run of one API, and the first error."""
    results = run_load(url, APIS[name], model, load, key=config.key, clients=config.clients, read_clock=config.late)
    found = summary(results, config.goodput)
    found["asked_output_tokens"] = load.work.num_output_tokens
    late = f", token age median {found['median_late_ms']:.1f}, p99 {found['p99_late_ms']:.1f} ms" if config.late else ""
    print(
        f"{name}, {config.workload} run {repeat}: {found.get('duration', 0):.2f} s, "
        f"{found.get('output_throughput', 0):.0f} tokens/s, "
        f"{found['completed']} completed, {found['failed']} failed; TTFT p99 {found.get('p99_ttft_ms', 0):.1f} ms, "
        f"ITL p99 {found.get('p99_itl_ms', 0):.1f} ms{late}",
        flush=True,
    )
    error = next((result.error for result in results if result.error is not None), None)
    if error is not None:
        print(f"  first error: {error}", flush=True)
    return found, error


def _offline(start: str, config: ServeBenchConfig) -> float:
    """Output tokens per second of the same workload without a server, with the engine options of the server."""
    from paceline.llm import LLM

    with LLM(**_library_options(start)) as llm:
        llm.generate(config.warm_up.prompts, config.warm_up.params)
        best = math.inf
        for repeat in range(config.repeats):
            work = config.work(repeat)
            began = time.perf_counter()
            outputs = llm.generate(work.prompts, work.params)
            best = min(best, time.perf_counter() - began)
            num_tokens = sum(len(one.token_ids) for one in outputs)
            assert num_tokens == work.num_output_tokens, f"{num_tokens} tokens, expected {work.num_output_tokens}"
    return work.num_output_tokens / best


def _library_options(start: str) -> dict[str, Any]:
    """The options of a server that `LLM` takes."""
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


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
