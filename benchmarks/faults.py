"""Faults that meet texts in real processes: connections that are reset, a verifier that is killed beside another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.reliability.setup import QUIET, MortalVerifier, mortal_verifier
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.library.client import Client, connect
from outrider.edge_client.library.result import Result
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile

PLAIN = (
    "serve",
    *QUIET,
    "--device",
    "cpu",
    "--num-threads",
    "1",
)  # of a fork, which may not wait for threads that it lacks
SLOWED = (*PLAIN, "--min-forward-ms", "5")  # a text lasts long enough to be met by its fault
MOST_TOKENS_BEFORE = 12  # a fault comes after so many at most
RTT_MS = 4  # of the link that is reset
RECOVER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Holds the verifiers' address that faults meet, a client that none meets, what makes a fault, and what ends it."""

    address: str
    quiet: Client
    strike: Callable[[random.Random], None]
    repair: Callable[[], None] = lambda: None

    def connect(self, **settings: Any) -> Client:
        """Returns a client that faults meet, and that waits until they are over."""
        return connect(self.address, on_timeout="wait", recover_timeout_s=RECOVER_TIMEOUT_S, **settings)

    def generate(self, client: Client, prompt: str, call: dict[str, Any], chance: random.Random) -> Result:
        """Returns a text of `connect`'s client that a fault meets after one of its first tokens, and ends the fault."""
        at, num_tokens = chance.randrange(MOST_TOKENS_BEFORE), 0
        with client.stream(prompt, **call) as stream:
            for event in stream:
                if isinstance(event, TokenEvent):
                    if num_tokens == at:
                        self.strike(chance)
                    num_tokens += 1
            result = stream.result()
        self.repair()
        return result


def is_met(result: Result) -> bool:
    """Returns whether a text lost its connection or its session on the way."""
    ours = result.usage["outrider"]
    assert isinstance(ours, dict), "a usage block"
    return bool(ours["num_reconnects"] + ours["num_rebuilds"])


@contextmanager
def _reset_links() -> Iterator[Faults]:
    with (
        mortal_verifier(*SLOWED) as verifier,
        create_realisation("proxy").open(LinkProfile("reset", rtt_ms=RTT_MS), verifier.address) as link,
        closing(connect(verifier.address)) as quiet,
    ):

        def strike(chance: random.Random) -> None:
            link.reset()

        yield Faults(link.address, quiet, strike)


@contextmanager
def _killed_verifiers() -> Iterator[Faults]:
    with (
        mortal_verifier(*SLOWED) as one,
        mortal_verifier(*SLOWED) as other,
        mortal_verifier(*PLAIN) as third,
        closing(connect(third.address)) as quiet,
    ):
        killed: list[MortalVerifier] = []

        def strike(chance: random.Random) -> None:
            killed.append(chance.choice((one, other)))
            killed[-1].kill()

        def repair() -> None:
            while killed:
                killed.pop().revive()

        yield Faults(f"{one.address},{other.address}", quiet, strike, repair)


FAULTS: dict[str, Callable[[], AbstractContextManager[Faults]]] = {
    "reset": _reset_links,
    "failover": _killed_verifiers,
}
