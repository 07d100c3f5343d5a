"""Dense codes averaged in two phases: bytes that do not grow with N, exact errors, and equal bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradients import ranks_of

from stenograd.compression.blocks import chunks_for
from stenograd.compression.codec import Codec
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.qsgd import QSGD
from stenograd.compressors.sign import Sign
from stenograd.simulate import exchange
from stenograd.wire.requests import Op
from stenograd.wire.traffic import moved_bytes

CODECS = [(Sign(), 1, 1024), (Sign(block=64), 1, 64), (QSGD(), 4, 512), (QSGD(bits=8, block=64), 8, 64)]
WORLDS = (2, 3, 4, 8, 16, 32, 64)


def coded_bytes(numels, bits, block):
    return -(-sum(numels) * bits // 8) + 4 * sum(-(-m // block) for m in numels)


def requests_of(codec, xs, shapes=None):
    found = []
    exchange(codec, xs, shapes=shapes, spy=found.append)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("codec", "bits", "block"), CODECS, ids=str)
def test_bytes_moved_do_not_grow_with_the_ranks(codec, bits, block, world):
    """At most 2.1 times the code, for one tensor and for many of awkward lengths."""
    for numels in ([100_000], [70_001, 3, 9_000, 1, 20_995, 257]):
        shapes = [torch.Size((m,)) for m in numels]
        found = requests_of(codec, ranks_of(world, sum(numels)), shapes)
        moved = sum(moved_bytes(r.op, r.nbytes, world) for r in found)
        assert moved <= 2.1 * coded_bytes(numels, bits, block)
        assert [r.op for r in found] == ([Op.GATHER] if world < 4 else [Op.SCATTER, Op.GATHER])


@settings(max_examples=150)
@given(
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    world=st.integers(4, 70),
    bits=st.integers(1, 8),
    block=st.integers(1, 100),
)
def test_chunks_are_alike_and_cover_everything(numels, world, bits, block):
    """A row is at most 1/N of the code, and what eight elements and two scales take more."""
    site = Site(shapes=tuple(torch.Size((m,)) for m in numels), world_size=world)
    chunks = chunks_for(site, bits, block)
    coded = coded_bytes(numels, bits, block)
    if chunks is None:
        assert coded <= 2 * (coded / world + 8 * bits + 24)
        return
    assert chunks.bounds[0] == 0
    assert chunks.bounds[-1] == sum(numels)
    assert [sum(piece) for piece in chunks.numels] == [
        chunks.span(r).stop - chunks.span(r).start for r in range(world)
    ]
    assert all(bound % 8 == 0 for bound in chunks.bounds[:-1] if bound != sum(numels))
    smallest = min((m for m in numels if m), default=1)
    crowd = 8 * (bits + 32 / min(block, smallest)) / 8  # eight elements, each perhaps with a scale
    assert 4 * chunks.row_words <= coded / world + crowd + 12


@settings(max_examples=60)
@given(
    numels=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    world=st.integers(4, 9),
    block=st.integers(1, 80),
    bits=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_the_average_is_the_mean_without_the_errors(numels, world, block, bits, seed):
    codec = Sign(block=block) if bits == 1 else QSGD(block=block, bits=bits)
    xs = ranks_of(world, sum(numels), seed=seed)
    out = exchange(codec, xs, shapes=[torch.Size((m,)) for m in numels], want_error=True)
    assert all(torch.equal(e.average, out[0].average) for e in out)
    applied = torch.stack([x.double() - e.error.double() for x, e in zip(xs, out, strict=True)]).mean(0)
    assert torch.allclose(out[0].average.double(), applied, atol=4e-6)


@pytest.mark.parametrize("codec", [Sign(block=32), QSGD(bits=3, block=32)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float64, 1e-6), (torch.bfloat16, 0.1), (torch.float16, 0.02)]
)
def test_other_types(codec, dtype, eps):
    """float64 keeps its errors but not its scales; x of 16 bits has such errors, four times at the owner."""
    xs = ranks_of(4, 1000, dtype=dtype)
    out = exchange(codec, xs, want_error=True)
    applied = torch.stack([x.double() - e.error.double() for x, e in zip(xs, out, strict=True)]).mean(0)
    for e in out:
        assert (e.average.dtype, e.error.dtype) == (dtype, dtype)
        assert torch.equal(e.average, out[0].average)
    assert torch.allclose(out[0].average.double(), applied, atol=eps)


@pytest.mark.parametrize("codec", [Sign(block=8), QSGD(block=8)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 8, 33, 100])
def test_tiny_tensors(codec, n):
    for world in (4, 5, 16):
        xs = ranks_of(world, n)
        found = []
        out = exchange(codec, xs, want_error=True, spy=found.append)
        applied = torch.stack([x - e.error for x, e in zip(xs, out, strict=True)]).mean(0)
        assert all(torch.equal(e.average, out[0].average) for e in out)
        assert torch.allclose(out[0].average, applied, atol=1e-5)
        gathered = (world - 1) * coded_bytes([n], getattr(codec, "bits", 1), 8)
        assert sum(moved_bytes(r.op, r.nbytes, world) for r in found) <= gathered


@pytest.mark.parametrize("codec", [Sign(block=16), QSGD(bits=2, block=16)], ids=str)
def test_feedback_telescopes_over_many_steps(codec):
    """Sum of averages + mean residual = mean of the sums of x, and the residual stays bounded."""
    fed, states = ErrorFeedback(inner=codec), None
    put_in, averaged, norms = torch.zeros(600), torch.zeros(600), []
    for step in range(100):
        xs = ranks_of(8, 600, seed=step)
        out = exchange(fed, xs, states, step=step)
        states = [e.state for e in out]
        put_in += torch.stack(xs).mean(0)
        averaged += out[0].average
        norms.append(float(torch.stack([s["residual"] for s in states]).mean(0).norm()))
    residual = torch.stack([s["residual"] for s in states]).mean(0)
    assert torch.allclose(averaged + residual, put_in, atol=1e-3)
    assert max(norms[50:]) < 2 * max(norms[20:50])


def test_the_owner_keeps_what_the_second_encoding_loses():
    """Four equal ranks of (1, 3), blocks of 2 and 8 an owner: C(x) = 2, so a = (x + 3 * 2) / 4 there.

    Owner: a = (1.75, 2.25), sent as 2, error 4 * (-.25, .25) = (-1, 1) on its chunk; elsewhere
    x - C(x) = (-1, 1) as well.
    """
    x = torch.tensor([1.0, 3.0] * 16)
    for e in exchange(Sign(block=2), [x] * 4, want_error=True):
        assert e.average.tolist() == [2.0] * 32
        assert e.error.tolist() == [-1.0, 1.0] * 16


def test_two_roundings_are_unbiased():
    """Mean of 2000 averages of four ranks' x: an error of at most 5 of its standard deviations.

    Each of 100 exchanges averages x 20 times, each time with other draws.
    """
    x = torch.linspace(-1, 2, 128)
    several = x.repeat(20)
    steps = [exchange(QSGD(bits=2), [several] * 4, step=step)[0].average for step in range(100)]
    averages = torch.stack(steps).view(2000, 128)
    deviation = averages.std(0) / 2000**0.5
    assert ((averages.mean(0) - x).abs() <= 5 * deviation + 1e-5).all()


def test_a_vote_is_gathered():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert [r.op for r in requests_of(Sign(majority=True), [x] * 8)] == [Op.GATHER]


@pytest.mark.parametrize("codec", [Sign(), QSGD()], ids=str)
def test_decoding_does_not_grow_with_the_ranks(codec):
    """Elements that a rank decodes, for seconds depend on what else runs: about two codes for any N."""
    decoded = {}
    for world in (4, 16, 64):
        seen = []

        class Counting(type(codec)):
            def decode(self, payload, like, site, seen=seen):
                seen.append(sum(site.numels))
                return super().decode(payload, like, site)

            def error(self, x, payload, site):
                return x

        exchange(Counting(), ranks_of(world, 65_536))
        decoded[world] = sum(seen) / world
    assert max(decoded.values()) <= 1.3 * min(decoded.values())


def test_gathered_and_shared_averages_differ_by_the_second_encoding_only():
    """With a code that is exact on this data (blocks of one), both are the mean."""
    xs = ranks_of(4, 64)
    mean = torch.stack(xs).mean(0)
    codec = Sign(block=1)
    gathered = exchange(_gathering(codec), xs)[0].average
    assert torch.allclose(gathered, mean, atol=1e-6)
    assert torch.allclose(exchange(codec, xs)[0].average, mean, atol=1e-6)


def _gathering(codec):
    """The same codec with the all-gather of `Codec`."""
    plain = type("Gathering", (type(codec),), {"facts": Codec.facts, "exchange": Codec.exchange})
    return plain(block=codec.block)
