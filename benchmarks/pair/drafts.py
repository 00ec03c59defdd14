"""The trained draft against drafts without training: prompt lookup, and the target's own first layers."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sessions import Sessions, tpot_s, warn_of_other_texts
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, tokens_per_s
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt

TRAINED, LOOKUP = "trained", "prompt lookup"
DRAFT_LENGTH = 4  # of the figures that are compared
LONG = 8  # shows the acceptance at later positions, for predictions of other draft lengths
RTTS_S = {"loopback": 0.0, "50 ms": 0.05}  # on top of what loopback itself takes


@contextlib.contextmanager
def open_strategies(
    pair: Path, scratch: Path, first_layers: Sequence[int]
) -> Iterator[dict[str, DraftModel]]:
    """Opens by name: the pair's draft, prompt lookup, and INT4 drafts of the target's first layers."""
    with contextlib.ExitStack() as stack:
        strategies = {
            TRAINED: stack.enter_context(create_draft_model("onnx", pair / "draft")),
            LOOKUP: stack.enter_context(create_draft_model("prompt-lookup", pair / "draft")),
        }
        for number in first_layers:
            report = export_draft(pair / "target", scratch / f"first-{number}", first_layers=number)
            total = report.num_source_layers or report.num_layers
            model = stack.enter_context(create_draft_model("onnx", report.out_dir))
            strategies[f"first {number} of {total} layers"] = model
        yield strategies


Sampled = dict[str, dict[int, Sessions]]  # strategy → draft length → sessions


def sample_strategies(
    address: str,
    strategies: dict[str, DraftModel],
    tokenizer: EdgeTokenizer,
    prompts: Sequence[Prompt],
    temperature: float,
    num_new: int,
) -> tuple[Sampled, list[SessionResult]]:
    """Runs every strategy on every prompt, taking turns, and the target alone; to the end of each text."""
    decoders = {name: Decoder(address, model, tokenizer) for name, model in strategies.items()}
    found: Sampled = {name: {n: Sessions() for n in (DRAFT_LENGTH, LONG)} for name in strategies}
    alone = []
    for number, prompt in enumerate(prompts):
        print(f"\rdrafts: prompt {number + 1} of {len(prompts)}", end="", flush=True)
        case = Case(ExecutionMode.CLOUD_ONLY, temperature)
        alone.append(decoders[TRAINED].decode(prompt.text, case, num_new, ignore_eos=False))
        for name, decoder in decoders.items():
            for n, sessions in found[name].items():
                case = Case(ExecutionMode.SPECULATIVE, temperature, n)
                sessions.results.append(decoder.decode(prompt.text, case, num_new, ignore_eos=False))
    print()
    for name, by_length in found.items():
        for n, sessions in by_length.items():
            warn_of_other_texts(f"{name} n={n}", sessions.results, alone)
    return found, alone


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """Holds what a round costs whoever drafts: verification by draft length, loopback, a cloud-only token."""

    verify_fixed_s: float
    verify_token_s: float
    loopback_s: float
    target_token_s: float


def shared_costs(found: Sampled, alone: Sequence[SessionResult]) -> SharedCosts:
    """Fits a line through the medians by draft length."""
    rounds = [r for by_length in found.values() for case in by_length.values() for r in case.rounds]
    by_count: dict[int, list[float]] = defaultdict(list)
    for record in rounds:
        by_count[record.num_draft_tokens].append(record.verifier_ms / 1e3)
    counts = sorted(by_count)
    medians = [statistics.median(by_count[count]) for count in counts]
    weights = [len(by_count[count]) ** 0.5 for count in counts]
    slope, fixed = np.polyfit(counts, medians, 1, w=weights)
    return SharedCosts(
        verify_fixed_s=float(fixed),
        verify_token_s=max(0.0, float(slope)),
        loopback_s=statistics.median(r.net_ms for r in rounds) / 1e3,
        target_token_s=statistics.median(tpot_s(each) for each in alone if len(each.token_ids) > 1),
    )


def strategy_figures(by_length: dict[int, Sessions], costs: SharedCosts) -> dict[str, Any]:
    """Returns one strategy's measured figures and the cost model's predictions from them, by round-trip
    time."""
    drafted = [r for r in by_length[DRAFT_LENGTH].rounds if r.num_draft_tokens]
    draft_ms = statistics.median(r.draft_ms / r.num_draft_tokens for r in drafted)
    return {
        "tokens_per_round": {str(n): round(rounds.tokens_per_round, 3) for n, rounds in by_length.items()},
        "acceptance_rate": {str(n): round(rounds.acceptance_rate, 4) for n, rounds in by_length.items()},
        "drafted_per_round": {str(n): round(_num_drafted(rounds), 2) for n, rounds in by_length.items()},
        "draft_ms_per_token": round(draft_ms, 4),
        "predicted_tokens_per_s": predict(by_length[LONG], draft_ms / 1e3, costs),
    }


def _num_drafted(sessions: Sessions) -> float:
    return statistics.fmean(r.num_draft_tokens for r in sessions.rounds)


def predict(long: Sessions, draft_token_s: float, costs: SharedCosts) -> dict[str, dict[str, float]]:
    """Predicts tokens/s at the length that is compared and at the best one, whether or not cloud-only
    beats it."""
    # A strategy that often has nothing to say neither drafts nor has verified what it does not say.
    share = _num_drafted(long) / LONG
    models = ModelCosts(
        draft_token_s * share, costs.target_token_s, costs.verify_fixed_s, costs.verify_token_s * share
    )
    acceptance = long.acceptance(LONG)
    predicted: dict[str, dict[str, float]] = {}
    for name, rtt_s in RTTS_S.items():
        link = LinkCosts(rtt_s=costs.loopback_s + rtt_s)
        rates = {n: tokens_per_s(acceptance, n, models, link) for n in range(1, LONG + 1)}
        best = max(rates, key=rates.__getitem__)
        predicted[name] = {
            f"at_{DRAFT_LENGTH}": round(rates[DRAFT_LENGTH], 1),
            "best_n": best,
            "best": round(rates[best], 1),
        }
    return predicted


def print_strategies(figures: dict[str, Any], cloud_only: float) -> None:
    """Prints one line a strategy."""
    print(f"\n{'draft':<24}{'tokens a round':>16}{'ms a token':>12}", end="")
    print("".join(f"{'predicted, ' + name:>22}" for name in RTTS_S))
    for draft, values in figures.items():
        print(f"{draft:<24}{values['tokens_per_round'][str(DRAFT_LENGTH)]:>16.3f}", end="")
        print(f"{values['draft_ms_per_token']:>12.3f}", end="")
        predictions = values["predicted_tokens_per_s"].values()
        print("".join(f"{p['best']:>14.1f}/s (n={p['best_n']})" for p in predictions))
    print(f"tokens a round at draft length {DRAFT_LENGTH}; cloud-only streams {cloud_only:.1f}/s at any RTT")
