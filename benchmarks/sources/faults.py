"""`src.same_text` with faults: connections that are reset, and a verifier that is killed beside another."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.faults import FAULTS, Faults, is_met
from benchmarks.results_file import Found
from benchmarks.sources.same_text import EVERY, NUM_NEW, SOURCES, TEMPERATURES, WAYS, write_datastore
from outrider.common.types import TokenIds
from outrider.edge_client.library.client import Client
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged


@dataclass(frozen=True, slots=True)
class Case:
    """Holds a way of drafting, what is asked, and cloud-only's answer."""

    way: str
    prompt: str
    call: dict[str, Any]
    alone: TokenIds


def run() -> Found:
    """Returns the measures."""
    measures, details = list[Measure](), dict[str, Any]()
    with TemporaryDirectory() as folder:
        store = write_datastore(Path(folder))
        for name, faulty in FAULTS.items():
            differing, met, num_texts = Counter[str](), Counter[str](), 0
            with faulty() as faults:
                cases = _cases(faults)
                for strategy in SOURCES:
                    with closing(faults.connect(draft_strategy=strategy, datastore=str(store))) as client:
                        num_texts += _play(faults, client, strategy, cases, differing, met)
                    print(
                        f"  {name}, {strategy}: {met[strategy]} met, {differing[strategy]} differ", flush=True
                    )
            what = f"texts unlike cloud-only's of {num_texts}, {met.total()} of them met by a {name}; {EVERY}"
            measures.append(judged(f"src.same_text_{name}", what, differing.total(), "texts", at_most(0)))
            details[name] = {"differing": dict(differing), "met": dict(met)}
    return measures, details


def _cases(faults: Faults) -> list[Case]:
    """Returns a case of each way and temperature, each with a prompt of its own."""
    cases = list[Case]()
    prompts = load_prompts()
    for temperature in TEMPERATURES:
        for way in WAYS:
            prompt, seed = prompts[len(cases) % len(prompts)].text, len(cases)
            call = {"temperature": temperature, "seed": seed, "max_new_tokens": NUM_NEW, "ignore_eos": True}
            alone = faults.quiet.generate(prompt, **call, mode="cloud-only")
            cases.append(Case(way, prompt, call, alone.ids))
    return cases


def _play(
    faults: Faults,
    client: Client,
    strategy: str,
    cases: list[Case],
    differing: Counter[str],
    met: Counter[str],
) -> int:
    """Writes every case's text twice, so that the second, which a fault meets, can be copied from the first. Counts
    those that differ and those that were met; returns the number of second ones."""
    chance = random.Random(strategy)
    for case in cases:
        call = {**case.call, **WAYS[case.way], "mode": "speculative"}
        first = client.generate(case.prompt, **call)
        text = faults.generate(client, case.prompt, call, chance)
        differing[strategy] += any(each.ids != case.alone for each in (first, text))
        met[strategy] += is_met(text)
    return len(cases)
