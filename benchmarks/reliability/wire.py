"""`rel.wire`: texts over links that lose, duplicate, reorder and hold back packets, reset and half-open connections.

Over TUN devices every fault happens to packets. Where those cannot be had, the proxy does what it can, and what
it cannot is printed and left out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.matrix import best_realisation
from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.reliability.texts import NUM_NEW, FaultyTexts, Workers, faulty_texts
from benchmarks.results_file import Found
from outrider.experiments.links.base import LinkRealisation, OpenLink
from outrider.experiments.links.profile import LinkProfile, Outage
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_most, judged

DARK_S, RESET_AFTER_S = 0.5, 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a link whose connections are broken `num_resets` times in each text. Where it has an outage that
    begins before: the edge hears nothing of it, and its connection is half open."""

    profile: LinkProfile
    num_resets: int = 0

    def strike(self, link: OpenLink) -> None:
        """Breaks the link's connections."""
        if self.profile.outages:
            link.restart_outages()
            threading.Timer(RESET_AFTER_S, link.reset).start()
        else:
            link.reset()


FAULTS = (
    Fault(LinkProfile("drop", rtt_ms=20, loss=0.05, loss_burst=2)),
    Fault(LinkProfile("duplicate", rtt_ms=20, duplicate=0.2)),
    Fault(LinkProfile("reorder", rtt_ms=20, jitter_ms=2, reorder=0.2)),
    Fault(LinkProfile("delay", rtt_ms=20, jitter_ms=30, jitter_distribution="pareto")),
    Fault(LinkProfile("reset", rtt_ms=20), num_resets=2),
    Fault(LinkProfile("half-open", rtt_ms=20, outages=(Outage(0.0, DARK_S),)), num_resets=2),
)


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found so far, a few times a link."""
    realisation = best_realisation()
    faults = list(_possible(settings, realisation))
    num_texts, num_at_once = settings.pick(1000, 90, 6), settings.pick(6, 6, 3)
    facts: dict[str, Any] = {"realisation": realisation.name}
    flags = (*QUIET, "--min-forward-ms", "10")
    with (
        running_verifier(*flags) as verifier,
        faulty_texts(verifier.address, settings.pick(8, 4, 1)) as texts,
    ):
        with ExitStack() as stack:
            links = [stack.enter_context(realisation.open(each.profile, verifier.address)) for each in faults]
            count = threading.Semaphore(0)
            workers = Workers(num_at_once, _text_over(faults, links, texts, count))
            step = max(1, num_texts // 20)
            for done in range(step, num_texts + 1, step):
                for _ in range(step):
                    count.acquire()
                settings.say(f"{done} texts: {len(texts.judged.different)} different")
                facts["links"] = {f.profile.name: lk.facts() for f, lk in zip(faults, links, strict=True)}
                yield _found(texts, facts)
            workers.stop()
            yield _found(texts, facts)


def _possible(settings: Settings, realisation: LinkRealisation) -> Iterator[Fault]:
    for fault in FAULTS:
        if reasons := realisation.refusals(fault.profile):
            settings.say(f"left out: {fault.profile.name}: {'; '.join(reasons)}")
        else:
            yield fault


def _text_over(
    faults: list[Fault], links: list[OpenLink], texts: FaultyTexts, count: threading.Semaphore
) -> Callable[[int], None]:
    """Returns what decodes text `number` over one of the links, each in turn."""

    def one(number: int) -> None:
        place = number % len(links)
        fault, link, chance = faults[place], links[place], random.Random(number)
        resets = chance.sample(range(2, NUM_NEW - 4), fault.num_resets)

        def on_token(index: int) -> None:
            if index in resets:
                fault.strike(link)

        try:
            texts.run(texts.decoder(link.address), number // len(links), fault.profile.name, on_token)
        finally:
            count.release()

    return one


def _found(texts: FaultyTexts, facts: dict[str, Any]) -> Found:
    found, links = texts.judged, facts["links"]
    about = f"over links that {', '.join(links)} ({facts['realisation']})"
    measures = [
        judged(
            "rel.wire",
            f"texts at wait that differ, of {found.num_texts['wait']}, {about}; {found.num_ties} ties",
            len(found.different),
            "texts",
            at_most(0),
        ),
        judged(
            "rel.wire_marks",
            f"unverified tokens without a mark in {found.num_texts.total()} texts under every policy, the same",
            found.num_unmarked,
            "tokens",
            at_most(0),
        ),
    ]
    return measures, {**facts, **found.details()}
