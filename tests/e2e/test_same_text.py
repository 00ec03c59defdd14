"""Speculation must not change the text: equal to cloud-only, token for token, whatever drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.notes import Note
from support.processes.decoding import HostileDraft, Oracle, TieLedger, assert_same_text, decode

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.base import DraftModel
from outrider.experiments.shared.processes import VerifierProcess

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTHS = (1, 4, 8)
VOCAB = 512


def make_prompt(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(i) for i in rng.integers(1, 300, size=int(rng.integers(3, 60)))]


def check_matrix(
    address: str,
    drafts: dict[str, DraftModel | None],
    oracle: Oracle,
    cases: Sequence[tuple[float, int, int, str]],
    num_new: int,
) -> TieLedger:
    """Every (temperature, depth, seed, transport) case with every draft, four sessions at a time."""
    ledger = TieLedger()

    def run(case: tuple[float, int, int, str]) -> int:
        temperature, depth, seed, transport = case
        sampling = SamplingParams(temperature=temperature, seed=seed)
        prompt = make_prompt(seed)
        reference = decode(address, prompt, sampling, num_new=num_new, transport=transport).token_ids
        assert len(reference) == num_new
        num_accepted = 0
        for name, model in drafts.items():
            draft = model or HostileDraft([*prompt, *reference], VOCAB)

            def again(
                prefix: Sequence[int], n: int, draft: object = draft, name: str = name
            ) -> Sequence[int]:
                nonlocal num_accepted
                result = decode(
                    address,
                    [*prompt, *prefix],
                    sampling,
                    draft=draft,
                    num_new=n,
                    depth=depth,
                    transport=transport,
                )
                accepted = sum(r.num_accepted_tokens for r in result.stats.rounds)
                if name == "hostile":
                    assert accepted == 0, "the hostile draft was right"
                if name == "own":
                    num_accepted += accepted
                return result.token_ids

            assert_same_text(reference, again, prompt, sampling, oracle, ledger)
        return num_accepted

    with ThreadPoolExecutor(4) as pool:
        accepted = list(pool.map(run, cases))
    if "own" in drafts:
        assert sum(accepted) > len(cases), "nothing was ever accepted: the comparison proves little"
    return ledger


def test_speculative_is_cloud_only_on_a_random_target(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    random_draft: DraftModel,
    tiny_oracle: Oracle,
    note: Note,
) -> None:
    drafts = {"own": own_draft, "random": random_draft, "hostile": None}
    cases = [
        (t, d, seed, ("stream", "unary")[i % 2])
        for i, (t, d, seed) in enumerate(itertools.product(TEMPERATURES, DEPTHS, (1, 2)))
    ]
    ledger = check_matrix(tiny_verifier.address, drafts, tiny_oracle, cases, num_new=24)
    note(f"random target: {ledger.check()}")


@pytest.mark.slow
def test_speculative_is_cloud_only_over_the_whole_matrix(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    random_draft: DraftModel,
    tiny_oracle: Oracle,
    note: Note,
) -> None:
    drafts = {"own": own_draft, "random": random_draft, "hostile": None}
    cases = list(itertools.product(TEMPERATURES, DEPTHS, range(10, 18), ("stream", "unary")))
    ledger = check_matrix(tiny_verifier.address, drafts, tiny_oracle, cases, num_new=64)
    note(f"random target: {ledger.check()}")


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": ((17, 4.0), (40, -9.0))},
        {"bad_words": ((31,), (9, 8))},
        {"min_new_tokens": 10},
        {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    ],
    ids=lambda fields: "+".join(fields),
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_parameters_hold_at_drafted_positions_as_in_cloud_only(
    tiny_verifier: VerifierProcess,
    own_draft: DraftModel,
    tiny_oracle: Oracle,
    fields: dict[str, object],
    temperature: float,
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, **fields)  # type: ignore[arg-type]
    prompt = make_prompt(7)
    reference = decode(tiny_verifier.address, prompt, sampling, num_new=24).token_ids

    # Penalties depend on what is prompt and what is output, so a forced tie cannot restart: ask for equality.
    result = decode(tiny_verifier.address, prompt, sampling, draft=own_draft, num_new=24, depth=5)
    if result.token_ids != reference:
        at = next(i for i, (a, b) in enumerate(zip(result.token_ids, reference, strict=True)) if a != b)
        gap = tiny_oracle.gap(prompt, reference[:at], reference[at], result.token_ids[at], sampling)
        assert gap < 1e-4, f"token {at} differs by {gap}"


def test_a_fixed_seed_gives_one_text_and_another_seed_another(tiny_verifier: VerifierProcess) -> None:
    prompt = make_prompt(1)
    texts = [
        decode(tiny_verifier.address, prompt, SamplingParams(temperature=1.0, seed=seed)).token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
