"""Keeps an eye on backward passes and optimizer steps: what would let the ranks drift apart is said."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from laconic.errors import LaconicError, TensorTypeError

__all__ = ["Passes"]

_BITS = 4  # of a pass's number that the ranks compare


class Passes:
    """Counts a rank's backward passes, and knows whether its gradients are averages.

    Args:
        local: whether there are gradients from before, which were never averaged.

    Attributes:
        count: number of passes begun, those without an exchange included.
    """

    def __init__(self, local: bool = False) -> None:
        self.count = 0
        self._local, self._warned = local, False
        self._task = -1

    def saw(self, task: int) -> None:
        """Count a pass when it makes its first gradient."""
        if task != self._task:
            self._task = task
            self.count += 1

    def accumulated(self, before: int) -> None:
        """Note that passes since number `before` exchanged nothing."""
        self._local = self._local or self.count > before

    def flags(self) -> list[bool]:
        """Return flags for the exchange that tell this pass's number modulo 16 from others.

        Each bit is sent as itself and as its opposite. Where both are set, two ranks are at different passes.

        Example:
            >>> Passes().flags()
            [False, False, False, False, True, True, True, True]
        """
        bits = [bool(self.count >> bit & 1) for bit in range(_BITS)]
        return bits + [not bit for bit in bits]

    def exchanged(self, any_flags: Sequence[bool]) -> None:
        """Take which flags any rank set, these being the last of them: gradients are averages now.

        Raises:
            LaconicError: on all ranks: they are at different backward passes.
        """
        ones, zeros = any_flags[-2 * _BITS : -_BITS], any_flags[-_BITS:]
        if any(one and zero for one, zero in zip(ones, zeros, strict=True)):
            raise LaconicError(
                f"the ranks are at different backward passes, this one at number {self.count}: use no_sync() "
                "and backward() for the same batches on every rank, and restart from a checkpoint"
            )
        self._local = False

    def check_gradient(self, grad: Tensor | None) -> None:
        """Refuse gradients that cannot be averaged where they are.

        Raises:
            TensorTypeError: it is sparse, or belongs to a graph.
        """
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise TensorTypeError(f"gradients must be dense, got {grad.layout}: use Embedding(sparse=False)")
        if grad.requires_grad:
            raise TensorTypeError(
                "gradients must not have a graph of their own, got one from backward(create_graph=True), "
                "which averaging would cut: use torch.autograd.grad for the inner derivative"
            )

    def check_step(
        self, optimizer: torch.optim.Optimizer, averaged: Collection[int], under_way: bool
    ) -> None:
        """Refuse to step on gradients that were not averaged, and warn once where some may hold local ones.

        Args:
            optimizer: about to step.
            averaged: ids of the parameters that are exchanged.
            under_way: whether a backward pass is.

        Raises:
            LaconicError: a pass is under way or failed, or a gradient was not averaged.
        """
        if under_way:
            raise LaconicError(
                "an optimizer stepped during a backward pass, before gradients were averaged (or the last "
                "pass failed): step after backward() returns"
            )
        held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        for p in held:
            if p.requires_grad and id(p) not in averaged:
                raise LaconicError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient that was not averaged: after "
                    "unfreezing parameters call sync.refresh() on every rank"
                )
        if held and self._local and not self._warned:
            self._warned = True
            warnings.warn(
                "optimizer.step() applies gradients of this rank alone, from no_sync() or from before "
                "distribute(): the ranks drift apart; end accumulation with a backward pass outside "
                "no_sync(), or call zero_grad() first",
                RuntimeWarning,
                stacklevel=5,
            )
