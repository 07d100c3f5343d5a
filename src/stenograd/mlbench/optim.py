"""MLBench's own update rules: signs of gradients, and a few coordinates of each tensor, the others later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stenograd.arguments import number, whole
from stenograd.compression.contract import Compressor, Exchange, Facts, Feedback, Site, State
from stenograd.compression.feedback import ErrorFeedback
from stenograd.errors import ConfigError, TensorTypeError, bad_value
from stenograd.mlbench.aggregation import Averaging, RememberingAggregation, gradient, unused_names
from stenograd.mlbench.wrapper import (
    Closure,
    Marks,
    check_lr,
    evaluate,
    kept_attributes,
    refuse_scaler,
    step_settings,
    whole_or_not_at_all,
)
from stenograd.sync.handshake import broadcast_tensors
from stenograd.wire.carried import wide
from stenograd.wire.finite import are_finite
from stenograd.wire.requests import Rounds, mean
from stenograd.wire.traffic import Traffic

__all__ = ["CentralizedSparsifiedSGD", "SignSGD", "SparsifiedAggregation", "SparsifiedSGD"]


class _Share(NamedTuple):
    """A flat tensor cut in two: the values to send, at these indices, and what stays."""

    indices: Tensor
    values: Tensor
    memory: Tensor

    def spread(self, average: Tensor) -> Tensor:
        """Return a tensor like the memory with the average on the indices, and 0 elsewhere."""
        return torch.zeros_like(self.memory).index_copy_(0, self.indices, average)


@dataclass(frozen=True, kw_only=True)
class _Coordinates(Compressor):
    """Send `min(count, d)` of each tensor's d elements, the same on all ranks, every one equally likely.

    Args:
        count: number of elements, at least 1.
        scattered: scattered elements instead of neighbours (round the end).
    """

    count: int
    scattered: bool

    def __post_init__(self) -> None:
        whole("sparse_grad_size", self.count, "10 is the default")

    feedback = Feedback.ON  # what is not drawn is lost

    def facts(self, site: Site) -> Facts:
        """One all-reduce of what all ranks drew alike; what was not drawn may hide NaN."""
        return Facts()

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Cut, average, put back."""
        share = self.cut(x if residual is None else x.add_(residual), site)
        average = yield from mean(share.values)
        return Exchange(share.spread(average), state, share.memory if site.error else None)

    def cut(self, x: Tensor, site: Site) -> _Share:
        """Take elements out of flat x, which becomes the memory; all ranks draw from (step, key) alike."""
        generator = site.generator(0, shared=True)  # alike on all ranks: no indices travel
        starts = accumulate(site.numels, initial=0)
        drawn = [self._draw(n, generator) + start for n, start in zip(site.numels, starts, strict=False)]
        indices = torch.cat(drawn).to(x.device)  # drawn on the CPU, so alike for every kind of device
        values = x[indices]
        return _Share(indices, values, x.index_fill_(0, indices, 0))

    def _draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the indices of `min(count, n)` of n elements, ascending."""
        k = min(self.count, n)
        if not self.scattered:
            start = int(torch.randint(max(n, 1), (), generator=generator, device="cpu"))
            return ((torch.arange(k, device="cpu") + start) % max(n, 1)).sort().values
        if 4 * k > n:
            return torch.randperm(n, generator=generator, device="cpu")[:k].sort().values
        # Drawing with repetition until k are distinct, and dropping a random surplus, costs O(k log k); a
        # permutation costs O(n).
        found = torch.empty(0, dtype=torch.int64, device="cpu")
        while found.numel() < k:
            found = torch.cat([found, torch.randint(n, (2 * k,), generator=generator, device="cpu")]).unique()
        return found[torch.randperm(found.numel(), generator=generator, device="cpu")[:k]].sort().values


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
        ConfigError: an argument is outside its range.
        TensorTypeError: a parameter is not real.

    Example:
        >>> w = torch.ones(5, requires_grad=True)
        >>> optimizer = SparsifiedSGD([w], lr=0.5, sparse_grad_size=2)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> sorted(w.tolist())
        [0.5, 0.5, 1.0, 1.0, 1.0]

    docs/mlbench.md lists the departures from MLBench. Memories are in at least float32.

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    _scattered = False  # what groups that say nothing of `random_sparse` do

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        weight_decay: float = 0,
        sparse_grad_size: int = 10,
    ) -> None:
        decay = number("weight_decay", weight_decay, "use 0 for none", least=0)
        self.skipped = 0
        defaults = {"lr": check_lr(lr), "weight_decay": decay}
        _Coordinates(count=sparse_grad_size, scattered=self._scattered)  # checks
        sparse = {"sparse_grad_size": sparse_grad_size, "random_sparse": self._scattered}
        super().__init__(params, {**defaults, **sparse})

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters start with an empty memory."""
        with whole_or_not_at_all(self):
            super().add_param_group(param_group)
            added: list[Tensor] = self.param_groups[-1]["params"]
            for p in added:
                if not p.is_floating_point():
                    raise TensorTypeError(
                        f"parameters must be real, got {p.dtype}: keep real and imaginary parts"
                    )
            self._meet(added)
        for p in added:
            memory = torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)
            # After `_meet`, by which p takes rank 0's values: the estimate begins with them.
            self.state[p] = {"step": 0, "memory": memory, "estimated_w": p.detach().clone()}

    def step(self, closure: Closure | None = None) -> Any:
        """Send, move, remember; return the closure's loss, None without one."""
        return self._step(closure, None)

    def sparsify_gradients(self, param: Tensor, lr: float) -> tuple[Tensor, Tensor]:
        """Take k coordinates out of `memory + lr g`: those that the next step would send.

        A further call before that step takes those of the step after it. What steps draw stays as it is, so
        ranks may call it unequally often.

        Args:
            param: one of the parameters.
            lr: learning rate of this gradient.

        Returns:
            The coordinates in the flattened tensor, ascending, int64 (MLBench: float32), and their values.
        """
        found = next(((at, group) for at, (group, p) in enumerate(self._all()) if p is param), None)
        if found is None:
            shape = tuple(param.shape)
            raise bad_value("param", "must be one of the optimizer's", shape, "pass one that it holds")
        at, group = found
        state = self.state[param]
        taken = state.get("taken", 0)  # by earlier calls since the last step
        share = self._share(at, {**group, "lr": lr}, param, ahead=taken)
        state["memory"], state["taken"] = share.memory.view(param.shape), taken + 1
        return share.indices, share.values

    @torch.no_grad()
    def update_estimated_weights(self, iteration: int, sparse_vector_size: int) -> None:
        """Move the estimates to `sum_i (i + d/s)^2 p_i / sum_i (i + d/s)^2` over iterations i = 0 .. t.

        Args:
            iteration: t, from 0; call it once for each.
            sparse_vector_size: s, at least 1: what sparse_grad_size is; d is the parameter's size.

        Raises:
            ConfigError: an argument is out of range.
        """
        number("iteration", iteration, "count from 0", least=0, finite=False)
        number("sparse_vector_size", sparse_vector_size, "pass sparse_grad_size", least=1, finite=False)
        for _, p in self._all():
            newest = _share_of_newest(iteration, p.numel() / sparse_vector_size)
            self.state[p]["estimated_w"].lerp_(p.detach(), newest)

    def get_estimated_weights(self) -> list[Tensor]:
        """Return the weighted averages of all parameters."""
        return [self.state[p]["estimated_w"] for _, p in self._all()]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved `state_dict()`; memories keep their float32 where torch would round them."""
        super().load_state_dict(dict(state_dict))
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for key, (_, p) in zip(numbers, self._all(), strict=True):
            # torch's own load has made it the parameter's type; the saved one is whole.
            self.state[p]["memory"] = state_dict["state"][key]["memory"].clone().to(p.device)

    @torch.no_grad()
    def _step(self, closure: Closure | None, tracker: Marks | None) -> Any:
        loss = evaluate(closure)
        exchanged = self._exchange()
        if tracker is not None:
            tracker.record_batch_agg()
        for group, p, share, average in exchanged:
            # Only now: after a bad gradient there is nothing to go through, and memories stay.
            state = self.state[p]
            state["memory"] = share.memory.view(p.shape)
            state["step"] += 1
            state.pop("taken", None)
            update = share.spread(average).view(p.shape)
            # p - u - lr weight_decay p, with lr in u already
            p.sub_(update.add_(p, alpha=group["lr"] * group["weight_decay"]).to(p.dtype))
        if tracker is not None:
            tracker.record_batch_opt_step()
        return loss

    def _all(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _meet(self, added: list[Tensor]) -> None:
        """Do what must be done when parameters join."""

    def _average(
        self, values: Mapping[str, Tensor], unused: Collection[str], bad: bool
    ) -> Mapping[str, Tensor] | None:
        """Return the averages of what some rank used; None where something was not finite on some rank."""
        return None if bad else {name: v for name, v in values.items() if name not in unused}

    def _exchange(self) -> list[tuple[dict[str, Any], Tensor, _Share, Tensor]]:
        """Return group, parameter, share and average of all that shall move; nothing after a bad gradient."""
        moving = {str(i): (g, p) for i, (g, p) in enumerate(self._all()) if p.requires_grad}
        if not moving:
            raise ConfigError("a step needs parameters that require a gradient, got none: unfreeze some")
        shares = {name: self._share(int(name), group, p) for name, (group, p) in moving.items()}
        unused = unused_names({name: p for name, (_, p) in moving.items()})
        bad = not are_finite(x for share in shares.values() for x in (share.values, share.memory))
        averages = self._average({name: share.values for name, share in shares.items()}, unused, bad)
        if averages is None:
            self.skipped += 1
            return []
        return [(*moving[name], shares[name], average) for name, average in averages.items()]

    def _share(self, at: int, group: dict[str, Any], p: Tensor, ahead: int = 0) -> _Share:
        state = self.state[p]
        # m + lr g
        x = torch.add(state["memory"], gradient(p, wide(p.dtype)), alpha=group["lr"]).reshape(-1)
        # An exchange moves the parameter's step on all ranks or on none, so all draw the same coordinates.
        drawn = _Coordinates(count=group["sparse_grad_size"], scattered=group["random_sparse"])
        return drawn.cut(x, Site(shapes=(p.shape,), step=state["step"] + ahead, key=at))

    def __getstate__(self) -> dict[str, Any]:
        return kept_attributes(self)


class CentralizedSparsifiedSGD(SparsifiedSGD):
    """`m_r <- m_r + lr g_r`, `p <- p - sum_r m_r / N - lr wd p` on S, `m_r <- 0` on S.

    S are drawn as in `SparsifiedSGD`, the same on all ranks. So exactly k coordinates of a tensor change,
    `4 k` bytes travel by one all-reduce, and no indices do. Rank 0's weights are broadcast at construction.
    A step whose gradients are not finite on some rank changes nothing on any. Arguments, attributes and
    departures that are not listed are `SparsifiedSGD`'s.

    Args:
        random_sparse: scattered coordinates instead of neighbours.
        world_size: number of ranks; must be the group's.
        average_world: divide by the world size; else updates are added.

    Raises:
        MismatchError: the ranks' parameters or options differ.

    Example:
        >>> w = torch.ones(5, requires_grad=True)
        >>> optimizer = CentralizedSparsifiedSGD([w], lr=0.5, sparse_grad_size=2, random_sparse=True)
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> sorted(w.tolist())
        [0.5, 0.5, 1.0, 1.0, 1.0]

    docs/mlbench.md lists the departures from MLBench; there each rank draws its own S.
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
        # Before super, which adds the groups and so calls `_meet`.
        self._averaging = Averaging(world_size)
        self.world_size = self._averaging.world_size
        self.average_world = bool(average_world)
        self._scattered = bool(random_sparse)
        super().__init__(params, lr, weight_decay, sparse_grad_size)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return refuse_scaler(self.world_size)

    @property
    def traffic(self) -> Traffic:
        """This rank's bytes."""
        return self._averaging.traffic

    def step(self, closure: Closure | None = None, tracker: Marks | None = None) -> Any:
        """Send, move, remember; arguments and result are those of `GenericCentralizedOptimizer.step`."""
        return self._step(closure, tracker)

    def _meet(self, added: list[Tensor]) -> None:
        options = {"optimizer": type(self).__name__, "average_world": self.average_world}
        group = {key: value for key, value in self.param_groups[-1].items() if key != "params"}
        self._averaging.meet({str(i): p for i, p in enumerate(added)}, {**options, **group})
        broadcast_tensors(self._averaging.driver, [p.detach() for p in added])

    def _average(
        self, values: Mapping[str, Tensor], unused: Collection[str], bad: bool
    ) -> Mapping[str, Tensor] | None:
        decays = any(group["weight_decay"] for group in self.param_groups)  # by this rank's own rate
        self._averaging.settings = step_settings(self if decays else None, None)
        averages = self._averaging.average(values, unused, bad=bad)
        if not self._averaging.finite:
            return None
        factor = 1 if self.average_world else self.world_size
        return {name: average * factor for name, average in averages.items()}


class SparsifiedAggregation(RememberingAggregation):
    """The same few random coordinates of each gradient on all ranks, with error feedback.

    In MLBench this class is empty. The learning rate does not enter its memory; in
    `CentralizedSparsifiedSGD` it does.

    Args:
        model: its trainable parameters get memories.
        use_cuda: as in `Aggregation`.
        world_size: number of ranks; None is the group's.
        sparse_grad_size: number of coordinates of each tensor to send, at least 1.
        random_sparse: scattered coordinates instead of a block of neighbours.

    Example:
        >>> layer = nn.Linear(3, 1, bias=False)
        >>> layer.weight.grad = torch.ones(1, 3)
        >>> SparsifiedAggregation(layer, sparse_grad_size=2).agg_grad()(layer, "avg_world")
        True
        >>> layer.weight.grad.sum()
        tensor(2.)
    """

    def __init__(
        self,
        model: nn.Module,
        use_cuda: bool = False,
        world_size: int | None = None,
        sparse_grad_size: int = 10,
        random_sparse: bool = False,
    ) -> None:
        drawn = _Coordinates(count=sparse_grad_size, scattered=bool(random_sparse))
        super().__init__(model, ErrorFeedback(inner=drawn), use_cuda, world_size)


class SignSGD(torch.optim.Optimizer):
    """`d = g + wd p`, `b <- mu b + (1 - dampening) d`, `p <- p - lr sign(b)`, with `sign(0) = 0`.

    The first step takes `b = d`; Nesterov's variant uses `d + mu b` for b. It does not communicate: put it in
    a `CustomCentralizedOptimizer` for the sign of the mean gradient, or use `stenograd.distribute(...,
    "sign")` to send signs.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0; must be given. A value outside its range is a ConfigError.
        momentum, weight_decay: mu and wd, at least 0.
        dampening, nesterov: as for `torch.optim.SGD`.

    Example:
        >>> w = torch.zeros(3, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, -0.1, 0.0])
        >>> SignSGD([w], lr=0.5).step()
        >>> w.tolist()
        [-0.5, 0.5, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        check_lr(lr)
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            number(name, value, "use 0 for none", least=0)
        if nesterov and (momentum <= 0 or dampening != 0):
            got = (momentum, dampening)
            raise bad_value("momentum, dampening", "must be above 0 and 0 with nesterov", got, "change them")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "dampening": dampening, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Move every parameter that has a gradient, and return the closure's loss."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self._direction(p, p.grad, group).sign(), alpha=-group["lr"])
        return loss

    def _direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Return d, with momentum if there is any."""
        decay, mu = group["weight_decay"], group["momentum"]
        d = grad.add(p, alpha=decay) if decay else grad  # which may be sparse
        if not mu:
            return d
        buffer: Tensor | None = self.state[p].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[p]["momentum_buffer"] = d.clone()
        else:
            buffer.mul_(mu).add_(d, alpha=1 - group["dampening"])  # b <- mu b + (1 - dampening) d
        return d.add(buffer, alpha=mu) if group["nesterov"] else buffer  # Nesterov: d + mu b


def _share_of_newest(t: int, tau: float) -> float:
    """Return `rho = (t + tau)^2 / sum_{i=0..t} (i + tau)^2` in closed form; `rho = 1` at t = 0.

    So `mean <- (1 - rho) mean + rho p` is the average with weights `(i + tau)^2`: Stich et al., theorem 2.4.
    """
    # sum over i = 0..t of tau^2 + 2 tau i + i^2
    total = (1 + t) * (6 * tau * tau + t + 6 * tau * t + 2 * t * t) / 6
    return (t + tau) ** 2 / total if total else 1.0  # t = tau = 0: all weights are 0
