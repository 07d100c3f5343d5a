"""Selection of the largest magnitudes: the shortcut is exact."""

import pytest
import torch

from stenograd.kernels.select import select

N = 200_000


def _places(x, k):
    return select(x, k)[0].long()


def _normal():
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


CASES = {
    "normal": _normal(),
    "heavy tails": _normal() ** 5,
    "layers of other orders": _normal() * torch.logspace(-6, 2, N),
    "mostly zero": _normal() * (_normal().abs() > 2.9),
    "all zero": torch.zeros(N),
    "all equal": torch.ones(N),
    "a period that fools a regular sample": torch.arange(N).remainder(7).float() * _normal(),
    "bfloat16": _normal().bfloat16(),
}


@pytest.mark.parametrize("k", [1, 20, 2000, N // 16, N // 2, N])
@pytest.mark.parametrize("x", CASES.values(), ids=CASES)
def test_the_shortcut_finds_the_largest(x, k):
    """Ties may be broken in another way, so magnitudes are compared, and places must differ."""
    places = _places(x, k)
    assert places.unique().numel() == k
    got = x[places].abs().sort(descending=True).values
    assert torch.equal(got, torch.topk(x.abs(), k).values)
