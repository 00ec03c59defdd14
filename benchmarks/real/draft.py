"""What a drafted token costs beside the bare run of the draft in onnxruntime."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.pair.draft import measure_draft
from benchmarks.results_file import Found
from outrider.experiments.shared.results import at_most, judged
from outrider.models import EMBEDDED


def run() -> Found:
    """Returns the ratio of a sampled token. Its noise, made while a round is in flight, is a detail."""
    drafts = measure_draft(EMBEDDED / "draft")
    greedy, sampled = drafts["greedy"], drafts["sampled"]
    what = f"drafted token, sampled : bare onnxruntime run of the same inputs (greedy {greedy.ratio:.2f})"
    details = {
        name: {field: round(value, 4) for field, value in asdict(each).items()}
        for name, each in drafts.items()
    }
    return [judged("real.draft", what, sampled.ratio, "ratio", at_most(1.4))], details
