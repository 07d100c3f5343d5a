"""PowerSGD against numpy."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from support.gradients import ranks_of

from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.powersgd import PowerSGD
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.wire.requests import Op

SHAPES = [torch.Size(s) for s in [(30, 20), (7,), (30, 20), (0, 3), (), (6, 5, 7), (30, 20)]]
NUMELS = [s.numel() for s in SHAPES]
exactly = partial(PowerSGD, values="float32")  # what is compared with numpy must not be rounded


def numpy_powersgd(ms: list[np.ndarray], q: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """One exchange in float64 with LAPACK's QR: average, errors, mean Q."""
    p, _ = np.linalg.qr(np.mean([m @ q for m in ms], axis=0))
    qs = [m.T @ p for m in ms]
    mean_q = np.mean(qs, axis=0)
    return p @ mean_q.T, [m - p @ own.T for m, own in zip(ms, qs, strict=True)], mean_q


def test_three_ranks_and_a_mixed_bucket_are_numpys():
    """Equal matrices are batched, at equal distances or not; vectors and scalars are exact."""
    method, xs = exactly(rank=2), ranks_of(3, sum(NUMELS))
    start = method.init(xs[0], Site(shapes=tuple(SHAPES)))
    out = exchange(method, xs, shapes=SHAPES, want_error=True)
    averages = out[0].average.split(NUMELS)
    errors = [e.error.split(NUMELS) for e in out]
    for i, shape in enumerate(SHAPES):
        parts = [x.split(NUMELS)[i].double().numpy() for x in xs]
        if f"q/{i}" not in start:
            assert np.allclose(averages[i], np.mean(parts, axis=0), atol=1e-6)
            assert not any(e[i].any() for e in errors)
            continue
        ms = [part.reshape(shape[0], -1) for part in parts]
        average, lost, mean_q = numpy_powersgd(ms, start[f"q/{i}"].double().numpy())
        assert np.allclose(averages[i].view(shape[0], -1), average, atol=1e-5)
        for e, own in zip(errors, lost, strict=True):
            assert np.allclose(e[i].view(shape[0], -1), own, atol=1e-5)
        kept = out[0].state[f"q/{i}"].double().numpy()  # the same subspace, whatever sign and length
        assert np.allclose(
            np.abs(np.sum(kept * mean_q, 0)), np.prod([np.linalg.norm(q, axis=0) for q in (kept, mean_q)], 0)
        )


def test_only_matrices_that_shrink_are_compressed():
    """r (n + m) < n m: 6 x 35 at rank 2 costs 82 of 210; 4 x 4 at rank 2 costs 16 of 16 and stays dense."""
    shapes = tuple(torch.Size(s) for s in [(6, 5, 7), (4, 4), (9,), (), (1, 50), (0, 5)])
    state = exactly(rank=2).init(torch.zeros(sum(s.numel() for s in shapes)), Site(shapes=shapes))
    assert {k: tuple(q.shape) for k, q in state.items()} == {"q/0": (35, 2)}


@pytest.mark.parametrize(
    ("shapes", "wire"),
    [
        ([(30, 20), (7,), (30, 20)], [(2 * 30 * 2 + 7) * 4, 2 * 20 * 2 * 4]),
        ([(7,), ()], [8 * 4]),
        ([(30, 20)], [30 * 2 * 4, 20 * 2 * 4]),
        ([(0,)], [0]),
    ],
)
def test_bytes_and_rounds(shapes, wire):
    """P and the dense parts, then Q; no second round without a matrix."""
    shapes = [torch.Size(s) for s in shapes]
    requests = []
    exchange(
        exactly(rank=2), [torch.ones(sum(s.numel() for s in shapes))], shapes=shapes, spy=requests.append
    )
    assert [(r.op, r.nbytes) for r in requests] == [(Op.MEAN, n) for n in wire]


@pytest.mark.parametrize(("world", "ops"), [(1, [Op.GATHER]), (3, [Op.GATHER]), (4, [Op.SCATTER, Op.GATHER])])
def test_in_16_bits_half_as_many_bytes_travel(world, ops):
    """Both factors, and what is not compressed; from four ranks on each hop moves a part to every rank."""
    shapes, requests = [torch.Size(s) for s in [(30, 20), (7,), (30, 20)]], []
    xs = ranks_of(world, sum(s.numel() for s in shapes))
    exchange(PowerSGD(rank=2), xs, shapes=shapes, spy=requests.append)
    assert [r.op for r in requests] == ops * 2
    scattered = world if world > 3 else 1  # the requests of `SCATTER` hold all rows, of `GATHER` one
    for asked, numel in zip(requests[:: len(ops)], (2 * 30 * 2 + 7, 2 * 20 * 2), strict=True):
        assert asked.nbytes == -(-numel // scattered) * scattered * 2


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_in_16_bits_nothing_is_lost_that_is_not_in_the_error(world, alternate):
    """Averages are near those of float32, and the mean of x without the errors to float32's precision."""
    nearby = None
    for step in range(4):
        xs = ranks_of(world, sum(NUMELS), seed=step)
        exact = exchange(
            exactly(rank=2, alternate=alternate), xs, nearby, shapes=SHAPES, step=step, want_error=True
        )
        method = PowerSGD(rank=2, alternate=alternate)
        out = exchange(method, xs, nearby, shapes=SHAPES, step=step, want_error=True)
        assert all(torch.equal(e.average, out[0].average) for e in out)
        wanted = np.mean([(x - e.error).double().numpy() for x, e in zip(xs, out, strict=True)], axis=0)
        assert np.allclose(out[0].average, wanted, atol=1e-5)
        assert not torch.equal(out[0].average, exact[0].average)
        assert np.allclose(out[0].average, exact[0].average, rtol=0, atol=0.01)
        assert out[0].state.keys() == exact[0].state.keys()
        nearby = [e.state for e in exact]


def test_a_rank_that_does_not_shrink_is_exact():
    """5 x 6 at rank 8 is r = 5, 55 numbers for 30: sent as it is."""
    xs = [x.view(5, 6) for x in ranks_of(3, 30)]
    (e, *_) = exchange(exactly(rank=8), xs, want_error=True)
    assert torch.allclose(e.average, sum(xs).reshape(-1) / 3, atol=1e-6)
    assert not e.error.any()


@pytest.mark.parametrize("warm_start", [True, False])
def test_matrices_of_the_rank_are_recovered(warm_start):
    """Every rank's 12 x 10 matrix has the same 3 left vectors, so rank 3 loses nothing."""
    rng = np.random.default_rng(1)
    left = rng.standard_normal((12, 3))
    xs = [torch.from_numpy(left @ rng.standard_normal((3, 10))).float() for _ in range(3)]
    out = exchange(exactly(rank=3, warm_start=warm_start), xs, want_error=True)
    assert torch.allclose(out[0].average, sum(xs).reshape(-1) / 3, atol=1e-5)
    assert all(e.error.abs().max() < 1e-5 for e in out)


def test_rank_one_with_a_common_right_vector():
    """u_r v^T averages to (mean u_r) v^T, which rank 1 holds; each rank's own error is outside of it."""
    rng = np.random.default_rng(2)
    v = rng.standard_normal(10)
    xs = [torch.from_numpy(np.outer(rng.standard_normal(12), v)).float() for _ in range(3)]
    out = exchange(exactly(rank=1), xs, want_error=True)
    assert torch.allclose(out[0].average, sum(xs).reshape(-1) / 3, atol=1e-5)
    sent = [x.reshape(-1) - e.error for x, e in zip(xs, out, strict=True)]
    assert torch.allclose(sum(sent) / 3, out[0].average, atol=1e-6)


@pytest.mark.parametrize(("alternate", "steps"), [(False, 60), (True, 80)])
def test_a_fixed_matrix_is_approximated_ever_better(alternate, steps):
    """Warm-started, the error does not increase and tends to the best rank-2 error (Eckart and Young)."""
    rng = np.random.default_rng(3)
    u, v = (np.linalg.qr(rng.standard_normal((n, 15)))[0] for n in (30, 20))
    sigma = 0.7 ** np.arange(15)
    m, states, errors = torch.from_numpy(u @ np.diag(sigma) @ v.T).float(), None, []
    method = exactly(rank=2, alternate=alternate)
    for step in range(steps):
        (e,) = exchange(method, [m], states, step=step)
        states = [e.state]
        errors.append(float((m.reshape(-1) - e.average).norm()))
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(errors))
    assert errors[-1] == pytest.approx(float(np.linalg.norm(sigma[2:])), rel=1e-4)


@pytest.mark.parametrize("alternate", [False, True])
def test_residuals_and_averages_add_up(alternate):
    """sum_r e_r + N * average = sum_r (g_r + e_r_old), every step, and the residuals stay bounded."""
    method, world, states = ErrorFeedback(inner=exactly(rank=1, alternate=alternate)), 3, None
    old, norms = torch.zeros(world, sum(NUMELS)), []
    for step in range(60):
        xs = ranks_of(world, sum(NUMELS), seed=step % 7)
        out = exchange(method, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        new = torch.stack([s["residual"] for s in states])
        assert torch.allclose(new.sum(0) + world * out[0].average, (torch.stack(xs) + old).sum(0), atol=1e-3)
        old = new
        norms.append(float(new.norm()))
    assert max(norms[30:]) < 3 * max(norms[:30])


def test_turns_are_numpys():
    """Even exchanges send mean(M Q) for the last Q, odd ones mean(M^T P) for the last P, each orthonormal."""
    method, states = exactly(rank=2, alternate=True), None
    start = method.init(torch.zeros(sum(NUMELS)), Site(shapes=tuple(SHAPES)))
    known = {i: start[f"q/{i}"].double().numpy() for i in range(len(SHAPES)) if f"q/{i}" in start}
    assert sorted(known) == [0, 2, 5, 6]
    for step in range(5):
        xs = ranks_of(3, sum(NUMELS), seed=step)
        out = exchange(method, xs, states, shapes=SHAPES, step=step, want_error=True)
        states = [e.state for e in out]
        assert all(e.state.keys() == start.keys() for e in out)
        averages, errors = out[0].average.split(NUMELS), [e.error.split(NUMELS) for e in out]
        for i, shape in enumerate(SHAPES):
            parts = [x.split(NUMELS)[i].double().numpy() for x in xs]
            if i not in known:
                assert np.allclose(averages[i], np.mean(parts, axis=0), atol=1e-6)
                assert not any(e[i].any() for e in errors)
                continue
            ms = [part.reshape(shape[0], -1) for part in parts]
            ms = ms if step % 2 == 0 else [m.T for m in ms]
            basis, _ = np.linalg.qr(known[i])
            sent = [m @ basis @ basis.T for m in ms]
            known[i] = np.mean([m @ basis for m in ms], axis=0)
            for found, wanted in [
                (averages[i], np.mean(sent, axis=0)),
                *((e[i], m - own) for e, m, own in zip(errors, ms, sent, strict=True)),
            ]:
                wanted = wanted if step % 2 == 0 else wanted.T
                assert np.allclose(found.view(shape[0], -1), wanted, atol=1e-4)


def test_turns_send_one_factor():
    shapes, requests = [torch.Size(s) for s in [(30, 20), (7,), (30, 20)]], []
    x, states = torch.ones(sum(s.numel() for s in shapes)), None
    for step in range(3):
        (e,) = exchange(
            exactly(rank=2, alternate=True), [x], states, shapes=shapes, step=step, spy=requests.append
        )
        states = [e.state]
    p, q = (2 * 30 * 2 + 7) * 4, (2 * 20 * 2 + 7) * 4
    assert [(r.op, r.nbytes) for r in requests] == [(Op.MEAN, n) for n in (p, q, p)]


def test_turns_need_a_warm_start():
    with pytest.raises(MethodError, match=r"warm_start must be true with alternate=true, .*, got False"):
        PowerSGD(alternate=True, warm_start=False)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_degenerate_start_does_not_last(value):
    """Q all zero, or with equal columns, and a first gradient of zero: the next steps recover."""
    rng = np.random.default_rng(4)
    m = torch.from_numpy(rng.standard_normal((12, 3)) @ rng.standard_normal((3, 10))).float()
    states = [{"q/0": torch.full((10, 3), value)}]
    for step, x in enumerate([torch.zeros(12, 10), m, m]):
        (e,) = exchange(exactly(rank=3), [x], states, step=step)
        states = [e.state]
    assert torch.allclose(e.average, m.reshape(-1), atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_any_magnitude_is_approximated_alike(size):
    """P holds M M^T P, which would leave float32 at 1e30 or 1e-30 without scaling Q."""
    rng = np.random.default_rng(5)
    m = torch.from_numpy(rng.standard_normal((12, 2)) @ rng.standard_normal((2, 10))).float()
    states = None
    for step in range(3):
        (e,) = exchange(exactly(rank=2), [m * size], states, step=step)
        states = [e.state]
    assert torch.allclose(e.average / size, m.reshape(-1), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_compute_in_float32_or_more(dtype):
    x = ranks_of(1, 600)[0].view(30, 20).to(dtype)
    (e,) = exchange(exactly(rank=2), [x])
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert (e.average.dtype, e.state["q/0"].dtype) == (dtype, wanted)


def test_without_warm_start_every_step_draws_anew():
    x, method = ranks_of(1, 600)[0].view(30, 20), exactly(rank=1, warm_start=False)
    first, second = (exchange(method, [x], step=step)[0] for step in (0, 1))
    assert first.state == {}
    assert not torch.equal(first.average, second.average)


def test_a_rank_below_one_is_refused():
    with pytest.raises(MethodError, match="rank must be at least 1, got 0: use 4"):
        PowerSGD(rank=0)


def test_another_word_for_values_is_refused():
    with pytest.raises(
        MethodError, match="values must be one of bfloat16, float32, got 'int8': leave it out"
    ):
        PowerSGD(values="int8")
