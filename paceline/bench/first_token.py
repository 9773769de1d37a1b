"""A process that makes an `LLM` and generates one token, as a user's script would: how old it is at both moments.

`python -m paceline.bench.first_token OPTIONS`, where OPTIONS are the arguments of `LLM` as JSON. Nothing else may be
imported: the order of imports is part of what is measured.
"""

from __future__ import annotations

import json
import os
import sys

from paceline import LLM, SamplingParams

FOUND = "FOUND "  # begins a line of JSON that a child process prints for its parent


def process_age_s() -> float:
    """Seconds since this process started."""
    with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as uptime:
        began = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(uptime.read().split()[0]) - began


def main() -> None:
    llm = LLM(**json.loads(sys.argv[1]))
    ready_s = process_age_s()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    print(FOUND + json.dumps({"ready_s": round(ready_s, 3), "first_token_s": round(process_age_s(), 3)}), flush=True)


if __name__ == "__main__":
    main()
