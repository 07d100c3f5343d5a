"""Groups and optimizers of frameworks that only look like PyTorch's get an error that says what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stenograd
from stenograd.errors import ConfigError


class KerasLike:
    """An optimizer that is none of torch's, as Keras's are."""


def test_an_optimizer_that_is_none_of_torchs_is_named():
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got \S+\.KerasLike: "):
        stenograd.distribute(nn.Linear(4, 2), KerasLike(), "topk")


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
