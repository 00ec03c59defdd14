"""`src.compare`: the draft that `draft compare` recommends for a target of the bank, and the one measured fastest.

A recommendation is made on every other prompt of the target's bank (`make pair-bank`); on the others every draft writes
real texts as in `make bench-pair`, one draft length after the other and drafts in turn, and has the speed of its best
length. The target alone is among them twice: their ratio is what cannot be told apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.results_file import ROOT, Found
from benchmarks.sessions import Sessions
from outrider.common.config.loader import with_values
from outrider.common.errors import UsageError
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.planning.compare import Comparison, compare, measure_drafts
from outrider.edge_client.session.factory import create_edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.training.bank.pairs import BANK, RUN, BankFolder

TEMPERATURE = 0.8
DEPTHS = (2, 4, 6, 8)
NUM_PROMPTS, NUM_NEW = 20, 96  # that are written by every draft
MEASURE_S = 20.0  # for each draft
ALONE, AGAIN = "none", "none again"


def run() -> Found:
    """Returns the number of targets whose recommendation is not the fastest, and the worst ratio."""
    found = {}
    for target in BANK:
        folder = BankFolder(ROOT / RUN, target)
        if not folder.prompts.is_file():
            raise UsageError(f"{folder.prompts} is missing: `make pair-bank` builds it")
        found[target.name] = _measure(folder)
        print(target.name, found[target.name], flush=True)
    wrong = [name for name, each in found.items() if each["recommended"] != each["fastest"]]
    named = ", ".join(f"{name} {each['recommended']}" for name, each in found.items())
    worst = min(each["recommended_to_fastest"] for each in found.values())
    aa = max(each["aa"] for each in found.values())
    return [
        judged(
            "src.compare",
            f"targets of the bank whose recommended draft ({named}) is not the one measured fastest, of {len(found)}",
            len(wrong),
            "targets",
            at_most(0),
        ),
        Measure(
            "src.compare_ratio",
            f"tokens/s of the recommended draft : the fastest, worst target (A/A {aa:.3f})",
            worst,
            "ratio",
        ),
        Measure(
            "src.compare_named",
            "targets whose fastest draft is recommended or named as not told apart from it",
            sum(each["fastest"] in (each["recommended"], *each["not_told_apart"]) for each in found.values()),
            "targets",
        ),
    ], {"targets": found, "wrong": wrong}


def _measure(folder: BankFolder) -> dict[str, Any]:
    prompts = load_prompts(folder.prompts)
    with running_verifier(
        "--num-threads", "1", "--log-level", "warning", target=folder.target_dir
    ) as verifier:
        comparison = _recommend(folder, verifier.address, prompts[0::2])
        speeds, tokens_per_round = _speeds(folder, verifier.address, prompts[1::2][:NUM_PROMPTS])
    rtt_s = comparison.rtts_s[0]
    recommended = comparison.recommended(rtt_s)
    name = ALONE if recommended is None else recommended.name
    again = speeds.pop(AGAIN)
    fastest = max(speeds, key=speeds.__getitem__)
    return {
        "recommended": name,
        "fastest": fastest,
        "recommended_to_fastest": round(speeds[name] / speeds[fastest], 3),
        "not_told_apart": comparison.close_to(rtt_s),
        "noise_share": round(comparison.noise_share, 3),
        "aa": round(max(again, speeds[ALONE]) / min(again, speeds[ALONE]), 3),
        "measured_tokens_per_s": {each: round(speed, 1) for each, speed in speeds.items()},
        "predicted_tokens_per_s": {
            each.name: round(each.best(rtt_s).tokens_per_s, 1) for each in comparison.ranked(rtt_s)
        },
        "measured_tokens_per_round": tokens_per_round,
        "predicted_mode": {each.name: str(each.best(rtt_s).mode) for each in comparison.drafts},
        "predicted_tokens_per_round": {
            each.name: round(each.tokens_per_round, 2) for each in comparison.drafts
        },
    }


def _recommend(folder: BankFolder, address: str, prompts: Sequence[Prompt]) -> Comparison:
    """Recommends as the command does, with the link as measured alone."""
    config = replace(
        with_values(RunConfig(), verifier=address, method="coupled"), mode=ExecutionMode.SPECULATIVE
    )
    with contextlib.ExitStack() as stack:
        edges = {}
        for draft in folder.target.drafts:
            values = {"draft": str(folder.draft_dir(draft)), "draft_strategy": draft.strategy}
            edges[draft.name] = create_edge(with_values(config, **values))
            stack.callback(edges[draft.name].close)
        tokenizer = next(iter(edges.values())).tokenizer
        ids = [tokenizer.encode(prompt.text) for prompt in prompts]
        return compare(measure_drafts(edges, prompts=ids, seconds=MEASURE_S), ())


def _speeds(
    folder: BankFolder, address: str, prompts: Sequence[Prompt]
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Returns tokens/s of the target alone, twice, and of every draft at its best length; tokens a round by length."""
    with contextlib.ExitStack() as stack:
        decoders = {}
        for draft in folder.target.drafts:
            directory = folder.draft_dir(draft)
            model = stack.enter_context(create_draft_model(draft.strategy, directory))
            decoders[draft.name] = Decoder(address, model, EdgeTokenizer(directory / "tokenizer.json"))
        any_decoder = next(iter(decoders.values()))
        alone = Case(ExecutionMode.CLOUD_ONLY, TEMPERATURE)
        ways = {(ALONE, 0): (any_decoder, alone), (AGAIN, 0): (any_decoder, alone)}
        for depth in DEPTHS:
            case = Case(ExecutionMode.SPECULATIVE, TEMPERATURE, depth)
            ways |= {(name, depth): (decoder, case) for name, decoder in decoders.items()}
        sessions = {way: Sessions() for way in ways}
        for decoder, case in ways.values():
            decoder.decode(prompts[0].text, case, num_new=8)
        for number, prompt in enumerate(prompts):
            order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for way in order:
                decoder, case = ways[way]
                sessions[way].results.append(decoder.decode(prompt.text, case, NUM_NEW))
    names = dict.fromkeys(name for name, _ in ways)
    speeds = {
        name: max(each.tokens_per_s for way, each in sessions.items() if way[0] == name) for name in names
    }
    rounds = {
        name: {way[1]: round(each.tokens_per_round, 2) for way, each in sessions.items() if way[0] == name}
        for name in decoders
    }
    return speeds, rounds
