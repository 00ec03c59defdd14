"""Turns cost what they took: a tenant whose rounds keep the host busy gets no more of it. In virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from support.fakes import FakeBackend
from test_engine import Harness
from test_scheduler import Item, a_prompt, a_round

from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.scheduler import (
    ADMISSION_S,
    HOST_SHARE,
    MAX_DEBT_S,
    OTHERS_ABOUT_S,
    FairQueue,
    Scheduler,
)
from outrider.cloud_verifier.engine.session import MAX_STORED_ENTRIES, MAX_STORED_REPLIES
from outrider.common.types import (
    Closed,
    CloseRequest,
    Opened,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    SamplingParams,
    Verdict,
    VerifyRequest,
)

STEP_TOKENS, TOKEN_S = 100, 0.001


def run(scheduler: Scheduler, works: list[Item], host_s: dict[str, float], num_steps: int) -> Counter[str]:
    """Returns the host seconds of each tenant, whose rounds always want something, under `step`."""
    spent: Counter[str] = Counter()
    for _ in range(num_steps):
        shares = scheduler.plan(works, 0.0).shares
        step_s = sum(host_s[works[share.index].tenant] for share in shares)
        spent["longest"] = max(spent["longest"], step_s)
        served = [works[share.index] for share in shares]
        num_tokens = sum(share.num_tokens for share in shares)
        scheduler.observe(num_tokens, 0, TOKEN_S * num_tokens)
        for work in served:
            scheduler.charge(work, host_s[work.tenant])
            spent[work.tenant] += host_s[work.tenant] + TOKEN_S * work.size
            spent[f"rounds of {work.tenant}"] += 1
        works = [work for work in works if not any(work is each for each in served)] + served
    return spent


def test_a_tenant_whose_rounds_take_the_host_long_gets_the_same_time_and_fewer_rounds() -> None:
    works = [a_round(5, tenant) for tenant in ("slow", "plain") for _ in range(100)]
    spent = run(Scheduler(STEP_TOKENS), works, {"slow": 0.02, "plain": 0.0}, 600)
    assert 0.8 < spent["slow"] / spent["plain"] < 1.25
    assert spent["rounds of plain"] > 3 * spent["rounds of slow"]


def test_a_step_shared_by_tenants_takes_the_host_at_most_a_quarter_of_the_largest_forward() -> None:
    works = [*(a_round(1, "slow") for _ in range(90)), a_round(5, "plain")]
    scheduler = Scheduler(STEP_TOKENS)
    run(scheduler, works, {"slow": 0.01, "plain": 0.0}, 5)  # which is found out
    spent = run(scheduler, works, {"slow": 0.01, "plain": 0.0}, 200)
    assert spent["longest"] <= HOST_SHARE * STEP_TOKENS * TOKEN_S + 1e-9
    assert spent["rounds of plain"] == 200, "whoever wants little is part of every step"


def test_a_tenant_that_pauses_between_its_rounds_is_expected_back() -> None:
    slow, plain = [a_round(1, "slow") for _ in range(90)], a_round(5, "plain")
    scheduler = Scheduler(STEP_TOKENS)
    run(scheduler, [*slow, plain], {"slow": 0.01, "plain": 0.0}, 5)
    most = HOST_SHARE * STEP_TOKENS * TOKEN_S / 0.01
    assert len(scheduler.plan(slow, 1.0).shares) <= most and scheduler.host_budget_s < 1.0
    assert len(scheduler.plan(slow, 1.0 + OTHERS_ABOUT_S).shares) == 90


def test_a_tenant_alone_fills_its_steps_whatever_they_take() -> None:
    works = [a_round(5, "slow") for _ in range(100)]
    spent = run(Scheduler(STEP_TOKENS), works, {"slow": 1.0}, 10)
    assert spent["rounds of slow"] == 10 * STEP_TOKENS / 5


def test_prompts_that_take_the_host_long_are_not_shut_out_by_rounds() -> None:
    works = [a_prompt(50, "slow"), *(a_round(5, "plain") for _ in range(5)), a_prompt(50, "other")]
    spent = run(Scheduler(STEP_TOKENS), works, {"slow": 10.0, "plain": 0.001, "other": 10.0}, 50)
    assert spent["rounds of slow"] >= 20


def test_jobs_are_taken_from_tenants_in_turn_by_the_time_they_took() -> None:
    queue = FairQueue()
    for tenant, number in (*(("loud", n) for n in range(50)), ("quiet", 0), ("quiet", 1)):
        queue.put(Job(bytes([number]), CloseRequest(), list, 0, tenant))
    order = []
    for _ in range(10):
        job = queue.take()
        assert job is not None
        queue.charge(job.tenant, 0.02 if job.tenant == "loud" else 0.001)
        order.append((job.tenant, job.session_id[0]))
    assert order[:3] == [("loud", 0), ("quiet", 0), ("quiet", 1)]
    assert order[3:] == [("loud", n) for n in range(1, 8)], "a tenant's jobs keep their order"
    assert len(queue) == 42


def take_all(queue: FairQueue, seconds: float, num_jobs: int) -> list[str]:
    """Returns the tenants of the next jobs, each of which takes so long."""
    order = []
    for _ in range(num_jobs):
        job = queue.take()
        assert job is not None
        queue.charge(job.tenant, seconds)
        order.append(job.tenant)
    return order


def put_closes(queue: FairQueue, tenant: str, num_jobs: int) -> None:
    for number in range(num_jobs):
        queue.put(Job(bytes([number]), CloseRequest(), list, 0, tenant))


def test_what_one_job_took_costs_its_tenant_a_few_turns() -> None:
    queue = FairQueue()
    for tenant in ("unlucky", "other"):
        put_closes(queue, tenant, 200)
    assert take_all(queue, 0.1, 1) == ["unlucky"]  # the machine stood still meanwhile
    order = take_all(queue, 0.0001, 200)
    assert "unlucky" in order[: round(MAX_DEBT_S / 0.0001) + 2]
    assert order[-50:].count("unlucky") == 25


def test_a_tenant_that_comes_back_has_no_credit() -> None:
    queue = FairQueue()
    put_closes(queue, "rare", 1)
    put_closes(queue, "busy", 200)
    take_all(queue, 0.001, 100)
    put_closes(queue, "rare", 100)
    assert take_all(queue, 0.001, 50).count("busy") in (24, 25, 26)


def test_a_step_admits_for_a_while_and_the_next_step_goes_on() -> None:
    harness = Harness(max_sessions=100)
    prompt = tuple([5] * 20)
    replies = []
    for name in range(10):
        request = OpenRequest(bytes([name]) * 16, prompt, 20, SamplingParams(temperature=0.0))
        replies.append(harness.submit(request.session_id, request))
    admit = harness.engine.admission.admit

    def slow(job: Job) -> object:
        harness.clock.now_s += ADMISSION_S * 0.4
        return admit(job)

    harness.engine.admission.admit = slow  # type: ignore[assignment, method-assign]
    assert harness.engine.step()
    assert len(harness.engine.sessions) == 3 and harness.engine.num_arrived == 7
    harness.settle()
    assert all(len(each) == 1 for each in replies)


def test_what_a_session_keeps_for_repetition_is_bounded() -> None:
    harness = Harness(max_sessions=8, max_context=64)
    session_id = bytes(16)
    opened = harness.submit(
        session_id,
        OpenRequest(session_id, (5, 6), 2, SamplingParams(temperature=0.0), num_logprobs=20, ignore_eos=True),
    )
    harness.settle()
    one = opened[0]
    for round_id in range(1, 2 * MAX_STORED_REPLIES):
        request = VerifyRequest(round_id, one.position, one.hash, (1,) * 50)  # type: ignore[union-attr]
        harness.submit(session_id, request)
        harness.settle()
    session = next(iter(harness.engine.sessions))
    assert len(session.replies) == MAX_STORED_REPLIES
    assert all(isinstance(content, int) for content, _ in session.replies.values()), "no request is kept"
    again = harness.submit(session_id, request)
    harness.settle()
    assert again == [session.replies[request.round_id][1]]


@pytest.mark.parametrize(("num_drafted", "num_kept"), [(64, 3), (200, 1)])
def test_what_a_session_keeps_of_long_replies_is_bounded_by_their_entries(
    num_drafted: int, num_kept: int
) -> None:
    """Every draft is accepted, and its tokens come with the most log-probabilities; the last reply always fits."""
    num_rounds, session_id = 6, bytes(16)
    length = 2 + num_rounds * (num_drafted + 1) + 1
    harness = Harness(FakeBackend(max_context=length + 1), max_draft_tokens=num_drafted)
    sampling = SamplingParams(temperature=0.0)
    text = [5, 6, *harness.reference((5, 6), sampling, length - 2)]
    opening = OpenRequest(session_id, (5, 6), 2, sampling, num_logprobs=20, ignore_eos=True)
    base, verdicts = harness.ask(session_id, opening), list[Verdict]()
    for round_id in range(1, num_rounds + 1):
        assert isinstance(base, Opened | Verdict)
        draft = tuple(text[base.position : base.position + num_drafted])
        base = harness.ask(session_id, VerifyRequest(round_id, base.position, base.hash, draft_tokens=draft))
        assert isinstance(base, Verdict) and base.accepted_len == num_drafted
        verdicts.append(base)
    session = next(iter(harness.engine.sessions))
    kept = [verdict for _, verdict in session.replies.values()]
    assert kept == verdicts[-num_kept:]
    sizes = [sum(1 + len(each.top_token_ids) for each in verdict.logprobs) for verdict in kept]
    assert sizes == [21 * (num_drafted + 1)] * num_kept
    assert num_kept == 1 or sum(sizes) <= MAX_STORED_ENTRIES < sum(sizes) + sizes[0]


def test_one_session_cannot_have_more_tokens_wait_than_its_context_and_drafts() -> None:
    harness = Harness(max_sessions=8, max_draft_tokens=1)
    session_id = bytes(16)
    opening = OpenRequest(session_id, tuple([5] * 40), 40, SamplingParams(temperature=0.0))
    harness.submit(session_id, opening)
    replies = [
        harness.submit(session_id, VerifyRequest(n, 41, 0, committed_tokens=(1,) * 30)) for n in range(1, 7)
    ]
    harness.engine.step()
    errors = [r[0] for r in replies if r and isinstance(r[0], RoundError)]
    refused = [error for error in errors if error.code is RoundErrorCode.REFUSED]
    assert len(refused) == 2 and "128 tokens" in refused[0].message
    harness.settle()
    closed = harness.submit(session_id, CloseRequest())
    harness.settle()
    assert isinstance(closed[0], Closed)
