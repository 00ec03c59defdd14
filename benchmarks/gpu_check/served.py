"""Texts of a verifier process, in every mode and by every draft source, against its own cloud-only text.

Once with the KV pool in the target's dtype, once with an EAGLE head that is trained here for some seconds, once with
the pool in FP8, once with weights of 4 bits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import outrider
from benchmarks.engine.setup import QUIET
from benchmarks.gpu_check.plan import missing_of
from benchmarks.gpu_check.runner import ROOT
from benchmarks.gpu_check.stage import NONE, Report, Setting, Target
from benchmarks.gpu_check.variants import SERVED, Served
from outrider.common.errors import OutriderError
from outrider.common.types import Origin, TokenIds
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED

CLOUD_ONLY = "cloud-only"
MODES: dict[str, dict[str, object]] = {
    CLOUD_ONLY: {"mode": "cloud-only"},
    "chain": {"mode": "speculative", "num_speculative_tokens": 4},
    "tree": {"mode": "speculative", "tree": "12"},
    "draft": {"mode": "co-located", "num_speculative_tokens": 4},
}
NUM_TEXTS, NUM_NEW, NUM_TOGETHER = 12, 96, 4
TOY_TEXTS, TOY_NEW = 1, 6
MIN_LEFT_S, TEXTS_S, STOP_S = 20.0, 3.0, 6.0  # a verifier's start, one mode, a verifier's stop
TRAINED_MINUTES, TRAINED_LIMIT_S = 0.15, 60.0

DRAFTED: Target = "> 0", lambda share: share > 0  # else the texts were written by the target alone


def run(setting: Setting, report: Report) -> None:
    """Starts a verifier for each line of `SERVED`; in a rehearsal for the first alone."""
    lines = list(SERVED.items())[: setting.pick(len(SERVED), 1)]
    for number, (name, served) in enumerate(lines):
        if missing := missing_of(served.packages):
            report.skip(name, f"not installed: {', '.join(missing)}")
            continue
        if setting.seconds_left < MIN_LEFT_S and not setting.is_rehearsal:
            report.skip(name, "the stage's time is over")
            continue
        share_s = setting.seconds_left / (len(lines) - number)
        try:
            until_s = max(STOP_S, setting.seconds_left - share_s)
            with tempfile.TemporaryDirectory() as scratch:
                flags = _train(setting, report, served.trained, Path(scratch)) if served.trained else ()
                _serve(setting, report, name, served, flags, until_s)
        except (
            RuntimeError,
            OutriderError,
            subprocess.SubprocessError,
        ) as error:  # the other lines stand by themselves
            report.note(**{f"{name}_error": str(error)[-2000:]})
            report.check(f"gpu.served.{name}", "verifiers that failed", 1, "", NONE)


def _train(setting: Setting, report: Report, kind: str, out: Path) -> tuple[str, ...]:
    """Trains heads of the embedded target on this project's documentation; returns the flags that serve them."""
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "outrider.training.heads", kind, "--target", str(EMBEDDED / "target")]
    command += ["--text", str(ROOT / "docs"), "--out", str(out), "--target-share", "0"]
    command += ["--minutes", str(TRAINED_MINUTES), "--device", setting.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAINED_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    seconds, line = time.perf_counter() - start_s, done.stdout.strip().splitlines()[-1:]
    report.note(**{f"{kind}_training_s": round(seconds, 1), f"{kind}_training": line})
    return "--heads", str(out)


def _serve(
    setting: Setting, report: Report, name: str, served: Served, trained: tuple[str, ...], until_s: float
) -> None:
    device = setting.pick("auto", "cpu")  # as a server that is told nothing
    flags = ("--device", device, "--kv-memory", setting.pick("2GiB", "64MiB"), "--max-queue-ms", "1000")
    with (
        running_verifier(*QUIET, *flags, *served.flags, *trained) as verifier,
        outrider.connect(verifier.address) as client,
    ):
        model = client.model
        assert model is not None, "a client of a verifier"
        is_judged = model.is_reproducible
        report.note(**{f"{name}_start_s": round(verifier.start_s, 1), f"{name}_is_reproducible": is_judged})
        expected: list[TokenIds] = []
        modes = {CLOUD_ONLY: MODES[CLOUD_ONLY]}  # then what this verifier alone has, while there is time
        modes |= {each: {"mode": "co-located", "draft_source": each} for each in served.draft_sources}
        modes |= MODES
        for mode, settings in modes.items():
            if setting.seconds_left < until_s + TEXTS_S and not setting.is_rehearsal:
                report.skip(f"{name}.{mode}", "the stage's time is over")
                continue
            start_s = time.perf_counter()
            results = _write(setting, client, settings)
            seconds, texts = time.perf_counter() - start_s, [each.ids for each in results]
            origins = [origin for each in results for origin in each.origins]
            id = f"gpu.served.{name}.{mode}"
            what = f"tokens a second of {NUM_TOGETHER} sessions, {mode}"
            report.figure(f"{id}.speed", what, len(origins) / seconds, "tokens/s")
            if mode == CLOUD_ONLY:
                expected = texts
                continue
            share = origins.count(Origin.ACCEPTED) / len(origins)
            report.figure(f"{id}.accepted", f"tokens that were drafted : all, {mode}", share, "", DRAFTED)
            pairs = zip(texts, expected, strict=True)
            what = f"texts unlike cloud-only, of {len(texts)} x {len(expected[0])} tokens, {mode}"
            num_unlike = sum(text != other for text, other in pairs)
            report.check(id, what, num_unlike, "texts", NONE if is_judged else None)


def _write(setting: Setting, client: outrider.Client, settings: dict[str, object]) -> list[outrider.Result]:
    """Returns the texts of the same prompts and seeds, some at a time."""
    prompts = [each.text for each in load_prompts(limit=setting.pick(NUM_TEXTS, TOY_TEXTS))]
    fixed = {"max_new_tokens": setting.pick(NUM_NEW, TOY_NEW), "ignore_eos": True}
    write = partial(_write_one, client, fixed | settings)
    with ThreadPoolExecutor(NUM_TOGETHER) as threads:
        return list(threads.map(write, prompts, range(len(prompts))))


def _write_one(
    client: outrider.Client, settings: dict[str, object], prompt: str, seed: int
) -> outrider.Result:
    temperature = (0.0, 0.8, 1.0)[seed % 3]
    return client.generate(prompt, seed=seed, temperature=temperature, **settings)
