"""MLBench's decentralized training: SGD on each rank, and averages with the neighbours on a graph."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.errors import bad_value
from stenograd.launch import process_group
from stenograd.mlbench.wrapper import Closure, Marks, Wrapper, check_lr, evaluate
from stenograd.sync.gossip import Gossip
from stenograd.sync.handshake import compare
from stenograd.topology.mixing import Graph
from stenograd.wire.carried import can_average
from stenograd.wire.driver import Driver
from stenograd.wire.finite import are_finite
from stenograd.wire.traffic import Traffic

__all__ = ["DecentralizedAggregation", "DecentralizedSGD"]


class DecentralizedAggregation:
    """Averages a model's weights or gradients with the neighbours': `x_i <- sum_j W_ij x_j`.

    Args:
        rank: this process's rank; None asks the process group.
        neighbors: ranks of the neighbours; whoever is one has this rank among its own. May be empty.
        use_cuda: taken for compatibility: tensors travel from the device where they are.
        weights: "uniform", `W_ij = 1 / (1 + degree_i)` as in MLBench, or "metropolis", which keeps the mean
            over the ranks on every graph.
        timeout_s: seconds to wait for a neighbour, above 0.

    It joins the ranks of the launch, if nothing did before. All ranks first average a model at the same time,
    neighbours or not: there its parameters are compared.

    Raises:
        ConfigError: on all ranks: a rank's number or neighbours are not what they should be, or the relation
            is not symmetric.
        MismatchError: on all ranks, when a model is first averaged: their parameters differ, or their order.

    Example:
        >>> average = DecentralizedAggregation(rank=0, neighbors=[]).agg_model(by_layer=False)
        >>> average(nn.Linear(2, 1), "avg_world")  # alone, so nothing changes
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
        process_group.join(timeout_s=timeout_s)
        driver = Driver.own(timeout_s=timeout_s)
        self.gossip = Gossip(driver, _agree_on_graph(driver, rank, neighbors, weights))
        self._met: weakref.ref[nn.Module] | None = None

    def agg_model(self, by_layer: bool = False) -> Callable[..., None]:
        """Return `f(model, op)` that averages a model's parameters; by_layer: one message per parameter."""

        def average(model: nn.Module, op: str = "avg_world", denom: Any = None) -> None:
            _check_op(op, denom)
            self._meet(model)
            self.gossip.mix([p for p in model.parameters() if can_average(p)], separately=by_layer)

        return average

    def agg_grad(self, by_layer: bool = False) -> Callable[..., None]:
        """Return `f(model, op)` that averages a model's gradients; by_layer: one message per parameter.

        A gradient that is None counts as zeros, and stays None where no neighbour has one either.
        """

        def average(model: nn.Module, op: str = "avg_world", denom: Any = None) -> None:
            _check_op(op, denom)
            self._meet(model)
            params = [p for p in model.parameters() if p.requires_grad]
            if not params:
                return
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
            has = [float(p.grad is not None) for p in params]
            used = torch.tensor(has, dtype=torch.float32, device=params[0].device)
            # `used` becomes 0 where no neighbour has a gradient
            self.gossip.mix([*grads, used], separately=by_layer)
            for p, grad, share in zip(params, grads, used.tolist(), strict=True):
                p.grad = grad if share > 0 else None

        return average

    def _meet(self, model: nn.Module) -> None:
        """Compare a model's parameters over the ranks, unless it was the last: they travel by position."""
        self.gossip.driver.check_groupless()
        if self._met is None or self._met() is not model:
            named = dict(model.named_parameters())
            trained = sorted(name for name, p in named.items() if p.requires_grad)
            compare(self.gossip.driver, {"parameters that have gradients": trained}, named)
            self._met = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_met": None}  # a copy is for another model


class DecentralizedSGD(Wrapper):
    """SGD on this rank's own gradients, then averaging with neighbours: `p_i <- sum_j W_ij (p_j - lr d_j)`.

    d is torch's SGD direction; momentum stays on its rank. All parameters that the optimizer holds are
    averaged, buffers are not. Ranks start from equal weights only if the caller sees to it. Arguments that
    are not listed are `DecentralizedAggregation`'s.

    Args:
        model: whose parameters to move, or parameters or parameter groups as for `torch.optim.SGD`.
        lr: learning rate, at least 0; must be given.
        momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`.
        average_world: must be True.
        by_layer: whether each parameter travels alone: less memory, more latency.

    Attributes:
        skipped: number of this rank's steps that did not move it, because a gradient was not finite.

    Raises:
        ConfigError: an argument breaks its rule; for rank and neighbors on all ranks.
        MismatchError: on all ranks: their parameters or settings differ.

    Departures from MLBench: rank 0 may use it, the neighbours are checked, Metropolis weights are offered,
    and a gradient that is not finite costs this rank's own step and nothing else.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DecentralizedSGD(0, [], model, lr=0.1)  # alone: plain SGD
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()

    Reference: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
    """

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        model: nn.Module | Iterable[Any] | None = None,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        *,
        weights: str = "uniform",
        timeout_s: float = 300.0,
    ) -> None:
        if model is None:
            raise bad_value("model", "must be a module or its parameters", model, "pass the model to train")
        if not average_world:
            advice = "leave it out; neighbours are always averaged"
            raise bad_value("average_world", "must be True", average_world, advice)
        params = model.parameters() if isinstance(model, nn.Module) else model
        inner = torch.optim.SGD(params, check_lr(lr), momentum, dampening, weight_decay, nesterov=nesterov)
        super().__init__(p for group in inner.param_groups for p in group["params"])
        self.optimizer = inner
        self.by_layer = by_layer
        self.skipped = 0
        self._aggregation = DecentralizedAggregation(
            rank, neighbors, use_cuda, weights=weights, timeout_s=timeout_s
        )
        self.world_size = self._gossip.driver.world_size
        settings: dict[str, Any] = {"by_layer": bool(by_layer)}
        known = model.named_parameters() if isinstance(model, nn.Module) else ()
        names: dict[Tensor, str] = {p: f", {name}" for name, p in known}
        # Parameters travel by position, so their order is compared, also where they have no names.
        forms = [f"{p.dtype} of shape {tuple(p.shape)}{names.get(p, '')}" for p in self._parameters()]
        settings |= {f"parameter {i} in the order of definition": form for i, form in enumerate(forms)}
        compare(self._gossip.driver, settings)

    @property
    def traffic(self) -> Traffic:
        """What this rank sent and how long it waited."""
        return self._gossip.driver.traffic

    @torch.no_grad()
    def step(self, closure: Closure | None = None, tracker: Marks | None = None) -> Any:
        """Move this rank's parameters, then average them with the neighbours'.

        Where a gradient of this rank is not finite, its parameters and momenta do not move, and are averaged.

        Args:
            closure: recomputes the loss and its gradients.
            tracker: is told when the local step and the averaging end.

        Returns:
            What the closure returned, or None.

        Raises:
            PeerLost: a neighbour did not answer in time; this rank's own step is done.
        """
        self._gossip.driver.check_groupless()
        loss = evaluate(closure)
        if are_finite(p.grad for p in self._parameters() if p.grad is not None):
            self.optimizer.step()
        else:
            self.skipped += 1
        if tracker is not None:
            tracker.record_batch_opt_step()
        # After a skipped step, too: the neighbours wait for this rank's parameters.
        self._gossip.mix([p for p in self._parameters() if can_average(p)], separately=self.by_layer)
        if tracker is not None:
            tracker.record_batch_agg()
        return loss

    @property
    def _gossip(self) -> Gossip:
        return self._aggregation.gossip

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _agree_on_graph(driver: Driver, rank: int | None, neighbors: Iterable[int] | None, weights: str) -> Graph:
    """Learn every rank's neighbours, so that a mistake of one rank is an error on all and not a deadlock."""
    try:
        own: Any = None if neighbors is None else [int(other) for other in neighbors]
    except (TypeError, ValueError):
        own = repr(neighbors)  # told like a list, so that the error comes on all ranks
    received = driver.gather_bytes(json.dumps([rank, own, weights], default=repr).encode())
    answers = [json.loads(message) for message in received]
    for place, (claimed, ranks, rule) in enumerate(answers):
        if claimed not in (None, place):
            advice = "pass init().rank, or None"
            raise bad_value(f"rank on rank {place}", f"must be {place} as in the group", claimed, advice)
        if not isinstance(ranks, list):
            advice = "pass the ranks it is connected with, [] for none"
            raise bad_value(f"neighbors of rank {place}", "must be a list of ranks", ranks, advice)
        if rule != (first := answers[0][2]):
            advice = "make it equal on all ranks"
            raise bad_value(f"weights on rank {place}", f"must be {first!r} as on rank 0", rule, advice)
    return Graph([ranks for _, ranks, _ in answers], weights)


def _check_op(op: str, denom: Any) -> None:
    if op != "avg_world" or denom is not None:
        got = op if denom is None else f"{op} with a denom"
        raise bad_value("op", "must be 'avg_world' without denom", got, "weights are those of the graph")
