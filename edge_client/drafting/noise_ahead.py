"""The noise that both sides share, made for coming positions while a round is in flight.

A position's noise depends on nothing but the seed, and every position comes: what is made ahead is made once, and
the next draft does not wait for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.common.noise.draws import NoiseRow, gumbel_at, gumbel_of_lanes, noise_row
from outrider.common.noise.philox import TokenIdArray

MAX_AHEAD_BYTES = 16 << 20  # that are worth preparing: 13 positions of 150,000 tokens
NOISE_BYTES = 8  # a token of one position


class NoiseAhead:
    """Keeps the noise of one seed by position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rows: dict[int, NoiseRow] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def row(self, position: int, num_tokens: int) -> NoiseRow:
        """Returns the noise at a position, made now where it was not before."""
        found = self._rows.get(position)
        if found is None:
            found = self._rows[position] = noise_row(self._seed, position, num_tokens)
        return found

    def gumbel_at(self, position: int, token_ids: TokenIdArray) -> NDArray[np.float64]:
        """Returns the noise of a few ids at a position: float64 [n]."""
        found = self._rows.get(position)
        if found is None:
            return gumbel_at(self._seed, position, token_ids)
        return gumbel_of_lanes(found.lanes[np.asarray(token_ids)])

    def drop_before(self, position: int) -> None:
        """Drops what no draft needs any more."""
        for each in [each for each in self._rows if each < position]:
            del self._rows[each]
