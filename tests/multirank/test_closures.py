"""Optimizers whose steps use gradients before they evaluate their closure, as sharpness-aware ones do."""

import warnings

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards
from support.faces import attached


class Sharpness(torch.optim.Optimizer):
    """Steps by the gradient at `w + rho g / |g|`, where g is the gradient that a backward pass left."""

    def __init__(self, parameters, rho=0.05):
        super().__init__(parameters, {"rho": rho})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def climb(self):
        held = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm() + 1e-12
        self.old = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=float(self.defaults["rho"] / norm))

    @torch.no_grad()
    def descend(self):
        for p, old in zip((p for g in self.param_groups for p in g["params"]), self.old, strict=True):
            p.copy_(old)
        self.inner.step()

    def step(self, closure):
        self.climb()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.descend()


def _train(rank, face, how, bad):
    """Five steps, in closures or one after the other; in `bad` of the two passes of step 2 comes a NaN."""
    model = mlp(0)
    optimizer = Sharpness(model.parameters())
    method = "topk:ratio=0.1" if face == "ddp" else face
    net, sync = attached(face, model, optimizer, method, SMALL_BUCKETS)
    with sync, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a step is skipped
        for s in range(5):
            xs, ys = shards(s, 2)

            def backward(number, s=s, xs=xs, ys=ys):
                loss = (net(xs[rank]) - ys[rank]).square().mean()
                (loss * (float("nan") if (s, number, rank) == (2, bad, 1) else 1.0)).backward()
                return loss

            optimizer.zero_grad()
            backward(0)
            if how == "closure":
                optimizer.step(lambda: backward(1))
            else:
                optimizer.climb()
                optimizer.zero_grad()
                backward(1)
                optimizer.descend()
        return flat(model), sync.skipped


@pytest.mark.parametrize("face", ["dense", "topk:ratio=0.1", "ddp", "local:every=4"])
def test_a_closure_is_evaluated_where_the_optimizer_wants_it(pool, face):
    by_closure, by_hand = (pool.run(2, _train, face, how, None) for how in ("closure", "by hand"))
    for (mine, _), (theirs, _) in zip(by_closure, by_hand, strict=True):
        assert torch.equal(mine, theirs)
    if "local" not in face:
        assert torch.equal(by_closure[0][0], by_closure[1][0])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("face", ["topk:ratio=0.1", "ddp"])
def test_a_bad_gradient_before_or_in_the_closure_leaves_weights_finite_and_equal(pool, face, bad):
    (mine, skipped), (theirs, _) = pool.run(2, _train, face, "closure", bad)
    assert torch.equal(mine, theirs)
    assert (skipped, bool(mine.isfinite().all())) == (1, True)


def _beside_another(rank, face):
    """A plain optimizer of one half steps before one of the other half looks at the same bad gradients."""
    model = mlp(0)
    parameters = list(model.parameters())
    plain, sharp = torch.optim.SGD(parameters[:2], lr=0.1), Sharpness(parameters[2:])
    net, sync = attached(face, model, [plain, sharp], "dense")
    moved = []
    with sync, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a step is skipped
        for s in range(3):
            (x, _), (y, _) = shards(s, 2)

            def backward(bad, x=x, y=y):
                loss = (net(x) - y).square().mean()
                (loss * (float("nan") if bad else 1.0)).backward()
                return loss

            for optimizer in (plain, sharp):
                optimizer.zero_grad()
            backward(s == 1)
            plain.step()

            def closure():
                moved.append(all(bool(p.isfinite().all()) for p in parameters))
                return backward(False)

            sharp.step(closure)
    return moved


@pytest.mark.parametrize("face", ["dense", "ddp"])
def test_each_of_several_optimizers_finds_out_that_gradients_are_bad(pool, face):
    """What moves first and evaluates its closure there must not move by NaN, whoever stepped before it."""
    for moved in pool.run(2, _beside_another, face):
        assert moved == [True] * 3


def _second_order(rank, face, search):
    """Ten steps of LBFGS on other data on each rank, on which losses differ widely."""
    model = mlp(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn=search)
    net, sync = attached(face, model, optimizer, "dense" if face == "ddp" else face)
    x = torch.randn(32, 10, generator=torch.Generator().manual_seed(rank)) * (1 + rank)
    evaluated = []

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - x.sin()[:, :3]).square().mean()
        loss.backward()
        evaluated.append(float(loss.detach()))
        return loss

    with sync:
        returned = [float(optimizer.step(closure)) for _ in range(6)]
    return len(evaluated), evaluated[0], returned, flat(model)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("face", ["dense", "topk:ratio=0.5", "ddp"])
def test_lbfgs_decides_alike_on_all_ranks_by_the_mean_loss(pool, face, search):
    """It stops, and searches along a line, by its loss: by losses of their own ranks would part."""
    mine, theirs = pool.run(2, _second_order, face, search)
    assert mine[0] == theirs[0]
    assert torch.equal(mine[3], theirs[3])
    assert mine[2] == theirs[2]
    assert mine[2][0] == pytest.approx((mine[1] + theirs[1]) / 2)
