"""Logging to standard error, as text or as one JSON object per line, with the Python stacks if native code crashes.

Fields given as `extra={"fields": {...}}` become members of the object, or follow the text as name=value.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import time


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        text = f"{when} {record.levelname.lower():7} {self._process}: {record.getMessage()}{fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def set_up_logs(level: str, format: str, process: str) -> None:
    faulthandler.enable(2)  # stderr of the process, whatever sys.stderr is
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if format == "json" else _TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("paceline").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # uvicorn warns about every invalid HTTP request
