"""The grammars of sessions: compiled beside the engine, and kept for the next openings of their tenant."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol, TypeAlias

from outrider.common.errors import InvalidFieldError, ModelError, UnimplementedFieldError
from outrider.common.grammar.checked import NotCheckedError
from outrider.common.grammar.memory import GrammarMemory, NoGrammarRoomError
from outrider.common.grammar.state import COMPILING_NICENESS, CompiledGrammar, GrammarBounds
from outrider.common.grammar.vocabulary import FIELD
from outrider.common.process.extras import MissingExtraError
from outrider.common.types import Grammar

log = logging.getLogger(__name__)

MAX_KEPT_OF_TENANT, MAX_KEPT = 16, 64  # compiled grammars
MAX_WAITING = 16  # of one tenant
MASKS_BUDGET_S = 0.05  # for the masks of one round; those of a usual schema take 20 microseconds each
DEFAULT_MAX_BYTES, DEFAULT_TENANT_MAX_BYTES = 2 << 30, 1 << 30


Found: TypeAlias = Grammar | InvalidFieldError | NotCheckedError | NoGrammarRoomError
"""The compiled grammar, what is wrong with it, or why that is not known, or nothing is kept of it."""


class CompilesGrammars(Protocol):
    """Is what compiles (`outrider.common.grammar.checked.CheckedCompiler`)."""

    def compile(self, grammar: Grammar, bounds: GrammarBounds) -> Grammar:
        """Returns the grammar with its compiled form, which keeps to its bounds. Raises `InvalidFieldError`,
        `NotCheckedError` and `NoGrammarRoomError`."""

    def close(self) -> None:
        """Frees what it holds."""


class TooManyGrammarsError(Exception):
    """A tenant has too many grammars waiting to be compiled."""


class GrammarStore:
    """Compiles one grammar after another on a thread, tenants in turn. A grammar of one tenant does not exist for
    another: how long an opening takes would tell of it."""

    def __init__(
        self,
        compiler: CompilesGrammars,
        pool: Executor | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tenant_max_bytes: int = DEFAULT_TENANT_MAX_BYTES,
    ) -> None:
        """The store closes both; `pool` is a thread of its own where none is given. The grammars of all sessions and
        those that are kept hold `max_bytes` at most, those of a tenant `tenant_max_bytes`."""
        self._compiler = compiler
        self.memory = GrammarMemory(max_bytes, tenant_max_bytes)
        self.memory.drop_kept = self._drop_kept
        self._pool = pool or ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_be_nice)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Grammar], Grammar | InvalidFieldError] = OrderedDict()
        self._waiting: OrderedDict[str, deque[Grammar]] = OrderedDict()  # by tenant, in turn
        self._told: dict[tuple[str, Grammar], dict[bytes, Callable[[Found], object]]] = {}  # by who waits
        self._is_compiling = False  # a function of the pool is under way, or about to be

    def get(
        self, tenant: str, grammar: Grammar, session_id: bytes, on_found: Callable[[Found], object]
    ) -> Grammar | InvalidFieldError | None:
        """Returns the compiled grammar, or what is wrong with it. None: `on_found` is called with it, on another
        thread; the last one of a session replaces those before it. Until then it is kept, with all that it holds: see
        `forget`. Raises `TooManyGrammarsError`, and `NoGrammarRoomError` where a session of the tenant has no room."""
        key = tenant, grammar
        self.memory.make_room(tenant)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                if not ((compiled := _compiled(found)) and compiled.is_used_up):
                    self._kept.move_to_end(key)
                    return found
            if (told := self._told.get(key)) is not None:
                told[session_id] = on_found
                return None
            queue = self._waiting.setdefault(tenant, deque())
            if len(queue) >= MAX_WAITING:
                raise TooManyGrammarsError(f"{MAX_WAITING} grammars of this tenant wait to be compiled")
            queue.append(grammar)
            self._told[key] = {session_id: on_found}
            was_compiling, self._is_compiling = self._is_compiling, True
        if not was_compiling:
            self._pool.submit(self._compile_waiting)
        return None

    def forget(self, tenant: str, grammar: Grammar, session_id: bytes) -> None:
        """Drops what a session waits for. A grammar that nobody waits for any more is not compiled, unless it already
        is being compiled."""
        key = tenant, grammar
        with self._lock:
            told = self._told.get(key, {})
            told.pop(session_id, None)
            queue = self._waiting.get(tenant, ())
            if told or grammar not in queue:
                return
            del self._told[key]
            self._waiting[tenant].remove(grammar)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def close(self) -> None:
        """Ends the thread and the compiler."""
        with self._lock:
            self._waiting.clear()
            self._told.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._compiler.close()

    def _compile_waiting(self) -> None:
        """Compiles what waits, tenants in turn, until nothing does."""
        while (taken := self._take()) is not None:
            found = self._compile(*taken)
            with self._lock:
                told = self._told.pop(taken, {})
            for on_found in told.values():
                try:
                    on_found(found)
                except Exception:  # the others wait for theirs
                    log.exception("a session was not told of its grammar")

    def _take(self) -> tuple[str, Grammar] | None:
        with self._lock:
            if not self._waiting:
                self._is_compiling = False
                return None
            tenant, queue = self._waiting.popitem(last=False)
            grammar = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            return tenant, grammar

    def _compile(self, tenant: str, grammar: Grammar) -> Found:
        """Returns what is found, and keeps what is so of the grammar itself: the next attempt may fare better with the
        rest."""
        found: Grammar | InvalidFieldError
        try:
            found = self._compiler.compile(grammar, GrammarBounds(MASKS_BUDGET_S, self.memory.of(tenant)))
        except InvalidFieldError as error:
            found = error.with_traceback(None)  # which would keep all that the functions had at hand
        except NoGrammarRoomError as error:
            return error.with_traceback(None)
        except NotCheckedError as error:
            log.warning("a grammar was not compiled: %s", error)
            return error.with_traceback(None)
        except MissingExtraError as error:  # which says where this copy was installed from
            log.warning("no grammars: %s", error)
            return UnimplementedFieldError(FIELD, "this verifier lacks its extra `structured`")
        except ModelError as error:
            return UnimplementedFieldError(FIELD, str(error))
        except Exception:
            log.exception("a grammar could not be compiled")
            return InvalidFieldError(FIELD, "it could not be compiled; the verifier's log says why")
        with self._lock:
            self._keep(tenant, grammar, found)
        return found

    def _keep(self, tenant: str, grammar: Grammar, found: Grammar | InvalidFieldError) -> None:
        self._kept[tenant, grammar] = found
        own = [key for key in self._kept if key[0] == tenant]
        if len(own) > MAX_KEPT_OF_TENANT:
            del self._kept[own[0]]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _drop_kept(self, tenant: str | None) -> bool:
        """Drops the oldest grammar that no session follows: the others would free nothing. See
        `GrammarMemory.drop_kept`."""
        with self._lock:
            own = ((key, _compiled(found)) for key, found in self._kept.items() if tenant in (None, key[0]))
            key = next((key for key, compiled in own if compiled and not compiled.has_states), None)
            dropped = None if key is None else self._kept.pop(key)
        return dropped is not None


def _compiled(found: Grammar | InvalidFieldError) -> CompiledGrammar | None:
    compiled = found.compiled if isinstance(found, Grammar) else None
    return compiled if isinstance(compiled, CompiledGrammar) else None


def _be_nice() -> None:
    """Has this thread give way to those of the engine; Linux has a niceness for each, and a sandbox may refuse it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILING_NICENESS)
    except OSError as error:
        log.warning("grammars are compiled with the priority of everything else: %s", error)
