"""What golden noise may differ by: the last bits of E, which are those of -log(E) near 0 too."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 4 * np.finfo(np.float64).eps


def assert_golden(noise: NDArray[np.float64], golden: Sequence[float]) -> None:
    np.testing.assert_allclose(noise, golden, rtol=TOLERANCE, atol=TOLERANCE)
