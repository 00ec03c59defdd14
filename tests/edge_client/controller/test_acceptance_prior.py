"""What texts teach of a draft: the next one's first belief, narrow where they are alike, soon left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.edge.edge_fakes import FakeDraft
from support.edge.engine_link import ChanceDraft, EngineLink

from outrider.common.types import Method, OpenRequest, SamplingParams, StopParams
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.controller.acceptance import AcceptanceEstimator
from outrider.edge_client.controller.acceptance_posterior import ALPHAS, posterior_of, usual_prior
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior, PriorKey
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.mode_policy import CHOOSABLE_MODES, ModePolicy
from outrider.edge_client.controller.round_costs import EarlierCosts, StepTimes
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.session.factory import Edge
from outrider.experiments.simulator.parts.drafts import SimulatedTokenizer
from tests.edge_client.decode.test_pipelined_rounds import PROMPT, decode, make_backend, reference

HERE = PriorKey("target-1", 2)


def mean(belief: Sequence[float]) -> float:
    return sum(alpha * weight for alpha, weight in zip(ALPHAS, belief, strict=True))


def text_of(prior: AcceptancePrior, num_stood: int, num_fell: int) -> list[float]:
    """What is believed at the end of a text that began with what is known."""
    return posterior_of(num_stood, num_fell, prior.probabilities(HERE))


def after(*texts: tuple[int, int]) -> AcceptancePrior:
    prior = AcceptancePrior()
    for stood, fell in texts:
        prior.learn(HERE, text_of(prior, stood, fell))
    return prior


def test_the_first_text_begins_with_what_is_usual() -> None:
    assert AcceptancePrior().probabilities(HERE) == pytest.approx(usual_prior())
    assert posterior_of(0, 0, AcceptancePrior().probabilities(HERE)) == pytest.approx(posterior_of(0, 0))


def test_each_text_moves_the_belief_towards_the_draft_that_it_showed() -> None:
    means = [mean(after(*[(243, 13)] * num).probabilities(HERE)) for num in range(12)]
    assert means[0] == pytest.approx(0.8, abs=0.03)
    assert means == sorted(means)
    assert means[2] > 0.88 and means[-1] == pytest.approx(0.945, abs=0.02)
    assert sum(after(*[(243, 13)] * 12).probabilities(HERE)) == pytest.approx(1)


def test_what_confidence_was_worth_is_carried_to_the_next_text() -> None:
    prior, first = AcceptancePrior(), AcceptanceEstimator()
    for _ in range(30):  # of a draft that is right whatever it says
        first.observe_confidences((0.4, 0.4, 0.4), 3)
    prior.learn(HERE, usual_prior(), first.calibration)
    prior.learn(HERE, usual_prior(), AcceptanceEstimator().calibration)  # a text that judged nothing
    later, fresh = AcceptanceEstimator(), AcceptanceEstimator()
    earlier = prior.calibration(HERE)
    assert earlier is not None
    later.start_from(earlier)
    assert later.has_confidences and later.by_confidence()(0.4) > 0.95 > fresh.by_confidence()(0.4)
    assert prior.calibration(PriorKey("target-2", 2)) is None


def test_a_long_text_counts_once_as_a_short_one_does() -> None:
    long_first = mean(after((2000, 500), (60, 60)).probabilities(HERE))
    short_first = mean(after((60, 60), (2000, 500)).probabilities(HERE))
    assert long_first == pytest.approx(short_first, abs=0.02)


def test_texts_that_differ_leave_the_belief_wide() -> None:
    def spread(prior: AcceptancePrior) -> float:
        belief = prior.probabilities(HERE)
        middle = mean(belief)
        return sum(w * (alpha - middle) ** 2 for alpha, w in zip(ALPHAS, belief, strict=True)) ** 0.5

    assert spread(after(*[(180, 20), (120, 80)] * 5)) > 2 * spread(after(*[(150, 50)] * 10))


@pytest.mark.parametrize(("usual_fate", "num_stood", "num_fell"), [((243, 13), 15, 15), ((100, 156), 38, 2)])
def test_a_text_unlike_all_before_is_known_within_forty_tokens(
    usual_fate: tuple[int, int], num_stood: int, num_fell: int
) -> None:
    prior = after(*[usual_fate] * 50)
    own = num_stood / (num_stood + num_fell)
    assert abs(mean(text_of(prior, num_stood, num_fell)) - own) < 0.1


def test_a_draft_that_changed_is_believed_after_some_texts() -> None:
    prior = after(*[(243, 13)] * 50, *[(128, 128)] * (SETTINGS.max_remembered_sequences + 3))
    assert mean(prior.probabilities(HERE)) < 0.65


@pytest.mark.parametrize(
    "elsewhere",
    [
        replace(HERE, target_fingerprint="target-2"),
        replace(HERE, temperature_halves=0),
    ],
)
def test_other_circumstances_know_nothing_of_it(elsewhere: PriorKey) -> None:
    assert after((10, 90)).probabilities(elsewhere) == pytest.approx(usual_prior())


def test_temperatures_that_hardly_differ_are_one() -> None:
    def at(temperature: float) -> PriorKey:
        return PriorKey.at("target-1", temperature)

    assert at(0.8) == at(0.9) == at(1.0) != at(0.0)
    assert at(0.0) != at(0.5) != at(1.5)


def test_sessions_may_teach_at_once() -> None:
    prior = AcceptancePrior()

    def teach() -> None:
        for _ in range(200):
            prior.learn(HERE, text_of(prior, 60, 40))

    threads = [threading.Thread(target=teach) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(prior.probabilities(HERE)) == pytest.approx(1)
    assert mean(prior.probabilities(HERE)) < 0.7


@pytest.mark.parametrize("accuracy", [0.05, 1.0])
def test_a_session_begins_with_what_the_last_one_saw_and_its_text_is_the_same(accuracy: float) -> None:
    prior, wanted = AcceptancePrior(), reference(SamplingParams(seed=1), StopParams(50, ignore_eos=True))
    first_means = []
    for _ in range(2):
        choice = ModePolicy(CHOOSABLE_MODES)
        link = EngineLink(make_backend())
        result = decode(
            link, mode=ExecutionMode.AUTO, choice=choice, accuracy=accuracy, acceptance_prior=prior
        )
        assert [*PROMPT, *result.token_ids] == wanted
        assert result.model is not None
        here = PriorKey.at(result.model.target_fingerprint, 0.8)
        first_means.append(mean(prior.probabilities(here)))
    assert first_means == sorted(first_means, reverse=accuracy < 0.5)
    assert abs(first_means[-1] - mean(usual_prior())) > 0.05, (
        "the fingerprint is that of the session's verifier"
    )


def test_a_session_begins_with_what_rounds_took_in_the_last_one() -> None:
    prior, choices = AcceptancePrior(), [ModePolicy(CHOOSABLE_MODES) for _ in range(2)]
    for choice in choices:
        decode(
            EngineLink(make_backend()),
            mode=ExecutionMode.AUTO,
            choice=choice,
            accuracy=1.0,
            acceptance_prior=prior,
        )
    first, second = (choice.conditions.costs for choice in choices)
    assert first.earlier == EarlierCosts()
    assert second.earlier.rtt_s == first.measured_rtt_s is not None
    assert second.earlier.round_overhead_s == first.measured_round_overhead_s is not None
    assert second.earlier == first.learned() and prior.costs == second.learned()


@pytest.mark.parametrize("case", [{}, {"mode": ExecutionMode.AUTO, "method": Method.SPARSE}])
def test_sessions_that_choose_nothing_or_see_something_else_teach_nothing(case: dict[str, Any]) -> None:
    prior = AcceptancePrior()
    choice = ModePolicy(CHOOSABLE_MODES) if case else None
    link = EngineLink(make_backend())
    result = decode(link, accuracy=0.1, acceptance_prior=prior, choice=choice, **case)
    assert result.model is not None
    circumstances = PriorKey.at(result.model.target_fingerprint, 0.8)
    assert prior.probabilities(circumstances) == pytest.approx(usual_prior())


def test_sessions_of_one_edge_share_their_experience() -> None:
    class Tokenizer:
        fingerprint, num_tokens = "tokenizer-1", 100

        def encode(self, text: str) -> list[int]:
            return list(PROMPT)

        def decoder(self, prompt_ids: Sequence[int], has_special_tokens: bool) -> object:
            return lambda token_id: ""

    edge = Edge(run_config(mode="cloud-only"), Tokenizer(), None, 0.0, ())  # type: ignore[arg-type]
    sessions = [edge.session("prompt", seed) for seed in (1, 2)]
    priors = {id(session._state._acceptance_prior) for session in sessions}
    assert priors == {id(edge.acceptance_prior)}
    assert Edge(edge.config, edge.tokenizer, None, 0.0, ()).acceptance_prior is not edge.acceptance_prior


# ------------------------------------------------------------------------------------------ the prompt


def begin_after_prompt(num_agreed: int, num_different: int) -> Conditions:
    conditions = Conditions()
    conditions.observe_prompt(num_agreed, num_different)
    return conditions


def test_a_text_begins_with_what_the_prompt_shows_of_the_draft() -> None:
    means = [begin_after_prompt(each, 16 - each).acceptance.posterior.prior_mean for each in range(17)]
    assert means == sorted(means) and means[0] < 0.4 < 0.8 < means[-1]
    untold = begin_after_prompt(0, 0).acceptance.posterior
    assert untold.probabilities == usual_prior() and not untold.has_observed


def test_a_draft_that_the_prompt_shows_to_be_useless_is_never_tried() -> None:
    """Rounds that a usual draft would make twice as fast as the stream."""
    for agreed, has_rounds in ((13, True), (1, False)):
        policy = ModePolicy(CHOOSABLE_MODES, conditions=begin_after_prompt(agreed, 16 - agreed))
        policy.conditions.observe_opening(0.03, 0.03, 2e-4, StepTimes(0.029, 0.0005))
        policy.choose(32)
        assert (policy.current is not ExecutionMode.CLOUD_ONLY) == has_rounds


def openings_of(**case: Any) -> list[OpenRequest]:
    link = EngineLink(make_backend())
    decode(link, accuracy=0.7, choice=ModePolicy(CHOOSABLE_MODES), mode=ExecutionMode.AUTO, **case)
    return link.openings


def test_the_prompt_is_compared_where_nothing_is_known_of_the_draft() -> None:
    prior, num_places = AcceptancePrior(), min(SETTINGS.num_prompt_choices, len(PROMPT) - 1)
    (first,) = openings_of(acceptance_prior=prior)
    (later,) = openings_of(acceptance_prior=prior)
    assert (first.num_prompt_choices, later.num_prompt_choices) == (num_places, 0)
    assert prior.num_judged(0.8) >= SETTINGS.enough_judged_tokens
    assert prior.num_judged(0.0) == 0, "at another temperature nothing is known yet"
    few = AcceptancePrior()
    openings_of(acceptance_prior=few, stop=StopParams(3, ignore_eos=True))
    assert 0 < few.num_judged(0.8) < SETTINGS.enough_judged_tokens
    assert openings_of(acceptance_prior=few)[0].num_prompt_choices == num_places
    (other,) = openings_of(method=Method.SPARSE)
    assert not other.num_prompt_choices, "whose acceptance is another"


@pytest.mark.parametrize(("penalty", "num_places"), [(1.0, 2), (1.1, 0)])
def test_the_prompt_is_compared_where_a_token_depends_on_its_distribution_alone(
    penalty: float, num_places: int
) -> None:
    config = run_config(mode="auto", repetition_penalty=penalty)
    edge = Edge(config, SimulatedTokenizer(), ChanceDraft([1], 1.0, 1), 0.0, ())  # type: ignore[arg-type]
    assert edge.session([1, 2, 3], 1)._state.num_prompt_choices == num_places


# -------------------------------------------------------------------------------------- drafts without a model


def begin(is_copied: bool) -> ModePolicy:
    """A text of 32 tokens over 10 ms: with a usual draft rounds take 2.5 ms a token, the target alone 4."""
    policy = ModePolicy(CHOOSABLE_MODES, conditions=Conditions(is_copied=is_copied))
    policy.conditions.observe_opening(0.01, 0.004, 1e-5, StepTimes(0.0038, 0.0002))
    policy.choose(32)
    return policy


def test_a_copying_draft_is_asked_to_be_right_before_rounds_are_tried() -> None:
    assert begin(is_copied=False).current is not ExecutionMode.CLOUD_ONLY
    policy = begin(is_copied=True)
    assert policy.current is ExecutionMode.CLOUD_ONLY
    for _ in range(6):  # a text that has begun to repeat itself
        policy.observe_stream(0.004)
        policy.observe_probe(is_accepted=True, draft_s=1e-5)
        policy.choose(32)
    assert policy.current is not ExecutionMode.CLOUD_ONLY


def test_earlier_texts_of_a_copying_draft_are_added_to_its_own_prior() -> None:
    usual = usual_prior(is_copied=True)
    assert mean(usual) < 0.55 < mean(usual_prior())
    assert AcceptancePrior().probabilities(HERE, usual) == pytest.approx(usual)
    assert (
        mean(usual)
        < mean(after((243, 13)).probabilities(HERE, usual))
        < mean(after((243, 13)).probabilities(HERE))
    )


@pytest.mark.parametrize(
    ("strategy", "is_copied"), [("prompt-lookup", True), ("model", False), ("model+suffix", False)]
)
def test_a_session_knows_whether_its_draft_has_a_model(strategy: str, is_copied: bool) -> None:
    config = run_config(mode="auto", draft_strategy=strategy)
    edge = Edge(config, SimulatedTokenizer(), FakeDraft(), 0.0, ())  # type: ignore[arg-type]
    session = edge.session([1, 2, 3], 1)
    posterior = session._state._remembered_conditions.acceptance.posterior  # type: ignore[union-attr]
    assert posterior.usual == usual_prior(is_copied)
