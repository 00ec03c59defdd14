"""The embedded target's texts: verified, in batches and after evictions, against cloud-only alone."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu_check.engine_texts import SAMPLINGS, EngineTexts, find_differences
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import TEXTS, Texts
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.common.types import TokenIds
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

NUM_TEXTS, NUM_NEW, BATCH = 64, 128, 16
TOY_TEXTS, TOY_NEW = 2, 6


def run(setting: Setting, report: Report) -> None:
    """Writes the same texts in every way, in each dtype."""
    prompts = make_prompts(setting.pick(NUM_TEXTS, TOY_TEXTS))
    for number, (name, texts) in enumerate(TEXTS.items()):
        share = 1 / (len(TEXTS) - number)
        _run_dtype(setting, report, name, texts, prompts, setting.seconds_left * share)
        gc.collect()


def make_prompts(num_prompts: int) -> list[TokenIds]:
    """Returns the embedded prompts' ids, again from the first where more are asked for; no two begin alike."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts()]
    return [(1 + number, *texts[number % len(texts)]) for number in range(num_prompts)]


def load(setting: Setting, dtype: str) -> TransformersBackend:
    """Returns the embedded target; in a rehearsal with its logits as tensors, for the interpreted kernels."""
    kv_tokens = setting.pick(2**17, 4096)
    backend = load_target(EMBEDDED / "target", device=setting.device, dtype=dtype, kv_tokens=kv_tokens)
    if setting.is_rehearsal and dtype == "float32" and importlib.util.find_spec("triton"):
        from outrider.kernels import device

        device.SPAN, device.TILE_BLOCKS = 8192, 1024  # a row in one tile: the interpreter's time is by tiles
        backend.has_device_logits = True
    return backend


def _run_dtype(
    setting: Setting, report: Report, name: str, texts: Texts, prompts: Sequence[TokenIds], share_s: float
) -> None:
    until_s, half_s = setting.seconds_left - share_s, setting.seconds_left - share_s / 2
    backend = load(setting, texts.dtype)
    engine, num_new = EngineTexts(backend), setting.pick(NUM_NEW, TOY_NEW)
    samplings = [replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i) for i in range(len(prompts))]
    alone: list[list[int]] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if setting.seconds_left < half_s:
            break
        alone += engine.cloud_only([prompt], [sampling], num_new)
    ways: dict[str, Callable[[slice], list[list[int]]]] = {
        "verified": lambda part: engine.verified(prompts[part], samplings[part], alone[part]),
        "evicted": lambda part: engine.verified(prompts[part], samplings[part], alone[part], is_evicted=True),
        "cloud-only": lambda part: engine.cloud_only(prompts[part], samplings[part], num_new),
    }
    for way, write in ways.items():
        found: list[list[int]] = []
        for start in range(0, len(alone), BATCH):
            if setting.seconds_left < until_s:
                break
            found += write(slice(start, min(start + BATCH, len(alone))))
        _judge(report, f"{name}.{way}", texts, found, alone)
    _judge(report, f"{name}.alone", texts, engine.verified(prompts[:1], samplings[:1], alone[:1]), alone)
    assert engine.num_evicted, "no session was evicted between its rounds"
    engine.engine.check_integrity()
    engine.engine.close()
    gap = logit_gap(backend, [*prompts[0], *alone[0]])
    report.figure(
        f"gpu.logit_gap.{name}", "largest difference of a logit, 5 rows at once : one by one", gap, ""
    )
    report.note(**{f"{name}_device_logits": backend.has_device_logits})


def _judge(
    report: Report, name: str, texts: Texts, found: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]
) -> None:
    if not found:
        report.skip(name, "the stage's time is over")
        return
    differing = find_differences(found, alone[: len(found)])
    report.note(**{f"differing_{name}": differing})
    what = f"texts unlike cloud-only alone, of {len(found)} x {len(alone[0])} tokens, batches of {BATCH}"
    report.check(f"gpu.texts.{name}", what, len(differing), "texts", NONE if texts.is_exact else None)


def logit_gap(backend: TransformersBackend, token_ids: Sequence[int], num_rows: int = 5) -> float:
    """Returns the largest difference between logits of rows computed together and one by one."""
    sequences = [backend.new_sequence() for _ in range(2)]
    start, gap = max(1, len(token_ids) - 40), 0.0
    backend.forward([ForwardItem(each, token_ids[:start], 0) for each in sequences])
    for first in range(start, len(token_ids) - num_rows, num_rows):
        fed = token_ids[first : first + num_rows]
        together = _floats(backend.forward([ForwardItem(sequences[0], fed, num_rows)]))
        single = [_floats(backend.forward([ForwardItem(sequences[1], [each], 1)])) for each in fed]
        gap = max(gap, float(np.abs(together - np.concatenate(single)).max()))
    for each in sequences:
        backend.close(each)
    return gap


def _floats(logits: object) -> np.ndarray:
    """Returns a copy on the host: the next forward may write over what this one returned."""
    if isinstance(logits, torch.Tensor):
        return np.array(logits.cpu())
    return np.array(logits)
