"""Compares what `edge-client plan` predicts with real runs over real links: `exp.plan_error` and `ctl.model`.

At each RTT every case decodes the same prompts in turn, several times. The plan gets the parts of those runs
(draft, verifier, round trip, acceptance; the target's step from the cloud-only stream's forwards) and
predicts ms a token of each case, which is compared with what the runs themselves took. A plan is for long
texts. These are short, so the prediction includes their ends: the last round is cut to what is wanted, and
asking for a stream costs one round trip. The A/A spread is the difference of a case's odd and even repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.plan_check_runs import CASES, SPECULATIVE, Runs, decoding, run_all
from benchmarks.results_file import Found
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.planning.samples import acceptance_by_position, known, sequences_of
from outrider.experiments.links.base import LinkRealisation, check_realisable
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.results import Measure, at_most, judged
from outrider.experiments.shared.short_texts import alphas_of, models_of, text_token_s
from outrider.experiments.synthetic.pair import SyntheticPair

RTTS_MS = (10.0, 50.0, 150.0)


@dataclass(frozen=True, slots=True)
class Checked:
    """Holds a case at an RTT: seconds a token, measured and predicted."""

    name: str
    rtt_ms: float
    measured_s: float
    predicted_s: float
    aa: float

    @property
    def error(self) -> float:
        """Returns predicted : measured - 1."""
        return self.predicted_s / self.measured_s - 1


def plan_check(
    realisation: LinkRealisation,
    pair: SyntheticPair | None = None,
    *,
    rtts_ms: Sequence[float] = RTTS_MS,
    num_repeats: int = 6,
    num_new: int = 128,
    min_forward_ms: float = 0.0,
    min_draft_ms: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Runs and predicts every case with the embedded pair, slowed down to resemble a larger one, or with a
    synthetic pair. `num_repeats` is even: each two share a prompt.

    Raises `UsageError` where the realisation refuses a constant delay.
    """
    profiles = [LinkProfile(name=f"rtt{rtt:g}", rtt_ms=rtt) for rtt in rtts_ms]
    for profile in profiles:
        check_realisable(realisation, profile)
    planned: list[Checked] = []
    own: list[Checked] = []
    facts: dict[str, Any] = {}
    stretch = f", min-forward-ms {min_forward_ms:g}, min-draft-ms {min_draft_ms:g}"
    own_labels = (f"embedded pair{stretch if min_forward_ms or min_draft_ms else ''}",)
    labels = own_labels if pair is None else pair.labels
    with decoding(pair, min_forward_ms, min_draft_ms) as (address, decoder_at):
        for profile in profiles:
            with realisation.open(profile, address) as link:
                runs = run_all(decoder_at(link.address), num_repeats, num_new)
                facts[profile.name] = link.facts()
            own += compare_own(runs, profile.rtt_ms)
            planned += compare(runs, profile.rtt_ms)
            for each in planned[-len(CASES) :]:
                say(
                    f"{profile.name} {each.name}: {1e3 * each.measured_s:.2f} ms a token measured, "
                    f"{1e3 * each.predicted_s:.2f} predicted ({100 * each.error:+.1f} %, A/A {each.aa:.3f})"
                )
    where = f"{labels[0]}, {realisation.name}"
    return [_error_measure(planned, where), _model_measure(own, where)], {
        "labels": list(labels),
        "realisation": realisation.name,
        "num_repeats": num_repeats,
        "num_new": num_new,
        "plan": [_as_json(each) for each in planned],
        "own_parts": [_as_json(each) for each in own],
        "links": facts,
    }


def compare(runs: dict[str, Runs], rtt_ms: float) -> list[Checked]:
    """Compares each case with what a plan made from the parts of all cases predicts."""
    speculative = [runs[case.name] for case in CASES if case.mode is ExecutionMode.SPECULATIVE]
    colocated = [runs[case.name] for case in CASES if case.mode is ExecutionMode.CO_LOCATED]
    streamed = [runs[case.name] for case in CASES if case.mode is ExecutionMode.CLOUD_ONLY]
    rounds = [each for its_runs in speculative for each in its_runs.rounds]
    forwards_ms = [ms for r in streamed for result in r.results for ms in result.stats.generate_forward_ms]
    models = models_of(
        rounds,
        stream_forward_s=known(forwards_ms).value / 1e3,
        colocated_rounds=[each for its_runs in colocated for each in its_runs.rounds],
    )
    texts = sequences_of([text for its_runs in speculative for text in its_runs.texts])
    return [
        _checked(runs[case.name], rtt_ms, models, rounds, alphas_of(texts, case.num_speculative_tokens or 1))
        for case in CASES
    ]


def compare_own(runs: dict[str, Runs], rtt_ms: float) -> list[Checked]:
    """Compares synchronous rounds with the cost model given nothing but their own parts."""
    found = []
    for case in SPECULATIVE:
        own = runs[case.name]
        models = models_of(own.rounds, stream_forward_s=0.0)  # which asks for no stream
        shares = acceptance_by_position(each for text in own.texts for each in text)
        alphas = [each.value for each in shares]
        found.append(_checked(own, rtt_ms, models, own.rounds, alphas))
    return found


def _checked(
    runs: Runs, rtt_ms: float, models: ModelCosts, rounds: Sequence[RoundRecord], alphas: Sequence[float]
) -> Checked:
    case, link = runs.case, LinkCosts(rtt_s=known([each.net_ms / 1e3 for each in rounds]).value)
    predicted_s = text_token_s(
        case.mode, case.num_speculative_tokens, alphas, runs.num_after_first, models, link
    )
    return Checked(case.name, rtt_ms, runs.tpot_s(), predicted_s, runs.aa)


def _error_measure(planned: list[Checked], where: str) -> Measure:
    worst = max(planned, key=lambda c: abs(c.error))
    spread = max(abs(each.aa - 1) for each in planned)
    text = (
        f"TPOT predicted by plan : measured, worst of {len(planned)} cases ({worst.name} at RTT "
        f"{worst.rtt_ms:g} ms; {where}; A/A spread {spread:.3f})"
    )
    return judged("exp.plan_error", text, abs(worst.error), "share", at_most(0.10))


def _model_measure(own: Sequence[Checked], where: str) -> Measure:
    slowest = max(own, key=lambda c: -c.error)
    spread = max(abs(each.aa - 1) for each in own)
    text = (
        f"measured TPOT of synchronous rounds : cost model from their own parts, worst of {len(own)} "
        f"({slowest.name} at RTT {slowest.rtt_ms:g} ms; {where}; A/A spread {spread:.3f})"
    )
    return judged("ctl.model", text, slowest.measured_s / slowest.predicted_s, "ratio", at_most(1.10))


def _as_json(each: Checked) -> dict[str, Any]:
    return {
        "case": each.name,
        "rtt_ms": each.rtt_ms,
        "measured_tpot_ms": round(1e3 * each.measured_s, 4),
        "predicted_tpot_ms": round(1e3 * each.predicted_s, 4),
        "error": round(each.error, 4),
        "aa": round(each.aa, 4),
    }
