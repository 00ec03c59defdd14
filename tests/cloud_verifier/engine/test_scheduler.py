"""Plans of single steps, and what they add up to: budgets, fairness, nobody starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud_verifier.engine.scheduler import Scheduler, Share


@dataclass
class Item:
    """A round of `num_logit_rows` rows, or a prefill; `num_pending` tokens to feed."""

    num_pending: int
    tenant: str = "default"
    num_logit_rows: int = 1
    is_prefill: bool = False
    last_step: int = 0
    size: int = 0
    num_positions: int = 0


def a_round(num_tokens: int, tenant: str = "default") -> Item:
    return Item(num_tokens, tenant, num_logit_rows=num_tokens, size=num_tokens)


def a_prompt(num_tokens: int, tenant: str = "default") -> Item:
    return Item(num_tokens, tenant, is_prefill=True, size=num_tokens)


def fed(shares: list[Share]) -> list[tuple[int, int]]:
    return [(share.index, share.num_tokens) for share in shares]


def test_rounds_come_first_and_a_prompt_gets_a_small_chunk_beside_them() -> None:
    scheduler = Scheduler(max_step_tokens=512, prefill_chunk_tokens=32)
    plan = scheduler.plan([a_prompt(2000), a_round(5), a_round(3)], now_s=0.0)
    assert fed(plan.shares) == [(1, 5), (2, 3), (0, 32)]
    assert [share.is_final for share in plan.shares] == [True, True, False]


def test_a_prompt_takes_the_whole_step_once_no_round_came_for_a_second() -> None:
    scheduler = Scheduler(max_step_tokens=512, prefill_chunk_tokens=32)
    scheduler.plan([a_round(5)], now_s=10.0)
    assert fed(scheduler.plan([a_prompt(2000)], now_s=10.9).shares) == [(0, 32)]
    assert fed(scheduler.plan([a_prompt(2000)], now_s=11.1).shares) == [(0, 512)]


def taught(max_step_tokens: int = 512, positions_a_token: int = 1024) -> Scheduler:
    """A scheduler that saw forwards where attending to so many positions takes as long as the rest of a token."""
    scheduler = Scheduler(max_step_tokens)
    for step in range(60):
        num_tokens, start = (5, 65, 256)[step % 3], (0, 1000, 4000)[step % 2]
        num_attended = num_tokens * start
        scheduler.observe(
            num_tokens, num_attended, 0.01 + 0.0002 * (num_tokens + num_attended / positions_a_token)
        )
    return scheduler


def test_tokens_after_a_long_text_count_for_what_their_attention_takes() -> None:
    late = Item(2000, is_prefill=True, num_positions=4096 - 256)
    assert fed(taught().plan([late], now_s=0.0).shares) == [(0, 512 // 5)]
    assert fed(taught().plan([a_prompt(2000)], now_s=0.0).shares)[0][1] > 400
    beside = taught().plan([late, *(a_round(5) for _ in range(4))], now_s=0.0).shares
    assert beside[-1].num_tokens == 512 // 4 // 5, "its smallest chunk takes a quarter of a step at most"
    short, long = a_round(50, "short"), a_round(50, "long")
    long.num_positions = 3 * 1024
    served = Counter[str]()
    scheduler, queue = taught(max_step_tokens=100), [*([short] * 50), *([long] * 50)]
    for _ in range(100):
        served.update(queue[share.index].tenant for share in scheduler.plan(queue, 0.0).shares)
    assert 3.5 < served["short"] / served["long"] < 4.5, "both tenants get the same time"


def test_one_forward_that_had_to_wait_changes_little_of_what_others_count_for() -> None:
    scheduler = taught()
    scheduler.observe(12, 12 * 4000, 5.0)
    late = Item(2000, is_prefill=True, num_positions=4096 - 256)
    assert 70 <= fed(scheduler.plan([late], now_s=0.0).shares)[0][1] <= 140


def test_many_prompts_get_as_many_tokens_each_as_a_round_has_and_rounds_keep_half_of_the_step() -> None:
    def num_fed(num_prompts: int, num_rounds: int) -> tuple[int, int]:
        works = [*(a_prompt(300) for _ in range(num_prompts)), *(a_round(5) for _ in range(num_rounds))]
        shares = Scheduler(max_step_tokens=512, prefill_chunk_tokens=32).plan(works, 0.0).shares
        fed_to_prompts = sum(share.num_tokens for share in shares if share.index < num_prompts)
        return fed_to_prompts, sum(share.num_tokens for share in shares) - fed_to_prompts

    assert num_fed(num_prompts=6, num_rounds=8) == (32, 40), "a few wait for small chunks, as one does"
    assert num_fed(num_prompts=40, num_rounds=8) == (200, 40)
    assert num_fed(num_prompts=199, num_rounds=1) == (256, 5)
    assert num_fed(num_prompts=100, num_rounds=100) == (256, 255)


def test_a_tenants_many_prompts_get_no_more_beside_others_rounds_than_a_tenants_rounds() -> None:
    def num_fed(*tenants: str) -> int:
        works = [*(a_prompt(300, tenant) for tenant in tenants for _ in range(50))]
        rounds = [a_round(10, "one") for _ in range(8)] + [a_round(20, "two")]
        shares = Scheduler(512, 32).plan([*works, *rounds], 0.0).shares
        return sum(share.num_tokens for share in shares if share.index < len(works))

    assert num_fed("loud") == 50, "100 tokens of two tenants"
    assert num_fed("loud", "louder", "two") == 150
    scheduler = Scheduler(512, 32)
    scheduler.plan([a_round(10), *(a_prompt(300) for _ in range(50))], 0.0)
    shares = scheduler.plan([a_prompt(300) for _ in range(50)], 0.1).shares
    assert sum(share.num_tokens for share in shares) == 256, "a round is about, though none is in this step"


def test_prompts_share_the_chunk_in_turns() -> None:
    scheduler = Scheduler(prefill_chunk_tokens=32)
    works = [a_round(1), a_prompt(2000), a_prompt(2000)]
    assert fed(scheduler.plan(works, 0.0).shares) == [(0, 1), (1, 32)]
    works = [works[0], works[2], works[1]]  # the served one went to the end
    assert fed(scheduler.plan(works, 0.0).shares) == [(0, 1), (1, 32)]


def test_a_tenant_with_one_round_is_not_behind_one_with_a_hundred() -> None:
    scheduler = Scheduler(max_step_tokens=50)
    flood = [a_round(5, "loud") for _ in range(100)]
    plan = scheduler.plan([*flood, a_round(5, "quiet")], 0.0)
    assert (100, 5) in fed(plan.shares) and len(plan.shares) == 10
    assert plan.round_tokens == {"loud": 500, "quiet": 5}


def test_a_tenant_that_was_alone_for_long_owes_little_of_it() -> None:
    scheduler = Scheduler(max_step_tokens=50)
    for _ in range(1000):
        scheduler.plan([a_round(50, "early"), a_round(1, "late")], 0.0)
    num_steps_without = 0
    while all(share.index >= 5 for share in scheduler.plan(both(), 0.0).shares):
        num_steps_without += 1
    assert num_steps_without <= 5


def both() -> list[Item]:
    return [*(a_round(10, "early") for _ in range(5)), *(a_round(10, "late") for _ in range(20))]


def test_a_round_larger_than_the_budget_goes_alone_and_whole() -> None:
    scheduler = Scheduler(max_step_tokens=8)
    assert fed(scheduler.plan([a_round(65), a_round(3)], 0.0).shares) == [(0, 65)]


def test_no_work_is_no_share() -> None:
    assert Scheduler().plan([], 0.0).shares == []


items = st.builds(
    lambda tenant, size, is_prefill: (a_prompt if is_prefill else a_round)(size, tenant),
    st.sampled_from(["a", "b", "c"]),
    st.integers(1, 20),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(items, min_size=1, max_size=10), st.integers(2, 40), st.integers(1, 40))
def test_in_every_load_each_work_gets_its_turn_within_the_budget(
    works: list[Item], max_step_tokens: int, chunk_tokens: int
) -> None:
    scheduler = Scheduler(max_step_tokens, chunk_tokens)
    # Three tenants, each at most a lead and all its work ahead of this one, at half a step a step.
    total = sum(work.size for work in works)
    most_steps = 3 * (4 * max_step_tokens + 2 * total) // (max_step_tokens // 2)
    queue = list(works)
    for step in range(1, min(2 * most_steps, 400)):
        shares = scheduler.plan(queue, now_s=0.0).shares
        served = [queue[share.index] for share in shares]
        num_fed = sum(share.num_tokens for share in shares)
        assert shares and len({share.index for share in shares}) == len(shares)
        assert num_fed <= max_step_tokens or shares[0].num_tokens > max_step_tokens // 2
        for work, share in zip(served, shares, strict=True):
            assert 0 < share.num_tokens <= work.num_pending
            assert share.is_final == (share.num_tokens == work.num_pending)
            assert share.is_final or work.num_pending - share.num_tokens >= work.num_logit_rows
            work.num_pending = work.size if share.is_final else work.num_pending - share.num_tokens
            work.last_step = step
        queue = [work for work in queue if not any(work is other for other in served)] + served
        assert step - min(work.last_step for work in queue) <= most_steps, "somebody starves"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 12))
def test_two_busy_tenants_get_the_same_whatever_they_ask_for(
    num_ours: int, num_theirs: int, our_size: int, their_size: int
) -> None:
    scheduler = Scheduler(max_step_tokens=12)
    queue = [a_round(our_size, "a") for _ in range(num_ours)]
    queue += [a_round(their_size, "b") for _ in range(num_theirs)]
    tokens = {"a": 0, "b": 0}
    total_wanted = our_size * num_ours + their_size * num_theirs
    if min(our_size * num_ours, their_size * num_theirs) < 12 or total_wanted <= 12:
        return  # no contention: each gets all it wants
    for _ in range(100):
        shares = scheduler.plan(queue, 0.0).shares
        served = [queue[share.index] for share in shares]
        for work, share in zip(served, shares, strict=True):
            tokens[work.tenant] += share.num_tokens
        queue = [work for work in queue if not any(work is other for other in served)] + served
    assert abs(tokens["a"] - tokens["b"]) <= 2 * 12
