"""`src.export_shapes`: every architecture exported and drafted with, beside transformers with the same weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.results_file import Found
from benchmarks.sources.shapes import KINDS, NUM_TOKENS, export_probs, make_dir, source_probs
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.export.precision import FLOAT16, INT8, PRECISIONS
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.shared.results import Measure, at_most, judged

NUM_IDS = 96
NUM_DRAFTED = 16


def run() -> Found:
    """Returns the largest difference of a probability in float16, and what INT8 and INT4 move in the mean."""
    ids = np.random.default_rng(11).integers(0, NUM_TOKENS, NUM_IDS).tolist()
    found = {}
    for kind in KINDS:
        with TemporaryDirectory() as scratch:
            found[kind] = _compare(Path(scratch), kind, ids)
        print(kind, found[kind], flush=True)
    largest = max(each["fp16_largest"] for each in found.values())
    moved = {name: max(each[f"{name}_moved"] for each in found.values()) for name in PRECISIONS}
    undrafted = [kind for kind, each in found.items() if each["num_drafted"] < NUM_DRAFTED]
    assert not undrafted, f"not drafted with: {undrafted}"
    what = f"{len(found)} random models of {len({kind.split(',')[0] for kind in found})} architectures"
    measures = [
        judged(
            "src.export_shapes",
            f"largest difference of a probability from transformers in float16, {what}, {NUM_IDS} tokens each",
            largest,
            "prob.",
            at_most(5e-3),
        ),
        *(
            Measure(
                f"src.export_shapes_{name}",
                f"probability that {name.upper()} moves (total variation), mean of a model's tokens, the worst model",
                round(moved[name], 4),
                "share",
            )
            for name in PRECISIONS
            if name != FLOAT16
        ),
    ]
    return measures, {"kinds": found}


def _compare(scratch: Path, kind: str, ids: list[int]) -> dict[str, float]:
    hf_dir = make_dir(scratch / "hf", kind)
    wanted = source_probs(hf_dir, ids)
    found: dict[str, float] = {}
    for precision in PRECISIONS:
        out_dir = scratch / precision
        export_draft(hf_dir, out_dir, precision=precision)
        difference = np.abs(export_probs(out_dir, ids) - wanted)
        found[f"{precision}_largest"] = round(float(difference.max()), 6)
        found[f"{precision}_moved"] = round(float(difference.sum(-1).mean() / 2), 5)
    with OnnxDraftModel.open(scratch / INT8) as model:
        sequence = model.sequence(SamplingParams(temperature=0.8, seed=1))
        sequence.commit(ids)
        found["num_drafted"] = len(sequence.propose(NUM_DRAFTED).token_ids)
    return found
