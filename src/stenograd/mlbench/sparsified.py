"""MLBench's sparsified SGD with memory: a few coordinates of each tensor a step, the others later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.compression.contract import Site
from stenograd.errors import ConfigError, TensorTypeError, bad_value
from stenograd.mlbench.arguments import check_lr
from stenograd.mlbench.compressed import sparsifier
from stenograd.mlbench.estimates import share_of_newest
from stenograd.mlbench.exchange import Part, Settled, exchange, flat_gradient
from stenograd.mlbench.wrapper import Closure, evaluate, kept_attributes

__all__ = ["SparsifiedSGD"]


class SparsifiedSGD(torch.optim.Optimizer):
    """On one rank: `m <- m + lr g`, `p <- p - m - lr wd p` on S and `p - lr wd p` elsewhere, `m <- 0` on S.

    S are k coordinates of each tensor, drawn anew each step, every coordinate equally likely: k neighbours
    (round the end), or scattered ones in a group with `random_sparse=True`. It does not communicate;
    `CentralizedSparsifiedSGD` does. A step with a gradient that is not finite changes nothing.

    Args:
        params: parameters of any shape, or groups of them.
        lr: learning rate, at least 0; must be given. It enters the memory.
        weight_decay: L2 penalty, at least 0; it stays out of the memory.
        sparse_grad_size: k, at least 1; smaller tensors are sent whole.

    Attributes:
        skipped: number of steps that changed nothing. `state[p]` has `memory` (m), `estimated_w` and `step`.

    Raises:
        ConfigError: a value is outside its range.
        TensorTypeError: a parameter is not real.

    Example:
        >>> w = torch.ones(5, requires_grad=True)
        >>> optimizer = SparsifiedSGD([w], lr=0.5, sparse_grad_size=2)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> sorted(w.tolist())
        [0.5, 0.5, 1.0, 1.0, 1.0]

    Departures: weights keep the user's values, any shape works, lr counts, weight decay is multiplied by lr,
    memories are in at least float32 (D-M4).

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        weight_decay: float = 0,
        sparse_grad_size: int = 10,
    ) -> None:
        self._set_up(params, lr, weight_decay, sparse_grad_size, random_sparse=False)

    def _set_up(
        self,
        params: Iterable[Any],
        lr: float | None,
        weight_decay: float,
        sparse_grad_size: int,
        random_sparse: bool,
    ) -> None:
        check_lr(lr)
        if not 0 <= weight_decay < float("inf"):
            raise bad_value("weight_decay", "must be finite and at least 0", weight_decay, "use 0 for none")
        sparsifier(sparse_grad_size, 1, random_sparse)  # checks
        self.skipped = 0
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(
            params, {**defaults, "sparse_grad_size": sparse_grad_size, "random_sparse": random_sparse}
        )

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters start with an empty memory."""
        super().add_param_group(param_group)
        added: list[Tensor] = self.param_groups[-1]["params"]
        for p in added:
            if not p.is_floating_point():
                raise TensorTypeError(
                    f"parameters must be real, got {p.dtype}: keep real and imaginary parts"
                )
        self._meet(added)
        for p in added:
            memory = torch.zeros(p.shape, dtype=_wide(p), device=p.device)
            self.state[p] = {"step": 0, "memory": memory, "estimated_w": p.detach().clone()}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Send, move, remember; return the closure's loss, None without one."""
        loss = evaluate(closure)
        self._move(self._exchange())
        return loss

    def sparsify_gradients(self, param: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Take k coordinates out of `memory + lr g`: those that the next step would send.

        Args:
            param: one of the parameters.
            lr: learning rate of this gradient.

        Returns:
            The coordinates in the flattened tensor, ascending, int64 (MLBench: float32), and their values.
        """
        at, group = next((i, g) for i, (g, p) in enumerate(self._all()) if p is param)
        part = self._part(at, {**group, "lr": lr}, param)
        numbers = torch.arange(1, param.numel() + 1, dtype=torch.float64, device=param.device)
        drawn = Part(part.compressor.inner, numbers, {}, part.site)  # type: ignore[attr-defined]
        places = exchange([drawn], None).exchanges[0].average.nonzero().view(-1)
        (done,) = exchange([part], None).exchanges
        self._remember(param, done.state["residual"])
        return places, done.average[places]

    @torch.no_grad()
    def update_estimated_weights(self, iteration: int, sparse_vector_size: int) -> None:
        """Move the estimates to `sum_i (i + d/s)^2 p_i / sum_i (i + d/s)^2` over iterations i = 0 .. t.

        Args:
            iteration: t, from 0; call it once for each.
            sparse_vector_size: s, at least 1: what sparse_grad_size is; d is the parameter's size.
        """
        for _, p in self._all():
            rho = share_of_newest(iteration, p.numel(), sparse_vector_size)
            self.state[p]["estimated_w"].lerp_(p.detach(), rho)

    def get_estimated_weights(self) -> list[Tensor]:
        """Return the weighted averages of all parameters."""
        return [self.state[p]["estimated_w"] for _, p in self._all()]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved `state_dict()`; memories keep their float32 where torch would round them."""
        super().load_state_dict(dict(state_dict))
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for number, (_, p) in zip(numbers, self._all(), strict=True):
            self.state[p]["memory"] = state_dict["state"][number]["memory"].clone().to(p.device)

    def _all(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _meet(self, added: list[Tensor]) -> None:
        """Do what must be done when parameters join."""

    def _way(self) -> Driver | None:
        """Return the way to the other ranks; None: stay alone."""
        return None

    def _exchange(self) -> Settled | None:
        moving = [(i, g, p) for i, (g, p) in enumerate(self._all()) if p.requires_grad]
        if not moving:
            raise ConfigError("a step needs parameters that require a gradient, got none: unfreeze some")
        settled = exchange([self._part(i, g, p) for i, g, p in moving], self._way(), guarded=True)
        if settled.applied:
            return settled
        self.skipped += 1
        return None

    def _part(self, at: int, group: dict[str, Any], p: Tensor) -> Part:
        state, way = self.state[p], self._way()
        rank, size = (way.rank, way.world_size) if way is not None else (0, 1)
        site = Site(shapes=(p.shape,), rank=rank, world_size=size, step=state["step"], key=at)
        codec = sparsifier(group["sparse_grad_size"], p.numel(), group["random_sparse"])
        x = flat_gradient(p, _wide(p)).mul_(group["lr"])
        return Part(codec, x, {"residual": state["memory"].view(-1)}, site, p.grad is not None)

    def _move(self, settled: Settled | None) -> None:
        if settled is None:
            return
        moving = [(g, p) for g, p in self._all() if p.requires_grad]
        for (group, p), done, used in zip(moving, settled.exchanges, settled.used, strict=True):
            self._remember(p, done.state["residual"])
            if used:
                update = self._scaled(done.average).view(p.shape)
                p.sub_(update.add_(p, alpha=group["lr"] * group["weight_decay"]).to(p.dtype))

    def _scaled(self, average: Tensor) -> Tensor:
        return average

    def _remember(self, p: Tensor, memory: Tensor) -> None:
        self.state[p]["memory"] = memory.view(p.shape)
        self.state[p]["step"] += 1

    def __getstate__(self) -> dict[str, Any]:
        return kept_attributes(self)


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
