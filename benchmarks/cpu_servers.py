"""Two servers with the same model on one CPU, in turns: this one and, for example, llama.cpp's.

    paceline serve --port 8001 --model file.gguf
    llama-server --port 8002 -m file.gguf -np 16 -c 65536
    python benchmarks/cpu_servers.py http://127.0.0.1:8001 http://127.0.0.1:8002

Each row is the median over `--repeats` turns. Both get the same requests, by POST /v1/completions; greedy, streamed.
Every prompt is new, so that no cache of prompts helps, except in the row with a shared prefix.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

WORDS = ("river", "stone", "cloud", "paper", "green", "seven", "music", "table", "winter", "garden", "silver", "bridge")


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def stream(url: str, prompt: str, num_tokens: int) -> Iterator[float]:
    """The times at which pieces of the output arrive."""
    body = {"model": model_of(url), "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices") or [{}]
                if choices[0].get("text"):
                    yield time.perf_counter()


_models: dict[str, str] = {}


def model_of(url: str) -> str:
    if url not in _models:
        with urllib.request.urlopen(url + "/v1/models") as response:
            _models[url] = json.load(response)["data"][0]["id"]
    return _models[url]


def decode(num_streams: int, num_tokens: int) -> Callable[[str, random.Random], float]:
    """Tokens per second of all streams together, after their first tokens. A piece may have several tokens (drafts), so
    pieces are not counted."""

    def run(url: str, rng: random.Random) -> float:
        prompts = [f"Write a long story about a {words(3, rng)}." for _ in range(num_streams)]
        times: list[list[float]] = [[] for _ in prompts]

        def one(index: int) -> None:
            times[index].extend(stream(url, prompts[index], num_tokens))

        threads = [threading.Thread(target=one, args=(index,)) for index in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum((num_tokens - 1) / (one[-1] - one[0]) for one in times)

    return run


def prefill(num_words: int) -> Callable[[str, random.Random], float]:
    """Prompt tokens per second, until the first token. All words are one token each."""

    def run(url: str, rng: random.Random) -> float:
        began = time.perf_counter()
        first = next(iter(stream(url, words(num_words, rng), 2)))
        return num_words / (first - began)

    return run


def shared(num_requests: int, num_words: int, num_tokens: int) -> Callable[[str, random.Random], float]:
    """Output tokens per second of requests that begin alike, from the first request to the last token."""

    def run(url: str, rng: random.Random) -> float:
        prefix = words(num_words, rng)
        threads = [
            threading.Thread(target=lambda: list(stream(url, f"{prefix} {words(8, rng)}", num_tokens)))
            for _ in range(num_requests)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return num_requests * num_tokens / (time.perf_counter() - began)

    return run


ROWS: dict[str, Callable[[str, random.Random], float]] = {
    "1 stream, decode": decode(1, 64),
    "8 streams": decode(8, 48),
    "16 streams": decode(16, 32),
    "prompt of 512": prefill(512),
    "prompt of 2,048": prefill(2048),
    "32 requests sharing 512": shared(32, 512, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    print(f"{'tokens/s':26s} {'first':>9s} {'second':>9s} {'ratio':>7s}")
    for name, run in ROWS.items():
        if options.rows not in name:
            continue
        found: dict[str, list[float]] = {url: [] for url in options.urls}
        for repeat in range(options.repeats):
            for url in options.urls:
                found[url].append(run(url, random.Random(f"{name} {repeat}")))  # the same prompts for both
        ours, theirs = (statistics.median(found[url]) for url in options.urls)
        print(f"{name:26s} {ours:9.1f} {theirs:9.1f} {ours / theirs:6.2f}x", flush=True)


if __name__ == "__main__":
    main()
