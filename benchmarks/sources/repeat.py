"""Prompts asked again with one token replaced: trees of the draft with suffixes beside trees of the draft alone.

With the same seed, as who pins one asks, and with another one: at T = .8 the text is then another sample.
"""

from __future__ import annotations

from typing import Any

from benchmarks.results_file import Found
from benchmarks.sources.playing import best, draft_model, play, prompt_ids, suffix_model, union, write
from outrider.common.types import TokenIds
from outrider.experiments.shared.results import at_least, judged
from outrider.training.judge.target_text import WrittenText

SETS, NUM_PROMPTS, NUM_NEW = ("embedded", "humaneval"), 16, 160


def run() -> Found:
    """Returns the measures."""
    details: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for name in SETS:
        prompts = prompt_ids(name, NUM_PROMPTS)
        edited = [_edited(each) for each in prompts]
        for temperature in (0.8, 0.0):
            first = write(prompts, temperature, NUM_NEW)
            ways = {"same seed": write(edited, temperature, NUM_NEW)}
            if temperature:
                ways["another seed"] = write(edited, temperature, NUM_NEW, first_seed=1000)
            for way, texts in ways.items():
                key = f"{name}, T={temperature:g}, {way}"
                ratios[key], details[key] = _compare(first, texts)
                print(f"  {key}: {ratios[key]:.2f}", flush=True)
    return [
        _measure("src.suffix_repeat", "the same seed, T = .8", ratios, "T=0.8, same seed"),
        _measure("src.suffix_repeat_greedy", "T = 0", ratios, "T=0, same seed"),
        _measure("src.suffix_repeat_reseeded", "another seed, T = .8", ratios, "T=0.8, another seed"),
    ], details


def _measure(id: str, how: str, ratios: dict[str, float], key: str) -> Any:
    own = {name: ratio for name, ratio in ratios.items() if name.endswith(key)}
    what = f"prompts asked again with a token replaced, {how}: tokens a round, best tree, with suffix : "
    every = ", ".join(f"{name.partition(',')[0]} {ratio:.2f}" for name, ratio in own.items())
    return judged(id, f"{what}draft alone, worst of {every}", min(own.values()), "ratio", at_least(1.5))


def _edited(prompt: TokenIds) -> TokenIds:
    middle = len(prompt) // 2
    return (*prompt[:middle], prompt[middle // 2], *prompt[middle + 1 :])


def _compare(first: list[WrittenText], texts: list[WrittenText]) -> tuple[float, dict[str, Any]]:
    suffixes = suffix_model()
    for text in first:
        suffixes.remember([*text.prompt, *text.new], len(text.prompt))
    (alone, figures), (joined, union_figures) = (
        best(model, texts) for model in (draft_model(), union(suffixes))
    )
    return joined / alone, {
        "draft": figures,
        "model+suffix": union_figures,
        "suffix, chains of 16": play(suffixes, texts, 16).figures(),
    }
