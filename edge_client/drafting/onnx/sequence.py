"""Drafts one sequence with the INT4 draft."""

from __future__ import annotations

from typing import Any

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.learned.learner import Learner
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.rows.dropout import DropoutPlan
from outrider.edge_client.drafting.rows.kv_sequence import KvSequence
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.spec import DraftSpec


class OnnxDraftSequence(KvSequence[OnnxRunner]):
    """Drafts one sequence in onnxruntime; `OnnxDraftModel.sequence` makes it."""

    def __init__(
        self,
        session: Any,
        spec: DraftSpec,
        sampling: SamplingParams,
        num_prompt_tokens: int | None,
        num_support: int,
        dropout: DropoutPlan | None = None,
        learner: Learner | None = None,
    ) -> None:
        sampler = DraftSampler(sampling, spec.eos_token_ids, num_support)
        runner = OnnxRunner(session, spec, sampling.temperature, dropout, has_hidden=learner is not None)
        runner.set_seed(sampling.seed)
        super().__init__(
            runner,
            sampler,
            spec.num_tokens,
            spec.max_context,
            spec.eos_token_ids,
            num_prompt_tokens,
            adapt=None if learner is None else learner.adapt,
        )
