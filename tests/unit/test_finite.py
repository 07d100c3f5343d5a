"""NaN and infinity are found wherever they are."""

import math

import pytest
import torch

from stenograd.data.finite import Finite, finite_of, is_finite, not_finite


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 5000])
def test_one_infinite_element_is_found_anywhere(n):
    """The sum of 3e38 is infinite from two elements on, though each of them is finite."""
    x = torch.full((n,), 3e38)
    assert (is_finite(x), float(not_finite(x))) == (True, 0.0)
    for bad in (math.nan, math.inf, -math.inf):
        for at in {0, n // 2, n - 1} if n else ():
            y = x.clone()
            y[at] = bad
            assert (is_finite(y), float(not_finite(y))) == (False, 1.0)
            assert int(finite_of([x, y])) == Finite.NO
