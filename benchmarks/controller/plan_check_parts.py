"""What the cost model says of the runs of a plan check, from parts of the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.controller.plan_check_runs import CASES, SPECULATIVE, Runs
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.core.options import Mode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.planning.samples import acceptance_by_position, known, standing_texts
from outrider.experiments.shared.short_texts import alphas_of, models_of, text_token_s


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
    there = [runs[case.name] for case in CASES if case.mode is Mode.CO_LOCATED]
    streamed = [runs[case.name] for case in CASES if case.mode is Mode.CLOUD_ONLY]
    rounds = [each for its_runs in speculative for each in its_runs.rounds]
    forwards_ms = [ms for r in streamed for result in r.results for ms in result.stats.generate_forward_ms]
    models = models_of(
        rounds,
        stream_forward_s=known(forwards_ms).value / 1e3,
        colocated_rounds=[each for its_runs in there for each in its_runs.rounds],
    )
    texts = standing_texts([text for its_runs in speculative for text in its_runs.texts])
    found = []
    for case in CASES:
        n = case.num_speculative_tokens
        found.append(_checked(runs[case.name], rtt_ms, models, _link(rounds), alphas_of(texts, n or 1)))
    return found


def compare_own(runs: dict[str, Runs], rtt_ms: float) -> list[Checked]:
    """Synchronous rounds against the cost model with nothing but their own parts."""
    found = []
    for case in SPECULATIVE:
        own = runs[case.name]
        models = models_of(own.rounds, stream_forward_s=0.0)  # which asks for no stream
        shares = acceptance_by_position(each for text in own.texts for each in text)
        alphas = [each.value for each in shares]
        found.append(_checked(own, rtt_ms, models, _link(own.rounds), alphas))
    return found


def _checked(
    runs: Runs, rtt_ms: float, models: ModelCosts, link: LinkCosts, alphas: Sequence[float]
) -> Checked:
    case = runs.case
    predicted_s = text_token_s(
        case.mode, case.num_speculative_tokens, alphas, runs.num_after_first, models, link
    )
    return Checked(case.name, rtt_ms, runs.tpot_s(), predicted_s, runs.aa)


def _link(rounds: Sequence[RoundRecord]) -> LinkCosts:
    return LinkCosts(rtt_s=known([each.net_ms / 1e3 for each in rounds]).value)
