"""A fused multiply-add in float32 for numpy, exact: x * y + z rounded once.

Triton's interpreter multiplies and then adds in 3.6, which rounds twice. Later versions have a fused one of their own;
the tests put this one in its place everywhere, so that they hold on all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fused(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    z: NDArray[np.float32],
) -> NDArray[np.float32]:
    """x * y + z, rounded once to nearest even, of arrays or scalars that broadcast."""
    with np.errstate(all="ignore"):
        product = np.asarray(x, np.float64) * np.asarray(y, np.float64)  # exact: 48 bits
        other = np.asarray(z, np.float64)
        total = np.asarray(product + other)
        # What the addition lost (Knuth's TwoSum): exact, and no number where the total is not finite.
        back = total - product
        lost = (product - (total - back)) + (other - back)
        # Round to odd: an inexact total whose last bit is 0 moves by one towards what was lost. Its last bit then says
        # "inexact", and rounding it to float32, 29 bits shorter, is rounding the exact sum (Boldo and Melquiond,
        # "Emulation of FMA and correctly rounded sums", 2008).
        bits = total.view(np.int64)
        away = np.where((lost > 0) == (total > 0), 1, -1)
        inexact = np.isfinite(total) & (lost != 0) & ((bits & 1) == 0)
        return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)
