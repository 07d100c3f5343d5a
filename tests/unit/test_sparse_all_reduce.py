"""The sparse all-reduce: bytes that do not grow with N, exact errors, equal bits, and who owns what."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradients import ranks_of

from stenograd.catalog.method import method
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compression.sparse import Regions, regions_for
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.wire.requests import Op
from stenograd.wire.traffic import moved_bytes


def moved_by(codec, xs):
    found = []
    exchange(codec, xs, spy=found.append)
    return sum(moved_bytes(r.op, r.nbytes, len(xs)) for r in found), [r.op for r in found]


def applied(xs, out):
    return torch.stack([x.double() - e.error.double() for x, e in zip(xs, out, strict=True)]).mean(0)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("world", [2, 4, 5, 8, 16, 33])
def test_at_most_six_words_an_entry_move(world, compact):
    """k = 1000, 300, 65 and 64: never more than 24 k bytes, and never more than an all-gather."""
    for n, ratio in ((100_000, 0.01), (1000, 0.3), (6500, 0.01), (640, 0.1)):
        codec, xs = TopK(ratio=ratio, compact=compact), ranks_of(world, n)
        moved, ops = moved_by(codec, xs)
        assert moved <= 24 * math.ceil(codec.ratio * xs[0].numel())
        assert ops == ([Op.GATHER] if world < 5 else [Op.SCATTER, Op.GATHER])
        assert moved <= moved_by(TopK(ratio=ratio, compact=compact, reduce="gather"), xs)[0]


@given(k=st.integers(1, 5000), world=st.integers(2, 64))
def test_counts_keep_to_the_budget(k, world):
    regions = Regions(10 * k, k, world)
    assert regions.slots >= 1
    assert sum(regions.quota(rank) for rank in range(world)) <= k
    assert max(regions.quota(rank) for rank in range(world)) <= regions.kept
    if k >= world:
        assert 2 * (world - 1) * (regions.slots + regions.kept) <= 6 * k
        assert regions.slots >= k / world
        assert sum(regions.quota(rank) for rank in range(world)) > k / 2


@given(numel=st.integers(1, 3000), world=st.integers(2, 64), step=st.integers(0, 10**12))
def test_every_place_has_one_owner(numel, world, step):
    regions, places = Regions(numel, 1, world, step), torch.arange(numel)
    owner, local = regions.divide(places)
    assert torch.equal(regions.join(owner, local), places)
    assert int(owner.amin()) >= 0
    assert int(owner.amax()) < world
    assert int(local.amax()) < regions.length
    assert int(owner.bincount().amax()) <= regions.length


def test_regions_are_balanced_over_columns_and_stretches():
    """Every 64th place, 1000 neighbours, every 1000th: each of 8 owners has 125 of them, give or take 60."""
    for places in (torch.arange(0, 64_000, 64), torch.arange(5000, 6000), torch.arange(0, 10**6, 1000)):
        owner, _ = Regions(10**6, 1000, 8).divide(places)
        assert (owner.bincount(minlength=8) - 125).abs().amax() <= 60


def test_what_does_not_divide_goes_round():
    """8 owners in 8 steps: k = 10 leaves room for one each (10 // 7), k = 3 for three of them a step."""
    for k, kept in ((10, 8), (3, 3)):
        totals = [sum(Regions(1000, k, 8, step).quota(rank) for step in range(8)) for rank in range(8)]
        assert totals == [kept] * 8


@settings(max_examples=60)
@given(numel=st.integers(1, 9000), world=st.integers(2, 20))
def test_a_region_is_taken_out_and_put_back(numel, world):
    """What is taken is at the region's local places, zeros stay behind, and all regions make up x."""
    regions, x = Regions(numel, 1, world), torch.arange(1.0, numel + 1)
    owner, local = regions.divide(torch.arange(numel))
    rest = x.clone()
    for rank in range(world):
        own = regions.take(rest, rank)
        wanted = torch.zeros(regions.length)
        wanted[local[owner == rank]] = x[owner == rank]
        assert torch.equal(own, wanted)
        again = torch.zeros(numel)
        regions.put(own, again, rank)
        assert torch.equal(again, torch.where(owner == rank, x, 0))
    assert not rest.any()


@settings(max_examples=80)
@given(
    n=st.integers(0, 120),
    ratio=st.floats(0.01, 1),
    world=st.integers(2, 9),
    compact=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_average_is_the_mean_without_the_errors(n, ratio, world, compact, seed):
    codec = TopK(ratio=ratio, compact=compact, reduce="regions")
    xs = ranks_of(world, n, seed=seed)
    out = exchange(codec, xs, want_error=True, step=seed)
    silent = exchange(codec, xs, step=seed)
    assert all(torch.equal(e.average, out[0].average) for e in [*out, *silent])
    assert torch.allclose(out[0].average.double(), applied(xs, out), atol=1e-6)
    assert int((out[0].average != 0).sum()) <= math.ceil(codec.ratio * xs[0].numel())


def test_the_average_is_that_of_the_selected():
    """Where it is not zero it is the mean of the k largest outside each rank's region and all inside it."""
    xs = ranks_of(8, 5000)
    codec = TopK(ratio=0.02, values="float32")
    out = exchange(codec, xs)
    owner, _ = Regions(5000, 100, 8).divide(torch.arange(5000))
    masked = []
    for rank, x in enumerate(xs):
        kept = torch.where(owner == rank, x, 0)
        places = torch.where(owner == rank, 0, x).abs().topk(math.ceil(codec.ratio * x.numel())).indices
        kept[places] = x[places]
        masked.append(kept)
    mean = torch.stack(masked).double().mean(0).float()
    at = out[0].average != 0
    assert torch.allclose(out[0].average[at], mean[at], atol=1e-6)
    smallest = float(out[0].average[at].abs().amin())
    larger = int((mean.abs() > smallest).sum())
    assert larger < 1.6 * int(at.sum()), "nearly the largest sums: each owner keeps those of its region"


@pytest.mark.parametrize("compact", [False, True])
def test_entries_that_do_not_fit_stay_the_smallest_first(compact):
    """Elements 1 .. 40 in region 0: ranks 1 to 3 send owner 0 the 20 largest, and all get the 10 largest.

    So the others keep 1 .. 20, and owner 0 its own of these, and four times 21 .. 30.
    """
    mine = torch.arange(1000)[Regions(1000, 40, 4).divide(torch.arange(1000))[0] == 0][:40]
    x = torch.zeros(1000).index_put_((mine,), torch.arange(1.0, 41.0))
    owner, *others = exchange(TopK(ratio=0.04, compact=compact, reduce="regions"), [x] * 4, want_error=True)
    assert owner.average[mine].tolist() == [0.0] * 30 + [float(v) for v in range(31, 41)]
    assert owner.error[mine].tolist() == [*range(1, 21), *range(84, 121, 4), *[0.0] * 10]
    for e in others:
        assert e.error[mine].tolist() == [*range(1, 21), *[0.0] * 20]


@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float64, 1e-12), (torch.bfloat16, 0.01), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("compact", [False, True])
def test_other_types(dtype, eps, compact):
    xs = ranks_of(4, 1000, dtype=dtype)
    out = exchange(TopK(ratio=0.1, compact=compact, reduce="regions"), xs, want_error=True)
    for e in out:
        assert (e.average.dtype, e.error.dtype) == (dtype, dtype)
        assert torch.equal(e.average, out[0].average)
    assert torch.allclose(out[0].average.double(), applied(xs, out), atol=eps)


def test_negligible_values_are_left_for_later():
    """Compact floats below 2**-62 of the largest of a row travel as zeros, so their sender keeps them."""
    x = torch.zeros(64)
    x[::4] = 1e-25
    x[:8] = 3.0
    out = exchange(TopK(ratio=0.5, compact=True, reduce="regions"), [x] * 4, want_error=True)
    small = x == x[8]
    assert torch.equal(torch.stack([e.average + e.error for e in out])[:, small].mean(0), x[small])


@pytest.mark.parametrize("compact", [False, True])
def test_feedback_telescopes_and_reaches_everything(compact):
    """Sum of averages + mean residual = sum of x; every place gets its turn."""
    fed, states = ErrorFeedback(inner=TopK(ratio=0.05, compact=compact)), None
    xs, averaged = ranks_of(8, 400), torch.zeros(400)
    for step in range(200):
        out = exchange(fed, xs, states, step=step)
        states = [e.state for e in out]
        averaged += out[0].average
    mean = torch.stack(xs).double().mean(0)
    residual = torch.stack([s["residual"] for s in states]).mean(0)
    assert torch.allclose((averaged + residual).double(), 200 * mean, atol=2e-3)
    large = mean.abs() > 0.3
    assert torch.allclose(averaged[large].double() / 200, mean[large], rtol=0, atol=0.1)


def test_fewer_entries_than_ranks():
    """k = 3 of 8 ranks: at most three places change, and which owner may send turns with the step."""
    xs, seen = ranks_of(8, 60), set()
    for step in range(30):
        out = exchange(TopK(ratio=0.05, reduce="regions"), xs, step=step, want_error=True)
        places = out[0].average.nonzero().view(-1).tolist()
        assert len(places) <= 3
        assert torch.allclose(out[0].average.double(), applied(xs, out), atol=1e-6)
        seen |= set(places)
    assert len(seen) == 8, "one place of each owner, for x is the same each time and nothing is fed back"


def test_automatic_choice():
    """Up to four ranks gather; one entry is gathered by any number of ranks."""
    chosen = [bool(regions_for(1000, 10, Site(shapes=(), world_size=n))) for n in range(1, 9)]
    assert chosen == [False, False, False, False, True, True, True, True]
    assert regions_for(1000, 1, Site(shapes=(), world_size=64)) is None
    assert regions_for(0, 0, Site(shapes=(), world_size=64), forced=True) is None


def test_the_key_is_read_from_text_and_checked():
    assert method("topk:reduce=gather").text == "topk:reduce=gather"
    with pytest.raises(MethodError, match=r"reduce must be one of auto, gather, regions, got .*ring"):
        TopK(reduce="ring")
