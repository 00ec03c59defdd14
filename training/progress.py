"""One progress bar for all training: a bar on a terminal, a plain line every half minute where output is
piped.
"""

import sys
import time
from types import TracebackType

from tqdm import tqdm

_PLAIN_INTERVAL_S = 30.0


class Progress:
    """Minutes done of minutes budgeted, with the loss and the speed. A context manager."""

    def __init__(self, name: str, budget_s: float, done_s: float = 0.0) -> None:
        self._name, self._budget_s, self._last_s = name, budget_s, done_s
        self._is_plain = not sys.stderr.isatty()
        self._printed_at = 0.0
        self._bar = tqdm(
            total=round(budget_s),
            initial=round(done_s),
            desc=name,
            disable=self._is_plain,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total} s {postfix}",
        )

    def update(
        self, elapsed_s: float, step: int, loss: float | None, tokens: int, tokens_per_s: float
    ) -> None:
        """Show the state after one optimiser step, or (no loss) while text is being sampled."""
        left_min = max(0.0, self._budget_s - elapsed_s) / 60
        state = "sampling" if loss is None else f"step {step}, loss {loss:.3f}"
        speed = f"{tokens / 1e6:.2f} M tokens, {tokens_per_s:.0f} tokens/s"
        text = f"{state}, {speed}, {left_min:.1f} min left"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(elapsed_s - self._last_s)
        self._last_s = elapsed_s
        if self._is_plain and time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
