"""MLBench's decentralized SGD: a local step, then the weights are averaged with those of the neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.driver import Driver
from stenograd.comm.traffic import Traffic
from stenograd.data.finite import is_finite
from stenograd.errors import bad_value
from stenograd.mlbench.neighbors import DecentralizedAggregation
from stenograd.mlbench.tracker import Tracker
from stenograd.sync.gossip import Gossip
from stenograd.sync.handshake import compare, versions

__all__ = ["DecentralizedAggregation", "DecentralizedSGD"]

_CPU = torch.device("cpu")


class DecentralizedSGD(torch.optim.Optimizer):
    """SGD on this rank's own gradients, then averaging with neighbours: `p_i <- sum_j W_ij (p_j - lr d_j)`.

    d is torch's SGD direction (momentum, dampening, weight decay, Nesterov); momentum stays on its rank. All
    parameters that the optimizer holds are averaged, buffers are not. Ranks do not start from equal weights
    unless the caller sees to it.

    Args:
        rank: this process's rank; None asks the process group.
        neighbors: ranks of the neighbours; whoever is one has this rank among its own. May be empty.
        model: whose parameters to move, or parameters or parameter groups as for `torch.optim.SGD`.
        lr: learning rate, >= 0; required.
        momentum: factor of the velocity, >= 0.
        dampening: of what enters the velocity.
        weight_decay: L2 penalty, >= 0.
        nesterov: whether to look ahead; needs momentum > 0 and dampening 0.
        average_world: must be True.
        use_cuda: as for `DecentralizedAggregation`.
        by_layer: whether each parameter travels alone: less memory, more latency.
        weights: "uniform" or "metropolis"; see `DecentralizedAggregation`.
        timeout_s: seconds to wait for a neighbour, above 0.

    Attributes:
        skipped: number of this rank's steps that did not move it, because a gradient was not finite.

    Raises:
        ConfigError: an argument breaks its rule; for rank and neighbors on all ranks.
        MismatchError: on all ranks: their parameters or settings differ.

    Departs from MLBench: rank 0 may use it, the neighbours are checked, Metropolis weights are offered, and a
    gradient that is not finite costs this rank's own step and nothing else.

    Example:
        >>> from stenograd.launch.process_group import init, shutdown
        >>> world = init()
        >>> model = nn.Linear(2, 1)
        >>> optimizer = DecentralizedSGD(world.rank, [], model, lr=0.1)  # alone: plain SGD
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> shutdown()

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
        if lr is None:
            raise bad_value("lr", "must be given", lr, "use 0.1 to start with")
        if not average_world:
            advice = "leave it out; neighbours are always averaged"
            raise bad_value("average_world", "must be True", average_world, advice)
        params = model.parameters() if isinstance(model, nn.Module) else model
        self._inner = torch.optim.SGD(params, lr, momentum, dampening, weight_decay, nesterov=nesterov)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.by_layer = by_layer
        self.skipped = 0
        self._aggregation = DecentralizedAggregation(
            rank, neighbors, use_cuda, weights=weights, timeout_s=timeout_s
        )
        _compare_settings(self._gossip.driver, self._parameters(), by_layer, use_cuda)

    @property
    def traffic(self) -> Traffic:
        """What this rank sent and how long it waited."""
        return self._gossip.driver.traffic

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, tracker: Tracker | None = None) -> Any:
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # load_state_dict and unpickling replace them, so they are handed over anew each time.
        self._inner.param_groups, self._inner.state = self.param_groups, self.state
        if all(p.grad is None or is_finite(p.grad) for p in self._parameters()):
            self._inner.step()
        else:
            self.skipped += 1
        if tracker is not None:
            tracker.record_batch_opt_step()
        self._gossip.mix(self._parameters(), separately=self.by_layer)
        if tracker is not None:
            tracker.record_batch_agg()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Keep what torch's own method, which knows three attributes, would drop from copies and pickles."""
        mine = {name: self.__dict__[name] for name in ("_inner", "by_layer", "_aggregation", "skipped")}
        return {**super().__getstate__(), **mine}

    @property
    def _gossip(self) -> Gossip:
        return self._aggregation.gossip

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def _compare_settings(driver: Driver, params: Sequence[Tensor], by_layer: bool, use_cuda: bool) -> None:
    settings: dict[str, Any] = {**versions(), "by_layer": bool(by_layer)}
    forms = {f"parameter {i}": f"{p.dtype} of shape {tuple(p.shape)}" for i, p in enumerate(params)}
    compare(driver, settings | forms, torch.device("cuda") if use_cuda else _CPU)
