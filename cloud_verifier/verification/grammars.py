"""The grammars of sessions: compiled beside the engine, and kept for the next openings of their tenant."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from outrider.common.errors import InvalidFieldError, ModelError, UnimplementedFieldError
from outrider.common.grammar.state import COMPILING_NICENESS
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.process.extras import MissingExtraError
from outrider.common.types import Grammar

log = logging.getLogger(__name__)

MAX_KEPT_OF_TENANT, MAX_KEPT = 16, 64  # compiled grammars, of up to 96 MB each, most of them of a few kB
MAX_WAITING = 16  # of one tenant


class CompilesGrammars(Protocol):
    """Is what compiles (`outrider.common.grammar.checked.CheckedCompiler`)."""

    def compile(self, grammar: Grammar) -> Grammar:
        """Returns the grammar with its compiled form. Raises `InvalidFieldError`."""

    def close(self) -> None:
        """Frees what it holds."""


class TooManyGrammarsError(Exception):
    """A tenant has too many grammars waiting to be compiled."""


class GrammarStore:
    """Compiles one grammar after another on a thread, tenants in turn. A grammar of one tenant does not exist for
    another: how long an opening takes would tell of it."""

    def __init__(self, compiler: CompilesGrammars, pool: Executor | None = None) -> None:
        """The store closes both; `pool` is a thread of its own where none is given."""
        self._compiler = compiler
        self._pool = pool or ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_be_nice)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Grammar], Grammar | InvalidFieldError] = OrderedDict()
        self._waiting: OrderedDict[str, deque[Grammar]] = OrderedDict()  # by tenant, in turn
        self._told: dict[tuple[str, Grammar], dict[bytes, Callable[[], object]]] = {}  # by who waits

    def get(
        self, tenant: str, grammar: Grammar, session_id: bytes, on_ready: Callable[[], object]
    ) -> Grammar | InvalidFieldError | None:
        """Returns the compiled grammar, or what is wrong with it. None: `on_ready` is called, on another thread, once
        it is known; the last one of a session replaces those before it, or what they hold would be kept. Raises
        `TooManyGrammarsError`."""
        key = tenant, grammar
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            if (told := self._told.get(key)) is not None:
                told[session_id] = on_ready
                return None
            queue = self._waiting.setdefault(tenant, deque())
            if len(queue) >= MAX_WAITING:
                raise TooManyGrammarsError(f"{MAX_WAITING} grammars of this tenant wait to be compiled")
            queue.append(grammar)
            self._told[key] = {session_id: on_ready}
        self._pool.submit(self._compile_next)
        return None

    def close(self) -> None:
        """Ends the thread and the compiler."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._compiler.close()

    def _compile_next(self) -> None:
        with self._lock:
            tenant, queue = self._waiting.popitem(last=False)
            grammar = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        found: Grammar | InvalidFieldError
        try:
            found = self._compiler.compile(grammar)
        except InvalidFieldError as error:
            found = error
        except (ModelError, MissingExtraError) as error:
            found = UnimplementedFieldError(FIELD, str(error))
        except Exception:
            log.exception("a grammar could not be compiled")
            found = InvalidFieldError(FIELD, "it could not be compiled; the verifier's log says why")
        with self._lock:
            self._keep(tenant, grammar, found)
            told = self._told.pop((tenant, grammar))
        for on_ready in told.values():
            on_ready()

    def _keep(self, tenant: str, grammar: Grammar, found: Grammar | InvalidFieldError) -> None:
        self._kept[tenant, grammar] = found
        own = [key for key in self._kept if key[0] == tenant]
        if len(own) > MAX_KEPT_OF_TENANT:
            del self._kept[own[0]]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def _be_nice() -> None:
    """Has this thread give way to those of the engine; Linux has a niceness for each, and a sandbox may refuse it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILING_NICENESS)
    except OSError as error:
        log.warning("grammars are compiled with the priority of everything else: %s", error)
