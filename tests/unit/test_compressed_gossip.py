"""Gossip by compressed differences: the mean is kept, ranks agree in the end, bad numbers stay put."""

import math

import numpy as np
import pytest
import torch

from stenograd.errors import ConfigError, MethodError
from stenograd.simulate import ranks
from stenograd.sync.gossip import Gossip
from stenograd.topology import Complete, OnePeer, Ring

SHAPES = ((30, 20), (7,), ())
CODECS = {"fp16": 1.0, "qsgd:bits=8": 1.0, "sign:block=16,dense_below=0": 0.3, "topk:ratio=0.1": 0.15}


def start(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mixed(how, consensus, steps, world=4, cut=None, nan_at=None, topology=None):
    def rank_of(driver):
        xs, saved = start(driver.rank), None
        for begin, end in [(0, steps)] if cut is None else [(0, cut), (cut, steps)]:
            gossip = Gossip(driver, topology or Ring(), how, consensus=consensus)
            if saved is not None:
                gossip.load_state_dict(saved)
            for step in range(begin, end):
                if nan_at == (driver.rank, step):
                    kept = xs[0][0, 0].item()
                    xs[0][0, 0] = math.nan
                gossip.mix(xs)
                if nan_at == (driver.rank, step):
                    assert xs[0][0, 0].isnan()
                    xs[0][0, 0] = kept
            saved = gossip.state_dict()
        return torch.cat([x.reshape(-1) for x in xs]), gossip.skipped, gossip.driver.traffic.moved_bytes

    return ranks(world, rank_of)


@pytest.mark.parametrize(("how", "consensus"), CODECS.items())
def test_the_mean_is_kept_and_ranks_come_to_it(how, consensus):
    """After 150 mixings on a ring of 4 the ranks' distance from the mean is 2 % of what it was."""
    first = np.stack([np.concatenate([x.numpy().ravel() for x in start(rank)]) for rank in range(4)])
    last = np.stack([x.numpy() for x, *_ in mixed(how, consensus, 150)])
    np.testing.assert_allclose(last.mean(0), first.mean(0), atol=2e-4)
    assert np.linalg.norm(last - last.mean(0)) < 0.02 * np.linalg.norm(first - first.mean(0))


def test_equals_the_formula_in_numpy():
    """q = top-k of x - h; h += q at both ends; x += gamma sum_j W_ij (h_j - h_i), gamma 0.5, W_ij 1/3."""
    k, n = math.ceil(0.1 * 608), 608
    x = np.stack([np.concatenate([t.numpy().ravel() for t in start(r)]) for r in range(4)]).astype(np.float32)
    h = np.zeros_like(x)
    for _ in range(5):
        difference = x - h
        for rank in range(4):
            chosen = np.argsort(-np.abs(difference[rank]), kind="stable")[:k]
            h[rank, chosen] += difference[rank, chosen]
        neighbours = [((r - 1) % 4, (r + 1) % 4) for r in range(4)]
        moved = [0.5 / 3 * sum(h[j] - h[r] for j in neighbours[r]) for r in range(4)]
        x = x + np.stack(moved).astype(np.float32)
    assert x.shape == (4, n)
    for rank, (mine, *_) in enumerate(mixed("topk:ratio=0.1,values=float32", 0.5, 5)):
        np.testing.assert_allclose(mine.numpy(), x[rank], atol=1e-5)


def test_saved_and_continued_equals_uninterrupted():
    whole, cut = (mixed("topk:ratio=0.1", 0.3, 8, cut=at) for at in (None, 3))
    assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(whole, cut, strict=True))


def test_a_rank_that_is_not_finite_takes_no_part_and_spoils_nobody():
    """Rank 2's neighbours on the ring count one mixing as incomplete; all stay finite and come together."""
    with pytest.warns(RuntimeWarning, match="were not finite"):
        out = mixed("sign:block=16,dense_below=0", 0.3, 120, nan_at=(2, 4))
    assert [skipped for _, skipped, _ in out] == [0, 1, 1, 1]
    values = torch.stack([x for x, *_ in out])
    assert values.isfinite().all()
    assert (values - values.mean(0)).norm() < 0.8


def test_bytes_are_the_codes_of_one_message_per_neighbour():
    """Sign of 608 elements in blocks of 64 within tensors: 76 bytes, 12 scales, one flag, twice per step."""
    (_, _, moved), *_ = mixed("sign:block=64,dense_below=0", 0.3, 10)
    handshake = mixed("sign:block=64,dense_below=0", 0.3, 0)[0][2]
    assert moved - handshake == 10 * 2 * (76 + 4 * 12 + 1)


@pytest.mark.parametrize(
    ("how", "options", "error", "says"),
    [
        ("powersgd", {}, MethodError, "one message of fixed length per rank, got powersgd"),
        ("threshold", {}, MethodError, "one message of fixed length"),
        ("sign:majority=true", {}, MethodError, "without clipping, warm-up or majority"),
        ("topk:clip_norm=1", {}, MethodError, "without clipping"),
        ("local:every=2/topk", {}, MethodError, "gossip takes a method without a schedule"),
        ("topk", {"consensus": 0.0}, ConfigError, r"consensus must be in \(0, 1\], got 0.0"),
        ("topk", {"lost": "drop"}, ConfigError, "lost must be 'raise' with topk"),
        ("topk", {"topology": OnePeer()}, ConfigError, "must be the same at every step with topk"),
    ],
)
def test_what_cannot_travel_to_neighbours_is_refused(how, options, error, says):
    options = dict(options)
    topology = options.pop("topology", Complete())
    with pytest.raises(error, match=says):
        ranks(4, lambda driver: Gossip(driver, topology, how, **options))
