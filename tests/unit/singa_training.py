"""A small model, its training and the optimizers that the tests of SINGA's optimizers share."""

import torch
from torch import nn

from stenograd.singa.optimizers import SGD, AdaGrad, Adam, RMSProp
from stenograd.singa.schedules import ExponentialDecay

MAKERS = {
    "sgd": lambda: SGD(lr=0.1),
    "momentum": lambda: SGD(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda: SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "fading": lambda: SGD(lr=0.05, momentum=ExponentialDecay(0.9, 3, 0.5)),
    "rmsprop": lambda: RMSProp(lr=0.01, weight_decay=0.01),
    "adagrad": lambda: AdaGrad(lr=0.1, weight_decay=0.01),
    "adam": lambda: Adam(lr=ExponentialDecay(0.01, 5, 0.9), weight_decay=0.01),
}


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def updated(optimizer, value, gradient, steps=1):
    w = torch.tensor([value])
    for _ in range(steps):
        optimizer.update(w, torch.tensor([gradient]))
        optimizer.step()
    return w.item()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def train(net, optimizer, steps):
    for step in steps:
        optimizer(net(batch(step)).square().mean())
    return torch.cat([p.detach().flatten() for p in net.parameters()])
