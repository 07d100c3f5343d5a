"""EF21: every rank sends how its gradient differs from what the others know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, State, Transport
from stenograd.data.requests import Rounds, mean
from stenograd.errors import MethodError, bad_value

__all__ = ["EF21", "require_contraction"]


def require_contraction(inner: Compressor, who: str) -> None:
    """Refuse a compressor whose errors are not its own to correct.

    Raises:
        MethodError: inner is unbiased or lossless, or its average is not a mean.
    """
    if inner.feedback is not Feedback.ON or inner.transport(Site(shapes=())).votes:
        raise MethodError(
            f"{who} needs a biased compressor whose average is a mean, such as topk, got {inner}: leave "
            "feedback out"
        )


@dataclass(frozen=True, kw_only=True)
class EF21(Compressor):
    """Send differences: `c = C(v - h)`, `h = h + c`, `G = G + mean(c)`, and deliver G, with `v = x`.

    So h, what the others know of this rank, comes closer to x at every step as long as x changes slowly, and
    `G = mean(h)` always. Nothing is owed: error feedback adds lost gradients to later ones, this replaces an
    outdated one. With eta below 1, `v = (1 - eta) v + eta x` is a momentum that takes the noise of small
    batches out of what is compressed (EF21-SGDM); use an optimizer without momentum then.

    The first exchange of a bucket sends x itself: with G = 0 the first steps would go nearly nowhere. Three
    to four tensors like x are kept in float32 or wider. With GradScaler h follows the scale of the loss, so
    after a change of scale G is wrong until h has caught up.

    Args:
        inner: the compressor C, a biased contraction such as top-k.
        eta: weight of the new gradient, in (0, 1]; 1 for plain EF21.

    Raises:
        MethodError: eta outside its range; inner is unbiased or lossless, or its average is not a mean.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> from stenograd.simulate import exchange
        >>> method, x = EF21(inner=TopK(ratio=0.5)), torch.tensor([1.0, 2.0])
        >>> (first,) = exchange(method, [x])
        >>> (second,) = exchange(method, [torch.tensor([1.5, 5.0])], [first.state])
        >>> first.average, second.average  # 3 is the larger of the differences 0.5 and 3
        (tensor([1., 2.]), tensor([1., 5.]))

    Reference: Richtárik et al., "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback", NeurIPS 2021; Fatkhullin et al., "Momentum Provably Improves Error Feedback!", NeurIPS 2023.
    """

    inner: Compressor
    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise bad_value(
                "eta", "must be in (0, 1]", self.eta, "use 0.1, or 1 for no momentum", MethodError
            )
        require_contraction(self.inner, "EF21")

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: it is a wrapper, and no method by itself."""
        return iter(())

    @property
    def feedback(self) -> Feedback:
        """What others do not know of x is in h."""
        return Feedback.OWN

    @property
    def own_momentum(self) -> bool:
        """With eta below 1 a moving average is delivered."""
        return self.eta < 1

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing known, and no tensor begun."""
        still = torch.zeros(
            like.numel(), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
        )
        state = {**self.inner.init(like, site), "ef21_known": still, "ef21_mean": still.clone()}
        if self.eta < 1:
            state["ef21_momentum"] = still.clone()
        begun = torch.zeros((), dtype=still.dtype, device="cpu")  # where reading it makes nobody wait
        return state | {f"ef21_begun/{i}": begun.clone() for i in range(len(site.shapes))}

    def transport(self, site: Site) -> Transport:
        """Take the inner compressor's, for differences."""
        inner = self.inner.transport(site.wide()).keeping()
        return _Differences(inner=inner, rounds=inner.rounds)


@dataclass(frozen=True, kw_only=True)
class _Differences(Transport):
    """The inner transport, given what changed; the first time x travels whole."""

    inner: Transport

    def run(
        self, codec: EF21, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Send what changed, and keep what all know; see `Transport.run`."""
        known, total = state["ef21_known"], state["ef21_mean"]
        v = x.to(known.dtype, copy=True)
        v = v if residual is None else v.add_(residual)
        names = [f"ef21_begun/{i}" for i in range(len(site.shapes))]
        begun = [one > 0 for one in torch.stack([state[name] for name in names]).tolist()]
        if codec.eta < 1:
            before = state["ef21_momentum"].split(site.numels)
            for part, old, runs in zip(v.split(site.numels), before, begun, strict=True):
                part.copy_(torch.lerp(old, part, codec.eta) if runs else part)
        new = dict(state)
        # A tensor that nobody used keeps its state, and must not keep its neighbours from being compressed:
        # where others have begun it starts from h = 0.
        if any(begun):
            inside = replace(site.wide(), buffer=None)
            done = yield from self.inner.run(codec.inner, v - known, None, state, inside, True)
            assert done.error is not None  # asked for
            new |= done.state
            new["ef21_known"], new["ef21_mean"] = v - done.error, total + done.average
        else:
            pieces = []
            for piece in v.tensor_split(self.rounds):  # as many collectives as at every other step
                pieces.append((yield from mean(piece.clone())))
            new["ef21_known"], new["ef21_mean"] = v, torch.cat(pieces)
        new |= {name: torch.ones_like(state[name]) for name in names}
        if codec.eta < 1:
            new["ef21_momentum"] = v.clone() if new["ef21_known"] is v else v
        average = site.out(x).copy_(new["ef21_mean"])  # the caller may change it, so it is no state
        error = (x - new["ef21_known"]).to(x.dtype) if want_error else None
        return Exchange(average, new, error)
