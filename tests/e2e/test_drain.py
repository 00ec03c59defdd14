"""A verifier that is stopped while texts are written: nothing committed is lost, and the text goes on."""

from __future__ import annotations

import threading

import pytest
from support.processes.decoding import decode
from support.processes.forked import running_verifier, start_verifier
from support.processes.pairs import Pair
from test_faults import NUM_NEW, sampling_of
from test_same_text import make_prompt

from outrider.edge_client.drafting.base import DraftModel
from outrider.experiments.shared.processes import VerifierProcess, kept_address


@pytest.mark.parametrize("mode", ["speculative", "cloud-only"])
def test_a_text_goes_on_without_a_trace_when_its_verifier_drains_and_another_takes_its_place(
    tiny_pair: Pair, own_draft: DraftModel, mode: str
) -> None:
    prompt, sampling = make_prompt(3), sampling_of(3)
    successors: list[VerifierProcess] = []
    statuses: list[int] = []
    # Slow enough that the text is not over before the signal is.
    flags = ("--drain-grace-s", "0", "--min-forward-ms", "20")
    with (
        kept_address() as address,
        running_verifier(*flags, target=tiny_pair.target, listen=address) as verifier,
    ):
        expected = decode(address, prompt, sampling, num_new=NUM_NEW).token_ids

        def replace() -> None:
            statuses.append(verifier.stop())
            successors.append(start_verifier(target=tiny_pair.target, listen=address))

        thread = threading.Thread(target=replace)
        try:
            result = decode(
                address,
                prompt,
                sampling,
                draft=own_draft if mode == "speculative" else None,
                num_new=NUM_NEW,
                depth=2,
                on_token=lambda index: thread.start() if index == 15 else None,
            )
        finally:
            thread.join()
            for successor in successors:
                successor.stop()
    assert statuses == [0], "the drain ended by itself"
    assert result.token_ids == expected
    assert result.num_unverified_tokens == 0 and result.stats.num_rebuilds == 1
