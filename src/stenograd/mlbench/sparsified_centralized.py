"""MLBench's CentralizedSparsifiedSGD: all ranks send the same few coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.comm.traffic import Traffic
from stenograd.errors import ConfigError
from stenograd.mlbench.exchange import join, meet
from stenograd.mlbench.sparsified import SparsifiedSGD
from stenograd.mlbench.wrapper import Closure, Marks, evaluate

__all__ = ["CentralizedSparsifiedSGD"]


class CentralizedSparsifiedSGD(SparsifiedSGD):
    """`m_r <- m_r + lr g_r`, `p <- p - sum_r m_r / N - lr wd p` on S, `m_r <- 0` on S.

    S are k coordinates of each tensor, the same on all ranks and drawn anew each step, every coordinate
    equally likely: k neighbours (round the end) or scattered ones. So exactly k coordinates of a tensor
    change, `4 k` bytes travel by one all-reduce, and no places do. Rank 0's weights are broadcast at
    construction. A step whose gradients are not finite on some rank changes nothing on any.

    Args:
        params: parameters of any shape, or groups of them; must be given.
        lr: learning rate, at least 0; must be given. It enters the memory.
        weight_decay: L2 penalty, at least 0; it stays out of the memory.
        sparse_grad_size: k, at least 1; smaller tensors are sent whole.
        random_sparse: scattered coordinates instead of neighbours.
        world_size: number of ranks; must be the group's.
        average_world: divide by the world size; else updates are added.

    Attributes:
        skipped: number of steps that changed nothing. traffic: this rank's bytes.

    Raises:
        ConfigError: a value is outside its range, or world_size is not the group's.
        TensorTypeError: a parameter is not real.
        MismatchError: the ranks' parameters or options differ.

    Example:
        >>> w = torch.ones(5, requires_grad=True)
        >>> optimizer = CentralizedSparsifiedSGD([w], lr=0.5, sparse_grad_size=2, random_sparse=True)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> sorted(w.tolist())
        [0.5, 0.5, 1.0, 1.0, 1.0]

    Departures: in MLBench each rank draws its own S, so that up to N k coordinates change, and a block never
    holds the last d mod k (D-M4). See `SparsifiedSGD` for the others.

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 0,
        sparse_grad_size: int = 10,
        random_sparse: bool = False,
        world_size: int | None = 1,
        average_world: bool = True,
    ) -> None:
        if params is None:
            raise ConfigError("params must be given, got None: pass model.parameters()")
        self._driver: Driver | None = join(world_size)
        self.world_size = self._driver.world_size
        self.average_world = bool(average_world)
        self._set_up(params, lr, weight_decay, sparse_grad_size, bool(random_sparse))

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes; a copy has sent none before it finds the ranks again."""
        return self._driver.traffic if self._driver is not None else Traffic()

    @torch.no_grad()
    def step(self, closure: Closure | None = None, tracker: Marks | None = None) -> Any:
        """Send, move, remember.

        Args:
            closure: re-evaluates the model, computes gradients and returns the loss.
            tracker: is told when aggregation has ended, and when the parameters have moved.

        Returns:
            The closure's loss, of this rank; None without a closure.
        """
        loss = evaluate(closure)
        settled = self._exchange()
        if tracker is not None:
            tracker.record_batch_agg()
        self._move(settled)
        if tracker is not None:
            tracker.record_batch_opt_step()
        return loss

    def _way(self) -> Driver:
        if self._driver is None:  # a copy finds the ranks again
            self._driver = join(self.world_size)
        return self._driver

    def _meet(self, added: list[Tensor]) -> None:
        options = {"optimizer": type(self).__name__, "average_world": self.average_world}
        group = {key: value for key, value in self.param_groups[-1].items() if key != "params"}
        meet(self._way(), {str(i): p for i, p in enumerate(added)}, {**options, **group})
        for p in added:
            self._way().broadcast(p.detach())

    def _scaled(self, average: Tensor) -> Tensor:
        return average if self.average_world else average.mul_(self.world_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_driver": None}
