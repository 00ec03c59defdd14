"""The embedded target with everything that may draft for it, and held-out prompts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.heads.service import Service
from benchmarks.results_file import ROOT
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.loading import load_heads
from outrider.cloud_verifier.heads.lookahead import Lookahead
from outrider.cloud_verifier.heads.source import DraftSource
from outrider.common.types import TokenIds
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED, shipped_heads
from outrider.training.heads.directory import write_early_exit

TRAINED = ROOT / "training" / "runs" / "heads"  # heads that are not shipped, where somebody trained some

# Of the fastest sets that `python -m outrider.training.heads layers` found, the one of fewest layers.
DRAFTING_LAYERS = (0, 2, 4, 5)


@cache
def make_service() -> Service:
    """Returns the service, of one process."""
    backend = load_target(EMBEDDED / "target", num_threads=1)
    with TemporaryDirectory() as folder:
        write_early_exit(DRAFTING_LAYERS, EMBEDDED / "target", Path(folder))
        sources: list[DraftSource] = [
            *load_heads([*head_directories(), Path(folder)], backend),
            Lookahead(backend),
        ]
    return Service(backend, sources, OnnxDraftModel.open(EMBEDDED / "draft"))


def head_directories() -> list[Path]:
    """Returns the directories of the heads that are shipped, and of those that somebody trained."""
    return [*shipped_heads(), *sorted(path.parent for path in TRAINED.glob("*/config.json"))]


def load_prompt_ids(limit: int) -> list[TokenIds]:
    """Returns the first prompts, encoded."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompts = load_prompts(EMBEDDED / "prompts.jsonl")[:limit]
    return [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]
