"""`str.accept`: tokens a round where both sides obey a schema, against those where the draft does not know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

from benchmarks.results_file import Found
from benchmarks.structured.clients import load_texts, serving_client
from benchmarks.structured.schemas import make_schemas
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.library.client import Client
from outrider.experiments.shared.results import Measure, judged

NUM_TEXTS, NUM_NEW, NUM_DRAFTED = 60, 128, 4


def run() -> Found:
    """Returns the measure; texts are the same, as `coupled` makes them."""
    with serving_client(mode="speculative", num_speculative_tokens=NUM_DRAFTED) as client:
        both = _tokens_a_round(client)
        with (
            patch.object(OnnxDraftModel, "sequence", _sequence_without),
            patch.object(Drafter, "num_obeying", _all),
        ):
            verifier_alone = _tokens_a_round(client)
    what = f"tokens a round, {NUM_DRAFTED} drafted, temperature .8: both sides masked : the verifier alone"
    above = "> 1", lambda value: value > 1
    return [
        judged("str.accept", what, both / verifier_alone, "ratio", above),
        Measure("str.accept.both", "tokens a round, both sides masked", round(both, 4), "tokens"),
    ], {"verifier_alone": verifier_alone}


def _tokens_a_round(client: Client) -> float:
    num_tokens = num_rounds = 0.0
    for number, (prompt, schema) in enumerate(zip(load_texts(), make_schemas(NUM_TEXTS), strict=False)):
        result = client.generate(
            prompt, json_schema=schema, temperature=0.8, seed=number, max_new_tokens=NUM_NEW
        )
        ours = result.usage["outrider"]
        assert isinstance(ours, dict)
        num_tokens += ours["tokens_per_round"] * ours["num_rounds"]
        num_rounds += ours["num_rounds"]
    return num_tokens / num_rounds


_sequence = OnnxDraftModel.sequence


def _sequence_without(
    model: OnnxDraftModel,
    sampling: SamplingParams,
    *,
    num_prompt_tokens: int | None = None,
    num_support: int = 0,
) -> OnnxDraftSequence:
    sampling = replace(sampling, grammar=None)
    return _sequence(model, sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)


def _all(drafter: Drafter, token_ids: Sequence[int], after: TokenIds) -> int:
    return len(after)
