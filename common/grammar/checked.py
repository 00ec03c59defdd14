"""Compiles grammars that strangers send: first in another process, which may be killed, then here.

llguidance bounds most of what a grammar costs, but not all: the automaton of `{"multipleOf": 99999989}` takes minutes
and gigabytes, and a thread cannot be stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from outrider.common.errors import InvalidFieldError, OutriderError
from outrider.common.grammar.state import UNBOUNDED, GrammarBounds, GrammarCost
from outrider.common.grammar.vocabulary import FIELD, Vocabulary
from outrider.common.types import Grammar, TokenIds

DEADLINE_S = 1.0  # of processor time for one grammar; the largest that are useful take .2
_MAX_WAIT_S = 30.0  # for an answer, on a machine whose other work leaves the process little of that time
_LOOK_MS = 50  # between two looks at the time it has taken
_MAX_LINE_BYTES = 1 << 16
# Signals that say nothing about a grammar, as where the machine has no memory left, or is shut down.
_FROM_OUTSIDE = frozenset(-each for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


class NotCheckedError(OutriderError):
    """The process that compiles grammars did not start, was killed, or got no processor time. Nothing is known about
    the grammar: it may be sent again."""


class CheckedCompiler:
    """Compiles grammars for one tokenizer. Any thread; one grammar at a time."""

    def __init__(
        self,
        tokenizer_json: Path,
        num_tokens: int,
        eos_token_ids: TokenIds,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """The tokenizer is read with the first grammar."""
        self._tokenizer_json, self._num_tokens = tokenizer_json, num_tokens
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0  # of the last grammar that was asked about
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar, bounds: GrammarBounds = UNBOUNDED) -> Grammar:
        """Returns the grammar with its compiled form. Raises `NotCheckedError`, and as `Vocabulary.compile` and
        `Vocabulary.open`."""
        with self._lock:
            if self._vocabulary is None:
                where = self._tokenizer_json, self._num_tokens, self._eos_token_ids
                self._vocabulary = Vocabulary.open(*where)
            return self._vocabulary.compile(grammar, bounds, self._check(grammar))

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _check(self, grammar: Grammar) -> GrammarCost:
        """Returns what a grammar takes. Raises what is wrong with it, and `NotCheckedError`."""
        process = self._running()
        try:
            answer = self._ask(process, grammar)
        except BaseException:
            self._end()  # what it would say later is no answer to the next grammar
            raise
        if answer["error"]:
            raise InvalidFieldError(FIELD, answer["error"])
        return GrammarCost(answer["num_bytes"], answer["compile_s"])

    def _ask(self, process: subprocess.Popen[bytes], grammar: Grammar) -> dict[str, Any]:
        """Returns what the process says of a grammar. Raises as `_check` where it says nothing."""
        self._number += 1
        said = {"kind": grammar.kind, "text": grammar.text, "has_whitespace": grammar.has_whitespace}
        assert process.stdin is not None, "it was opened with pipes"
        try:
            process.stdin.write(json.dumps(said | {"number": self._number}).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process, _processor_s(process) + self._deadline_s)
        except _TooSlowError as error:
            raise self._too_slow(grammar) from error
        except OSError:
            line = b""
        if not line:
            raise self._why_it_ended(process, grammar)
        answer: dict[str, Any] = json.loads(line)
        if answer["number"] != self._number:
            raise NotCheckedError(
                "the process that compiles grammars answered about another one", "try again"
            )
        return answer

    def _why_it_ended(self, process: subprocess.Popen[bytes], grammar: Grammar) -> OutriderError:
        process.kill()  # one that has ended keeps its own code
        code = process.wait()
        if code in _FROM_OUTSIDE:
            return NotCheckedError("the process that compiles grammars was killed", "try again")
        if code == -signal.SIGPROF:
            return self._too_slow(grammar)
        return InvalidFieldError(FIELD, f"{grammar.kind}: takes more memory to compile: simplify it")

    def _too_slow(self, grammar: Grammar) -> InvalidFieldError:
        what = f"more than {self._deadline_s:g} s"
        return InvalidFieldError(FIELD, f"{grammar.kind}: takes {what} to compile: simplify it")

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, a new one where there is none or it has ended. Raises `NotCheckedError`."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = self._tokenizer_json, self._num_tokens, *self._eos_token_ids
        command = [sys.executable, "-m", "outrider.common.grammar.worker", *map(str, arguments)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise NotCheckedError(
                f"no process can be started to compile grammars ({error})", "try again"
            ) from error
        try:
            if not self._read_line(process):
                raise NotCheckedError("the process that compiles grammars ended as it started", "try again")
        except BaseException:
            _kill(process)
            raise
        return process

    def _read_line(self, process: subprocess.Popen[bytes], until_s: float = math.inf) -> bytes:
        """Returns a line, b"" where the process has ended. Raises `_TooSlowError` where it took processor time until
        `until_s` of it, `NotCheckedError` where it had no such time."""
        assert process.stdout is not None, "it was opened with pipes"
        line, end_s = b"", time.monotonic() + _MAX_WAIT_S
        stdout = select.poll()  # which takes any number of open files
        stdout.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            ready = stdout.poll(_LOOK_MS)
            part = os.read(process.stdout.fileno(), _MAX_LINE_BYTES) if ready else b""
            if ready and not part:
                return b""
            line += part
            if not part and _processor_s(process) > until_s:
                raise _TooSlowError
            if not part and time.monotonic() > end_s:
                raise NotCheckedError("the machine is too busy to compile a grammar", "try again")
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


class _TooSlowError(Exception):
    """A grammar takes more processor time than it may."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not sent is written now, to nobody
                pipe.close()


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    """Returns the processor time that a process has taken."""
    after_name = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
