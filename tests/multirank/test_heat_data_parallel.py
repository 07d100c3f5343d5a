"""Heat's DataParallel on real gloo ranks: without blocking it must give what it gives with."""

import io
import warnings

import pytest
import torch
from heat_nets import OPTIMIZERS, in_both_modes, loss_of, make, train
from models import buckets_of, flat, mlp, shards, step
from torch import nn

import stenograd

ZEROINGS = (
    "before forward",
    "after forward",
    "before backward, torch",
    "after step",
    "after step, torch",
    "after step, zeros",
    "after step, by hand",
    "after step, module",
    "after step, wrapper",
    "before step",
    "before step, torch",
    "never",
)


def _twenty_steps(rank, world_size, kind, method):
    def run(blocking):
        net, optimizers = make(rank, blocking, kind=kind, method=method)
        parameters = []
        for s in range(20):
            train(net, optimizers, rank, world_size, [s])
            if s % 3 == 2 or s == 19:
                net.flush()
                parameters.append(flat(net))
        assert buckets_of(net.sync) >= 3
        net.close()
        return parameters

    # Below 6e-5 it matters whether a gradient is divided by the ranks before or after it is cast to fp16, and
    # a last bit of a weight may then turn the rounding of a later gradient, 5e-4 of it.
    return in_both_modes(run, tolerance=1e-5 if method == "fp16" else 0.0)[-1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_both_modes_equal_one_process_on_the_whole_batch(pool, world_size, kind):
    """Equal shards: the mean of the ranks' mean gradients is the gradient of the whole batch's mean."""
    model = mlp(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for s in range(20):
        xs, ys = shards(s, world_size)
        step(model, optimizer, torch.cat(xs), torch.cat(ys))
    for parameters in pool.run(world_size, _twenty_steps, world_size, kind, "dense"):
        torch.testing.assert_close(parameters, flat(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["topk:ratio=0.1", "powersgd:rank=2", "fp16"])
def test_both_modes_are_equal_with_compression(pool, method):
    first, second = pool.run(2, _twenty_steps, 2, "momentum", method)
    assert torch.equal(first, second)


def _epochs(rank, zeroing):
    """Two epochs of three batches, each followed by an evaluation; there are many ways to zero gradients."""

    def zero(moment, net, optimizer):
        when, _, how = zeroing.partition(", ")
        if when != moment:
            return
        if how == "torch":
            optimizer.torch_optimizer.zero_grad()
        elif how == "zeros":
            optimizer.torch_optimizer.zero_grad(set_to_none=False)
        elif how == "by hand":
            for p in net.parameters():
                p.grad = None
        elif how == "module":
            net.module.zero_grad()
        else:
            (net if how == "wrapper" else optimizer).zero_grad()

    def run(blocking):
        net, (optimizer,) = make(rank, blocking)
        seen = []
        for s in range(6):
            zero("before forward", net, optimizer)
            loss = loss_of(net, rank, 2, s)
            zero("after forward", net, optimizer)
            zero("before backward", net, optimizer)
            loss.backward()
            zero("before step", net, optimizer)
            optimizer.step()
            zero("after step", net, optimizer)
            if s % 3 == 2:
                net.eval()
                seen += [flat(net), net(torch.ones(1, 10)).detach()]
                net.train()
        net.close()
        return seen

    in_both_modes(run)


@pytest.mark.parametrize("zeroing", ZEROINGS)
def test_evaluation_applies_the_last_update_once_however_gradients_are_zeroed(pool, zeroing):
    pool.run(2, _epochs, zeroing)


def _visibility(rank):
    net, (optimizer,) = make(rank, False)
    train(net, [optimizer], rank, 2, [0])
    first = flat(net)
    assert optimizer.update_next
    assert torch.equal(first, flat(mlp(0))), "the update must wait"
    loss_of(net, rank, 2, 1)
    second = flat(net)
    assert not optimizer.update_next
    assert not torch.equal(first, second), "a forward pass must apply it"
    train(net, [optimizer], rank, 2, [1])
    for look in (net.flush, net.eval, net.state_dict, net.module.state_dict, optimizer.state_dict):
        train(net, [optimizer], rank, 2, [2])
        waiting = flat(net)
        look()
        assert not optimizer.update_next
        assert not torch.equal(flat(net), waiting), look
        net.train()
    train(net, [optimizer], rank, 2, [3])
    waiting = flat(net)
    optimizer.torch_optimizer.state_dict()
    assert not torch.equal(flat(net), waiting)
    assert net.eval() is net
    assert net.train() is net
    train(net, [optimizer], rank, 2, [4, 5])
    net.close()
    net.close()
    return flat(net)


def test_an_update_waits_until_someone_looks(pool):
    first, second = pool.run(2, _visibility)
    assert torch.equal(first, second)


def _inference(rank):
    """Evaluation in inference mode applies the first update ever, which makes the momentum buffers."""

    def run(blocking):
        net, optimizers = make(rank, blocking)
        train(net, optimizers, rank, 2, [0])
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            net.eval()
        net.train()
        train(net, optimizers, rank, 2, [1, 2])
        net.close()
        return [flat(net)]

    in_both_modes(run)


def test_evaluation_in_inference_mode(pool):
    pool.run(2, _inference)


class _Odd(nn.Module):
    """A root-level parameter, and layers: frozen, tied, used by rank 0 only, used by nobody."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.randn(10))
            self.first = nn.Linear(10, 10)
            self.tied = nn.Linear(10, 10)
            self.tied.weight = self.first.weight
            self.frozen = nn.Linear(10, 10).requires_grad_(False)
            self.sometimes = nn.Linear(10, 10)
            self.unused = nn.Linear(10, 10)
            self.last = nn.Linear(10, 3)

    def forward(self, x, extra):
        x = self.frozen(self.tied(torch.tanh(self.first(x * self.scale))))
        return self.last(self.sometimes(x) if extra else x)


def _groups(model):
    layers = [model.scale, *model.first.parameters(), model.tied.bias, *model.frozen.parameters()]
    head = [*model.sometimes.parameters(), *model.unused.parameters()]
    groups = [{"params": layers}, {"params": head, "lr": 0.02}]
    return [
        torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.Adam(model.last.parameters(), lr=0.01),
    ]


def _odd(rank, world_size, how):
    def run(blocking):
        model = _Odd(rank)
        net, optimizers = make(rank, blocking, model=model, optimizers=_groups)
        unused, frozen = model.unused.weight.clone(), model.frozen.weight.clone()
        seen = []
        for s in range(8):
            xs, ys = shards(s, world_size)
            loss = nn.functional.mse_loss(net(xs[rank], extra=rank == 0 and s % 2 == 0), ys[rank])
            loss.backward()
            for o in optimizers:
                o.step()
            for o in optimizers:
                (o if how == "own" else o.torch_optimizer).zero_grad()
            if s % 3 == 2:
                net.flush()
                seen.append(flat(net))
        net.eval()
        assert torch.equal(model.unused.weight, unused), "weight decay moved what nobody used"
        assert torch.equal(model.frozen.weight, frozen)
        assert model.tied.weight is model.first.weight
        net.close()
        return [*seen, flat(net)]

    return in_both_modes(run)[-1]


@pytest.mark.parametrize("how", ["own", "torch"])
def test_frozen_shared_root_level_and_unused_parameters_groups_and_optimizers(pool, how):
    ranks = pool.run(3, _odd, 3, how)
    for parameters in ranks[1:]:
        assert torch.equal(parameters, ranks[0])


def _accumulated(rank):
    """Several backward passes a step: without an exchange, of two forwards in a row, of one graph twice."""

    def run(blocking):
        net, (optimizer,) = make(rank, blocking)
        seen = []
        for s in range(0, 12, 4):
            optimizer.zero_grad()
            loss_of(net, rank, 2, s).backward()
            with net.no_sync():
                loss_of(net, rank, 2, s + 1).backward()
            one, other = loss_of(net, rank, 2, s + 2), loss_of(net, rank, 2, s + 3)
            one.backward(retain_graph=True)
            other.backward()
            one.backward()
            optimizer.step()
            seen.append(net(torch.ones(1, 10)).detach())
        net.close()
        return [*seen, flat(net)]

    return in_both_modes(run)[-1]


def test_accumulation_equals_blocking_mode(pool):
    first, second = pool.run(2, _accumulated)
    assert torch.equal(first, second)


def _step_habits(rank):
    """Two steps for one backward pass, a step without any, and clipping, which needs a flush before it."""

    def run(blocking):
        net, (optimizer,) = make(rank, blocking)
        optimizer.step()
        loss_of(net, rank, 2, 0).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        loss_of(net, rank, 2, 1).backward()
        net.flush()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        net.close()
        return [flat(net)]

    in_both_modes(run)


def test_steps_without_a_backward_pass_equal_blocking_mode(pool):
    pool.run(2, _step_habits)


def _schedule(rank):
    """A rate that a scheduler sets after step() is for the next update; its first call must not warn."""

    def run(blocking):
        net, (optimizer,) = make(rank, blocking)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.torch_optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for s in range(4):
                train(net, [optimizer], rank, 2, [s])
                scheduler.step()
        net.eval()
        assert optimizer.param_groups[0]["lr"] == 0.05 / 16
        net.close()
        return [flat(net)]

    in_both_modes(run)


def test_learning_rate_schedulers(pool):
    pool.run(2, _schedule)


def _checkpoint(rank):
    """A state saved while an update waits holds it; loading applies what waits before."""

    def run(blocking):
        whole, optimizers = make(rank, blocking, method="topk:ratio=0.1")
        train(whole, optimizers, rank, 2, range(8))
        whole.close()
        net, (optimizer,) = make(rank, blocking, method="topk:ratio=0.1")
        train(net, [optimizer], rank, 2, range(5))
        file = io.BytesIO()
        torch.save((net.state_dict(), optimizer.state_dict(), net.sync.state_dict()), file)
        train(net, [optimizer], rank, 2, [5, 5])
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        net.sync.load_state_dict(saved[2])
        train(net, [optimizer], rank, 2, range(5, 8))
        net.close()
        assert torch.equal(flat(net), flat(whole))
        return [flat(net)]

    in_both_modes(run)


def test_save_load_continue_is_bit_identical(pool):
    pool.run(2, _checkpoint)


def _thaw(rank):
    def run(blocking):
        model = mlp(rank)
        model[4].requires_grad_(False)
        net, optimizers = make(rank, blocking, model=model)
        train(net, optimizers, rank, 2, [0])
        model[4].requires_grad_(True)
        net.refresh()
        train(net, optimizers, rank, 2, [1, 2])
        net.close()
        return [flat(net)]

    return in_both_modes(run)[-1]


def test_unfrozen_parameters_join_after_refresh(pool):
    first, second = pool.run(2, _thaw)
    assert torch.equal(first, second)


def _joined(rank):
    def run(blocking):
        def head(model):
            return [torch.optim.SGD(model[6].parameters(), lr=0.1)]

        net, (optimizer,) = make(rank, blocking, optimizers=head)
        train(net, [optimizer], rank, 2, [0])
        added = {"params": list(net.module[4].parameters()), "lr": 0.05}
        if not blocking:
            with pytest.raises(stenograd.StenogradError, match="a parameter group was added while"):
                optimizer.torch_optimizer.add_param_group(dict(added))
            assert len(optimizer.param_groups) == 1
        net.flush()
        optimizer.torch_optimizer.add_param_group(added)
        train(net, [optimizer], rank, 2, [1, 2])
        net.close()
        return [flat(net)]

    return in_both_modes(run)[-1]


def test_added_param_groups_join(pool):
    first, second = pool.run(2, _joined)
    assert torch.equal(first, second)
