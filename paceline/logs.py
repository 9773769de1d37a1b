"""Logging to standard error, as text or as one JSON object per line, with the Python stacks if native code crashes.

Fields given as `extra={"fields": {...}}` become members of the object, or follow the text as name=value. Child
processes that get no options, such as ranks, log as their parent does (`set_up_child_logs`).
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

log = logging.getLogger("paceline")
_VARIABLE = "_PACELINE_LOGS"  # for child processes: level, format and name of this one


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
    os.environ[_VARIABLE] = json.dumps([level, format, process])
    faulthandler.enable(2)  # stderr of the process, whatever sys.stderr is
    handler = logging.StreamHandler(sys.stderr)
    if format == "json":
        handler.setFormatter(_JsonFormatter(process))
        # What Python would write to standard error as text.
        logging.captureWarnings(True)
        sys.excepthook, threading.excepthook, sys.unraisablehook = _log_exception, _log_in_thread, _log_unraisable
    else:
        handler.setFormatter(_TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("paceline").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # uvicorn warns about every invalid HTTP request


def set_up_child_logs(name: str) -> None:
    """In a child process, first of all. Nothing is set up if nothing was in the parent: there Paceline is a library."""
    if (given := os.environ.get(_VARIABLE)) is not None:
        level, format, parent = json.loads(given)
        set_up_logs(level, format, f"{parent}: {name}")


def logs_json() -> bool:
    """Whether the logs of this process were set up as JSON: then it writes nothing else."""
    return any(isinstance(one.formatter, _JsonFormatter) for one in logging.getLogger().handlers)


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("the process ends with an error: %s", error, exc_info=(kind, error, traceback))


def _log_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = "" if args.thread is None else args.thread.name
        log.error("the thread %s ended with an error: %s", name, args.exc_value, exc_info=args.exc_value)


def _log_unraisable(args: UnraisableHookArgs) -> None:
    log.error("%s: %r", args.err_msg or "an exception was ignored", args.object, exc_info=args.exc_value)
