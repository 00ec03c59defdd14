"""Compiles grammars in a process of its own, and answers whether each can be: see `outrider.common.grammar.checked`.

One line of JSON in, one out, with the number of the one it answers. A grammar that needs more memory than allowed ends
the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path

from outrider.common.errors import InvalidFieldError
from outrider.common.grammar.state import COMPILING_NICENESS, state_of
from outrider.common.grammar.vocabulary import Vocabulary
from outrider.common.types import Grammar, GrammarKind

MAX_S = 10  # of processor time for one grammar, ten times what whoever asks grants
MAX_BYTES = 96 << 20  # of memory for all grammars that one process compiles at a time


def main(tokenizer: str, num_tokens: str, *eos_token_ids: str) -> None:
    """Answers each line until the end of the input."""
    vocabulary = Vocabulary.open(Path(tokenizer), int(num_tokens), tuple(map(int, eos_token_ids)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    print("ready", flush=True)
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        os.nice(COMPILING_NICENESS)  # not before: on a busy machine its start alone would take minutes
    for line in sys.stdin:
        said = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_S)  # ends this process where nobody is left to do so
        error = _check(vocabulary, Grammar(GrammarKind(said["kind"]), said["text"], said["has_whitespace"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps({"number": said["number"], "error": error}), flush=True)


def _check(vocabulary: Vocabulary, grammar: Grammar) -> str:
    """Returns what is wrong with a grammar, "" for nothing."""
    try:
        state_of(vocabulary.compile(grammar)).allowed()
    except InvalidFieldError as failure:
        return failure.reason
    except Exception as failure:
        return str(failure)[:500] or type(failure).__name__  # a MemoryError has no text
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
