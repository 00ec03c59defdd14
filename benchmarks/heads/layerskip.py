"""`heads.layerskip`: chains by the first layers of a target that was trained for it, and of the embedded one, which was
not; what was computed below the exit is not computed again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.heads.embedded import load_prompt_ids
from benchmarks.heads.service import Case, Service
from benchmarks.results_file import ROOT, Found
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.cloud_verifier.heads.early_exit import EarlyExit
from outrider.cloud_verifier.heads.loading import load_head
from outrider.common.types import EARLY_EXIT, SamplingParams
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

TRAINED = ROOT / "training" / "runs" / "layerskip"  # --out of `python -m outrider.training.heads layerskip`
NUM_PROMPTS, NUM_NEW, CHAIN = 24, 96, 4
TEMPERATURES = (0.0, 0.8)
FIRST_LAYERS = (0, 1)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Holds what was measured of one target: tokens a round by temperature, and the KV rows below the exit that were
    written for tokens which had them."""

    tokens: tuple[float, ...]
    num_again: int
    num_below: int  # KV rows written there in all

    @property
    def details(self) -> dict[str, Any]:
        """Returns them for the file of results."""
        tokens = {f"T={each:g}": found for each, found in zip(TEMPERATURES, self.tokens, strict=True)}
        return {"tokens a round": tokens, "KV rows below the exit": self.num_below, "again": self.num_again}


def run() -> Found:
    """Returns the measures; those of a trained target where there is one in `TRAINED`."""
    embedded = load_target(EMBEDDED / "target", num_threads=1)
    plain = _rounds(embedded, EarlyExit(embedded, FIRST_LAYERS, ""))
    what = f"tokens a round by the embedded target's first 2 of 6 layers, untrained, chains of {CHAIN}, temperature 0"
    measures = [
        Measure("heads.layerskip_untrained", f"{what} (at .8: {plain.tokens[1]})", plain.tokens[0], "tokens")
    ]
    details = {"untrained": plain.details}
    if (TRAINED / "config.json").is_file():
        trained = _trained(TRAINED)
        details["trained"] = trained.details
        what = f"tokens a round by early exit, trained, chains of {CHAIN}, temperature 0 (at .8: {trained.tokens[1]})"
        measures.append(judged("heads.layerskip", what, trained.tokens[0], "tokens", at_least(1.8)))
        what = f"KV rows below the exit written for tokens that had them, of {trained.num_below}"
        measures.append(judged("heads.layerskip_rows", what, trained.num_again, "rows", at_most(0)))
    return measures, details


def _trained(directory: Path) -> Rounds:
    backend = load_target(directory / "target", num_threads=1)
    source = load_head(directory, backend)
    assert isinstance(source, EarlyExit), f"{directory} is of another kind"
    return _rounds(backend, source)


def _rounds(backend: TransformersBackend, source: EarlyExit) -> Rounds:
    service, prompts, tokens = Service(backend, [source]), load_prompt_ids(NUM_PROMPTS), []
    for temperature in TEMPERATURES:
        texts = []
        for start in range(0, len(prompts), 8):
            cases = [
                Case(
                    prompt,
                    SamplingParams(temperature=temperature, seed=start + seed),
                    EARLY_EXIT,
                    CHAIN,
                    False,
                )
                for seed, prompt in enumerate(prompts[start : start + 8])
            ]
            texts += service.write(cases, NUM_NEW)
        num_tokens = sum(len(text.token_ids) - 1 for text in texts)
        tokens.append(round(num_tokens / sum(text.num_steps for text in texts), 3))
    # Each token that is fed has one row in the last layer, whatever drafted it.
    *_, last = backend.num_kv_rows
    below = backend.num_kv_rows[: backend.entry_layer]
    return Rounds(tuple(tokens), sum(below) - last * len(below), sum(below))
