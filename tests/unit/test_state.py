"""What `load_state_dict` refuses; alone in a world of one."""

import copy

import pytest
import torch
from torch import nn

import stenograd
from stenograd.errors import CheckpointError


@pytest.fixture
def alone():
    yield
    stenograd.shutdown()


def _sync(model, method="topk:ratio=0.1"):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return stenograd.distribute(model, optimizer, method, bucket_bytes=64)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def _other_shape(state):
    state["parameters"]["0.weight"]["residual"] = torch.zeros(3, 3)


def _missing_key(state):
    del state["parameters"]["0.weight"]["residual"]


def _missing_name(state):
    del state["parameters"]["1.bias"]


def _extra_name(state):
    state["parameters"]["2.bias"] = {}


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda s: s.update(format=2), "format must be 1, got 2"),
        (lambda s: s.update(method="sign"), "method must be 'topk:ratio=0.1', got 'sign'"),
        (lambda s: s.update(world_size=4), "world_size must be 1, got 4"),
        (lambda s: s.update(rank=1), "rank must be 0, got 1"),
        (lambda s: s.pop("parameters"), "differ in parameter"),
        (_missing_name, "differ in parameter '1.bias'"),
        (_extra_name, "differ in parameter '2.bias'"),
        (_missing_key, "residual of 0.weight must have shape"),
        (_other_shape, "residual of 0.weight must have shape"),
    ],
)
def test_foreign_state_is_refused_and_changes_nothing(alone, harm, says):
    with _sync(_model()) as sync:
        before = sync.state_dict()
        foreign = copy.deepcopy(before)
        foreign["step"] = 7
        harm(foreign)
        with pytest.raises(CheckpointError, match=says):
            sync.load_state_dict(foreign)
        after = sync.state_dict()
        assert after["step"] == before["step"] == 0
        assert after["parameters"].keys() == before["parameters"].keys()


def test_the_state_is_a_copy(alone):
    model = _model()
    with _sync(model) as sync:
        model(torch.ones(2, 4)).sum().backward()
        saved = sync.state_dict()
        kept = saved["parameters"]["0.weight"]["residual"].clone()
        assert kept.any()
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(saved["parameters"]["0.weight"]["residual"], kept)


def test_close_gives_everything_back(alone):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "topk")
    sync.close()
    sync.close()
    before = sync.traffic.collectives
    model(torch.ones(1, 4)).sum().backward()
    assert sync.traffic.collectives == before
    assert "add_param_group" not in vars(optimizer)


def test_sparse_gradients_that_no_module_announces_are_refused(alone):
    model = nn.Linear(3, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        stenograd.distribute(model, optimizer),
        pytest.raises(
            stenograd.errors.TensorTypeError, match=r"must be dense.*nn\.Embedding\(\.\.\., sparse=True\)"
        ),
    ):
        nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
