"""Texts of a verifier process, in every mode and by every draft source, against its own cloud-only text.

Once with the KV pool in the target's dtype, once with it in FP8, once with weights of 4 bits.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import outrider
from benchmarks.engine.setup import QUIET
from benchmarks.gpu_check.plan import missing_of
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import SERVED, Served
from outrider.common.errors import OutriderError
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts

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

Texts = list[tuple[int, ...]]


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
            _serve(setting, report, name, served, max(STOP_S, setting.seconds_left - share_s))
        except (RuntimeError, OutriderError) as error:  # the other lines stand by themselves
            report.note(**{f"{name}_error": str(error)[-2000:]})
            report.check(f"gpu.served.{name}", "verifiers that failed", 1, "", NONE)


def _serve(setting: Setting, report: Report, name: str, served: Served, until_s: float) -> None:
    size = setting.pick("2GiB", "64MiB")
    flags = (*QUIET, "--device", setting.device, "--kv-memory", size, "--max-queue-ms", "1000", *served.flags)
    with running_verifier(*flags) as verifier, outrider.connect(verifier.address) as client:
        model = client.model
        assert model is not None, "a client of a verifier"
        is_judged = model.is_reproducible
        report.note(**{f"{name}_start_s": round(verifier.start_s, 1), f"{name}_is_reproducible": is_judged})
        expected: Texts = []
        modes = dict(MODES)
        for source in served.draft_sources:
            modes[source] = {"mode": "co-located", "draft_source": source}
        for mode, settings in modes.items():
            if setting.seconds_left < until_s + TEXTS_S and not setting.is_rehearsal:
                report.skip(f"{name}.{mode}", "the stage's time is over")
                continue
            start_s = time.perf_counter()
            texts = _write(setting, client, settings)
            num_tokens, seconds = sum(map(len, texts)), time.perf_counter() - start_s
            id = f"gpu.served.{name}.{mode}"
            what = f"tokens a second of {NUM_TOGETHER} sessions, {mode}"
            report.figure(f"{id}.speed", what, num_tokens / seconds, "tokens/s")
            if mode == CLOUD_ONLY:
                expected = texts
                continue
            pairs = zip(texts, expected, strict=True)
            what = f"texts unlike cloud-only, of {len(texts)} x {len(expected[0])} tokens, {mode}"
            num_unlike = sum(text != other for text, other in pairs)
            report.check(id, what, num_unlike, "texts", NONE if is_judged else None)


def _write(setting: Setting, client: outrider.Client, settings: dict[str, object]) -> Texts:
    """Returns the texts of the same prompts and seeds, some at a time."""
    prompts = [each.text for each in load_prompts(limit=setting.pick(NUM_TEXTS, TOY_TEXTS))]
    fixed = {"max_new_tokens": setting.pick(NUM_NEW, TOY_NEW), "ignore_eos": True}
    write = partial(_write_one, client, fixed | settings)
    with ThreadPoolExecutor(NUM_TOGETHER) as threads:
        return list(threads.map(write, prompts, range(len(prompts))))


def _write_one(
    client: outrider.Client, settings: dict[str, object], prompt: str, seed: int
) -> tuple[int, ...]:
    temperature = (0.0, 0.8, 1.0)[seed % 3]
    return tuple(client.generate(prompt, seed=seed, temperature=temperature, **settings).ids)
