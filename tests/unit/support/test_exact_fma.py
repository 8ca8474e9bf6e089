"""The multiply-add that Triton's interpreter is given rounds once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.exact_fma import fused

BITS = st.integers(0, 2**32 - 1)


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def is_nearest_even(got: np.float32, exact: Fraction) -> bool:
    """Whether a finite number is the rounding of an exact one: its neighbours' midpoints tell."""
    bits = int(got.view(np.uint32))
    if bits & 0x7FFFFFFF == 0:
        return abs(exact) <= Fraction(1, 2**150)
    half = [(Fraction(float(got)) + Fraction(float(float_of(bits + by)))) / 2 for by in (-1, 1)]
    low, high = min(half), max(half)
    return low < exact < high or (bits & 1 == 0 and exact in half)


@settings(max_examples=300, deadline=None)
@given(x=BITS, y=BITS, z=BITS, near=st.integers(-3, 3), cancels=st.booleans())
def test_it_is_the_rounding_of_the_exact_sum(x: int, y: int, z: int, near: int, cancels: bool) -> None:
    a, b = float_of(x), float_of(y)
    with np.errstate(all="ignore"):
        # Where the product all but cancels, what a second rounding loses is all that is left.
        c = float_of(int((-(a * b)).view(np.uint32)) + near & 0xFFFFFFFF) if cancels else float_of(z)
    got = fused(a, b, c)[()]
    if not all(map(np.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            assert np.array_equal(got, np.float64(a) * np.float64(b) + np.float64(c), equal_nan=True)
        return
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if np.isinf(got):
        assert abs(exact) >= Fraction(2**128) - Fraction(2**103)
    else:
        assert is_nearest_even(got, exact)


def test_it_rounds_once_where_float64_would_round_twice() -> None:
    x, y = (np.float32(2.0**-12 * (1 + sign * 2.0**-18)) for sign in (1, -1))
    # 2**-60 below the middle of z and its neighbour; float64 does not see that, and the middle's even neighbour is up.
    z = np.float32(1 + 2.0**-23)
    assert fused(x, y, z)[()] == z
    assert np.float32(np.float64(x) * np.float64(y) + np.float64(z)) == np.float32(1 + 2.0**-22)
