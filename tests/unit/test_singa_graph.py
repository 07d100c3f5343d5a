"""Parameters found from the loss, and gradients in the order of backward."""

import pytest
import torch
from singa_training import batch, leaf, model, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from stenograd.errors import ConfigError
from stenograd.singa.gradients import Walker, _InOrder, backward, parameters_of
from stenograd.singa.optimizers import SGD


def fired(loss, parameters):
    order = []
    handles = [p.register_post_accumulate_grad_hook(lambda p: order.append(id(p))) for p in parameters]
    loss.backward()
    for handle in handles:
        handle.remove()
    return order


class Tangled(nn.Module):
    """Skips, a tied weight, a branch and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.frozen = nn.LayerNorm(4), nn.Linear(4, 4).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = torch.relu(self.a(x)) + x
        z = self.frozen(self.b(y)) * self.gate + y
        return self.norm(self.c(z) + self.a(z)) * self.gate @ self.c.weight


NETS = [model(), Tangled(), nn.LSTM(4, 4, 2), nn.TransformerEncoderLayer(4, 2, 8)]


@pytest.mark.parametrize("net", NETS)
def test_the_order_is_that_of_backward(net):
    out = net(torch.randn(2, 3, 3 if isinstance(net, nn.Sequential) else 4))
    loss = (out[0] if isinstance(out, tuple) else out).square().sum()
    parameters = parameters_of(loss)
    expected = {id(p) for p in net.parameters() if p.requires_grad}
    assert {id(p) for p in parameters} == expected
    assert len(parameters) == len(expected)
    if not isinstance(net, nn.LSTM):  # where leaves of one operation are ready at once, PyTorch shuffles them
        assert [id(p) for p in parameters] == fired(loss, parameters)


def test_long_graphs_need_no_recursion():
    w = leaf(1.0)
    x = w
    for _ in range(20_000):
        x = x + 1
    assert parameters_of(x.sum())[0] is w


def test_a_loss_may_be_a_parameter():
    w = leaf(1.0)
    SGD(lr=0.1)(w)
    assert w.item() == pytest.approx(0.9)


@pytest.mark.parametrize("loss", [torch.ones(1), leaf(1.0).detach(), torch.ones(1).sum()])
def test_a_loss_without_a_graph_is_refused(loss):
    with pytest.raises(ConfigError, match="without a graph"):
        SGD()(loss)


def test_other_losses_are_refused():
    with pytest.raises(TypeError, match="float"):
        SGD()(0.5)
    with pytest.raises(ConfigError, match="one element"):
        SGD()(leaf(1.0, 2.0) * 2)
    net = nn.Linear(2, 2)
    out = checkpoint(net, torch.ones(1, 2, requires_grad=True), use_reentrant=True)
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        SGD()(out.sum())


def test_checkpointed_parameters_are_found():
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = net.weight.detach().clone()
    SGD()(checkpoint(net, x, use_reentrant=False).sum())
    assert not torch.equal(net.weight, before)


def test_gradients_do_not_accumulate():
    optimizer, w = SGD(lr=1), leaf(0.0)
    w.grad = torch.full((1,), 100.0)
    for _ in range(3):
        optimizer(w.sum())
    assert w.item() == -3


def test_dynamic_graphs():
    """A parameter that appears later is found; an unused one stands still, though it had a gradient."""
    optimizer, a, b = SGD(lr=1, momentum=0.5), leaf(0.0), leaf(0.0)
    optimizer(a.sum())
    optimizer((a + b).sum())
    assert (a.item(), b.item()) == (-2.5, -1)
    optimizer(b.sum())  # as many nodes as in the first graph
    assert (a.item(), b.item()) == (-2.5, -2.5)
    assert a.grad is None


def test_switching_between_equal_graphs():
    optimizer, experts = SGD(lr=1), [leaf(0.0) for _ in range(3)]
    for step in range(7):
        optimizer((experts[step % 3] * 2).sum())
    assert [e.item() for e in experts] == [-6, -4, -4]


def test_tied_parameters_are_updated_once_with_the_whole_gradient():
    """d(w x + 3 w)/dw at x = 2 is 5."""
    optimizer, w = SGD(lr=0.1, momentum=0.9), leaf(1.0)
    optimizer((w * 2 + w * 3).sum())
    assert w.item() == pytest.approx(0.5)
    assert optimizer.get_states()["moments"][0].tolist() == [5]


def test_frozen_parameters_stand_still_and_may_thaw():
    net, optimizer = model(), SGD(lr=0.1)
    net[0].requires_grad_(False)
    before = net[0].weight.detach().clone()
    train(net, optimizer, range(3))
    assert torch.equal(net[0].weight, before)
    net[0].requires_grad_(True)
    train(net, optimizer, range(3, 4))
    assert not torch.equal(net[0].weight, before)


def test_backward_hands_out_final_gradients_during_backward():
    net, events = model(), []
    loss = net(batch(0)).square().mean()
    loss.register_hook(lambda g: events.append("loss"))
    net[0].weight.register_hook(lambda g: events.append("first layer"))
    backward(loss, lambda p: events.append(tuple(p.shape)))
    assert events == ["loss", (2,), (2, 4), (4,), "first layer", (4, 3)]
    del events[:]
    net(batch(1)).square().mean().backward()  # the hooks are gone
    assert events == ["first layer"]


def test_hooks_are_gone_after_an_error():
    w, calls = leaf(1.0), []

    def fail(parameter):
        calls.append(parameter)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        backward((w * 2).sum(), fail)
    (w * 2).sum().backward()
    assert len(calls) == 1


def test_an_undefined_gradient_holds_nobody_up():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, g):
            return g, None

    a, b, c, got = leaf(1.0), leaf(1.0), leaf(1.0), []
    backward(Half.apply(a * c, b).sum(), got.append)
    assert {id(p) for p in got} == {id(a), id(c)}
    assert b.grad is None


def test_overtaking_gradients_wait():
    """As with two devices: b arrives before a, and c never."""
    a, b, c, d, got = *(torch.zeros(i) for i in range(4)), []
    queue = _InOrder([a, b, c, d], lambda t: got.append(t.numel()))
    queue.arrived(b)
    assert got == []
    queue.arrived(a)
    queue.arrived(d)
    assert got == [0, 1]
    queue.flush()
    assert got == [0, 1, 3]


def test_a_walker_keeps_only_the_last_parameters():
    walker, a, b = Walker(), leaf(1.0), leaf(1.0)
    assert [p is a for p in walker.find((a * 2).sum())] == [True]
    a.grad = torch.ones(1)
    assert [p is b for p in walker.find((b * 2).sum())] == [True]
    assert a.grad is None
