"""A verifier process that tests kill, and that comes back each time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from support.calls import PATIENCE_S
from support.processes.forked import start_verifier

from outrider.experiments.shared.processes import kept_address

# So slow that a streamed text of 400 tokens takes 1.6 s: where others keep the processors busy, an edge that is not
# run for a while would else find all of it on the way when it kills the verifier.
_FLAGS = ("--min-forward-ms", "4")


class MortalVerifier:
    """One process after the other on one address; the last one serves the next test too."""

    def __init__(self, target: Path) -> None:
        self._target = self._serves = target
        self._kept = contextlib.ExitStack()
        self.address = self._kept.enter_context(kept_address())
        self._process = start_verifier(*_FLAGS, target=target, listen=self.address)
        self.num_deaths = 0
        self._thread: threading.Thread | None = None

    def revive(self) -> None:
        """As a test expects to find it."""
        self.wait_until_back()
        self.num_deaths = 0
        if self._serves != self._target:
            self._process.stop()
            self._start(self._target)

    def dies_at(
        self, token: int, comes_back_with: Path | None = None, after: threading.Event | None = None
    ) -> Callable[[int], None]:
        """To be told each token: kills it (SIGKILL) at this one and starts another in the background, `after` that
        where given: on a busy machine the edge may notice nothing until the other one serves."""

        def on_token(index: int) -> None:
            if index == token:
                self.num_deaths += 1
                self._process.kill()
                target = comes_back_with or self._target
                self._thread = threading.Thread(target=self._start, args=(target, after))
                self._thread.start()

        return on_token

    def _start(self, target: Path, after: threading.Event | None = None) -> None:
        if after is not None:
            after.wait(PATIENCE_S)
        self._process, self._serves = start_verifier(*_FLAGS, target=target, listen=self.address), target

    def wait_until_back(self) -> None:
        """Returns once the process that was last started serves."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.wait_until_back()
        self._process.stop()
        self._kept.close()
