"""Indices in few bits: exact, of the size promised, and refused when they do not fit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.compression.sparse import Message, _Rows
from stenograd.compressors.topk import TopK
from stenograd.errors import WireError
from stenograd.kernels.indices import indices_bytes, pack_indices, unpack_indices
from stenograd.simulate import exchange

SIZES = [
    (0, 0),
    (5, 0),
    (1, 1),
    (10, 10),
    (1000, 999),
    (257, 1),
    (300, 150),
    (431_080, 4311),
    (2**31, 1),
    (2**31, 7),
    (2**31 - 5, 1000),
]


def _places(n, k, seed=0):
    rng = np.random.default_rng(seed)
    drawn = rng.choice(n, k, replace=False) if n < 10**6 else np.unique(rng.integers(0, n, k))
    return torch.from_numpy(np.sort(drawn)).long()


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_places_come_back(n, k):
    random = _places(n, k)
    first, last = torch.arange(random.numel()), torch.arange(n - random.numel(), n)
    for places in (random, first, last):
        packed = pack_indices(places, n)
        assert packed.dtype is torch.uint8
        assert packed.numel() == indices_bytes(n, places.numel())
        assert torch.equal(unpack_indices(packed, n, places.numel()).long(), places)


@settings(max_examples=60)
@given(n=st.integers(1, 3000), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_places_take_less_than_two_bits_more_than_their_low_bits(n, share, seed):
    """l k low bits and at most k + n / 2**l marks, n / 2**l < 2 k; each part is rounded up to bytes."""
    k = max(1, round(share * n))
    back = unpack_indices(pack_indices(_places(n, k, seed), n), n, k)
    assert torch.equal(back.long(), _places(n, k, seed))
    low = (n // k).bit_length() - 1
    assert 8 * indices_bytes(n, k) <= k * (low + 3) + 8 * (low // 8 + 2)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("n", [1 << 31, 1 << 33])
def test_places_beyond_int32_come_back(n, compact):
    """Where int32 holds all of them it is what travels."""
    places, values = torch.tensor([3, n // 2 + 1, n - 1]), torch.ones(3)
    form = Message(n, 3, compact, None)
    sent = form.write(places, values)
    assert form.read(sent)[0].tolist() == places.tolist()
    rows = _Rows(3, n - 3, compact, halves=False)
    sent_rows = rows.write(places[None], values[None])
    assert rows.read(tuple(t[0] for t in sent_rows))[0].tolist() == places.tolist()
    if not compact:
        wanted = torch.int32 if n == 1 << 31 else torch.int64
        assert sent[0].dtype is sent_rows[0].dtype is wanted


def test_other_sizes_are_refused():
    packed = pack_indices(_places(1000, 10), 1000)
    with pytest.raises(WireError, match="11 of 1000 indices take"):
        unpack_indices(packed, 1000, 11)
    with pytest.raises(WireError, match="the ranks disagree on k"):
        unpack_indices(torch.zeros_like(packed), 1000, 10)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_compact_topk_gives_what_topk_gives(ratio, dtype):
    """Of `values=float30`, an earlier form, the text still works: it means float32, which is exact."""
    xs = [torch.randn(5000, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)]
    plain = exchange(TopK(ratio=ratio, values="float32", compact=False), xs, want_error=True)
    requests = []
    compact = exchange(TopK(ratio=ratio, values="float30"), xs, want_error=True, spy=requests.append)
    for a, b in zip(plain, compact, strict=True):
        assert torch.equal(a.average, b.average)
        assert torch.equal(a.error, b.error)
    k, n = round(ratio * 5000), 5000
    assert sum(r.nbytes for r in requests) == indices_bytes(n, k) + dtype.itemsize * k
