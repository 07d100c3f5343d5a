"""Deep gradient compression: the largest elements of a velocity that every rank accumulates for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.contract import (
    Average,
    Compressor,
    Exchange,
    Facts,
    Feedback,
    Kind,
    Site,
    State,
    StateKind,
    require_floating,
)
from stenograd.compression.sparse import Message, check_ramp, ramped
from stenograd.errors import MethodError, bad_value
from stenograd.kernels.scatter import scatter_mean
from stenograd.kernels.select import select
from stenograd.wire.finite import finite_of, norm_of
from stenograd.wire.requests import Rounds, gather, mean, together

__all__ = ["DGC"]


@dataclass(frozen=True)
class DGC(Compressor):
    """Send the largest of a growing velocity: `u = m u + g`, `v = v + u`, `S = top_k(|v|)`, `sent = v_S`.

    Then `v_S = 0`, and with masking `u_S = 0` too, so that no momentum goes on from what was just applied.
    With Nesterov's momentum, `u = m (u + g)` and `v = v + u + g`. Unlike error feedback, which delays a
    gradient, this delays a gradient with its momentum, as if it had been applied step by step.

    What is delivered has the momentum in it, so the optimizer must be SGD without: `momentum` here is what
    `torch.optim.SGD` would have had. Put weight decay in the optimizer: it then acts on the weights, without
    momentum. Tensors of at most one dimension are averaged exactly, and their momentum is taken afterwards.
    With GradScaler u and v follow the scale of the loss, so a change of scale weighs old gradients wrongly.

    Wire: k indices of about `2 + log2(n / k)` bits and k values with `k = ceil(ratio * n)`, in an all-gather,
    which moves N-1 times that; beside it an all-reduce of the small tensors.

    Args:
        ratio: share of the elements to send, in (0, 1].
        momentum: m, in [0, 1); 0 for none, and then any optimizer will do.
        nesterov: whether it is Nesterov's; it needs momentum.
        masking: whether what is sent loses its momentum on this rank.
        ratio_from: the share at the first step, from which it falls to `ratio` by the same factor per step.
        ramp_steps: number of steps until then; 0 for no ramp.
        clip: largest L2 norm of a tensor's mean gradient if all ranks' were independent: a rank's is limited
            to `clip / sqrt(N)` before it is accumulated; 0 for no limit.

    Raises:
        MethodError: a value outside its range, or nesterov without momentum.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> dgc, g = DGC(ratio=0.5, momentum=0.9), torch.tensor([[4.0, 1.0]])
        >>> (first,) = exchange(dgc, [g])
        >>> (second,) = exchange(dgc, [torch.zeros(1, 2)], [first.state])
        >>> first.average, second.average  # 1 + 0.9 * 1: the first step's momentum is in it
        (tensor([4., 0.]), tensor([0.0000, 1.9000]))

    Reference: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
    Training", ICLR 2018. There the ratio falls by epochs and clipping takes the norm of all tensors together.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dgc": {}}
    summary: ClassVar[str] = "the largest of a velocity kept on each rank; for SGD without momentum"

    ratio: float = 0.001
    _: KW_ONLY
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    ratio_from: float = 0.25
    ramp_steps: int = 0
    clip: float = 0.0

    def __post_init__(self) -> None:
        check_ramp(self.ratio, self.ratio_from, self.ramp_steps)
        if not 0 <= self.momentum < 1:
            raise bad_value("momentum", "must be in [0, 1)", self.momentum, "use 0.9", MethodError)
        if self.nesterov and not self.momentum:
            advice = "set momentum=0.9, or leave nesterov off"
            raise bad_value("nesterov", "needs momentum above 0", self.nesterov, advice, MethodError)
        if not (self.clip >= 0 and math.isfinite(self.clip)):
            advice = "leave it out for no limit"
            raise bad_value("clip", "must be at least 0 and finite", self.clip, advice, MethodError)

    @classmethod
    def examples(cls) -> Iterator[DGC]:
        """Yield it with every switch, and as top-k with feedback."""
        yield cls(ratio=0.1)
        yield cls(ratio=0.1, momentum=0.5, nesterov=True, clip=1.0)
        yield cls(ratio=0.1, masking=False, ramp_steps=4)
        yield cls(ratio=0.1, momentum=0.0)

    # `dense_momentum` is not named: it is made of averages, so it is equal on all ranks.
    state_kinds: ClassVar[Mapping[str, StateKind]] = {"dgc_u": Kind.SUM, "dgc_v": Kind.SUM}
    feedback = Feedback.OWN  # what is not sent stays in v

    def init(self, like: Tensor, site: Site) -> State:
        """Start at rest."""
        require_floating(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        still = torch.zeros(like.numel(), dtype=wide, device=like.device)
        small = {f"dense_momentum/{i}": still.new_zeros(site.shapes[i]) for i in _small(site)}
        return {"dgc_u": still, "dgc_v": still.clone(), **small}

    def facts(self, site: Site) -> Facts:
        """One all-gather of what is selected, as NaN is, beside an all-reduce of small tensors."""
        average = Average.VELOCITY if self.momentum else Average.MEAN
        return Facts(rounds=1 if sum(site.numels) else 0, finite=True, average=average)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Accumulate, select, gather."""
        # copied: g is clipped and zeroed in place, x is needed for the error
        g = x.to(state["dgc_u"].dtype, copy=True)
        g = self.clipped(g if residual is None else g.add_(residual), site)
        pieces, small = g.split(site.numels), _small(site)
        # With an empty tensor in front, because `torch.cat` refuses an empty list.
        dense = torch.cat([g.new_zeros(0), *(pieces[i] for i in small)])
        for i in small:
            pieces[i].zero_()  # so that neither u nor v holds anything of them
        u, step = self.moved(state["dgc_u"], g)
        v = state["dgc_v"] + step  # v <- v + u
        count = self.count(site)
        # Values are not rounded: v becomes zero where it was sent, so nothing would keep what rounding loses.
        message = Message(g.numel(), count, compact=True, values=None)
        chosen, values = select(v, count)
        asked: list[Rounds[Any]] = [gather(*message.write(chosen, values))] if count else []
        replies = yield from together(asked + ([mean(dense)] if dense.numel() else []))  # one round for both
        sparse, exact = (replies[0], replies[1:]) if count else ([], replies)
        finite = finite_of([*(other[1] for other in sparse), *exact])
        average = torch.zeros_like(g)
        if count:
            average = scatter_mean([message.read(other) for other in sparse], g.numel(), out=average)
        sent = torch.zeros_like(g).index_copy_(0, chosen.long(), values)
        v.index_fill_(0, chosen.long(), 0)  # v_S = 0
        if self.masking:
            u.index_fill_(0, chosen.long(), 0)  # u_S = 0
        new = {**state, "dgc_u": u, "dgc_v": v}
        parts = exact[0].split([site.numels[i] for i in small]) if dense.numel() else ()
        # Without `dense`, `small` may still name tensors that have no elements.
        for i, part in zip(small, parts, strict=dense.numel() > 0):
            # `moved` is linear, so this is the mean of what ranks would each have as momentum.
            momentum, delivered = self.moved(state[f"dense_momentum/{i}"], part.view(site.shapes[i]))
            new[f"dense_momentum/{i}"] = momentum
            for whole in (average, sent):
                whole.split(site.numels)[i].copy_(delivered.reshape(-1))
        error = (x.to(sent.dtype) - sent).to(x.dtype) if site.error else None
        return Exchange(average.to(x.dtype), new, error, finite)

    def count(self, site: Site) -> int:
        """Return how many elements a rank sends in this step, besides small tensors."""
        large = sum(site.numels) - sum(site.numels[i] for i in _small(site))
        return math.ceil(ramped(self.ratio, self.ratio_from, self.ramp_steps, site.step) * large)

    def clipped(self, x: Tensor, site: Site) -> Tensor:
        """Limit every tensor's norm to `clip / sqrt(N)`, in place."""
        if self.clip:
            bound = self.clip / math.sqrt(site.world_size)
            for part in x.split(site.numels):
                norm = norm_of(part)
                # NaN is above no bound, and 0 * inf is NaN, so a bad gradient still shows in messages.
                part.mul_(torch.where(norm > bound, bound / norm, 1.0))
        return x

    def moved(self, u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next momentum and what it adds to the velocity, as `torch.optim.SGD` does."""
        if self.nesterov:
            u = (u + g).mul_(self.momentum)
            return u, u + g
        u = torch.add(g, u, alpha=self.momentum)
        return u, u


def _small(site: Site) -> list[int]:
    """Return which tensors are averaged exactly: vectors and scalars."""
    return [i for i, shape in enumerate(site.shapes) if len(shape) <= 1]
