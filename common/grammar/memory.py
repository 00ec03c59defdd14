"""Counts the memory that grammars hold, by what is known of it, and bounds it for each tenant and for all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from outrider.common.errors import OutriderError

_GROWTH_SHARE = 0.25  # of a bound, which is left to what was let in before and grows


class NoGrammarRoomError(OutriderError):
    """Grammars hold as much memory as they may."""


class GrammarMemory:
    """Counts the bytes that are held, for each tenant. Thread-safe."""

    def __init__(self, max_bytes: int, tenant_max_bytes: int) -> None:
        self._max_bytes, self._tenant_max_bytes = max_bytes, tenant_max_bytes
        self._of_tenant = Counter[str]()
        self._total = 0
        self._lock = threading.RLock()  # what is freed meanwhile, on this thread too, gives its bytes back
        # Drops the oldest thing that is kept for later, of this tenant or, None, of any; returns whether there was one.
        self.drop_kept: Callable[[str | None], bool] = lambda _: False

    @property
    def num_bytes(self) -> int:
        """Returns how many bytes are held."""
        return self._total

    def of(self, tenant: str) -> TenantMemory:
        """Returns the part of one tenant."""
        return TenantMemory(self, tenant)

    def make_room(self, tenant: str, num_bytes: int = 0, *, is_new: bool = True) -> None:
        """Drops what is kept for later until so many bytes more have room, `is_new` or of what was let in before.
        Raises `NoGrammarRoomError`."""
        share = 1 - _GROWTH_SHARE if is_new else 1.0
        while full := self._full(tenant, num_bytes, share):
            if not self.drop_kept(tenant if full is _OWN else None):
                raise NoGrammarRoomError(f"{full} hold as much memory as they may", "try again later")

    def add(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes whatever the bounds."""
        with self._lock:
            self._total += num_bytes
            self._of_tenant[tenant] += num_bytes
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    def _full(self, tenant: str, num_bytes: int, share: float) -> str:
        """Returns whose grammars have no room for so many more bytes within this share of their bound, "" for none."""
        with self._lock:
            if self._of_tenant[tenant] + num_bytes > share * self._tenant_max_bytes:
                return _OWN
            return _ALL if self._total + num_bytes > share * self._max_bytes else ""


_OWN, _ALL = "the grammars of this tenant", "the grammars of all tenants"


class TenantMemory:
    """Counts what the grammars of one tenant hold."""

    def __init__(self, memory: GrammarMemory, tenant: str) -> None:
        self._memory, self._tenant = memory, tenant

    def hold(self, num_bytes: int) -> Held:
        """Counts the bytes of something new until it is gone. Raises `NoGrammarRoomError`."""
        self._memory.make_room(self._tenant, num_bytes)
        return Held(self._memory, self._tenant, num_bytes)

    def hold_let_in(self, num_bytes: int) -> Held:
        """Counts the bytes of what was let in before, whatever the bounds."""
        return Held(self._memory, self._tenant, num_bytes)


class Held:
    """Counts bytes for as long as it lives: it belongs to what holds them."""

    def __init__(self, memory: GrammarMemory, tenant: str, num_bytes: int) -> None:
        self._memory, self._tenant, self.num_bytes = memory, tenant, num_bytes
        memory.add(tenant, num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Sets the number of bytes. Raises `NoGrammarRoomError`, and counts them all the same: whoever holds them is to
        be dropped."""
        more, self.num_bytes = num_bytes - self.num_bytes, num_bytes
        try:
            if more > 0:
                self._memory.make_room(self._tenant, more, is_new=False)
        finally:
            self._memory.add(self._tenant, more)

    def __del__(self) -> None:
        self._memory.add(self._tenant, -self.num_bytes)
