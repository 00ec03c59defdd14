"""`str.same_text` with faults: connections that are reset, and a verifier that is killed beside another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.reliability.setup import QUIET, MortalVerifier, mortal_verifier
from benchmarks.results_file import Found
from benchmarks.structured.clients import load_texts
from benchmarks.structured.schemas import make_schemas
from benchmarks.structured.texts import NUM_NEW, TEMPERATURES, WAYS
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.library.client import Client, connect
from outrider.edge_client.library.result import Result
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.results import Measure, at_most, judged

DRAFTED = {name: way for name, way in WAYS.items() if name != "co-located"}
SLOWED = ("--min-forward-ms", "5")  # a text lasts long enough to be met by its fault
MOST_TOKENS_BEFORE = 12  # a fault comes after so many at most


def run() -> Found:
    """Returns the measures."""
    measures, details = list[Measure](), dict[str, object]()
    for name, faulty in (("reset", _reset_links), ("failover", _killed_verifiers)):
        differing, num_met = Counter[str](dict.fromkeys(DRAFTED, 0)), 0
        schemas, prompts = make_schemas(), load_texts()
        with faulty() as faults:
            for number, schema in enumerate(schemas):
                prompt, chance = prompts[number % len(prompts)], random.Random(number)
                call = {"json_schema": schema, "seed": number, "max_new_tokens": NUM_NEW}
                call["temperature"] = TEMPERATURES[number % len(TEMPERATURES)]
                alone = faults.quiet.generate(prompt, **call, mode="cloud-only")
                way = list(DRAFTED)[number // 2 % len(DRAFTED)]
                text = _generate(faults, prompt, {**call, **DRAFTED[way]}, chance)
                differing[way] += text.ids != alone.ids
                ours = text.usage["outrider"]
                assert isinstance(ours, dict), "a usage block"
                num_met += ours["num_reconnects"] + ours["num_rebuilds"] > 0
                faults.repair()
        about = f"texts unlike cloud-only's, of {len(schemas)}, {num_met} of them met by a {name}"
        measures.append(judged(f"str.same_text.{name}", about, differing.total(), "texts", at_most(0)))
        details[name] = {"differing": dict(differing), "met": num_met}
    return measures, details


@dataclass(frozen=True, slots=True)
class Faults:
    """Holds a client that faults meet and one that none does, what makes a fault, and what ends it."""

    client: Client
    quiet: Client
    strike: Callable[[random.Random], None]
    repair: Callable[[], None] = lambda: None


def _generate(faults: Faults, prompt: str, call: dict[str, Any], chance: random.Random) -> Result:
    """Returns a text that a fault meets after one of its first tokens."""
    at, num_tokens = chance.randrange(MOST_TOKENS_BEFORE), 0
    with faults.client.stream(prompt, **call) as stream:
        for event in stream:
            if isinstance(event, TokenEvent):
                if num_tokens == at:
                    faults.strike(chance)
                num_tokens += 1
        return stream.result()


@contextmanager
def _reset_links() -> Iterator[Faults]:
    with (
        mortal_verifier("serve", *QUIET, *SLOWED) as verifier,
        create_realisation("proxy").open(LinkProfile("reset", rtt_ms=4), verifier.address) as link,
        closing(_patient(link.address)) as client,
        closing(connect(verifier.address)) as quiet,
    ):

        def strike(chance: random.Random) -> None:
            link.reset()

        yield Faults(client, quiet, strike)


@contextmanager
def _killed_verifiers() -> Iterator[Faults]:
    with (
        mortal_verifier("serve", *QUIET, *SLOWED) as one,
        mortal_verifier("serve", *QUIET, *SLOWED) as other,
        mortal_verifier("serve", *QUIET) as third,
        closing(_patient(f"{one.address},{other.address}")) as client,
        closing(connect(third.address)) as quiet,
    ):
        killed: list[MortalVerifier] = []

        def strike(chance: random.Random) -> None:
            killed.append(chance.choice((one, other)))
            killed[-1].kill()

        def repair() -> None:
            while killed:
                killed.pop().revive()

        yield Faults(client, quiet, strike, repair)


def _patient(address: str) -> Client:
    return connect(address, on_timeout="wait", recover_timeout_s=30.0)
