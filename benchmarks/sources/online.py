"""`src.online_stale` and `src.online_safe`: what the learned head of a draft brings, and what it costs.

A stale draft is one that was distilled for an earlier checkpoint of the embedded target: its graph is taken from the
repository's history and exported as today's are. The constants of `HeadSettings` were chosen with the draft of the
first checkpoint and today's on HumanEval prompts; the draft of the second checkpoint and today's are judged on the
embedded prompts. Today's target writes every text; a draft is fed it token by token, so that each position is judged.
Acceptance there is the chance, over the noise that both sides share, that both choose the same token: with the tempered
p and q it is Σᵢ 1 / Σⱼ max(pⱼ/pᵢ, qⱼ/qᵢ) (Daliri et al. 2024, 2408.07978), computed, not sampled.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import ROOT, Found
from benchmarks.sources.playing import prompt_ids, target, write
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.common.errors import UsageError
from outrider.common.types import TokenLogprobs
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.learned.head import NUM_TOP, HeadSettings, LearnedHead
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.rows.rows import Rows, rows_of
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED
from outrider.training.draft.restore import restore_draft
from outrider.training.judge.target_text import WrittenText

TEMPERATURE = 0.8
NUM_LEARNED = 2_000  # tokens within which a stale draft is to gain
CHECKPOINTS = {"first": "d4b92881", "second": "f96b9014"}  # commits with the draft of each earlier target
NUM_SUPPORT = 128  # ids of a position's acceptance, the likeliest on either side
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Position:
    """Holds one position of a text: what the draft computes there, and what a verdict tells."""

    text: int
    before: tuple[int, ...]
    logits: Floats
    hidden: Floats
    target_logits: Floats
    told: TokenLogprobs


def stale_draft(checkpoint: str, out: Path) -> Path:
    """Exports the draft of an earlier checkpoint into a directory. Raises `UsageError` without the history."""
    old = out / "old"
    old.mkdir(parents=True)
    for name in ("draft.json", "draft.onnx", "tokenizer.json"):
        path = f"{CHECKPOINTS[checkpoint]}:models/embedded/draft/{name}"
        found = subprocess.run(["git", "-C", str(ROOT), "show", path], capture_output=True, check=False)
        if found.returncode:
            raise UsageError(f"git knows no {path}: the stage needs a clone with its whole history")
        (old / name).write_bytes(found.stdout)
    shutil.copyfile(EMBEDDED / "draft" / "tokenizer_config.json", old / "tokenizer_config.json")
    restore_draft(old, out / "hf")
    export_draft(out / "hf", out / "draft")
    return out / "draft"


def positions_of(directory: Path, texts: Sequence[WrittenText], limit: int) -> list[Position]:
    """Returns the first positions of the texts, with the draft's rows before any learning."""
    found: list[Position] = []
    with OnnxDraftModel.open(directory) as model:
        for number, text in enumerate(texts):
            if len(found) >= limit:
                break
            runner = OnnxRunner(model._session, model.spec, TEMPERATURE, has_hidden=True)
            theirs = _target_rows(text)
            ids = [*text.prompt, *text.new]
            for index, token_id in enumerate(ids[:-1]):
                rows = runner.feed([token_id], index)
                place = index + 1 - len(text.prompt)
                if place >= 0:
                    assert rows.hidden is not None
                    before = tuple(ids[: index + 1])
                    told = _told(theirs[place], ids[index + 1])
                    row = rows.logits[0].copy(), rows.hidden[0].copy()
                    found.append(Position(number, before, *row, theirs[place], told))
    return found[:limit]


def learn(positions: Sequence[Position], settings: HeadSettings) -> tuple[dict[str, Any], LearnedHead]:
    """Plays positions in order; returns the acceptances at each of the draft alone and of what drafted, and the time
    that a token's learning and applying took."""
    head = LearnedHead(len(positions[0].logits), len(positions[0].hidden), settings)
    alone, drafted = np.zeros(len(positions)), np.zeros(len(positions))
    spent_s = 0.0
    for index, each in enumerate(positions):
        rows = rows_of(each.logits[None].copy(), TEMPERATURE)
        rows = Rows(
            rows.logits, rows.probs, rows.tempered_logits, rows.tempered_probs, hidden=each.hidden[None]
        )
        base = rows.tempered_probs[0].copy()
        start_s = time.perf_counter()
        head.adapt(rows, 0, TEMPERATURE, len(each.before), each.before)
        middle_s = time.perf_counter()
        wanted = _softmax(each.target_logits / TEMPERATURE)
        alone[index] = same_chance(wanted, base)
        drafted[index] = same_chance(wanted, rows.tempered_probs[0]) if head.is_drafting else alone[index]
        again_s = time.perf_counter()
        head.learn(len(each.before), each.before, each.told)
        spent_s += middle_s - start_s + time.perf_counter() - again_s
    return {"alone": alone, "drafted": drafted, "us": 1e6 * spent_s / len(positions)}, head


def same_chance(target_probs: Floats, draft_probs: Floats) -> float:
    """Returns the chance that both sides choose the same token with shared noise (exponential races)."""
    most = np.maximum(target_probs, draft_probs)
    ids = np.argpartition(most, -NUM_SUPPORT)[-NUM_SUPPORT:]
    p, q = (np.maximum(each[ids].astype(np.float64), 1e-30) for each in (target_probs, draft_probs))
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / ratios.sum(axis=1)).sum())


def run() -> Found:
    """Returns the measures of both drafts that are judged."""
    settings = HeadSettings()
    with TemporaryDirectory() as scratch:
        texts = write(prompt_ids("embedded") * 2, TEMPERATURE, 96, first_seed=500)  # two seeds each
        drafts = {"stale": stale_draft("second", Path(scratch)), "today": EMBEDDED / "draft"}
        found, details = {}, {}
        for name, directory in drafts.items():
            found[name], head = learn(positions_of(directory, texts, NUM_LEARNED), settings)
            details[name] = summary(found[name]) | {"is_drafting_at_the_end": head.is_drafting}
            print(name, details[name], flush=True)
    stale, today = details["stale"], details["today"]
    what = f"temperature {TEMPERATURE:g}, embedded prompts"
    return [
        judged(
            "src.online_stale",
            f"acceptance that a stale draft gains by learning, second thousand of {NUM_LEARNED} tokens, {what}",
            stale["gain_second_half"],
            "share",
            at_least(0.03),
        ),
        Measure(
            "src.online_stale_all",
            "the same over all of them, the first ones included",
            stale["gain"],
            "share",
        ),
        judged(
            "src.online_safe",
            f"acceptance that today's draft loses over {NUM_LEARNED} tokens, {what}",
            -today["gain"],
            "share",
            at_most(0.003),
        ),
        judged(
            "src.online_us",
            f"time of applying and learning with today's draft, a token, one core (stale draft {stale['us']:g})",
            today["us"],
            "µs",
            at_most(60),
        ),
    ], details


def summary(played: dict[str, Any]) -> dict[str, float]:
    """Returns the means of what `learn` played."""
    half = len(played["alone"]) // 2
    gains = played["drafted"] - played["alone"]
    return {
        "num_tokens": len(gains),
        "alone": round(float(played["alone"].mean()), 4),
        "gain": round(float(gains.mean()), 4),
        "gain_second_half": round(float(gains[half:].mean()), 4),
        "us": round(played["us"], 1),
    }


def _target_rows(text: WrittenText) -> Floats:
    backend = target()
    sequence = backend.new_sequence()
    try:
        item = ForwardItem(sequence, (*text.prompt, *text.new[:-1]), len(text.new))
        rows = np.asarray(backend.forward([item]))[:, : backend.num_tokens]
        return np.array(rows, np.float32)
    finally:
        backend.close(sequence)


def _told(row: Floats, token_id: int) -> TokenLogprobs:
    logs = row - (np.log(np.exp(row - row.max()).sum()) + row.max())
    top = np.argsort(-logs)[:NUM_TOP]
    return TokenLogprobs(
        float(logs[token_id]), 0.0, tuple(top.tolist()), tuple(float(each) for each in logs[top])
    )


def _softmax(scores: Floats) -> Floats:
    weights: Floats = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights
