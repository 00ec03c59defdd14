"""What stands in for a GPU's parts on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

Run = Callable[[], torch.Tensor]


class RunAgain:
    """Stands in for the capture of CUDA graphs: the same is run again over the memory that it was given."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, run: Run) -> Run:
        """Returns what runs it again, and leaves what it returns where it was."""
        self.num_captures += 1
        out = run()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay
