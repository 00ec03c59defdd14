"""Staged drafts beside the same draft without stages: what is drafted, and how long a drafted token takes.

The text is one that was written before (repetitive), or fresh. A run of the draft takes 12 ms however many rows it has,
as where weights are what it waits for; and as long as it does for the embedded draft, whose rows cost a third of a run.
Both again with two rows in every run (`two_rows`): it tells what differs because of the rows of a run from all else.
"""

from __future__ import annotations

from typing import Any

from benchmarks.results_file import Found
from benchmarks.sources.playing import draft_model, prompt_ids, suffix_model, write
from benchmarks.sources.two_rows import TwoRowModel
from outrider.common.sequences import common_prefix
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.staged import StagedModel
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED
from outrider.training.judge.target_text import WrittenText

NUM_PROMPTS, NUM_NEW, CHAIN = 6, 96, 8
RUN_S = 0.012
WAYS = ("plain", "staged", "plain, two rows", "staged, two rows")


def run() -> Found:
    """Returns the measures."""
    texts = write(prompt_ids("embedded", NUM_PROMPTS), 0.8, NUM_NEW)
    found = {
        (is_repeated, run_s): _compare(texts, is_repeated=is_repeated, run_s=run_s)
        for is_repeated in (True, False)
        for run_s in (RUN_S, 0.0)
    }
    slow = found[True, RUN_S]
    shares = f"{slow['runs_a_token']:.2f} runs a drafted token"
    return [
        judged(
            "src.staged",
            f"time a drafted token, staged : not, 12 ms a run, text written before ({shares})",
            slow["ratio"],
            "ratio",
            at_most(0.8),
        ),
        judged(
            "src.staged_same",
            "drafted tokens that are the same with stages and without (rows of a run, docs/sources.md)",
            min(each["same"] for each in found.values()),
            "share",
            at_least(1.0),
        ),
        judged(
            "src.staged_same_rows",
            "the same where every run of the draft has two rows at least, with stages and without",
            min(each["same_rows"] for each in found.values()),
            "share",
            at_least(1.0),
        ),
        Measure(
            "src.staged_rows_cost",
            "time a drafted token without stages, two rows in every run : one, the embedded draft's own time",
            found[False, 0.0]["rows_cost"],
            "ratio",
        ),
        Measure(
            "src.staged_fresh",
            "time a drafted token, 12 ms a run, fresh text",
            found[False, RUN_S]["ratio"],
            "ratio",
        ),
        Measure(
            "src.staged_small",
            "the same, the embedded draft's own time, text written before",
            found[True, 0.0]["ratio"],
            "ratio",
        ),
    ], {
        f"{'repeated' if repeated else 'fresh'}, {1e3 * run_s:g} ms a run": each
        for (repeated, run_s), each in found.items()
    }


def _compare(texts: list[WrittenText], *, is_repeated: bool, run_s: float) -> dict[str, Any]:
    suffixes = suffix_model()
    for text in texts if is_repeated else ():
        suffixes.remember([*text.prompt, *text.new], len(text.prompt))
    models = (draft_model(), TwoRowModel.open(EMBEDDED / "draft"))
    every: list[DraftModel] = [each for model in models for each in (model, StagedModel(model, [suffixes]))]
    ways = dict(zip(WAYS, every, strict=True))
    ms = dict.fromkeys(ways, 0.0)
    num_same = num_same_rows = num_tokens = num_runs = 0
    for text in texts:
        drafters = {
            name: Drafter(model, text.sampling, len(text.prompt), 0, run_s) for name, model in ways.items()
        }
        done = 1
        while done < len(text.new):
            known = [*text.prompt, *text.new[:done]]
            drafts = {}
            for name, drafter in drafters.items():
                drafts[name], took_ms = drafter.propose(known, CHAIN)
                ms[name] += took_ms
            plain, staged, plain_rows, staged_rows = (drafts[name].token_ids for name in WAYS)
            num_same += sum(a == b for a, b in zip(plain, staged, strict=True))
            num_same_rows += sum(a == b for a, b in zip(plain_rows, staged_rows, strict=True))
            num_tokens += len(plain)
            num_runs += getattr(drafts["staged"], "num_runs", 0)
            done += common_prefix(plain, text.new[done:]) + 1
        for drafter in drafters.values():
            drafter.close()
    return {
        "ratio": ms["staged"] / ms["plain"],
        "ratio_two_rows": ms["staged, two rows"] / ms["plain"],
        "rows_cost": ms["plain, two rows"] / ms["plain"],
        "same": num_same / num_tokens,
        "same_rows": num_same_rows / num_tokens,
        "runs_a_token": num_runs / num_tokens,
        "num_tokens": num_tokens,
    }
