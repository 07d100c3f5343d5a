"""A step's 0/1 flags, which all ranks must agree on, as passengers of a message that travels anyway."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from stenograd.data.requests import REDUCTIONS, Op, Reply, Request, Rounds, mean

__all__ = ["Flags"]

T = TypeVar("T")


class Flags:
    """Flags of one rank, and after an exchange, which of them any rank had set.

    Args:
        mine: 1-D floating tensor of zeros and ones, equally long on all ranks.

    Example:
        >>> from stenograd.simulate import run
        >>> from stenograd.data.requests import gather
        >>> ranks = [Flags(torch.tensor([1.0, 0.0])), Flags(torch.tensor([0.0, 0.0]))]
        >>> told = run([flags.carried_by(gather(torch.tensor([7]))) for flags in ranks])
        >>> told[0], ranks[1].any
        ([(tensor([7]),), (tensor([7]),)], tensor([1, 0], dtype=torch.uint8))
    """

    def __init__(self, mine: Tensor) -> None:
        self._mine = mine
        self._any: Tensor | None = None if mine.numel() else mine

    @property
    def any(self) -> Tensor:
        """After the exchange, above 0 for each flag that any rank has set.

        Raises:
            RuntimeError: there was no exchange.
        """
        if self._any is None:
            raise RuntimeError("the flags were not exchanged yet")
        return self._any

    def alone(self) -> Rounds[None]:
        """Exchange them in a collective of their own."""
        self._any = yield from mean(self._mine)

    def carried_by(self, rounds: Rounds[T]) -> Rounds[T]:
        """Run a coroutine; the flags travel with its first request, or after it where that cannot take them.

        As bytes behind what is gathered, or as numbers behind what is averaged, which copies that once.
        """
        reply: Reply = None
        while True:
            try:
                request = rounds.send(reply)
            except StopIteration as stop:
                if self._any is None:
                    yield from self.alone()
                return stop.value  # type: ignore[no-any-return]
            loaded = self._loaded(request) if self._any is None else None
            reply = (yield request) if loaded is None else self._unloaded(request, (yield loaded))

    def _loaded(self, request: Request) -> Request | None:
        """Return a request with the flags as one more tensor; None where it does not reach all ranks."""
        if request.op is Op.SEVERAL:
            first = self._loaded(request.parts[0])
            return None if first is None else replace(request, parts=(first, *request.parts[1:]))
        rider = self._rider(request)
        return None if rider is None else replace(request, tensors=(*request.tensors, rider))

    def _rider(self, request: Request) -> Tensor | None:
        if request.op in REDUCTIONS:
            return self._mine.to(request.tensors[0].dtype) if request.tensors else self._mine
        if request.op is Op.GATHER:
            return self._mine.to(torch.uint8)
        if request.op is Op.SCATTER:
            ranks = len(request.tensors[0])
            return self._mine.to(torch.uint8).expand(ranks, -1)
        return None

    def _unloaded(self, request: Request, reply: Reply) -> Reply:
        """Take the flags of all ranks, and return the reply without them."""
        if request.op is Op.SEVERAL:
            return [self._unloaded(request.parts[0], reply[0]), *reply[1:]]
        if request.op in REDUCTIONS:
            self._any = reply[-1]
            return reply[:-1]
        self._any = torch.stack([theirs[-1] for theirs in reply]).amax(0)
        return [theirs[:-1] for theirs in reply]
