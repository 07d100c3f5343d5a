"""Numbers on which all versions of a kernel must agree, bit for bit."""

import torch
from hypothesis import strategies as st

KINDS = ("normal", "ties", "zeros", "special", "rare", "subnormal", "huge", "outliers")
LAYOUTS = st.lists(st.integers(0, 90), max_size=4) | st.sampled_from([[1024], [2049, 3], [31, 33, 64]])


def data(n, kind, seed):
    """Return a gradient and a residual; both start inside a larger buffer."""
    g = torch.Generator().manual_seed(seed)
    x, r = torch.randn(n + 3, generator=g)[3:], torch.randn(n + 1, generator=g)[1:]
    if kind == "ties":
        x, r = x.round(), r.round()
    elif kind == "zeros":  # of either sign
        x, r = x * 0, r * 0
    elif kind == "special" and n:
        x[torch.randint(n, (n // 50 + 1,), generator=g)] = float("nan")
        x[0], r[-1] = float("inf"), -float("inf")
    elif kind == "rare":
        x, r = x * (torch.rand(n, generator=g) < 0.002), r * 0
    elif kind == "subnormal":
        x, r = x * 1e-42, r * 1e-43
    elif kind == "huge":
        x, r = x * 5e37, r * 5e37
    elif kind == "outliers":  # all in one stretch, and between the sampled places
        x[n // 2 : n // 2 + n // 20] += 100
    return x, r


def same(a, b):
    """Compare tuples of tensors by their bits; any NaN equals any other."""
    assert len(a) == len(b)
    for s, t in zip(a, b, strict=True):
        assert s.dtype is t.dtype
        if s.is_floating_point():
            assert torch.equal(s.isnan(), t.isnan())
            s, t = s.nan_to_num(7.0), t.nan_to_num(7.0)
        assert s.contiguous().view(torch.uint8).tolist() == t.contiguous().view(torch.uint8).tolist()
