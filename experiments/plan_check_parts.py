"""What the cost model says of the runs of a plan check, from parts of the same runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.costmodel import LinkCosts, ModelCosts, cloud_only_s, colocated_models, rounds_s
from common.plan_samples import acceptance_by_position, cost_line, known, replayed
from edge_client.options import Mode
from edge_client.plan_measure import standing_texts
from edge_client.stats import RoundRecord
from experiments.decoding import Case
from experiments.plan_check_runs import CASES, Runs


@dataclass(frozen=True, slots=True)
class Checked:
    """A case at an RTT: seconds a token, measured and predicted."""

    name: str
    rtt_ms: float
    measured_s: float
    predicted_s: float
    aa: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1



def compare(runs: dict[str, Runs], rtt_ms: float) -> list[Checked]:
    """Each case against what a plan made from the parts of all says of it."""
    speculative = [runs[case.name] for case in CASES if case.mode is Mode.SPECULATIVE]
    models, link = _parts([each for its_runs in speculative for each in its_runs.rounds])
    models = _with_streamed_parts(models, runs)
    texts = standing_texts([text for its_runs in speculative for text in its_runs.texts])
    found = []
    for case in CASES:
        its_runs = runs[case.name]
        shares = acceptance_by_position(replayed(texts, case.num_speculative_tokens or 1))
        alphas = [each.value for each in shares]
        predicted_s = _predicted_s(case, models, link, alphas, its_runs.num_after_first)
        found.append(Checked(case.name, rtt_ms, its_runs.tpot_s(), predicted_s, its_runs.aa))
    return found


def compare_own(runs: dict[str, Runs], rtt_ms: float) -> list[Checked]:
    """Synchronous rounds against the cost model with nothing but their own parts."""
    found = []
    for case in CASES:
        if case.mode is Mode.SPECULATIVE:
            own = runs[case.name]
            models, link = _parts(own.rounds)
            shares = acceptance_by_position(each for text in own.texts for each in text)
            alphas = [each.value for each in shares]
            predicted_s = _predicted_s(case, models, link, alphas, own.num_after_first)
            found.append(Checked(case.name, rtt_ms, own.tpot_s(), predicted_s, own.aa))
    return found


def _predicted_s(
    case: Case, models: ModelCosts, link: LinkCosts, alphas: list[float], num_tokens: int
) -> float:
    """Seconds a token of a text's `num_tokens` after its first, which comes with the opening."""
    n = case.num_speculative_tokens
    match case.mode:
        case Mode.CLOUD_ONLY:
            return cloud_only_s(models, link) + link.rtt_s / num_tokens
        case Mode.CO_LOCATED:
            there = colocated_models(models)
            return (rounds_s(alphas, n, num_tokens, there, LinkCosts(0.0)) + link.rtt_s) / num_tokens
        case Mode.EDGE_ONLY:  # n tokens at once, again and again; the first ones begin the clock
            num_drafts = math.ceil((num_tokens + 1) / n) - 1
            return num_drafts * models.draft_s(n) / num_tokens
        case _:
            return rounds_s(alphas, n, num_tokens, models, link) / num_tokens


def _parts(rounds: Sequence[RoundRecord]) -> tuple[ModelCosts, LinkCosts]:
    """As `edge-client plan --measure` makes them; the target's own step is not among them."""
    drafted = [(each.num_draft_tokens, each.draft_ms / 1e3) for each in rounds if each.num_draft_tokens]
    draft_fixed, draft_token = cost_line(drafted, is_flat=False)
    verified = [(each.num_draft_tokens, each.verifier_ms / 1e3) for each in rounds]
    verify_fixed, verify_token = cost_line(verified, is_flat=True)
    models = ModelCosts(
        draft_token_s=draft_token.value,
        target_token_s=math.nan,
        verify_fixed_s=verify_fixed.value,
        verify_token_s=verify_token.value,
        draft_fixed_s=draft_fixed.value,
    )
    return models, LinkCosts(rtt_s=known([each.net_ms / 1e3 for each in rounds]).value)


def _with_streamed_parts(models: ModelCosts, runs: dict[str, Runs]) -> ModelCosts:
    """The target's step is a cloud-only forward and what the verifier adds to one; and the draft there."""
    by_mode = {case.mode: runs[case.name] for case in CASES}
    forwards_ms = [ms for r in by_mode[Mode.CLOUD_ONLY].results for ms in r.stats.generate_forward_ms]
    rounds = by_mode[Mode.SPECULATIVE].rounds
    beside_ms = known([r.verifier_ms - r.queue_ms - r.forward_ms for r in rounds]).value
    there = by_mode[Mode.CO_LOCATED].rounds
    return replace(
        models,
        target_token_s=(known(forwards_ms).value + beside_ms) / 1e3,
        colocated_draft_token_s=sum(r.draft_ms for r in there) / 1e3 / sum(r.num_draft_tokens for r in there),
    )
