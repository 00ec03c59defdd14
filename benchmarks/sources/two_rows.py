"""The embedded draft with two rows in every run, as no draft is run: it shows what one row alone changes.

onnxruntime multiplies one row by another kernel than two and more, and a row of 2 to 16 has the same bits whatever is
beside it. With a second row beside single tokens a staged draft and one without stages must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.onnx.sequence import OnnxDraftSequence
from outrider.edge_client.drafting.rows.rows import Rows
from outrider.edge_client.drafting.spec import HIDDEN

_BIAS = np.triu(np.full((2, 2), HIDDEN, np.float32), 1)
_PADDING_ID = 0


class TwoRowRunner(OnnxRunner):
    """Feeds a token beside a padding token, whose KV is past what is valid; the next call overwrites it."""

    def feed(self, token_ids: Sequence[int], num_past: int) -> Rows:
        """See `OnnxRunner.feed`."""
        if len(token_ids) > 1 or num_past + 2 > self._spec.max_context:
            return super().feed(token_ids, num_past)
        fed = (*token_ids, _PADDING_ID)
        return self.feed_nodes(fed, (num_past, num_past + 1), _BIAS, num_past).one(0)


class TwoRowModel(OnnxDraftModel):
    """Is the draft in a directory, run with two rows."""

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> OnnxDraftSequence:
        """See `OnnxDraftModel.sequence`."""
        sequence = super().sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)
        sequence._runner = TwoRowRunner(self._session, self.spec, sampling.temperature)
        return sequence
