"""What frameworks hand over by mistake gets an error that says what to do: groups, optimizers, models."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stenograd
from stenograd.errors import ConfigError


class Around:
    """What stands around an optimizer of torch's, and is none by its class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class KerasLike:
    """An optimizer that is none of torch's, as Keras's are."""


def test_an_optimizer_that_is_none_of_torchs_is_named():
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got \S+\.KerasLike: "):
        stenograd.distribute(nn.Linear(4, 2), KerasLike(), "topk")


def test_what_stands_around_an_optimizer_is_saved_as_it_is_attached(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    with stenograd.distribute(model, optimizer, "topk") as sync:
        parts = {"model": model, "optimizer": optimizer, "sync": sync}
        stenograd.save_checkpoint(tmp_path, step=3, **parts)
        optimizer.param_groups[0]["lr"] = 0.5
        assert stenograd.load_checkpoint(tmp_path, **parts).step == 3
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("joined", [False, True])
def test_a_group_that_torch_did_not_make_is_refused(joined):
    """As torchft's: `torch.distributed` has no names for its ranks, so no group can be made beside it."""
    model = nn.Linear(4, 2)
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    if joined:
        stenograd.init()
    try:
        with pytest.raises(ConfigError, match=r"got ProcessGroup of 2 ranks, of which it knows 0: "):
            stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk", group=group)
    finally:
        stenograd.shutdown()


def sgd(*modules):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


@pytest.mark.parametrize("method", ["topk", "local:every=4", "gossip"])
def test_a_model_is_attached_once(method):
    """As where a framework makes a new optimizer for the same model: gradients would travel twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first = stenograd.distribute(model, sgd(model[0]), method)
    with pytest.raises(ConfigError, match="attached once, got one whose gradients are averaged already"):
        stenograd.distribute(model, sgd(*model), method)
    first.close()
    stenograd.distribute(model, sgd(*model), method).close()


def test_optimizers_of_different_parts_are_attached_one_by_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    syncs = [stenograd.distribute(model, sgd(part), "dense:clip_value=0.5") for part in model]
    model(torch.full((1, 4), 9.0)).sum().backward()
    assert [sync.step for sync in syncs] == [1, 1]
    assert max(p.grad.abs().max().item() for p in model.parameters()) == 0.5  # 9 or 1 without an exchange
    for sync in syncs:
        sync.close()
