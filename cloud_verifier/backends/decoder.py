"""What computes a model: packed tokens in, logits out."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.cloud_verifier.backends.attention.plan import ForwardPlan
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind
from outrider.cloud_verifier.backends.products.ways import Linear


class Decoder(Protocol):
    """Computes the model itself."""

    is_of_transformers: bool  # its code is transformers', not ours
    writes_padding: bool  # rows that pad a step are a sequence like others, whose KV is in the spare block

    @property
    def num_weight_bytes(self) -> int:
        """Returns the bytes of all weights."""

    @property
    def most_own_rows(self) -> int:
        """Returns up to how many rows are multiplied by a kernel of ours with the bits that the library gives to as
        many, in less time the fewer they are; 0: none."""
        return 0

    def matrix_kinds(self) -> list[MatrixKind]:
        """Returns every kind of matrix whose product a forward takes, each once.

        Raises `ModelError` where a parameter is multiplied in a way that is not known.
        """

    def use_linear(self, linear: Linear) -> None:
        """Multiplies all matrices by `linear` from now on, those of `matrix_kinds` too; what is kept of other products
        or settings of the library (captured graphs) is dropped.

        Raises `ModelError` where a matrix is multiplied by other code. With torch's own `linear` all is as at first.
        """

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        """Returns logits [rows, vocab_size] of the selected rows, all where `rows` is None.

        `token_ids` and `positions` are int64 [num_rows], or int32 where the decoder writes padding. Keeps in
        `plan.features` what `plan.feature_layers` ask for.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the input embeddings [n, hidden_size] of ids [n]."""

    def score(self, features: torch.Tensor) -> torch.Tensor:
        """Returns logits [n, vocab_size] of states after the final norm [n, hidden_size]."""
