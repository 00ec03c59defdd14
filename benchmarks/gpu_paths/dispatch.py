"""What a verify step asks of torch's dispatcher and of our kernels: counted on a CPU, with the kernels left out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.shape import SHAPE_TOY, make_facts, make_model
from benchmarks.gpu_check.stage import Setting
from benchmarks.gpu_check.step import COUNTED_CONTEXT, COUNTED_SESSIONS, CallCounter, open_step
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.decoder_config import make_decoder_config, with_defaults
from outrider.cloud_verifier.backends.lean import LeanDecoder
from outrider.cloud_verifier.backends.loading import make_backend
from outrider.cloud_verifier.backends.paged import PagedPlanner
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder, quiet_transformers
from outrider.cloud_verifier.backends.transformers_backend import Decoder
from outrider.cloud_verifier.backends.weights import Weights
from outrider.experiments.shared.results import at_most, judged
from outrider.kernels import paged_attention

MAX_CALLS = 400
KV_TOKENS = 2 * COUNTED_SESSIONS * COUNTED_CONTEXT
KERNELS = ("_attend_split", "_combine")


class CountedKernel:
    """Stands in for a kernel: counts its launches and computes nothing."""

    def __init__(self) -> None:
        self.num_launches = 0

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: object, **options: object) -> None:
        self.num_launches += 1


def run() -> Found:
    """Counts a step of 64 sessions of 5 rows through each decoder: of ours what CUDA runs, plain products in
    bfloat16."""
    setting = Setting(is_rehearsal=True, limit_s=600.0)
    model = make_model(setting, SHAPE_TOY, torch.bfloat16)
    counts = {
        "lean": _count(setting, _lean_decoder(model)),
        "transformers": _count(setting, TransformersDecoder(model)),
    }
    what = (
        "of the dispatcher, views left out, and of our kernels in a forward, 28 layers, 64 sessions x 5 rows"
    )
    measures = [
        judged("gpu.dispatch", f"calls {what}", counts["lean"]["calls"], "calls", at_most(MAX_CALLS)),
    ]
    return measures, {"counts": counts}


def _lean_decoder(model: Any) -> LeanDecoder:
    with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        fields = with_defaults(json.loads((Path(folder) / "config.json").read_text("utf-8")))
        config = fields and make_decoder_config(fields)
        assert config, "not a configuration of our own decoder"
        with Weights(Path(folder), "cpu", torch.bfloat16) as weights:
            return LeanDecoder(config, weights)


def _count(setting: Setting, decoder: Decoder) -> dict[str, int]:
    """Returns the calls of one forward: "views", "launches" of our kernels, and "calls", which are all but views."""
    facts = make_facts(setting, SHAPE_TOY, torch.bfloat16)
    backend = make_backend(decoder, facts, kv_tokens=KV_TOKENS, exact_rows="off")
    num_groups = facts.num_heads // facts.num_kv_heads
    backend.planner = PagedPlanner(backend.blocks.block_size, num_groups, torch.device("cpu"))
    step = open_step(backend, COUNTED_SESSIONS, COUNTED_CONTEXT, counts_rows=False)
    kernels = {name: getattr(paged_attention, name) for name in KERNELS}
    stand_ins = {name: CountedKernel() for name in KERNELS}
    vars(paged_attention).update(stand_ins)
    try:
        with CallCounter() as counter:
            step.run()
    finally:
        vars(paged_attention).update(kernels)
    num_launches = sum(each.num_launches for each in stand_ins.values())
    return {
        "calls": counter.num_computing + num_launches,
        "launches": num_launches,
        "views": counter.num_calls - counter.num_computing,
    }
