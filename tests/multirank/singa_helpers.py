"""What the tests of stenograd.singa share; imported by the rank processes."""

import torch

from stenograd.singa import SGD, DistOpt


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def push(parameters, gradients):
    """A loss whose gradients are the ones given; the last parameter's comes first in backward order."""
    terms = [(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]
    return torch.stack(terms).sum()


def spied(opt):
    """Record the payload bytes of each non-empty collective that an optimizer starts."""
    log, start = [], opt._driver.start

    def spy(request, *label):
        if request.nbytes:
            log.append(request.nbytes)
        return start(request, *label)

    opt._driver.start = spy
    return log


def unit_sgd(**arguments):
    """An optimizer whose updates are the averaged gradients."""
    return DistOpt(SGD(lr=1.0), timeout_s=30, **arguments)


def moved(parameter, start=0.0):
    """The averaged gradient that unit_sgd applied to a parameter that was `start`."""
    return (start - parameter.detach()).tolist()
