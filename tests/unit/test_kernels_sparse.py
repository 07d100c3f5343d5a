"""Selection, scatter and Elias-Fano: numba against plain torch on the same data, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import KINDS, data

from stenograd.errors import ConfigError, TensorTypeError, WireError
from stenograd.kernels.cpu import indices as cpu_places
from stenograd.kernels.cpu import scatter as cpu_scatter
from stenograd.kernels.cpu import select as cpu_select
from stenograd.kernels.indices import indices_bytes
from stenograd.kernels.scatter import put, scatter_mean
from stenograd.kernels.select import select, select_feedback
from stenograd.testing.checks import Plain

plain_places = Plain("indices")
plain_scatter = Plain("scatter")
plain_select = Plain("select")


def same(a, b):
    """Compare tuples of tensors by their bits."""
    assert len(a) == len(b)
    for s, t in zip(a, b, strict=True):
        assert s.dtype is t.dtype
        assert s.contiguous().numpy().tobytes() == t.contiguous().numpy().tobytes()


def one_nan(x):
    """Return x with all NaN alike: which of many a difference gives, no standard says."""
    return x.masked_fill(x.isnan(), float("nan"))


@settings(max_examples=150)
@given(
    n=st.integers(0, 300) | st.sampled_from([1024, 4097]),
    share=st.floats(0, 1),
    kind=st.sampled_from(KINDS),
    halves=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_k_largest_are_the_references(n, share, kind, halves, seed):
    x, r = data(n, kind, seed)
    k, theirs, before = round(share * n), r.clone(), x.clone()
    fast = cpu_select.select_feedback(x, r, k, halves)
    plain = plain_select.select_feedback(x.clone(), theirs, k, halves)
    same((*fast, one_nan(r)), (*plain, one_nan(theirs)))
    same((x,), (before,))
    same(cpu_select.select(x, k), plain_select.select(x, k))
    places, values = fast
    assert places.numel() == values.numel() == k
    assert (places.diff() > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "halves"), [(1, True), (700, False), (700, True), (5000, True)])
def test_large_tensors_take_the_guessed_bound_or_the_exact_way(kind, k, halves):
    """80,000 elements are sampled; zeros, ties and rare values make the guess fail on either side."""
    x, r = data(80_000, kind, k)
    theirs = r.clone()
    fast = cpu_select.select_feedback(x, r, k, halves)
    plain = plain_select.select_feedback(x.clone(), theirs, k, halves)
    same((*fast, one_nan(r)), (*plain, one_nan(theirs)))
    by_numpy = np.argsort(-(x.abs().view(torch.int32).numpy().astype(np.int64)), kind="stable")[:k]
    assert cpu_select.select(x, k)[0].tolist() == sorted(by_numpy.tolist())


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_taken_and_what_stays_add_up(halves):
    """A number is the sum of what bfloat16 makes of it and of what that loses, without rounding."""
    x, r = data(70_001, "normal", 0)
    whole = x + r
    places, values = select_feedback(x, r, 701, halves=halves)
    assert torch.equal(values, whole[places])
    assert torch.equal(r.index_add(0, places, values.bfloat16().float() if halves else values), whole)
    assert values.abs().min() >= r.abs().max()


@settings(max_examples=80)
@given(
    n=st.integers(1, 300) | st.just(20_000),
    ranks=st.integers(1, 5),
    ordered=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_mean_of_sparse_vectors_is_the_references(n, ranks, ordered, wide, seed):
    """The ranks choose different numbers of places; one may choose none."""
    rng = np.random.default_rng(seed)
    vectors = []
    for _ in range(ranks):
        places = rng.permutation(n)[: rng.integers(0, n + 1)]
        places = torch.from_numpy(np.sort(places) if ordered else places)
        vectors.append((places if wide else places.int(), torch.randn(places.numel())))
    out = torch.full((n,), float("nan"))
    result = cpu_scatter.scatter_mean(vectors, n, out)
    assert result is out
    same((out,), (plain_scatter.scatter_mean(vectors, n),))


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("first", [0, 1, 15, 16])
def test_large_means_end_where_they_should(ranks, first):
    """What begins at a multiple of 64 bytes is written past the caches, and nothing beside the result is."""
    n = (1 << 20) + 7
    generator = torch.Generator().manual_seed(ranks)
    vectors = []
    for _ in range(ranks):
        places = torch.randperm(n, generator=generator)[: n // 50].sort().values.int()
        vectors.append((places, torch.randn(places.numel(), generator=generator)))
    memory = torch.full((n + 32,), 7.0)
    cpu_scatter.scatter_mean(vectors, n, memory[first : first + n])
    wanted = torch.full((n + 32,), 7.0)
    wanted[first : first + n] = plain_scatter.scatter_mean(vectors, n)
    same((memory,), (wanted,))


def test_a_large_mean_may_lie_at_an_odd_address():
    n = 1 << 20
    raw = torch.zeros(4 * n + 4, dtype=torch.uint8).numpy()
    odd = torch.from_numpy(raw[1 : 1 + 4 * n].view(np.float32))
    cpu_scatter.scatter_mean([(torch.tensor([0, n - 1]), torch.tensor([1.0, 2.0]))], n, odd)
    assert raw[1:5].view(np.float32) == 1
    assert raw[4 * n - 3 : 4 * n + 1].view(np.float32) == 2


@pytest.mark.parametrize("function", [cpu_scatter.scatter_mean, plain_scatter.scatter_mean])
@pytest.mark.parametrize("places", [[-1], [5], [0, 9, 2], [2**31 - 1], [-(2**31)]])
def test_places_outside_are_refused_before_anything_is_written(function, places):
    vector = torch.tensor(places, dtype=torch.int32), torch.ones(len(places))
    with pytest.raises(WireError, match=r"indices lie in \[0, 5\)"):
        function([vector], 5)
    with pytest.raises(WireError, match=r"indices lie in \[0, 5\)"):
        function([(torch.tensor([2**32]), torch.ones(1))], 5)
    with pytest.raises(WireError, match="1 indices came with 2 values"):
        function([(torch.tensor([1]), torch.ones(2))], 5)


@settings(max_examples=100)
@given(n=st.integers(1, 3000) | st.just(2**31), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_places_have_the_compact_format(n, share, seed):
    rng = np.random.default_rng(seed)
    k = round(share * min(n, 3000))
    drawn = rng.choice(n, k, replace=False) if n < 2**31 else np.unique(rng.integers(0, n, k))
    places = torch.from_numpy(np.sort(drawn)).long()
    packed = cpu_places.pack_indices(places, n)
    same((packed,), (plain_places.pack_indices(places, n),))
    assert packed.numel() == indices_bytes(n, places.numel())
    received = torch.cat([packed[:0], torch.zeros(1, dtype=torch.uint8), packed])[1:]  # misaligned
    for unpack in (cpu_places.unpack_indices, plain_places.unpack_indices):
        assert torch.equal(unpack(received, n, places.numel()), places.int())


@settings(max_examples=150)
@given(n=st.integers(0, 2000), share=st.floats(0, 1), flips=st.integers(0, 3), seed=st.integers(0, 999))
def test_damaged_places_are_refused_or_in_range(n, share, flips, seed):
    """Random bytes, or a true payload with a few bytes changed: both versions agree on what they say."""
    rng = np.random.default_rng(seed)
    k = round(share * n)
    if flips:
        places = np.sort(rng.choice(n, k, replace=False)).astype(np.int64)
        packed = cpu_places.pack_indices(torch.from_numpy(places), n).numpy()
        for _ in range(flips if packed.size else 0):
            packed[rng.integers(packed.size)] ^= 1 << rng.integers(8)
    else:
        packed = rng.integers(0, 256, indices_bytes(n, k), dtype=np.uint8)
    said = []
    for unpack in (cpu_places.unpack_indices, plain_places.unpack_indices):
        try:
            places = unpack(torch.from_numpy(packed), n, k)
            assert ((places >= 0) & (places < n)).all()
            assert (places.diff() > 0).all()
            said.append(places.tolist())
        except WireError as error:
            said.append(str(error))
    assert said[0] == said[1]


@pytest.mark.parametrize("module", [cpu_places, plain_places])
def test_places_that_cannot_be_written_or_read(module):
    for places in ([1, 1], [2, 1], [-1, 3], [3, 10]):
        with pytest.raises(ConfigError, match=r"strictly ascending in \[0, 10\)"):
            module.pack_indices(torch.tensor(places), 10)
    with pytest.raises(WireError, match="3 of 10 indices take 2 bytes, got 5"):
        module.unpack_indices(torch.zeros(5, dtype=torch.uint8), 10, 3)
    with pytest.raises(ConfigError, match="k must be 0 to 10, got 11"):
        module.unpack_indices(torch.zeros(5, dtype=torch.uint8), 10, 11)


def test_wrong_arguments_say_what_is_wrong():
    x = torch.zeros(5)
    with pytest.raises(ConfigError, match="k must be 0 to 5, got 6"):
        select(x, 6)
    with pytest.raises(ConfigError, match="residual must have the 5 elements of x, got 4"):
        select_feedback(x, torch.zeros(4), 1)
    with pytest.raises(TensorTypeError, match="must be flat and floating"):
        select(torch.zeros(2, 2), 1)
    with pytest.raises(ConfigError, match="must not be empty"):
        scatter_mean([], 5)
    with pytest.raises(ConfigError, match=r"out must have the shape \(5,\), got \(4,\)"):
        scatter_mean([(torch.tensor([0]), torch.ones(1))], 5, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_other_types_and_strided_tensors_work(dtype):
    x = torch.randn(400).to(dtype)[::2]
    residual = torch.zeros(400, dtype=dtype)[::2]
    places, values = select_feedback(x, residual, 20)
    assert values.dtype is dtype
    assert torch.equal(values, x[places.long()])
    assert torch.equal(residual, x.index_fill(0, places.long(), 0))
    mean = scatter_mean([(places, values)], 200, torch.empty(400, dtype=dtype)[::2])
    assert torch.equal(mean + residual, x)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_are_put_at_their_places(monkeypatch, kernels, dtype):
    """In any order, among others and up to both ends; none at all change nothing."""
    monkeypatch.setenv("STENOGRAD_KERNELS", kernels)
    x = torch.arange(1000.0)
    put(x, torch.tensor([], dtype=dtype), torch.tensor([]))
    put(x, torch.tensor([999, 0, 17], dtype=dtype), torch.tensor([1.0, torch.inf, -3.0]))
    wanted = np.arange(1000.0)
    wanted[[999, 0, 17]] = [1.0, np.inf, -3.0]
    np.testing.assert_array_equal(x.numpy(), wanted)
