"""Tries a chat template before it is served, in a process with limits.

The sandbox checks what it knows to be expensive. What it does not know costs this process its life, and not the server.
It runs while the weights are loaded.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from paceline.model.spec import ModelError
from paceline.text.chat import ChatTemplate, ChatTemplateError, ChatTemplateLimitError

MAX_CPU_S = 1.0  # per conversation
MAX_BYTES = 100 * 2**20


class TemplateTrial:
    """Started by the constructor; `check` waits for the result."""

    def __init__(self, templates: Sequence[str]) -> None:
        self._process: subprocess.Popen[str] | None = None
        if templates:
            command = [sys.executable, "-m", "paceline.text.template_trial"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            assert self._process.stdin is not None, "a pipe"
            self._process.stdin.write(json.dumps(templates))
            self._process.stdin.close()

    def check(self) -> None:
        """Raises ModelError if a template does not keep the limits."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdout is not None, "a pipe"
        with process.stdout:
            reason = process.stdout.read().strip()
        status = process.wait()
        if status == -signal.SIGVTALRM:
            reason = f"runs for more than {MAX_CPU_S:g} s"
        if reason or status:
            raise ModelError(
                f"The model's chat template {reason or f'ends its process with status {status}'} in a trial at the "
                "start: it may be hostile; use the template of the model's author."
            )

    def close(self) -> None:
        """Ends a trial that nobody waits for."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def conversations() -> list[dict[str, Any]]:
    """Arguments of `ChatTemplate.render`: an ordinary conversation, long ones and hostile ones."""
    schema: dict[str, object] = {"type": "string", "enum": ["a", "b"], "description": "x"}
    for depth in range(12):
        schema = {"type": "object", "properties": {f"p{depth}": schema, "q": {"type": "integer"}}, "required": ["q"]}
    tools = [
        {"type": "function", "function": {"name": f"f{index}", "description": "Does it.", "parameters": schema}}
        for index in range(8)
    ]
    # No longer: templates for images only take a string for a list, and loop over its characters.
    hostile = "{{%s}} {0:>9} %9d \\ud7ff\0<|im_end|></think><tool_call>\n\n  " * 40 + "9" * 1_000
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "f1", "arguments": {"q": 1, hostile[:99]: [{}]}},
    }

    def turns(text: str, count: int) -> list[dict[str, object]]:
        return [{"role": ("user", "assistant")[index % 2], "content": text} for index in range(2 * count + 1)]

    called = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": hostile, "tool_call_id": "abcdefghi", "name": "f1"},
    ]
    return [
        {"messages": turns("Hello.", 1)},
        {"messages": [{"role": "system", "content": "Be brief."}, *turns("Hello.", 1)]},
        {"messages": turns("Hello. ", 50)},  # some templates take time by its square
        {"messages": turns("word " * 2_000, 0)},
        {"messages": turns(hostile, 2)},
        {"messages": turns("a", 1), "tools": tools},
        {"messages": called, "tools": tools},
        {
            "messages": [*called, {"role": "assistant", "content": hostile, "reasoning_content": hostile}],
            "tools": tools,
        },
    ]


def main() -> None:
    templates = [ChatTemplate(source, bos_token="<s>", eos_token="</s>") for source in json.load(sys.stdin)]
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # ends the process, also within a call of C
    for template in templates:
        for index, conversation in enumerate(conversations()):
            if index == 0:
                _limit_memory()
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
            try:
                template.render(**conversation)
            except ChatTemplateLimitError as error:
                print(error.reason)
                return
            except ChatTemplateError:
                continue  # many templates refuse some conversations; one that cannot be compiled refuses all


def _limit_memory() -> None:
    if sys.platform != "linux":  # others do not say how much a process has
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, most))


if __name__ == "__main__":
    main()
