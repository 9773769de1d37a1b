"""Asks the same questions twice with recent outputs as drafts, and once without speculative decoding, one stream.

    python benchmarks/repeated_prompts.py QUESTIONS.jsonl --count 16 --max-tokens 96

Each line of the file is an object with `turns`, as in MT-Bench; the first turn is asked, at temperature 0, with the
default model. The three answers to a question follow each other, so that load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from paceline.llm import LLM, RequestOutput
from paceline.request import SamplingParams


def ask(llm: LLM, question: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    began = time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": question}], params, progress=False)
    return output, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    lines = args.questions.read_text().splitlines()
    questions = [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // args.count)]][: args.count]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    seconds: dict[str, list[float]] = {"off": [], "first": [], "second": []}
    tokens = 0
    with LLM(kv_tokens=4096) as plain, LLM(kv_tokens=4096, speculate="ngram") as drafting:
        for llm in (plain, drafting):
            ask(llm, "Hello!", SamplingParams(temperature=0, max_tokens=8))
        for number, question in enumerate(questions, 1):
            outputs = []
            for name, llm in (("off", plain), ("first", drafting), ("second", drafting)):
                output, took = ask(llm, question, params)
                outputs.append(output)
                seconds[name].append(took)
            same = len({tuple(output.token_ids) for output in outputs}) == 1
            tokens += len(outputs[0].token_ids)
            drafts = [f"{output.num_accepted_tokens}/{output.num_drafted_tokens}" for output in outputs[1:]]
            times = ", ".join(f"{name} {took[-1]:.2f} s" for name, took in seconds.items())
            print(
                f"{number:3}: {len(outputs[0].token_ids)} tokens, {times}, accepted {drafts}, same {same}", flush=True
            )
    for name in ("first", "second"):
        ratios = [before / after for before, after in zip(seconds["off"], seconds[name], strict=True)]
        total = sum(seconds["off"]) / sum(seconds[name])
        print(
            f"{name}: {total:.2f}x of off in total, median {statistics.median(ratios):.2f}x, "
            f"{min(ratios):.2f}x to {max(ratios):.2f}x ({tokens} tokens)"
        )


if __name__ == "__main__":
    main()
