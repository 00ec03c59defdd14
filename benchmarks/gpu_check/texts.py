"""The embedded target's texts: verified, in batches and after evictions, against cloud-only alone."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.engine_texts import write_texts
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import TEXTS, Texts
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.server.cli import describe_target
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_least
from outrider.models import EMBEDDED

NUM_TEXTS, NUM_NEW, BATCH = 64, 128, 16
TOY_TEXTS, TOY_NEW = 2, 6
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50),
)


def run(setting: Setting, report: Report) -> None:
    """Writes the same texts in every way, in each dtype, with exact rows and without."""
    prompts = make_prompts(setting.pick(NUM_TEXTS, TOY_TEXTS))
    for number, (name, texts) in enumerate(TEXTS.items()):
        share = 1 / (len(TEXTS) - number)
        try:
            _run_dtype(setting, report, name, texts, prompts, setting.seconds_left * share)
        except ModelError as error:  # no way to multiply is exact here: what the check is there to find
            report.check(f"gpu.texts.{name}", f"ways that are exact: {error}"[:300], 0, "", at_least(1))
        gc.collect()


def make_prompts(num_prompts: int) -> list[TokenIds]:
    """Returns the embedded prompts' ids, again from the first where more are asked for; no two begin alike."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts()]
    return [(1 + number, *texts[number % len(texts)]) for number in range(num_prompts)]


def load(setting: Setting, dtype: str, exact_rows: str) -> PagedBackend:
    """Returns the embedded target; in a rehearsal with its logits as tensors, for the interpreted kernels."""
    kv_tokens = setting.pick(2**17, 4096)
    backend = load_target(
        EMBEDDED / "target",
        device=setting.device,
        dtype=dtype,
        kv_tokens=kv_tokens,
        exact_rows=exact_rows,
        decoder="cuda",
    )
    if setting.is_rehearsal and dtype == "float32" and importlib.util.find_spec("triton"):
        from outrider.kernels import device

        device.SPAN, device.TILE_BLOCKS = 8192, 1024  # a row in one tile: the interpreter's time is by tiles
        backend.has_device_logits = True
    return backend


def _run_dtype(
    setting: Setting, report: Report, name: str, texts: Texts, prompts: Sequence[TokenIds], share_s: float
) -> None:
    until_s, half_s = setting.seconds_left - share_s, setting.seconds_left - share_s / 2
    backend = load(setting, texts.dtype, texts.exact_rows)
    num_new = setting.pick(NUM_NEW, TOY_NEW)
    samplings = [replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i) for i in range(len(prompts))]
    alone: list[list[int]] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if setting.seconds_left < half_s:
            break
        alone += write_texts(backend, [prompt], [sampling], num_new)

    def verify(part: slice, *, is_evicted: bool = False) -> list[list[int]]:
        its = prompts[part], samplings[part], num_new
        return write_texts(backend, *its, expected=alone[part], num_together=BATCH, is_evicted=is_evicted)

    ways: dict[str, Callable[[slice], list[list[int]]]] = {
        "verified": verify,
        "evicted": functools.partial(verify, is_evicted=True),
        "cloud-only": lambda part: write_texts(
            backend, prompts[part], samplings[part], num_new, num_together=BATCH
        ),
    }
    for way, write in ways.items():
        found: list[list[int]] = []
        for start in range(0, len(alone), BATCH):
            if setting.seconds_left < until_s:
                break
            found += write(slice(start, min(start + BATCH, len(alone))))
        _judge(report, f"{name}.{way}", texts, found, alone)
    if not alone:
        return
    _judge(report, f"{name}.alone", texts, verify(slice(0, 1)), alone)
    assert isinstance(backend.decoder, CudaDecoder)
    what = "sizes of steps that are replayed as CUDA graphs"
    report.figure(f"gpu.graphs.{name}", what, backend.decoder.num_graphs, "sizes", at_least(1))
    gap = logit_gap(backend, [*prompts[0], *alone[0]])
    report.figure(
        f"gpu.logit_gap.{name}", "largest difference of a logit, 5 rows at once : one by one", gap, ""
    )
    report.note(
        **{f"{name}_device_logits": backend.has_device_logits, f"{name}_rows": describe_target(backend)}
    )


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


def find_differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the first differing position of each text that differs, by the text's number."""
    differing: dict[int, int] = {}
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if list(mine) != list(theirs):
            pairs = enumerate(zip(mine, theirs, strict=False))
            differing[number] = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    return differing


def logit_gap(backend: PagedBackend, token_ids: Sequence[int], num_rows: int = 5) -> float:
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
