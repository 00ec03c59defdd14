"""`src.export_auto`: what `draft export --precision auto` leaves of models that nobody prepared for INT4.

A precision is chosen on some held-out documents, and judged on others: the mean of Σ min(p, q) between the export, fed
token by token as a draft is, and its own float model in transformers, at temperature 0.8.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.results_file import Found
from benchmarks.sources.small_models import SHAPES, Texts, make_tokenizer, read_texts, train_model
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.agreement import (
    NUM_PASSAGES,
    PASSAGE_TOKENS,
    TEMPERATURE,
    choose_precision,
)
from outrider.edge_client.drafting.export.exporter import read_source, write_draft
from outrider.edge_client.drafting.export.precision import PRECISIONS
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.shared.results import Measure, at_least, judged

NUM_JUDGED, JUDGED_TOKENS = 16, 128


def run() -> Found:
    """Returns the measures: the least acceptance of the three shapes, and that of INT4 alone."""
    torch.set_num_threads(1)
    texts = read_texts()
    tokenizer = make_tokenizer(texts.train)
    found: dict[str, Any] = {}
    for shape in SHAPES:
        with TemporaryDirectory() as scratch:
            found[shape] = _measure(Path(scratch), shape, tokenizer, texts)
        print(shape, found[shape], flush=True)
    chosen = {shape: each["precision"] for shape, each in found.items()}
    named = ", ".join(f"{shape} {precision}" for shape, precision in chosen.items())
    what = f"acceptance against the own float model, temperature {TEMPERATURE:g}, least of three"
    return [
        judged(
            "src.export_auto",
            f"{what}: auto ({named}), held-out text it was not chosen on",
            min(each["judged"][each["precision"]] for each in found.values()),
            "share",
            at_least(0.97),
        ),
        *(
            Measure(
                f"src.export_auto_{precision}",
                f"{what}: always {precision}",
                round(min(each["judged"][precision] for each in found.values()), 4),
                "share",
            )
            for precision in PRECISIONS
        ),
    ], {"shapes": found, "num_judged_tokens": NUM_JUDGED * JUDGED_TOKENS}


def _measure(scratch: Path, shape: str, tokenizer: Tokenizer, texts: Texts) -> dict[str, Any]:
    hf_dir = scratch / "hf"
    loss = train_model(shape, tokenizer, texts.train, hf_dir)
    source = read_source(hf_dir)
    passages = [each.ids[:PASSAGE_TOKENS] for each in tokenizer.encode_batch(list(texts.choose))][
        :NUM_PASSAGES
    ]
    graph, choice = choose_precision(source, passages)
    judged_ids = [each.ids[:JUDGED_TOKENS] for each in tokenizer.encode_batch(list(texts.judge))][:NUM_JUDGED]
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
    wanted = [_source_probs(model, ids) for ids in judged_ids]
    acceptance = {}
    for precision in PRECISIONS:
        write_draft(source, source.build(precision), scratch / precision)
        with OnnxDraftModel.open(scratch / precision) as draft:
            rows = [_export_probs(draft, ids) for ids in judged_ids]
        overlaps = [np.minimum(ours, theirs).sum(-1) for ours, theirs in zip(rows, wanted, strict=True)]
        acceptance[precision] = round(float(np.concatenate(overlaps).mean()), 4)
    return {
        "num_parameters": graph.num_parameters,
        "training_nats": round(loss, 3),
        "precision": choice.precision,
        "chosen_on": {name: round(share, 4) for name, share in choice.acceptance.items()},
        "judged": acceptance,
        "megabytes": {name: round(_megabytes(scratch / name), 2) for name in PRECISIONS},
    }


def _megabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.glob("draft.onnx*")) / 1e6


def _source_probs(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    return torch.softmax(logits / TEMPERATURE, dim=-1).numpy()


def _export_probs(draft: OnnxDraftModel, ids: list[int]) -> np.ndarray:
    runner, _ = draft.sequence(SamplingParams(temperature=TEMPERATURE)).parts
    return np.stack([runner.feed([each], at).tempered_probs[0].copy() for at, each in enumerate(ids)])
