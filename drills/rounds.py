"""What a program of `programs.py` is judged by where its ranks average parameters in rounds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from digests import digest
from torch import Tensor, nn

from stenograd.catalog.registry import schedules
from stenograd.schedules.schedule import What

__all__ = ["Rounds", "scheduled", "unfit"]

# Programs that a schedule of rounds refuses, with the words of the refusal; the beginnings of their names.
_UNFIT = {
    "uneven": "rounds need equally many batches on every rank",
    "ddp": "DDP averages gradients in every pass",
}
_EVERY = 4  # steps between rounds
_SEND_LESS = "topk:ratio=0.1"


def scheduled() -> list[str]:
    """Return a text for every schedule of rounds, alone and with a codec."""
    texts = []
    for name, (cls, _) in schedules().items():
        if cls.what is What.PARAMETERS:
            keys = f":every={_EVERY}" if any(f.name == "every" for f in fields(cls)) else ""
            texts += [f"{name}{keys}", f"{name}{keys}/{_SEND_LESS}"]
    return texts


def unfit(program: str, method: str) -> str:
    """Return why a program makes no sense under a method; empty where it does."""
    reasons = [reason for start, reason in _UNFIT.items() if program.startswith(start)]
    return reasons[0] if reasons and method in scheduled() else ""


class Rounds:
    """What this rank's parameters are right after each round, with the interface of `Ledger`.

    After an exact round they must be equal on all ranks as they are. After one that a codec wrote they differ
    by what the ranks have not sent yet; then the mean of what all have sent must be equal.

    Args:
        model: whose parameters are averaged.
        sync: what averages them.
    """

    def __init__(self, model: nn.Module, sync: Any) -> None:
        self.model, self.sync = model, sync
        self._exact = sync.method.each_round().lossless
        self._seen = sync.round
        self._digests: list[tuple[int, str]] = []

    def begin(self) -> None:
        """Do nothing: steps and forward passes hold rounds, so `end` sees them as well."""

    def end(self) -> None:
        """Note what a round left, if one was held since the last pass; this pass has not changed it."""
        if self.sync.round == self._seen or (self.sync.pending and not self._exact):
            return  # `state_dict()` would hold the round that is due, before the step that belongs to it
        self._seen = self.sync.round
        # Not `consensus()`, which puts parameters in place that a forward pass, kept for later, has used.
        agreed = list(self.model.parameters()) if self._exact else _sent(self.sync)
        self._digests.append((self._seen, digest(agreed)))

    def settled(self) -> AbstractContextManager[None]:
        """Return a block in which the parameters are what all ranks agree on."""
        block: AbstractContextManager[None] = self.sync.consensus()
        return block

    def lost(self) -> dict[str, float]:
        """Return nothing: gradients are not averaged."""
        return {}

    def misused(self) -> list[tuple[int, str]]:
        """Return where the number of rounds is wrong, which the schedule and the passes made determine."""
        self.sync.flush()
        due = self.sync.step // self.sync.method.schedule.every
        return [] if self.sync.round == due else [(self.sync.round, f"rounds held of {due}")]

    def told(self) -> list[tuple[int, str]]:
        """Return the rounds looked at with what they left, which must be equal on all ranks."""
        return list(self._digests)


def _sent(sync: Any) -> list[Tensor]:
    """Return the mean of what all ranks have sent so far, of which each keeps a copy."""
    found = sync.state_dict()["parameters"]
    return [tensors["mean of sent"] for tensors in found.values() if "mean of sent" in tensors]
