"""The target's features of a session's last tokens, from the forward that computed them to the head that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FeatureLog:
    """Holds features of consecutive tokens, those up to the end of the session's KV: what is done to the KV is done to
    them. Rows are tensors, which this module only slices."""

    def __init__(self, *, keeps_all: bool) -> None:
        """Without `keeps_all` the last token's alone are kept from one forward to the next."""
        self._keeps_all = keeps_all
        self._rows: Any = None  # [end - start, size]
        self.start = self.end = 0  # positions

    @property
    def num_bytes(self) -> int:
        """Returns the size of the features."""
        return 0 if self._rows is None else int(self._rows.nbytes)

    def append(self, start: int, rows: Any) -> None:
        """Takes features of the tokens from `start` on; those before stay where all are kept and these follow."""
        if self._rows is not None and start == self.end and self._keeps_all:
            self._rows = _joined(self._rows, rows)
        else:
            self._rows, self.start = rows.clone(), start  # not a view of the whole forward's
        self.end = self.start + len(self._rows)

    def keep(self, start: int, nodes: Sequence[int]) -> None:
        """Keeps the tokens before `start` and after them those of `nodes`, a path of the tree fed at `start`."""
        if self._rows is not None and self.start <= start <= self.end:
            first = start - self.start
            self._rows = self._rows[[*range(first), *(first + node for node in nodes)]]
            self.end = start + len(nodes)

    def truncate(self, length: int) -> None:
        """Keeps the tokens before position `length`: nothing where it has none of these, so that no head begins with
        features of no token."""
        if length <= self.start:
            self.forget()
        elif self._rows is not None and self.end > length:
            self._rows = self._rows[: length - self.start]
            self.end = length

    def forget(self) -> None:
        """Drops everything."""
        self._rows, self.start, self.end = None, 0, 0

    def take(self) -> Any:
        """Returns the rows, and drops all but the last."""
        rows = self._rows
        if rows is not None and len(rows):
            self._rows, self.start = rows[-1:].clone(), self.end - 1
        return rows

    def drop_oldest(self) -> int:
        """Drops the older half, of one row nothing; returns the bytes that this frees."""
        num_bytes, num_dropped = self.num_bytes, (self.end - self.start) // 2
        if num_dropped:
            self._rows, self.start = self._rows[num_dropped:].clone(), self.start + num_dropped
        return num_bytes - self.num_bytes


def _joined(first: Any, then: Any) -> Any:
    import torch  # where the rows come from; an engine without heads need not have it

    return torch.cat((first, then))
