"""Systems in virtual time against what must hold of them: closed forms, conservation, queues, faults."""

from __future__ import annotations

import pytest
from played_systems import DRAFT, VERIFIER, edges, seen, system

from outrider.common import codec
from outrider.common.errors import UsageError
from outrider.common.types import Method
from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, cloud_only_s, round_s
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.experiments.simulator.parts import network

MODELS = ModelCosts(
    draft_token_s=DRAFT["token_ms"] / 1e3,
    target_token_s=(VERIFIER["step_ms"] + VERIFIER["token_ms"]) / 1e3,
    verify_fixed_s=(VERIFIER["step_ms"] + VERIFIER["token_ms"]) / 1e3,
    verify_token_s=VERIFIER["token_ms"] / 1e3,
)
LINK = LinkCosts(rtt_s=0.05)
ONCE = {"requests": 1}


# ------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("alpha, num_tokens", [(1.0, 5), (0.0, 1)])
def test_rounds_of_one_edge_take_what_the_cost_model_says(alpha, num_tokens):
    found = seen(system(edges(**ONCE, acceptance=alpha, edge={"num_speculative_tokens": 4})))
    full = found.gaps_s[:-5]  # the last rounds of a text are shorter
    assert full and all(gap == pytest.approx(round_s(4, MODELS, LINK), abs=1e-9) for gap in full)
    assert {n for _, n in found.logs[0].commits[1:-2]} == {num_tokens}


def test_a_cloud_only_stream_takes_a_step_a_token():
    found = seen(system(edges(**ONCE, edge={"mode": "cloud-only"})))
    assert found.gaps_s[0] == pytest.approx(LINK.rtt_s + MODELS.target_token_s, abs=1e-9)  # asking for it
    assert all(gap == pytest.approx(cloud_only_s(MODELS, LINK), abs=1e-9) for gap in found.gaps_s[1:])


def test_co_located_rounds_take_draft_and_verification_and_no_trip():
    group = edges(**ONCE, acceptance=1.0, edge={"mode": "co-located", "num_speculative_tokens": 4})
    found = seen(system(group, verifier={"draft": {"token_ms": 3.0}}))
    expected_s = 4 * 0.003 + MODELS.verify_s(4)
    assert all(gap == pytest.approx(expected_s, abs=1e-9) for gap in found.gaps_s[1:-2])


def test_an_edge_alone_drafts_at_its_own_speed():
    found = seen(system(edges(**ONCE, edge={"mode": "edge-only", "num_speculative_tokens": 4})))
    assert found.gaps_s[0] == pytest.approx(4 * MODELS.draft_token_s, abs=1e-9)


def test_the_first_token_takes_connection_opening_and_prompt():
    """A trip for TCP, one for HTTP/2, one for the opening."""
    found = seen(system(edges(**ONCE, prompt_tokens=30)))
    expected_s = 3 * LINK.rtt_s + (VERIFIER["step_ms"] + 30 * VERIFIER["token_ms"]) / 1e3
    assert found.logs[0].ttft_s == pytest.approx(expected_s, abs=1e-9)


def test_a_slow_link_takes_its_messages_time():
    """100 kbit/s up: a request of some 90 bytes with all its headers is some 12 ms on its way."""
    link = {"rtt_ms": 50, "up_mbit": 0.1}
    slow = seen(system(edges(**ONCE, acceptance=1.0, link=link))).gaps_s[0]
    request_bytes = (slow - round_s(4, MODELS, LINK)) * 0.1e6 / 8
    assert 100 < request_bytes < 180


def test_a_slowed_target_stretches_every_step():
    found = seen(system(edges(**ONCE, acceptance=1.0), verifier={"serve": {"min_forward_ms": 70}}))
    expected_s = round_s(4, MODELS, LINK) - MODELS.verify_s(4) + 0.07
    assert found.gaps_s[0] == pytest.approx(expected_s, abs=1e-9)


# -------------------------------------------------------------------------------------- what adds up


def test_every_round_is_answered_once_and_tokens_add_up():
    group = edges(count=12, requests=3, think_s=0.5, output_tokens=[5, 60], prompt_tokens=[1, 300])
    found = seen(system(group)).outcome
    total, (verifier,) = found.total, found.verifiers
    assert total.num_requests == total.num_finished == 36 and total.num_failed == 0
    assert total.num_rounds == verifier.num_rounds
    assert total.num_tokens == total.num_accepted_tokens + total.num_rounds + total.num_requests


def test_groups_add_up_to_the_whole():
    found = seen(system(edges(name="a", **ONCE), edges(name="b", count=2, **ONCE))).outcome
    for name in ("num_requests", "num_tokens", "num_rounds", "num_draft_tokens"):
        assert sum(getattr(each, name) for each in found.groups) == getattr(found.total, name)


def test_acceptance_is_what_was_given_and_what_was_recorded():
    given = seen(system(edges(count=8, requests=8, acceptance=0.7))).outcome.total
    rounds = given.num_rounds
    assert given.num_accepted_tokens / rounds == pytest.approx(0.7 + 0.49 + 0.343 + 0.2401, rel=0.1)
    recorded = seen(system(edges(count=4, requests=8, acceptance="embedded T=0"))).outcome.total
    assert 0 < recorded.num_accepted_tokens < recorded.num_draft_tokens


@pytest.mark.parametrize("mode", REQUESTABLE_MODES)
def test_every_mode_of_the_product_plays_to_its_end(mode):
    total = seen(system(edges(count=2, requests=2, edge={"mode": str(mode)}))).outcome.total
    assert (total.num_finished, total.num_tokens) == (4, 160)


@pytest.mark.parametrize("policy", DEPTH_POLICIES)
def test_every_depth_policy_of_the_product_plays(policy):
    group = edges(count=2, requests=2, acceptance="embedded T=0.8", edge={"depth_policy": policy})
    assert seen(system(group)).outcome.total.num_finished == 4


@pytest.mark.parametrize("method", list(Method))
def test_every_method_of_the_product_plays(method):
    found = seen(system(edges(count=2, requests=2, edge={"method": str(method)}))).outcome
    assert found.total.num_finished == 4 and found.total.num_rounds == found.verifiers[0].num_rounds


def test_pipelined_rounds_hide_the_trip():
    group = {**edges(**ONCE, acceptance=0.95, link={"rtt_ms": 200}, output_tokens=200)}
    plain = seen(system(group)).outcome.total.tpot_ms.p50
    piped = seen(system({**group, "edge": {"pipeline": "on"}})).outcome.total.tpot_ms.p50
    assert piped < 0.6 * plain


def test_a_message_is_as_long_as_the_codec_makes_it():
    """Supports of 16 ids and weights take more than ids and probabilities."""
    plain = seen(system(edges(**ONCE))).outcome.total.bytes_up_per_token
    sparse = seen(system(edges(**ONCE, edge={"method": "sparse"}))).outcome.total.bytes_up_per_token
    assert 10 < plain < 60 < sparse


# ------------------------------------------------------------------------------------ many at a time


def test_rounds_that_share_a_step_cost_less_each():
    def busy_s_a_round(count):
        found = seen(system(edges(count=count, requests=2, start_within_s=0.1))).outcome
        return found.verifiers[0].utilisation * found.seconds / found.total.num_rounds, found

    alone_s, one = busy_s_a_round(1)
    shared_s, many = busy_s_a_round(16)
    assert one.verifiers[0].mean_batch == 1.0 and many.verifiers[0].mean_batch > 3
    assert shared_s < 0.5 * alone_s


def test_under_overload_rounds_are_refused_with_hints_and_all_texts_are_finished():
    group = edges(count=40, requests=1, prompt_tokens=4, output_tokens=20, start_within_s=0.5)
    slow = {"times": {"step_ms": 20, "token_ms": 3}, "serve": {"max_step_tokens": 64}}
    found = seen(system(group, verifier=slow)).outcome
    assert found.total.num_refusals > 0 and found.verifiers[0].num_refused["queue_ms"] > 0
    assert found.total.num_finished == 40 and found.total.num_failed == 0


def test_after_an_overload_nobody_is_refused_any_more():
    crowd = edges(name="crowd", count=40, requests=1, prompt_tokens=4, output_tokens=20, start_within_s=0.5)
    later = edges(name="later", count=1, requests=40, prompt_tokens=4, think_s=1.0, start_within_s=0.0)
    slow = {"times": {"step_ms": 20, "token_ms": 3}, "serve": {"max_step_tokens": 64}}
    found = seen(system(crowd, later, verifier=slow))
    end_s = max(log.end_s for log in found.logs if log.edge < 40)
    after = [log for log in found.logs if log.edge == 40 and log.start_s > end_s]
    assert len(after) > 5 and all(log.result.stats.num_refusals == 0 for log in after)


def test_a_full_pool_evicts_idle_sessions_and_goes_on():
    group = edges(count=8, requests=2, prompt_tokens=64, output_tokens=30, start_within_s=0.1)
    found = seen(system(group, verifier={"kv_tokens": 512})).outcome
    assert found.total.num_finished == 16 and found.total.num_tokens == 16 * 30
    assert found.verifiers[0].most_kv_tokens <= 512 and found.verifiers[0].num_evicted > 0


def test_two_verifiers_share_the_edges():
    found = seen(system(edges(count=20, requests=4, think_s=0.2), verifier={"count": 2})).outcome
    assert len(found.verifiers) == 2 and all(each.num_rounds > 200 for each in found.verifiers)


# --------------------------------------------------------------------------------------------- faults

OUTAGE = {"rtt_ms": 50, "outages": [{"start_s": 1.0, "duration_s": 2.0}]}


def test_in_an_outage_an_edge_keeps_its_own_tokens_and_comes_back():
    found = seen(system(edges(**ONCE, link=OUTAGE, output_tokens=150)))
    total, commits = found.outcome.total, found.logs[0].commits
    assert total.num_timeouts > 0 and total.num_unverified_tokens > 0 and total.num_finished == 1
    assert commits[-1][0] > 3.5


def test_a_patient_edge_waits_an_outage_out_and_stays_exact():
    found = seen(system(edges(**ONCE, link=OUTAGE, output_tokens=150, edge={"on_timeout": "wait"})))
    total = found.outcome.total
    assert total.num_unverified_tokens == 0 and total.num_finished == 1
    assert max(found.gaps_s) > 1.9


def test_losses_and_jitter_cost_time_and_no_tokens():
    link = {"rtt_ms": 50, "jitter_ms": 5, "loss": 0.03}
    clean = seen(system(edges(count=4, requests=2))).outcome.total
    lossy = seen(system(edges(count=4, requests=2, link=link, edge={"on_timeout": "wait"}))).outcome.total
    assert lossy.num_tokens == clean.num_tokens
    assert lossy.commit_gap_ms.p99 > 1.5 * clean.commit_gap_ms.p99


# --------------------------------------------------------------------------------------------- repeats


def test_the_same_seed_plays_the_same_history_and_another_another():
    group = edges(count=6, requests=2, think_s=0.3, link="5g", output_tokens=[10, 50])
    first, again = seen(system(group)), seen(system(group))
    assert first.outcome == again.outcome
    assert [log.commits for log in first.logs] == [log.commits for log in again.logs]
    assert seen(system(group, seed=2)).outcome != first.outcome


def test_two_hundred_edges_of_every_kind_play_together():
    kinds = [
        {"link": "wifi", "edge": {"depth_policy": "optimal"}},
        {"link": "4g", "edge": {"mode": "auto"}},
        {"link": "leo", "edge": {"pipeline": "auto", "on_timeout": "wait"}},
        {"link": "cross-region", "edge": {"mode": "cloud-only"}},
    ]
    groups = [edges(name=str(i), count=50, think_s=3, **kind) for i, kind in enumerate(kinds)]
    big = {"count": 4, "serve": {"prefill_chunk_tokens": 256}}
    found = seen(system(*groups, verifier=big, seconds=5.0, warmup_s=1.0)).outcome
    assert found.total.num_edges == 200 and found.total.num_tokens > 5000
    assert found.total.num_failed == 0


def test_a_gate_over_traces_without_confidences_is_refused_by_name():
    with pytest.raises(UsageError, match=r"edges\[0\]: acceptance: a gate asks how sure the draft is"):
        seen(system(edges(**ONCE, edge={"gate": "stop", "gate_nll": 0.5})))


def test_lengths_remembered_by_shape_are_the_codecs_own(monkeypatch):
    seen_types, request_bytes, response_bytes = set(), network.request_bytes, network.response_bytes

    def checked_request(request):
        found = request_bytes(request)
        assert found == codec.encode_request(request).ByteSize(), request
        seen_types.add(type(request).__name__)
        return found

    def checked_response(response, kind):
        found = response_bytes(response, kind)
        assert found == codec.encode_response(response, kind).ByteSize(), response
        seen_types.add(type(response).__name__)
        return found

    monkeypatch.setattr(network, "request_bytes", checked_request)
    monkeypatch.setattr(network, "response_bytes", checked_response)
    kinds = [
        {"depth_policy": "optimal"},
        {"pipeline": "on"},
        {"mode": "co-located"},
        {"method": "candidates"},
        {"reverify": True},
    ]
    groups = [edges(name=str(i), count=2, requests=3, link=OUTAGE, edge=each) for i, each in enumerate(kinds)]
    gate = {"gate": "stop", "gate_nll": 0.5}
    groups.append(edges(name="gate", requests=3, edge=gate, acceptance="embedded T=0.8"))
    seen(system(*groups))
    assert {"VerifyRequest", "Verdict", "OpenRequest", "Opened", "GeneratedTokens"} <= seen_types


def test_with_its_own_draft_length_a_crowd_is_never_slower_than_cloud_only():
    """Each session's own best length would be the ruin of all: a long draft delays its own session hardly."""

    def tokens_per_s(edge: dict[str, object]) -> float:
        group = edges(count=32, edge={"timeout_ms": 5000, **edge}, draft={"token_ms": 0.3}, link="loopback",
                      acceptance="embedded T=0.8", output_tokens=100, start_within_s=0.2)  # fmt: skip
        verifier = {
            "times": {"step_ms": 9.0, "session_ms": 0.5, "token_ms": 0.5},
            "serve": {"max_queue_ms": 1000},
        }
        return seen(system(group, verifier=verifier, seconds=5.0, warmup_s=1.5)).outcome.total.tokens_per_s

    cloud_only = tokens_per_s({"mode": "cloud-only"})
    short = tokens_per_s({"num_speculative_tokens": 3})
    assert tokens_per_s({"depth_policy": "optimal"}) > max(
        1.1 * cloud_only, 0.95 * short
    )  # 600 with each its own best


def test_sessions_that_come_back_together_share_their_steps():
    """Two halves that take turns would each pay the fixed time of a step alone."""
    group = edges(count=4, acceptance=0.8, draft={"token_ms": 0.3}, link={"rtt_ms": 1}, output_tokens=100)
    verifier = {"times": {"step_ms": 30.0, "token_ms": 0.05}}
    alone = seen(system({**group, "count": 1}, verifier=verifier, seconds=3.0)).outcome
    together = seen(system(group, verifier=verifier, seconds=3.0)).outcome
    assert together.total.tokens_per_s > 3 * alone.total.tokens_per_s
    assert together.verifiers[0].mean_batch > 3


# ------------------------------------------------------------------------------------- many sessions


@pytest.mark.parametrize("token_ms, better", [(0.2, "cloud-only"), (0.05, "speculative")])
def test_where_many_share_a_verifier_auto_is_as_fast_as_the_better_mode(token_ms, better):
    """Of 24 edges each is faster with rounds, for as long as the others stream; all of them are where tokens are
    cheap."""
    verifier = {"times": {"step_ms": 1.2, "token_ms": token_ms, "answer_ms": 0.05}}
    seconds = {}
    for mode in ("cloud-only", "speculative", "auto"):
        group = edges(
            count=24,
            requests=3,
            edge={"mode": mode, "depth_policy": "optimal"},
            link={"rtt_ms": 0.8},
            draft={"token_ms": 0.6},
            acceptance="embedded T=0.8",
            output_tokens=96,
        )
        seconds[mode] = max(log.end_s for log in seen(system(group, verifier=verifier)).logs)
    assert min(seconds, key=lambda mode: (mode == "auto", seconds[mode])) == better, seconds
    assert seconds["auto"] <= 1.05 * seconds[better], seconds
