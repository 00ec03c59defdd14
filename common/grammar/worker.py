"""Compiles grammars in a process of its own, and answers whether each can be, and what it takes.

See `outrider.common.grammar.checked`. One line of JSON in, one out, with the number of the one it answers. A grammar
that needs more memory than allowed ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from outrider.common.errors import InvalidFieldError
from outrider.common.grammar.state import COMPILING_NICENESS, state_of
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind

MAX_S = 10  # of processor time for one grammar, ten times what whoever asks grants
MAX_BYTES = 32 << 20  # of memory to compile one; those of the benchmark's 200 schemas hold .25 MB at most


def main(tokenizer: str, num_tokens: str, *eos_token_ids: str) -> None:
    """Answers each line until the end of the input."""
    vocabulary = Vocabulary.open(Path(tokenizer), int(num_tokens), tuple(map(int, eos_token_ids)))
    _check(vocabulary, Grammar(GrammarKind.REGEX, "a"))  # what is made once is no grammar's
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    print("ready", flush=True)
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        os.nice(COMPILING_NICENESS)  # not before: on a busy machine its start alone would take minutes
    for line in sys.stdin:
        said = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_S)  # ends this process where nobody is left to do so
        found = _check(vocabulary, Grammar(GrammarKind(said["kind"]), said["text"], said["has_whitespace"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"number": said["number"], **found}), flush=True)


def _check(vocabulary: Vocabulary, grammar: Grammar) -> dict[str, Any]:
    """Returns what is wrong with a grammar, "" for nothing, how many bytes it takes, and how much processor time."""
    error, compile_s, before = "", 0.0, _resident_bytes()
    try:
        start_s = time.thread_time()
        compiled = vocabulary.compile(grammar)
        compile_s = time.thread_time() - start_s
        state_of(compiled).allowed()
    except InvalidFieldError as failure:
        error = failure.reason
    except Exception as failure:
        error = str(failure)[:500] or type(failure).__name__  # a MemoryError has no text
    return {"error": error, "num_bytes": max(0, _resident_bytes() - before), "compile_s": compile_s}


def _resident_bytes() -> int:
    """Returns the memory of this process, without what is free in its heap where the C library gives that back."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(*sys.argv[1:])
