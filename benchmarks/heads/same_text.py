"""`heads.same_text`: every source's text beside all others', against cloud-only's alone."""

from __future__ import annotations

from benchmarks.heads.embedded import load_prompt_ids, make_service
from benchmarks.heads.service import CLOUD_ONLY, Case
from benchmarks.results_file import Found
from outrider.common.types import SamplingParams
from outrider.experiments.shared.results import at_most, judged

TEMPERATURES = (0.0, 0.8)
NUM_TEXTS, NUM_NEW = 8, 64  # of each source at each temperature


def run() -> Found:
    """Returns the measure. Each batch holds eight texts of all sources in turn."""
    service, prompts = make_service(), load_prompt_ids(NUM_TEXTS)
    sources = service.drafter.sources
    differing: dict[str, int] = dict.fromkeys(sources, 0)
    num_texts = 0
    for temperature in TEMPERATURES:
        samplings = [SamplingParams(temperature=temperature, seed=seed) for seed in range(NUM_TEXTS)]
        pairs = list(zip(prompts, samplings, strict=True))
        alone = [service.write([Case(*pair, CLOUD_ONLY)], NUM_NEW)[0].token_ids for pair in pairs]
        for turn in range(len(sources)):
            mixed = [sources[(turn + number) % len(sources)] for number in range(NUM_TEXTS)]
            cases = [Case(*pair, source) for pair, source in zip(pairs, mixed, strict=True)]
            for source, text, wanted in zip(mixed, service.write(cases, NUM_NEW), alone, strict=True):
                differing[source] += text.token_ids != wanted
                num_texts += 1
    what = f"texts unlike cloud-only's of {num_texts}, eight at once, by {', '.join(sources)}, temperatures 0 and .8"
    return [judged("heads.same_text", what, sum(differing.values()), "texts", at_most(0))], {
        "differing": differing
    }
