"""Averaging a model's weights or gradients with the neighbours', on a graph that all ranks agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stenograd.comm.driver import Driver
from stenograd.errors import bad_value
from stenograd.sync.gossip import Gossip
from stenograd.topology.mixing import Graph

__all__ = ["DecentralizedAggregation"]


class DecentralizedAggregation:
    """Averages a model's weights or gradients with the neighbours': `x_i <- sum_j W_ij x_j`.

    Args:
        rank: this process's rank; 0 too.
        neighbors: ranks of the neighbours; whoever is one has this rank among its own. May be empty.
        use_cuda: whether the ranks agree on the graph through CUDA, as groups with NCCL alone need. Weights
            are exchanged from where they are.
        weights: "uniform", `W_ij = 1 / (1 + degree_i)` as MLBench has it, or "metropolis", which keeps the
            mean over the ranks on every graph.
        timeout_s: seconds to wait for a neighbour, above 0.

    Raises:
        ConfigError: on all ranks: a rank's number or neighbours are not what they should be, or the relation
            is not symmetric.

    Example:
        >>> from stenograd.launch.process_group import init, shutdown
        >>> _ = init()
        >>> average = DecentralizedAggregation(rank=0, neighbors=[]).agg_model(by_layer=False)
        >>> average(nn.Linear(2, 1), "avg_world")  # alone, so nothing changes
        >>> shutdown()
    """

    def __init__(
        self,
        rank: int | None,
        neighbors: Iterable[int] | None,
        use_cuda: bool = False,
        *,
        weights: str = "uniform",
        timeout_s: float = 300.0,
    ) -> None:
        driver = Driver.own(timeout_s=timeout_s)
        device = torch.device("cuda") if use_cuda else torch.device("cpu")
        self.gossip = Gossip(driver, _agree_on_graph(driver, rank, neighbors, weights, device))

    def agg_model(self, by_layer: bool = False) -> Callable[..., None]:
        """Return `f(model, op)` that averages a model's parameters; by_layer: one message a parameter."""

        def average(model: nn.Module, op: str = "avg_world", denom: Any = None) -> None:
            _check_op(op, denom)
            self.gossip.mix(list(model.parameters()), separately=by_layer)

        return average

    def agg_grad(self, by_layer: bool = False) -> Callable[..., None]:
        """Return `f(model, op)` that averages a model's gradients; by_layer: one message a parameter.

        A gradient that is None counts as zeros, and stays None where no neighbour has one either.
        """

        def average(model: nn.Module, op: str = "avg_world", denom: Any = None) -> None:
            _check_op(op, denom)
            params = [p for p in model.parameters() if p.requires_grad]
            if not params:
                return
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
            used = torch.tensor([float(p.grad is not None) for p in params], device=params[0].device)
            self.gossip.mix([*grads, used], separately=by_layer)
            for p, grad, share in zip(params, grads, used.tolist(), strict=True):
                p.grad = grad if share > 0 else None

        return average


def _agree_on_graph(
    driver: Driver, rank: int | None, neighbors: Iterable[int] | None, weights: str, device: torch.device
) -> Graph:
    """Learn every rank's neighbours, so that a mistake of one rank is an error on all and not a deadlock.

    Args:
        driver: the way to the other ranks.
        rank: what this process takes for its rank; None for whatever it is.
        neighbors: what it takes for its neighbours.
        weights: "uniform" or "metropolis".
        device: where messages may live (NCCL wants CUDA).

    Raises:
        ConfigError: on all ranks: the first mistake of the lowest rank.
    """
    try:
        mine: Any = None if neighbors is None else [int(other) for other in neighbors]
    except (TypeError, ValueError):
        mine = repr(neighbors)
    told = driver.gather_bytes(json.dumps([rank, mine, weights], default=repr).encode(), device)
    answers = [json.loads(message) for message in told]
    for place, (claimed, theirs, rule) in enumerate(answers):
        if claimed not in (None, place):
            advice = "pass init().rank, or None"
            raise bad_value(f"rank on rank {place}", f"must be {place} as in the group", claimed, advice)
        if not isinstance(theirs, list):
            advice = "pass the ranks it is connected with, [] for none"
            raise bad_value(f"neighbors of rank {place}", "must be a list of ranks", theirs, advice)
        if rule != answers[0][2]:
            advice = "make it equal on all ranks"
            raise bad_value(
                f"weights on rank {place}", f"must be {answers[0][2]!r} as on rank 0", rule, advice
            )
    return Graph([theirs for _, theirs, _ in answers], weights)


def _check_op(op: str, denom: Any) -> None:
    if op != "avg_world" or denom is not None:
        got = op if denom is None else f"{op} with a denom"
        raise bad_value("op", "must be 'avg_world' without denom", got, "weights are those of the graph")
