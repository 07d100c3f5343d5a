"""Virtual workers of `plan --learn` against real ranks, on the same batches and the same dropout."""

import pytest
import torch
from torch import nn

import stenograd
from stenograd.catalog.method import method
from stenograd.planning.learn import _curve


def _batch(number):
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(number))
    return inputs, inputs.sum(1, keepdim=True)


def make_trial():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = [_batch(number) for number in range(32)]
    return stenograd.Trial(model, optimizer, batches, lambda m, b: (m(b[0]) - b[1]).square().mean())


def _trained(rank, text):
    work, losses = make_trial(), []
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).tolist()
    with stenograd.distribute(work.model, work.optimizer, text):
        for step in range(12):
            number = 2 * step + rank
            work.optimizer.zero_grad()
            torch.manual_seed((1 << 32) + number)
            value = work.loss(work.model, work.batches[order[number]])
            value.backward()
            work.optimizer.step()
            losses.append(value.item())
    return losses


@pytest.mark.parametrize("text", ["dense", "topk:ratio=0.1", "local:every=4", "qsgd"])
def test_two_virtual_workers_learn_what_two_real_ones_do(pool, text):
    real = pool.run(2, _trained, text)
    given = make_trial()
    tried = _curve(given, list(given.batches), method(text), 2, 12, 1)
    assert tried == [sum(pair) / 2 for pair in zip(*real, strict=True)]
