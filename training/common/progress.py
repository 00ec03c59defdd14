"""One progress bar for all training: a bar on a terminal, a plain line every half minute where output is
piped.
"""

import sys
import time
from types import TracebackType

from tqdm import tqdm

_PLAIN_INTERVAL_S = 30.0


class Progress:
    """Shows the share of the budget done, with the loss, the speed and the time left. A context manager."""

    def __init__(self, name: str, done: float = 0.0, is_shown: bool = True) -> None:
        self._name, self._done, self._first = name, done, done
        self._is_plain = is_shown and not sys.stderr.isatty()
        self._printed_at, self._started_at = 0.0, time.monotonic()
        self._bar = tqdm(
            total=100.0,
            initial=100 * done,
            desc=name,
            disable=self._is_plain or not is_shown,
            bar_format="{desc} {percentage:5.1f}%|{bar}| {postfix}",
        )

    def update(self, done: float, step: int, loss: float | None, tokens: int, tokens_per_s: float) -> None:
        """Show the state after one optimiser step, or (no loss) while text is being sampled."""
        state = "sampling" if loss is None else f"step {step}, loss {loss:.3f}"
        text = f"{state}, {tokens / 1e6:.2f} M tokens, {tokens_per_s:.0f} tokens/s, {self._left(done)}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(100 * (done - self._done))
        self._done = done
        if self._is_plain and time.monotonic() - self._printed_at >= _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            print(f"{self._name}: {done:.1%}, {text}", file=sys.stderr, flush=True)

    def _left(self, done: float) -> str:
        gained = done - self._first
        if gained <= 0:
            self._started_at = time.monotonic()  # sampling before the first step is not of the budget
            return "? min left"
        return f"{(time.monotonic() - self._started_at) * max(0.0, 1 - done) / gained / 60:.1f} min left"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
