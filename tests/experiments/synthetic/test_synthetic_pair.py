"""Synthetic models: they stand as often as asked, take the time asked, and run through the real engine."""

from __future__ import annotations

import math
import time

import pytest
from support.processes.decoding import decode
from support.processes.server import serving
from support.timed import timed

from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.common.errors import UsageError
from outrider.common.types import Method, SamplingParams
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.synthetic.draft import SyntheticDraft, SyntheticTokenizer
from outrider.experiments.synthetic.keyed import KeyedTokens
from outrider.experiments.synthetic.pair import SyntheticPair, pair_from
from outrider.experiments.synthetic.serve import running_synthetic
from outrider.experiments.synthetic.target import SyntheticBackend

PROMPT = SyntheticTokenizer().encode("def read_lines(path):")


def judged_by_position(pair: SyntheticPair, depth: int, num_judged: int) -> dict[int, list[bool]]:
    """Rounds of one length as `coupled` would judge them, until the first position was judged so often."""
    tokens = KeyedTokens(pair.seed)
    sequence = SyntheticDraft(pair).sequence(SamplingParams(seed=7), num_prompt_tokens=len(PROMPT))
    sequence.commit(PROMPT)
    found: dict[int, list[bool]] = {i: [] for i in range(depth)}
    while len(found[0]) < num_judged:
        draft = sequence.propose(depth).token_ids
        target = tokens.between(sequence.position, sequence.position + depth + 1).tolist()
        num_accepted = next((i for i in range(depth) if draft[i] != target[i]), depth)
        for i in range(min(num_accepted + 1, depth)):
            found[i].append(i < num_accepted)
        sequence.commit(target[: num_accepted + 1])
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.97, 1.0])
def test_over_20000_positions_tokens_stand_as_often_as_asked(alpha: float) -> None:
    judged = judged_by_position(SyntheticPair((alpha,)), 1, 20_000)[0]
    standard_error = math.sqrt(alpha * (1 - alpha) / len(judged))
    assert abs(sum(judged) / len(judged) - alpha) <= standard_error


def test_each_position_of_a_draft_has_its_own_chance_given_those_before() -> None:
    asked = (0.9, 0.7, 0.5)
    judged = judged_by_position(SyntheticPair(asked), 4, 10_000)
    for position, alpha in enumerate((*asked, asked[-1])):
        share = sum(judged[position]) / len(judged[position])
        assert abs(share - alpha) <= 2 * math.sqrt(alpha * (1 - alpha) / len(judged[position]))


def test_what_is_drafted_does_not_depend_on_how_far_and_is_the_same_again() -> None:
    def propose(num: int, seed: int = 1, prompt: list[int] = PROMPT) -> tuple[int, ...]:
        sequence = SyntheticDraft(SyntheticPair((0.5,))).sequence(SamplingParams(seed=seed))
        sequence.commit(prompt)
        return sequence.propose(num).token_ids

    assert propose(64)[:5] == propose(5) == propose(5)
    assert propose(64) != propose(64, seed=2), "another seed, other luck"
    assert propose(64) != propose(64, prompt=[*PROMPT[:-1], 99]), "another prompt, other luck"


def test_reading_a_prompt_in_pieces_changes_no_luck() -> None:
    draft = SyntheticDraft(SyntheticPair((0.5,)))
    whole = draft.sequence(SamplingParams(), num_prompt_tokens=len(PROMPT))
    pieces = draft.sequence(SamplingParams(), num_prompt_tokens=len(PROMPT))
    whole.commit(PROMPT)
    pieces.commit(PROMPT[:5])
    pieces.propose(1)
    pieces.commit(PROMPT[5:])
    assert pieces.propose(32) == whole.propose(32)


@pytest.mark.parametrize("method", [Method.COUPLED, Method.SPARSE, Method.BLOCK, Method.CANDIDATES])
def test_sessions_over_the_wire_write_the_targets_text_at_the_acceptance_asked(method: Method) -> None:
    pair = SyntheticPair((0.8,), seed=3)
    draft = SyntheticDraft(pair)
    drafter = CoLocatedDrafter(SyntheticDraft(pair))
    with serving(SyntheticBackend(pair), drafter=drafter) as server:
        address, sampling = f"127.0.0.1:{server.port}", SamplingParams(temperature=0.8, seed=5)
        result = decode(address, PROMPT, sampling, draft=draft, num_new=400, depth=4, method=method)
        there = decode(
            address, PROMPT, sampling, mode=ExecutionMode.CO_LOCATED, num_new=400, depth=4, method=method
        )
        alone = decode(address, PROMPT, sampling, num_new=400, method=method)
    expected = KeyedTokens(3).between(len(PROMPT), len(PROMPT) + 400).tolist()
    assert list(result.token_ids) == list(there.token_ids) == list(alone.token_ids) == expected
    rounds = result.stats.rounds
    assert [r.num_accepted_tokens for r in rounds] == [r.num_accepted_tokens for r in there.stats.rounds]
    judged = sum(min(r.num_accepted_tokens + 1, r.num_draft_tokens) for r in rounds)
    accepted = sum(r.num_accepted_tokens for r in rounds)
    assert abs(accepted / judged - 0.8) < 2 * math.sqrt(0.16 / judged)


@timed
def test_a_server_process_takes_its_times_and_says_that_it_is_synthetic(is_timed: bool) -> None:
    pair = SyntheticPair((0.9,), draft_token_s=0.002, target_s=0.02, verify_token_s=0.001)
    with running_synthetic(pair) as verifier:
        result = decode(
            verifier.address, PROMPT, SamplingParams(), draft=SyntheticDraft(pair), num_new=24, depth=4
        )
    assert result.model is not None and result.model.labels == pair.labels
    told = "synthetic acceptance 0.9, draft 2 ms a token, target 20 ms + 1 ms a token"
    assert pair.labels == ("synthetic", told)
    whole = [r for r in result.stats.rounds if r.num_draft_tokens == 4]
    assert whole and all(r.forward_ms >= 24.0 and r.draft_ms >= 8.0 for r in whole)
    if is_timed:
        assert min(r.forward_ms for r in whole) < 34.0 and min(r.draft_ms for r in whole) < 18.0


def test_a_draft_takes_its_time_a_token() -> None:
    sequence = SyntheticDraft(SyntheticPair(draft_token_s=0.003)).sequence(SamplingParams())
    sequence.commit(PROMPT)
    start_s = time.perf_counter()
    sequence.propose(4)
    assert time.perf_counter() - start_s >= 0.012


def test_yaml_gives_a_pair_and_errors_name_the_key() -> None:
    pair = pair_from({"alpha": [0.9, 0.8], "t_draft": "10ms", "t_target": "0.07s", "seed": 4})
    assert pair == SyntheticPair((0.9, 0.8), draft_token_s=0.01, target_s=0.07, seed=4)
    for wrong, words in (
        ({"alpha": 1.2}, r"alpha 1\.2: not a number between 0 and 1"),
        ({"t_draft": 10}, "t_draft 10: not a duration"),
        ({"t_traget": "1ms"}, "t_traget.*t_target"),
    ):
        with pytest.raises(UsageError, match=words):
            pair_from(wrong)
