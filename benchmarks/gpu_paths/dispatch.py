"""What a verify step asks of torch's dispatcher and of our kernels: counted on a CPU, with the kernels left out."""

from __future__ import annotations

import torch

from benchmarks.gpu_check.shape import SHAPE_TOY, ModelWeights, make_facts, make_model, own_config
from benchmarks.gpu_check.stage import Setting
from benchmarks.gpu_check.step import COUNTED_CONTEXT, COUNTED_SESSIONS, open_step
from benchmarks.gpu_paths.fake_device import FakeDevice
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.attention.paged import PagedPlanner
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.decoder import Decoder
from outrider.cloud_verifier.backends.loading import make_backend
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder
from outrider.experiments.shared.results import at_most, judged
from outrider.kernels import layers, paged_attention

MAX_CALLS = 400
KV_TOKENS = 2 * COUNTED_SESSIONS * COUNTED_CONTEXT
KERNELS = (
    (paged_attention, "_attend_split"),
    (paged_attention, "_combine"),
    (layers, "_add_norm"),
    (layers, "_rotate"),
    (layers, "_gate"),
)


def run() -> Found:
    """Counts a step of 64 sessions of 5 rows through each decoder, as CUDA runs it: in bfloat16, without graphs."""
    setting = Setting(is_rehearsal=True, limit_s=600.0)
    model = make_model(setting, SHAPE_TOY, torch.bfloat16)
    config, weights = own_config(model), ModelWeights(model)
    counts = {
        "cuda": _count(setting, CudaDecoder(config, weights, layers)),
        "transformers": _count(setting, TransformersDecoder(model)),
    }
    what = (
        "of the dispatcher, views left out, and of our kernels in a forward, 28 layers, 64 sessions x 5 rows"
    )
    measures = [
        judged("gpu.dispatch", f"calls {what}", counts["cuda"]["calls"], "calls", at_most(MAX_CALLS)),
    ]
    return measures, {"counts": counts}


def _count(setting: Setting, decoder: Decoder) -> dict[str, int]:
    """Returns the calls of one forward: "views", "launches" of our kernels, and "calls", which are all but views."""
    facts = make_facts(setting, SHAPE_TOY, torch.bfloat16)
    with FakeDevice(KERNELS, is_computing=False) as device:
        backend = make_backend(decoder, facts, kv_tokens=KV_TOKENS, exact_rows="off")
        num_groups = facts.num_heads // facts.num_kv_heads
        upload = backend.inputs.add if backend.inputs else None
        backend.planner = PagedPlanner(
            backend.blocks.block_size, num_groups, torch.device("cpu"), upload=upload
        )
        step = open_step(backend, COUNTED_SESSIONS, COUNTED_CONTEXT, counts_rows=False)
        before = device.num_launches, device.num_computing, device.num_calls
        step.run()
        after = device.num_launches, device.num_computing, device.num_calls
    num_launches, num_computing, num_calls = (now - then for now, then in zip(after, before, strict=True))
    return {
        "calls": num_computing + num_launches,
        "launches": num_launches,
        "views": num_calls - num_computing,
    }
