"""Logging for both commands: lines for a person or JSON for a collector, on stderr.

Logs never contain a user's text: no prompt, no completion, no token ids. Loggers pass facts as `extra`, and
the names below are dropped even where a call breaks the rule.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from outrider.common.printable import one_line

_NEVER_LOGGED = frozenset(
    "prompt text completion content messages tokens token_ids prompt_ids output_ids committed_tokens "
    "draft_tokens draft_token_ids stop_strings".split()
)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVELS = ("debug", "info", "warning", "error")
_PACKAGE = "outrider"


def setup_logging(level: str = "info", json: bool = False, stream: TextIO | None = None) -> None:
    """Sends our package's logs at `level` (debug, info, warning, error) to `stream` (stderr).

    Other libraries stay at warning. It may be called again; the last call counts. Raises ValueError for a
    level that is none of these.
    """
    set_log_level(level)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if json else _LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Sends our package's logs at `level` from now on. Raises ValueError for one that is none of the four."""
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}")
    logging.getLogger(_PACKAGE).setLevel(level.upper())


def session_tag(session_id: bytes) -> str:
    """Returns a session's name for logs: its first 8 hex digits.

    The whole id would let a reader use the session.
    """
    return session_id[:4].hex()


class LogLimiter:
    """Writes at most one line a key every `interval_s`; the next one contains how many were left out.

    It is for lines that an overload would write by the thousand. Used by one thread; keys are few.
    """

    def __init__(
        self, log: logging.Logger, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._interval_s, self._clock = log, interval_s, clock
        self._next_s: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def is_due(self, key: str) -> bool:
        """Returns whether `info` would write, before facts are made for it; else counts the line as left out."""
        now_s = self._clock()
        if now_s < self._next_s.get(key, now_s):
            self._num_left_out[key] = self._num_left_out.get(key, 0) + 1
            return False
        return True

    def info(self, key: str, message: str, facts: Mapping[str, object]) -> None:
        """Writes a line with its facts, unless one with this key was written within `interval_s`."""
        self._write(logging.INFO, key, message, facts)

    def error(
        self, key: str, message: str, facts: Mapping[str, object], raised: BaseException | None = None
    ) -> None:
        """Writes an error as `info` writes a line, with the traceback of what was `raised`."""
        self._write(logging.ERROR, key, message, facts, raised)

    def _write(
        self,
        level: int,
        key: str,
        message: str,
        facts: Mapping[str, object],
        raised: BaseException | None = None,
    ) -> None:
        if not self.is_due(key):
            return
        self._next_s[key] = self._clock() + self._interval_s
        if num_left_out := self._num_left_out.pop(key, 0):
            facts = {**facts, "num_left_out": num_left_out}
        self._log.log(level, message, extra=facts, exc_info=raised)


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and k not in _NEVER_LOGGED}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        said = one_line(f"{record.getMessage()}{facts}")
        line = f"{_time(record)} {record.levelname.lower()} {record.name}: {said}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)
