"""`heads.layerskip`: chains by the first layers of a target that was trained for it, and of the embedded one, which was
not; what was computed below the exit is not computed again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from typing import Any

import numpy as np

from benchmarks.heads.embedded import load_prompt_ids
from benchmarks.heads.service import Case, Service
from benchmarks.results_file import ROOT, Found
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.early_exit import EarlyExit
from outrider.cloud_verifier.heads.loading import load_head
from outrider.common.types import EARLY_EXIT, SamplingParams
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

TRAINED = ROOT / "training" / "runs" / "layerskip"  # --out of `python -m outrider.training.heads layerskip`
NUM_PROMPTS, NUM_NEW, CHAIN = 24, 96, 4
TEMPERATURES = (0.0, 0.8)
FIRST_LAYERS = (0, 1)
# Of the library's modules those that no target here was trained on (training/data/heldout.py), and tokens of each.
HELD_OUT = ("configparser", "csv", "difflib", "fractions", "heapq", "posixpath", "statistics", "textwrap")
NUM_HELD_OUT = 2048


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
        backend = load_target(TRAINED / "target", num_threads=1)
        source = load_head(TRAINED, backend)
        assert isinstance(source, EarlyExit), f"{TRAINED} is of another kind"
        trained = _rounds(backend, source)
        details["trained"] = trained.details
        what = f"tokens a round by early exit, trained, chains of {CHAIN}, temperature 0 (at .8: {trained.tokens[1]})"
        measures.append(judged("heads.layerskip", what, trained.tokens[0], "tokens", at_least(1.8)))
        what = f"KV rows below the exit written for tokens that had them, of {trained.num_below}"
        measures.append(judged("heads.layerskip_rows", what, trained.num_again, "rows", at_most(0)))
        lost = _loss(backend) - _loss(embedded)
        what = f"target's loss on held-out code after that training, minus before, nats a token ({', '.join(HELD_OUT)})"
        measures.append(judged("heads.layerskip_loss", what, round(lost, 4), "nats", at_most(0.05)))
    return measures, details


def _loss(backend: PagedBackend) -> float:
    """Returns the mean cross-entropy on held-out text, in nats a token."""
    tokenizer, losses = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json"), []
    for name in HELD_OUT:
        text = (Path(get_path("stdlib")) / f"{name}.py").read_text("utf-8")
        ids = tokenizer.encode(text)[:NUM_HELD_OUT]
        sequence = backend.new_sequence()
        logits = np.asarray(backend.forward([ForwardItem(sequence, ids[:-1], len(ids) - 1)]))
        backend.close(sequence)
        highest = logits.max(axis=1)
        sums = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
        losses.append(sums - logits[np.arange(len(ids) - 1), ids[1:]])
    return float(np.concatenate(losses).mean())


def _rounds(backend: PagedBackend, source: EarlyExit) -> Rounds:
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
