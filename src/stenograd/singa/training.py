"""One training step in each of SINGA's modes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.launch.process_group import World
from stenograd.singa.fusion import DEFAULT_THRESHOLD
from stenograd.singa.gradients import Gradients
from stenograd.singa.inner import Inner
from stenograd.singa.methods import plain, rounded, sparse
from stenograd.singa.primitives import Primitives

__all__ = ["Training"]


class Training(Primitives):
    """The `backward_and_...` methods of `DistOpt`.

    Args:
        inner: the optimizer that updates the parameters.
        driver: the way to the other ranks.
        world: this process's rank on its host.
    """

    def __init__(self, inner: Inner, driver: Driver, world: World) -> None:
        super().__init__(driver, world)
        self._inner = inner
        self._gradients = Gradients(driver)
        self.partial = 0
        self.skipped = 0

    def __call__(self, loss: Tensor) -> None:
        """Train one step: `backward_and_update(loss)`."""
        self.backward_and_update(loss)

    def backward_and_update(self, loss: Tensor, threshold: int = DEFAULT_THRESHOLD) -> None:
        """Train one step on gradients averaged in full precision.

        Args:
            loss: one element, with a graph.
            threshold: in elements, at least 0: larger gradients travel alone, the others in groups of more
                than this; with 0 each travels alone. Smaller groups start earlier, larger ones cost fewer
                latencies.

        Raises:
            ConfigError: threshold is negative, or loss has no graph or several elements.
            MismatchError: at the first step, the ranks' parameters, modes or thresholds differ.
            PeerLost: a rank did not answer within the timeout.
        """
        self._train(loss, threshold, plain())

    def backward_and_update_half(
        self,
        loss: Tensor,
        threshold: int = DEFAULT_THRESHOLD,
        clipping: bool = False,
        clip_Value: float = 100,
        *,
        clip_value: float | None = None,
    ) -> None:
        """Train one step on gradients that travel in float16: half the bytes, 11 significant bits.

        Gradients are divided by the world size before they are summed, so that a sum cannot overflow; those
        below 6e-8 times the world size become 0.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`.
            clipping: whether to clamp this rank's gradients to [-clip_Value, clip_Value] first.
            clip_Value: above 0.
            clip_value: another spelling of clip_Value, from SINGA's documents.

        Raises:
            ConfigError: as in `backward_and_update`, or clip_Value is not positive and finite.
        """
        limit = clip_Value if clip_value is None else clip_value
        self._train(loss, threshold, rounded(limit if clipping else None))

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int = DEFAULT_THRESHOLD,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """Train one step on the most significant elements of each group's gradient.

        With v the group's gradient plus its accumulation, S is `{i : |v_i| >= spars}`, or the `ceil(spars n)`
        largest of n with topK; the ranks average v on S, and the rest of v is the next accumulation. Start
        with topK: a good absolute threshold differs between models and epochs.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`.
            spars: with topK the share of the elements to send, in (0, 1]; otherwise the smallest magnitude
                to send, > 0. SINGA's default means 5 % with topK; as a magnitude it is far above MNIST's
                gradients, which are about 1e-3.
            topK: True selects a share of the elements, False selects by magnitude.
            corr: whether to accumulate what is not sent; otherwise it is lost, and training suffers. It may
                change from step to step: accumulations are kept with their parameters.

        Raises:
            ConfigError: as in `backward_and_update`, or spars is outside its range.
        """
        self._train(loss, threshold, sparse(spars, topK, corr))

    backward_and_spars_update = backward_and_sparse_update  # the older name

    def backward_and_partial_update(self, loss: Tensor, threshold: int = DEFAULT_THRESHOLD) -> None:
        """Train one step on this rank's gradients alone, then average one partition of the parameters.

        Partitions are the fusion rule's groups; each call averages the next one, and after the last `partial`
        is 0 again. Momentum is not averaged. Call `finalize()` after training.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`; the smaller, the more partitions.

        Raises:
            ConfigError: as in `backward_and_update`.
        """
        walked, partitions = self._gradients.local(loss, threshold)
        # Other ranks do not learn of a bad gradient here, so only this rank's update is left out.
        finite = all(bool(p.grad.isfinite().all()) for p in walked if p.grad is not None)
        self._update_all(walked, finite)
        self.partial = self.partial + 1 if self.partial < len(partitions) else 1
        self._average([self._gradients.parameters[name] for name in partitions[self.partial - 1]])
        self.partial %= len(partitions)

    def finalize(self, model: nn.Module | None = None) -> None:
        """Average all parameters seen so far and a model's float buffers, so that all ranks end equal."""
        self._average(self._gradients.parameters.values())
        if model is not None:
            self._average([b for b in model.buffers() if b.is_floating_point()])
        self.partial = 0

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Divide a gradient, a sum over the ranks, by the world size in place, and update with it."""
        with torch.no_grad():  # a user's own optimizer may change parameters in place without saying so
            self._inner.update(param, grad.div_(self.world_size))

    def step(self) -> None:
        """Count a step, as `opt.step()` does; the `backward_and_...` methods count themselves."""
        self._inner.step()

    def _train(self, loss: Tensor, threshold: int, how: Method) -> None:
        walked, finite = self._gradients.averaged(loss, threshold, how)
        self._update_all(walked, finite)

    def _update_all(self, parameters: Iterable[Tensor], finite: bool) -> None:
        """Update parameters with their gradients if these are finite, and count the step either way."""
        self.skipped += not finite
        with torch.no_grad():
            for parameter in parameters:
                if not finite:
                    parameter.grad = None
                elif parameter.grad is not None:
                    self._inner.update(parameter, parameter.grad)
        self._inner.step()

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the ranks, with one collective per type and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for members in kinds.values():
            self._reduce(members, plain(), mean=True)
