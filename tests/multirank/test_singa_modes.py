"""DistOpt's training modes on gloo ranks, against a single process and against their definitions."""

import pytest
import torch
from singa_helpers import leaf, moved, push, spied, unit_sgd

from stenograd.errors import ConfigError, MismatchError, StenogradError
from stenograd.singa import SGD, DistOpt, Optimizer
from stenograd.tasks.models import mnist_cnn


def _collectives(rank):
    out, model = {}, mnist_cnn()
    opt = unit_sgd()
    opt.backward_and_update(model(torch.rand(2, 1, 28, 28)).sum() * 0, 50000)
    log = spied(opt)
    opt.backward_and_update(model(torch.rand(2, 1, 28, 28)).sum(), 50000)
    out["cnn"] = sorted(log)
    del log[:]
    fours = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    opt.backward_and_update(push(fours, [1.0] * 3), 8)
    out["8"] = list(log)
    del log[:]
    sizes = [torch.zeros(n, requires_grad=True) for n in (4, 9, 4, 8)]
    opt.backward_and_update(push(sizes, [1.0] * 4), 8)
    out["big"] = sorted(log)
    return out


def test_fusion_rule_on_the_wire(pool):
    """400,000 alone and the other 31,080 together; 4, 4, 4 at 8 in one; a big one leaves the group open."""
    for out in pool.run(2, _collectives):
        assert out["cnn"] == [4 * 31_080, 4 * 400_000]
        assert out["8"] == [4 * 12]  # 8 is not more than 8
        assert out["big"] in ([4 * 4, 4 * 9, 4 * 12], [4 * 9, 4 * 16])


def _overlapped(rank):
    """Three groups of one: the first is on its way before the last gradient exists."""
    ws, opt, events = [leaf(0.0) for _ in range(3)], unit_sgd(), []
    opt.backward_and_update(push(ws, [1.0] * 3), threshold=0)
    submit = opt._gradients._submit
    opt._gradients._submit = lambda *group: (events.append("sent"), submit(*group))
    for w in ws:
        w.register_post_accumulate_grad_hook(lambda w: events.append("gradient"))
    opt.backward_and_update(push(ws, [1.0] * 3), threshold=0)
    return events


def test_communication_overlaps_backward(pool):
    for events in pool.run(2, _overlapped):
        assert events == ["gradient", "sent"] * 3


def _half(rank):
    out = {}
    for name, g, how in (
        ("rounded", 0.1, {}),
        ("large", 40000.0, {}),
        ("clipped", 1000.0, {"clipping": True, "clip_Value": 100}),
        ("older", 1000.0, {"clipping": True, "clip_value": 10}),
        ("free", 1000.0, {"clip_Value": 100}),
    ):
        w, opt = leaf(0.0), unit_sgd()
        opt.backward_and_update_half(push([w], [g]), **how)
        out[name] = moved(w)[0]
    log = spied(opt)
    opt.backward_and_update_half(push([torch.zeros(50, requires_grad=True)], [1.0]))
    return out, log


def test_half(pool):
    """Clip, then float16, then the mean; 40,000 on two ranks is finite, as a sum would not be."""
    for out, log in pool.run(2, _half):
        assert out["rounded"] == pytest.approx(0.1, rel=2**-11)
        assert (out["large"], out["clipped"], out["older"], out["free"]) == (40000, 100, 10, 1000)
        assert log == [2 * 50]


def _partial(rank):
    """Three partitions: threshold 2, parameters of 3 elements each, gradients r+1."""
    ws = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    opt = DistOpt(SGD(lr=1.0, momentum=0.9), timeout_s=30)
    alone, alone_opt = torch.zeros(3, requires_grad=True), SGD(lr=1.0, momentum=0.9)
    trace = []
    for _ in range(4):
        opt.backward_and_partial_update(push(ws, [rank + 1.0] * 3), threshold=2)
        alone_opt(push([alone], [rank + 1.0]))
        trace.append((opt.partial, [w[0].item() for w in ws]))
    moments = opt.get_states()["optimizer"]["moments"].values()
    same = all(torch.equal(m, *alone_opt.get_states()["moments"].values()) for m in moments)
    opt.finalize()
    return trace, same, [w[0].item() for w in ws]


def test_partial_update_averages_one_partition_a_step(pool):
    """Partition j is equal after step j only, momentum is local, and after finalize all ranks are equal."""
    (a, same_a, end_a), (b, same_b, end_b) = pool.run(2, _partial)
    assert [partial for partial, _ in a] == [1, 2, 0, 1]
    assert same_a
    assert same_b
    equal = [[x == y for x, y in zip(va, vb, strict=True)] for (_, va), (_, vb) in zip(a, b, strict=True)]
    assert [sum(step) for step in equal] == [1] * 4
    assert [step.index(True) for step in equal[:3]] in ([0, 1, 2], [2, 1, 0])
    assert equal[3] == equal[0]
    assert a[0][1][equal[0].index(True)] == -1.5  # mean of -1 and -2
    assert end_a == end_b


def _one_partition(rank):
    w, opt = leaf(0.0), unit_sgd()
    for _ in range(2):
        opt.backward_and_partial_update(push([w], [rank + 1.0]))
        assert opt.partial == 0
    ws = [leaf(0.0) for _ in range(4)]
    for threshold in (0, 0, 0, 2, 2):  # from four partitions, three of them done, to two
        opt.backward_and_partial_update(push(ws, [rank + 1.0] * 4), threshold)
    return moved(w), opt.partial


def test_partial_update_with_one_partition_or_another_threshold(pool):
    assert pool.run(2, _one_partition) == [([3.0], 0)] * 2


def _sparse(rank):
    out = {}
    w, opt = leaf(0.0, 0.0, 0.0, 0.0), unit_sgd()
    first = torch.tensor([0.1, 0.9, -0.3, 0.2])
    before = opt.sparsInit, opt.gradAccumulation
    opt.backward_and_sparse_update(push([w], [first]), spars=0.25, topK=True)
    out["sent"], out["left"] = moved(w), opt.gradAccumulation[0].tolist()
    opt.backward_and_spars_update(push([w], [torch.zeros(4)]), spars=0.25, topK=True)
    out["next"] = moved(w)
    out["flags"] = before, opt.sparsInit
    w, opt = leaf(0.0, 0.0, 0.0, 0.0), unit_sgd()
    opt.backward_and_sparse_update(push([w], [first]), spars=1.0, topK=True)
    out["dense"] = moved(w)
    w = leaf(0.0, 0.0, 0.0)
    opt = unit_sgd()
    opt.backward_and_sparse_update(push([w], [torch.tensor([0.05, 0.049, 0.0])]), spars=0.05)
    out["threshold"] = moved(w), opt.gradAccumulation[0].tolist()
    a, b = leaf(0.1, 0.1), leaf(0.1, 0.1)
    opt.backward_and_sparse_update(push([a, b], [0.1, 7.0]), spars=0.5, topK=True, corr=False)
    out["unit"] = moved(a, 0.1), moved(b, 0.1)
    return out


def test_sparse_modes(pool):
    for out in pool.run(2, _sparse):
        assert out["sent"] == pytest.approx([0, 0.9, 0, 0])
        assert out["left"] == torch.tensor([0.1, 0, -0.3, 0.2]).tolist()
        assert out["next"] == pytest.approx([0, 0.9, -0.3, 0])
        assert out["flags"] == ((False, []), True)
        assert out["dense"] == pytest.approx([0.1, 0.9, -0.3, 0.2])
        assert out["threshold"][0] == pytest.approx([0.05, 0, 0])
        assert out["threshold"][1] == torch.tensor([0, 0.049, 0]).tolist()
        assert out["unit"] == ([0, 0], pytest.approx([7, 7], rel=1e-5))


def _identity(rank, corr, topK, spars):
    """50 random steps of 30 + 80 elements in groups; the updates are the sums of what was sent."""
    g = torch.Generator().manual_seed(rank)
    ws, opt = [torch.zeros(30, requires_grad=True), torch.zeros(80, requires_grad=True)], unit_sgd()
    total = [torch.zeros(30), torch.zeros(80)]
    for _ in range(50):
        gs = [torch.randn(w.shape, generator=g) for w in ws]
        total = [t + x for t, x in zip(total, gs, strict=True)]
        opt.backward_and_sparse_update(push(ws, gs), 40, spars, topK, corr)
    left = opt.get_states()["residuals"]
    byname = [left[opt._gradients.name(w)]["residual"] for w in ws] if left else None
    return [-w.detach() for w in ws], total, byname


@pytest.mark.parametrize(("topK", "spars"), [(True, 0.1), (False, 1.5)])
def test_what_is_sent_and_what_is_left_is_what_was_put_in(pool, topK, spars):
    """Mean over ranks of (sum of gradients - residual) is what was applied; uncorrected, mass is lost."""
    ranks = pool.run(2, _identity, True, topK, spars)
    for i in range(2):
        wanted = sum(total[i] - left[i] for _, total, left in ranks) / 2
        torch.testing.assert_close(ranks[0][0][i], wanted, rtol=1e-4, atol=1e-4)
    applied, totals, left = zip(*pool.run(2, _identity, False, topK, spars), strict=True)
    assert left == (None, None)
    assert (applied[0][1] - sum(t[1] for t in totals) / 2).abs().max() > 0.5


def _bits(rank):
    """spars .01 of 431,080: k = 4,311 (4,000 of the large group and 311 of the other)."""
    model, opt, bits = mnist_cnn(), unit_sgd(), []
    opt.synchronize(model)
    for threshold in (50000, 2**21):
        for step in range(2):
            before = opt.traffic.payload_bytes
            loss = model(torch.rand(8, 1, 28, 28)).square().mean()
            opt.backward_and_sparse_update(loss, threshold, spars=0.01, topK=True)
            if step:
                bits.append(8 * (opt.traffic.payload_bytes - before) / 4311)
    return bits


def test_top_k_with_correction_sends_at_most_41_bits_an_element(pool):
    """All that crosses counted, control included; the original sends 64."""
    for bits in pool.run(2, _bits):
        assert len(bits) == 2
        assert all(30 < b <= 41 for b in bits)


def _large(rank):
    w = torch.zeros(300_000, requires_grad=True)
    opt = unit_sgd(buffSize=1000)
    for call in (opt.backward_and_update, opt.backward_and_update_half, opt.backward_and_partial_update):
        call(push([w], [1.0]), threshold=100)
    opt.backward_and_sparse_update(push([w], [1.0]), spars=0.5)  # every element
    return float(w.detach().min()), float(w.detach().max())


def test_tensors_beyond_the_buffer_size_work(pool):
    """300,000 elements with buffSize 1,000, and a sparse density of 100 %."""
    assert pool.run(2, _large) == [(-4.0, -4.0)] * 2


@pytest.mark.parametrize("kind", ["update", "update_half", "partial_update", "sparse_update"])
def test_bad_input_is_refused(kind):
    w, opt = leaf(1.0, 2.0), unit_sgd()
    step = getattr(opt, f"backward_and_{kind}")
    with pytest.raises(ConfigError, match="threshold must be a whole number of at least 0, got -1"):
        step(w.sum(), threshold=-1)
    with pytest.raises(ConfigError, match="without a graph"):
        step(torch.ones(()))
    with pytest.raises(ConfigError, match="loss must have one element"):
        step(w * 2)
    assert w.tolist() == [1.0, 2.0]
    step(w.sum())  # and a right one works after all of these
    assert w.tolist() == [0.0, 1.0]


def _recovered(rank, broken_later):
    """A step that is refused on all ranks before anything is sent harms nothing; a broken one is told."""
    w, v, opt = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True), unit_sgd()
    opt(push([v, w], [1.0, 1.0]))
    with pytest.raises(ConfigError):
        opt(w * 2)
    opt(push([v, w], [1.0, 1.0]))
    if broken_later:
        v.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.backward_and_update(push([v, w], [1.0, 1.0]), threshold=0)
        with pytest.raises(StenogradError, match="the last step did not finish"):
            opt(push([w], [1.0]))
    return moved(w)


@pytest.mark.parametrize("broken_later", [False, True])
def test_a_refused_step_harms_nothing_and_a_broken_one_is_told(pool, broken_later):
    assert pool.run(2, _recovered, broken_later) == [[2.0, 2.0]] * 2


def test_bad_clip_values_and_shares_are_refused():
    w, opt = leaf(1.0), unit_sgd()
    for value in (0, -1.0, float("inf")):
        with pytest.raises(ConfigError, match="clip_Value must be finite and above 0"):
            opt.backward_and_update_half(w.sum(), clipping=True, clip_Value=value)
    for spars, top in ((0, True), (1.1, True), (0, False), (-1, False)):
        with pytest.raises(ConfigError, match="spars must be"):
            opt.backward_and_sparse_update(w.sum(), spars=spars, topK=top)


class _Apply(Optimizer):
    """As users of SINGA's latest version write one."""

    def apply(self, param_name, param_value, param_grad):
        param_value.sub_(param_grad, alpha=self.lr_value)


class _Update(Optimizer):
    """As in SINGA's documents."""

    def update(self, param, grad):
        param -= self.lr_value * grad


@pytest.mark.parametrize("own", [_Apply, _Update])
def test_a_users_own_optimizer_changes_parameters_in_place(own):
    for train in (
        lambda o, w: o((w * w).sum()),
        lambda o, w: o.backward_and_update_half((w * w).sum()),
        lambda o, w: o.backward_and_partial_update((w * w).sum()),
        lambda o, w: o.backward_and_sparse_update((w * w).sum()),
        lambda o, w: o.update(w, 2 * w.detach()),
    ):
        w = leaf(1.0)
        train(DistOpt(own(lr=0.25)), w)
        assert w.item() == 0.5


def _other_optimizers(rank):
    """Partial updates may differ: each rank makes its own steps."""
    model = torch.nn.Linear(3, 1)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1 * rank)
    head = SGD(lr=0.1)
    head.register(model.named_parameters(), {"lr": 0.1 + 0.1 * rank})
    for inner, what in [
        (SGD(lr=0.1 + 0.1 * rank), "lr"),
        (SGD(momentum=0.9, nesterov=not rank), "nesterov"),
        (momentum, "momentum of optimizer 0's group 0"),
        (head, "settings of parameter 'bias'"),
    ]:
        with pytest.raises(MismatchError, match=f"ranks differ in {what}: rank 0 has"):
            DistOpt(inner, timeout_s=30)(model(torch.ones(2, 3)).sum())
    DistOpt(SGD(lr=0.1 * rank), timeout_s=30).backward_and_partial_update(model(torch.ones(2, 3)).sum())


def test_ranks_with_other_optimizers_inside_are_told(pool):
    pool.run(2, _other_optimizers)


class _Master(torch.optim.Optimizer):
    """Steps copies in float64, and rounds them."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p].setdefault("wide", p.detach().double()).sub_(p.grad))


def _with_copies(rank):
    a, b = leaf(0.0), leaf(0.0)
    opt = DistOpt(_Master([a, b], {}), timeout_s=30)
    for _ in range(2):
        opt.backward_and_partial_update(push([a, b], [rank + 1.0] * 2), 0)
    return sorted(a.tolist() + b.tolist())


def test_copies_that_an_optimizer_keeps_follow_partial_updates(pool):
    """Step 1 averages -1 and -2 of one parameter, which steps on from -1.5; step 2 -2 and -4 of the other."""
    assert pool.run(2, _with_copies) == [[-3.0, -2.5], [-3.5, -3.0]]


def _broadcast(rank):
    w = leaf(float(rank))
    master = _Master([w], {})
    master.state[w]["wide"] = w.detach().double()  # as one that makes its copies at construction
    opt = DistOpt(master, timeout_s=30)
    opt.synchronize([w])
    opt(w.sum())
    return w.item()


def test_copies_that_an_optimizer_keeps_follow_a_broadcast(pool):
    assert pool.run(2, _broadcast) == [-1.0, -1.0]
