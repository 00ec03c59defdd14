"""`str.same_text` with faults: connections that are reset, and a verifier that is killed beside another."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing

from benchmarks.faults import FAULTS, is_met
from benchmarks.results_file import Found
from benchmarks.structured.clients import load_texts
from benchmarks.structured.schemas import make_schemas
from benchmarks.structured.texts import NUM_NEW, TEMPERATURES, WAYS
from outrider.experiments.shared.results import Measure, at_most, judged

DRAFTED = {name: way for name, way in WAYS.items() if name != "co-located"}


def run() -> Found:
    """Returns the measures."""
    measures, details = list[Measure](), dict[str, object]()
    for name, faulty in FAULTS.items():
        differing, num_met = Counter[str](dict.fromkeys(DRAFTED, 0)), 0
        schemas, prompts = make_schemas(), load_texts()
        with faulty() as faults, closing(faults.connect()) as client:
            for number, schema in enumerate(schemas):
                prompt, chance = prompts[number % len(prompts)], random.Random(number)
                call = {"json_schema": schema, "seed": number, "max_new_tokens": NUM_NEW}
                call["temperature"] = TEMPERATURES[number % len(TEMPERATURES)]
                alone = faults.quiet.generate(prompt, **call, mode="cloud-only")
                way = list(DRAFTED)[number // 2 % len(DRAFTED)]
                text = faults.generate(client, prompt, {**call, **DRAFTED[way]}, chance)
                differing[way] += text.ids != alone.ids
                num_met += is_met(text)
        about = f"texts unlike cloud-only's, of {len(schemas)}, {num_met} of them met by a {name}"
        measures.append(judged(f"str.same_text.{name}", about, differing.total(), "texts", at_most(0)))
        details[name] = {"differing": dict(differing), "met": num_met}
    return measures, details
