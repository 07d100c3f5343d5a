"""The kernels of few levels: numba against plain torch, bit for bit, and against trying all levels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import KINDS, LAYOUTS, data, same

from stenograd.errors import WireError
from stenograd.kernels.lowbit import lowbit_decode, lowbit_encode
from stenograd.testing.checks import Plain

cpu = pytest.importorskip("stenograd.kernels.cpu.lowbit")

reference = Plain("lowbit")
FORMATS = ("e3m0", "int4", "int2")


def halves(n, seed):
    """Return halves of levels, of integers and of powers of two."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-56, 57, (n,), generator=g) / 56 * 2.0 ** torch.randint(-7, 1, (n,), generator=g)


@settings(max_examples=200)
@given(
    numels=LAYOUTS,
    name=st.sampled_from(FORMATS),
    block=st.sampled_from([1, 3, 32, 100, 512]),
    kind=st.sampled_from([*KINDS, "halves"]),
    seed=st.integers(0, 99),
)
def test_versions_agree(numels, name, block, kind, seed):
    n = sum(numels)
    x = halves(n, seed) if kind == "halves" else data(n, kind, seed)[0]
    before = x.clone()
    ours = cpu.lowbit_encode(x, name, block, numels)
    same((*ours, x), (*reference.lowbit_encode(x, name, block, numels), before))
    read = cpu.lowbit_decode(ours, name, block, numels)
    same((read,), (reference.lowbit_decode(ours, name, block, numels),))


@pytest.mark.parametrize("name", FORMATS)
def test_the_nearest_level_is_sent(name):
    """Found by trying all levels in float64; between two that are equally near either will do."""
    table = {
        "e3m0": [0.0, *(2.0**k for k in range(-6, 1)), *(-(2.0**k) for k in range(-6, 1))],
        "int4": [k / 7 for k in range(-7, 8)],
        "int2": [-1.0, 0.0, 1.0],
    }[name]
    x, _ = data(5000, "normal", 3)
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
