"""Virtual time for a test that itself waits: a deadline passes at once, and always at the same moment."""

from __future__ import annotations

from typing import Any

from greenlet import greenlet

from outrider.experiments.simulator.world.world import World


class CallersWorld(World):
    """A world in which its caller runs already, as a task: events run while the caller waits, in its thread."""

    _loop: Any = None

    @property
    def _hub(self) -> Any:
        if self._loop is None:
            self._loop = greenlet(self._run_on)
        return self._loop

    @_hub.setter
    def _hub(self, creator: Any) -> None: ...

    def _run_on(self) -> None:
        self.run()
        raise AssertionError("every task waits, and nothing is planned that would end a wait")
