"""Compiles grammars that strangers send: first in another process, which may be killed, then here.

llguidance bounds most of what a grammar costs, but not all: the automaton of `{"multipleOf": 99999989}` takes minutes
and gigabytes, and a thread cannot be stopped.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from outrider.common.errors import InvalidFieldError
from outrider.common.grammar.vocabulary import FIELD, Vocabulary
from outrider.common.types import Grammar, TokenIds

DEADLINE_S = 1.0  # of processor time for one grammar; the largest that are useful take .2
_MAX_WAIT_S = 30.0  # for an answer, on a machine whose other work leaves the process little of that time
_LOOK_S = 0.05  # between two looks at the time it has taken
_MAX_LINE_BYTES = 1 << 16


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
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Grammar:
        """Returns the grammar with its compiled form. Raises `InvalidFieldError` naming what is wrong, and where, and
        what `Vocabulary.open` does."""
        with self._lock:
            if self._vocabulary is None:
                where = self._tokenizer_json, self._num_tokens, self._eos_token_ids
                self._vocabulary = Vocabulary.open(*where)
            if error := self._ask(grammar):
                raise InvalidFieldError(FIELD, error)
            return self._vocabulary.compile(grammar)

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _ask(self, grammar: Grammar) -> str:
        """Returns what is wrong with a grammar, "" for nothing."""
        process = self._process or self._begin()
        said = {"kind": grammar.kind, "text": grammar.text, "has_whitespace": grammar.has_whitespace}
        assert process.stdin is not None, "it was opened with pipes"
        try:
            process.stdin.write(json.dumps(said).encode() + b"\n")
            process.stdin.flush()
            answer = self._read_line(process, _processor_s(process) + self._deadline_s)
        except OSError:
            answer = b""
        if answer:
            return str(json.loads(answer))
        is_over = process.poll() is not None
        self._end()
        what = "memory" if is_over else f"than {self._deadline_s:g} s"
        return f"{grammar.kind}: takes more {what} to compile: simplify it"

    def _begin(self) -> subprocess.Popen[bytes]:
        arguments = self._tokenizer_json, self._num_tokens, *self._eos_token_ids
        command = [sys.executable, "-m", "outrider.common.grammar.worker", *map(str, arguments)]
        process = self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._read_line(process), "the process that compiles grammars did not start"
        return process

    def _read_line(self, process: subprocess.Popen[bytes], until_s: float = math.inf) -> bytes:
        """Returns a line, b"" where the process ended, or took processor time until `until_s` of it."""
        assert process.stdout is not None, "it was opened with pipes"
        line, end_s = b"", time.monotonic() + _MAX_WAIT_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], _LOOK_S)
            part = os.read(process.stdout.fileno(), _MAX_LINE_BYTES) if ready else b""
            is_late = time.monotonic() > end_s or _processor_s(process) > until_s
            if not part and (ready or is_late):
                return b""
            line += part
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _processor_s(process: subprocess.Popen[bytes]) -> float:
    """Returns the processor time that a process has taken."""
    after_name = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
    user, system = after_name[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
