"""The kernels of few levels: numba against plain torch, bit for bit, and against trying all levels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import WireError
from stenograd.kernels.lowbit import lowbit_decode, lowbit_encode
from stenograd.testing.checks import Plain

cpu = pytest.importorskip("stenograd.kernels.cpu.lowbit")

reference = Plain("lowbit")
FORMATS = ("e3m0", "int4", "int2")
KINDS = ("normal", "zeros", "negative zeros", "special", "subnormal", "huge", "ties")
LAYOUTS = st.lists(st.integers(0, 90), max_size=4) | st.sampled_from([[1024], [2049, 3], [31, 33, 64]])


def data(n, kind, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 1, generator=g)[1:]
    if kind in ("zeros", "negative zeros"):
        x = x * 0 if kind == "zeros" else -(x * 0).abs()
    elif kind == "special" and n:
        x[torch.randint(n, (n // 50 + 1,), generator=g)] = float("nan")
        x[-1] = -float("inf")
    elif kind == "subnormal":
        x = x * 1e-42
    elif kind == "huge":
        x = x * 5e37
    elif kind == "ties":  # halves of levels, of integers and of powers of two
        x = torch.randint(-56, 57, (n,), generator=g) / 56 * 2.0 ** torch.randint(-7, 1, (n,), generator=g)
    return x


def equal(a, b):
    assert a.dtype == b.dtype
    assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if a.is_floating_point() else torch.equal(a, b)


@settings(max_examples=200)
@given(
    numels=LAYOUTS,
    name=st.sampled_from(FORMATS),
    block=st.sampled_from([1, 3, 32, 100, 512]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_versions_agree(numels, name, block, kind, seed):
    x = data(sum(numels), kind, seed)
    before = x.clone()
    ours = cpu.lowbit_encode(x, name, block, numels)
    theirs = reference.lowbit_encode(x, name, block, numels)
    for mine, plain in zip(ours, theirs, strict=True):
        equal(mine, plain)
    equal(x, before)
    read = cpu.lowbit_decode(ours, name, block, numels)
    plain = reference.lowbit_decode(ours, name, block, numels)
    assert torch.equal(read.isnan(), plain.isnan())
    equal(read, plain)


@pytest.mark.parametrize("name", FORMATS)
def test_the_nearest_level_is_sent(name):
    """Found by trying all levels in float64; between two that are equally near either will do."""
    table = {
        "e3m0": [0.0, *(2.0**k for k in range(-6, 1)), *(-(2.0**k) for k in range(-6, 1))],
        "int4": [k / 7 for k in range(-7, 8)],
        "int2": [-1.0, 0.0, 1.0],
    }[name]
    x = data(5000, "normal", 3)
    got = lowbit_decode(lowbit_encode(x, name, 64, [4096, 904]), name, 64, [4096, 904]).double().numpy()
    rows = np.split(x.double().numpy(), range(64, 5000, 64))
    for row, sent in zip(rows, np.split(got, range(64, 5000, 64)), strict=True):
        scale = np.abs(row).max()
        nearest = np.abs(row[:, None] - scale * np.array(table)).min(1)
        assert np.allclose(np.abs(row - sent), nearest, atol=1e-6)


def test_a_message_of_another_length_is_refused():
    codes, scales = lowbit_encode(torch.ones(9), "e3m0", 4, [9])
    for payload in ((codes[:-1], scales), (codes, scales[:-1])):
        for version in (cpu, reference):
            with pytest.raises(WireError):
                version.lowbit_decode(payload, "e3m0", 4, [9])
