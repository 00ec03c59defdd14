"""`quant.kv_*`: keys and values in FP8 beside those of the target's dtype: bytes, texts, and what they change.

Texts are written by the embedded target over FP8 KV: by cloud-only, each alone; then speculatively, alone, four at once
with a pool so small that prompts are found in the prefix cache or evicted, and with a session's KV given up after each
of its rounds and computed again. How much the quantised numbers change is asked of modules of the standard library on
which nothing was trained: whether the likeliest next token is that of the target with its own KV.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.exact_rows import make_prompts
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED
from outrider.training.data.heldout import HELD_OUT_STDLIB

NUM_TEXTS, NUM_NEW, NUM_TOGETHER = 200, 32, 4
KV_TOKENS = 512  # four of the longest sessions
PASSAGE_TOKENS, CHUNK = 1000, 100
SURE = 0.05  # of probability, between the likeliest token and the next
TARGET = EMBEDDED / "target"


def run() -> Found:
    """Returns what was found."""
    num_unlike, texts = _texts()
    of_modules = _agreement()
    agreement, of_sure = np.mean(list(of_modules.values()), axis=0).tolist()
    fp8, bf16 = (
        load_target(TARGET, dtype="bfloat16", kv_dtype=kv_dtype, kv_tokens=256, exact_rows="off").facts
        for kv_dtype in ("fp8", "auto")
    )
    measures = [
        judged(
            "quant.kv_bytes",
            f"KV bytes a token, FP8 {fp8.kv_bytes_per_token} : bfloat16 {bf16.kv_bytes_per_token}",
            fp8.kv_bytes_per_token / bf16.kv_bytes_per_token,
            "ratio",
            at_most(0.52),
        ),
        judged(
            "quant.kv_exact",
            f"texts over FP8 KV unlike their cloud-only's, of {NUM_TEXTS} alone, beside three others, recomputed",
            sum(num_unlike.values()),
            "texts",
            at_most(0),
        ),
        judged(
            "quant.kv_quality",
            f"likeliest tokens over FP8 KV that are those without, {PASSAGE_TOKENS} tokens of each of "
            f"{len(of_modules)} modules nothing was trained on",
            agreement,
            "share",
            at_least(0.97),
        ),
        Measure(
            "quant.kv_quality_sure",
            f"the same where the likeliest token has {SURE} more than the next one",
            of_sure,
            "share",
        ),
    ]
    return measures, {"kv": {"unlike": num_unlike, **texts, "agreement_of_modules": of_modules}}


def _texts() -> tuple[dict[str, int], dict[str, int]]:
    """Returns the texts unlike cloud-only by how they are written, and what shows that the ways differ."""
    prompts, samplings = make_prompts(NUM_TEXTS)
    backend, plain = (
        load_target(TARGET, kv_dtype=kv_dtype, kv_tokens=KV_TOKENS) for kv_dtype in ("fp8", "auto")
    )
    expected = write_texts(backend, prompts, samplings, NUM_NEW)
    ways: dict[str, Any] = {
        "alone": {},
        "beside others": {"num_together": NUM_TOGETHER},
        "recomputed": {"is_evicted": True},
    }
    unlike = {}
    for name, way in ways.items():
        texts = write_texts(backend, prompts, samplings, NUM_NEW, expected=expected, **way)
        unlike[name] = sum(text != wanted for text, wanted in zip(texts, expected, strict=True))
    of_plain = write_texts(plain, prompts, samplings, NUM_NEW)
    changed = sum(text != wanted for text, wanted in zip(of_plain, expected, strict=True))
    return unlike, {
        "num_evicted_blocks": backend.kv_usage.num_evicted,
        "unlike_those_without_fp8": changed,
    }


def _agreement() -> dict[str, tuple[float, float]]:
    """Returns by module the share of positions with the same likeliest token: of all, and of those where the target is
    sure of it."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    fp8, plain = (load_target(TARGET, kv_dtype=kv_dtype, kv_tokens=2048) for kv_dtype in ("fp8", "auto"))
    shares = {}
    for name in HELD_OUT_STDLIB:
        path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        ids = tokenizer.encode(path.read_text("utf-8"))[:PASSAGE_TOKENS]
        if len(ids) == PASSAGE_TOKENS:
            found, wanted = _rows(fp8, ids), _rows(plain, ids)
            is_same = found.argmax(axis=1) == wanted.argmax(axis=1)
            second, first = np.sort(softmax(wanted, axis=1), axis=1)[:, -2:].T
            shares[name] = float(is_same.mean()), float(is_same[first - second >= SURE].mean())
    return shares


def _rows(backend: PagedBackend, token_ids: Sequence[int]) -> Logits:
    """Returns the logits of every token, each computed over KV that was written before."""
    sequence = backend.new_sequence()
    rows = [
        np.array(backend.forward([ForwardItem(sequence, token_ids[at : at + CHUNK], CHUNK)]))
        for at in range(0, len(token_ids), CHUNK)
    ]
    backend.close(sequence)
    return np.concatenate(rows)
