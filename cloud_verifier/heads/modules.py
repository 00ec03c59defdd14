"""The arithmetic of draft heads, as it is trained and as it is served.

Notation: h[t] is the target's last hidden state after token t, the row that its output embedding scores; e(x) the
target's input embedding. The token after t is known when a head is asked, so a head's first guess is of token t + 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

UNSCORED = -1e4  # a logit, finite so that entropies are; exp(-1e4) is 0 in float32


class ResidualBlock(nn.Module):
    """Computes x + SiLU(W x + b); begins as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., size] to the same."""
        return x + silu(self.linear(x))


class MedusaHead(nn.Module):
    """Guesses the token k places further on from h alone (Cai et al. 2024, arXiv 2401.10774, section 2.1.1)."""

    def __init__(self, size: int, num_blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(num_blocks))
        self.output: nn.Module | None = None  # its own output embedding, where it does not share the target's

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps h [..., size] to the row [..., size] that the output embedding scores."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class HydraHead(nn.Module):
    """Guesses a token from h and the embeddings of the tokens between (Ankner et al. 2024, arXiv 2402.05109,
    section 3): of the k-th head k of them."""

    def __init__(self, size: int, num_embeddings: int, num_blocks: int = 1) -> None:
        super().__init__()
        self.inputs = nn.Linear(size * (1 + num_embeddings), size)
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(num_blocks))
        nn.init.zeros_(self.inputs.weight)
        nn.init.zeros_(self.inputs.bias)

    def forward(self, hidden: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        """Maps h [..., size] and k embeddings [..., size], oldest first, to the row [..., size] to be scored."""
        hidden = hidden + silu(self.inputs(torch.cat((hidden, *embedded), dim=-1)))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class DraftVocabulary(nn.Module):
    """Scores a part of the target's vocabulary by an output embedding of its own; the rest scores `UNSCORED`."""

    token_ids: Tensor

    def __init__(self, size: int, token_ids: Tensor, vocab_size: int) -> None:
        """`token_ids` int64 [n] are the target's ids of the rows."""
        super().__init__()
        self.linear = nn.Linear(size, len(token_ids), bias=False)
        self.register_buffer("token_ids", token_ids)
        self._vocab_size = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., size] to logits [..., vocab_size]."""
        logits: Tensor = self.linear(x)
        every: Tensor = logits.new_full((*logits.shape[:-1], self._vocab_size), UNSCORED)
        every[..., self.token_ids] = logits
        return every
