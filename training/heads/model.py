"""The heads of one kind as they are trained together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outrider.cloud_verifier.heads.modules import HydraHead, MedusaHead


@dataclass(frozen=True)
class Kind:
    """Describes a kind of heads."""

    make: Callable[[int, int, int], nn.Module]
    """Makes the head at an index, from 0, of a hidden size and a number of blocks."""
    sees_tokens: bool
    """Whether the head at index k gets the embeddings of the k + 1 tokens after h, too."""


KINDS = {
    "medusa": Kind(lambda size, _index, num_blocks: MedusaHead(size, num_blocks), sees_tokens=False),
    "hydra": Kind(lambda size, index, num_blocks: HydraHead(size, index + 1, num_blocks), sees_tokens=True),
}


@dataclass(frozen=True)
class HeadsShape:
    """Describes a set of heads."""

    kind: str = "medusa"
    num_heads: int = 4
    num_blocks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind}: choose from {', '.join(KINDS)}")
        if self.num_heads < 1:
            raise ValueError(f"--num-heads {self.num_heads}: give at least 1")
        if self.num_blocks < (self.kind == "medusa"):  # without a block it would say what the target does
            raise ValueError(f"--num-blocks {self.num_blocks}: {self.kind} takes at least 1")


class Heads(nn.Module):
    """Guesses tokens from the target's last hidden state: the head at index k that of k + 2 places further on."""

    def __init__(self, shape: HeadsShape, size: int) -> None:
        super().__init__()
        self.shape, self.size, kind = shape, size, KINDS[shape.kind]
        self.sees_tokens = kind.sees_tokens
        self.heads = nn.ModuleList(
            kind.make(size, index, shape.num_blocks) for index in range(shape.num_heads)
        )

    def row(self, index: int, hidden: Tensor, following: Sequence[Tensor]) -> Tensor:
        """Returns what the output embedding scores: of [num_rows, size] hidden states, and the embeddings of the
        index + 1 tokens after each, oldest first, [num_rows, size]."""
        head: Any = self.heads[index]
        row: Tensor = head(hidden, following) if self.sees_tokens else head(hidden)
        return row
