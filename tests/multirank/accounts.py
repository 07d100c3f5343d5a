"""What a program of `programs.py` is given, and the accounts that are kept of what its ranks average."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stenograd
from stenograd.catalog.registry import schedules
from stenograd.compression.contract import Site
from stenograd.schedules.schedule import What

BUCKET_BYTES = 1200  # at least two buckets in every program, and a tensor that is larger than one
# Programs that a schedule of rounds refuses, with the words of the refusal; the beginnings of their names.
_UNFIT = {
    "uneven": "rounds need equally many batches on every rank",
    "ddp": "DDP averages gradients in every pass",
}
_EVERY = 4  # steps between rounds
_SEND_LESS = "topk:ratio=0.1"


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a hash of all bits."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@dataclass
class Job:
    """What a program is told, and what it hands back besides its losses.

    Attributes:
        options: arguments for `stenograd.distribute`.
        ledgers: the accounts of all watched models.
        alike: tensors that must be equal on all ranks at the end, besides the watched models' parameters;
            where ranks train by themselves between rounds, they are each rank's own.
    """

    rank: int
    world: int
    steps: int
    method: str
    options: dict[str, Any] = field(default_factory=lambda: {"bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0})
    ledgers: list[Ledger | Rounds] = field(default_factory=list)
    alike: list[Tensor] = field(default_factory=list)

    def generator(self, step: int) -> torch.Generator:
        """Return random numbers of this rank's own for a step."""
        return torch.Generator().manual_seed(100_003 * (step + 1) + self.rank)

    def batch(self, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs (size, 10) and targets (size, 3) of a step, which can be learned."""
        x = torch.randn(size, 10, generator=self.generator(step))
        return x, torch.tanh(x @ _TEACHER) + 0.5

    def learn(
        self, optimizers: Sequence[torch.optim.Optimizer], loss_of: Callable[[int, Tensor, Tensor], Tensor]
    ) -> list[float]:
        """Take every step of an ordinary loop, on the loss of (step, inputs, targets); return the losses."""
        losses = []
        for step in range(self.steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(step, *self.batch(step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())
        return losses

    def attach(self, model: nn.Module, optimizers: Any) -> Any:
        """Let the method average over the ranks, and keep accounts of it."""
        return self.watch(model, stenograd.distribute(model, optimizers, self.method, **self.options))

    def watch(self, model: nn.Module, sync: Any) -> Any:
        """Keep accounts of a model whose gradients, or parameters, `sync` averages."""
        in_rounds = sync.method.schedule.what is What.PARAMETERS
        self.ledgers.append(Rounds(model, sync) if in_rounds else Ledger(model, sync))
        return sync


class Ledger:
    """What this rank computed, what its backward passes left in `.grad`, and when, for every parameter.

    Error feedback promises, over any number of steps and for each parameter,

        mean over ranks of sum g = sum of what was applied + mean over ranks of the residual

    where g is what this rank's passes computed, seen by tensor hooks, and what is applied is what passes
    added to `.grad`. A pass without an exchange adds local gradients; the next one takes them off again.

    Args:
        model: whose parameters to watch.
        sync: what exchanges their gradients; `state_dict()` tells residuals, `step` and `skipped` count.
    """

    def __init__(self, model: nn.Module, sync: Any) -> None:
        self.model, self.sync = model, sync
        self._parameters = dict(model.named_parameters())
        self._summed = {name: torch.zeros_like(_wide(p)) for name, p in self._parameters.items()}
        self._sparse: set[str] = set()  # they travel exactly, whatever the method
        self._hooked: set[str] = set()
        # The rest by the number of exchanges before the pass. Ranks that have run out of data miss some.
        self._applied: dict[int, dict[str, Tensor]] = {}
        self._used: dict[int, set[str]] = {}
        self._changed: dict[int, set[str]] = {}
        self._has: dict[int, set[str]] = {}

    def begin(self) -> None:
        """Note what a backward pass finds in `.grad`."""
        for name, p in self._parameters.items():
            if p.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                p.register_hook(partial(self._on_gradient, name))
        self._at = self.sync.step + self.sync.skipped
        self._before = {name: self._gradient(name) for name in self._parameters}
        self._used.setdefault(self._at, set())
        self._changed.setdefault(self._at, set())

    def end(self) -> None:
        """Note what the pass left there."""
        sums = self._applied.setdefault(self._at, {n: torch.zeros_like(s) for n, s in self._summed.items()})
        has = self._has[self._at] = set()
        for name, before in self._before.items():
            after = self._gradient(name)
            sums[name] += (0 if after is None else after) - (0 if before is None else before)
            if after is not None:
                has.add(name)
            if (after is None) != (before is None) or (after is not None and not torch.equal(after, before)):
                self._changed[self._at].add(name)

    def settled(self) -> AbstractContextManager[None]:
        """Return a block in which the parameters are what all ranks agree on, which they always are."""
        return nullcontext()

    def told(self) -> list[tuple[int, str]]:
        """Return nothing: whatever may differ between ranks in between shows in the end."""
        return []

    def lost(self) -> dict[str, float]:
        """Return, alike on all ranks, how much of each parameter's summed gradient is unaccounted for.

        Relative to the norm of the sum. Only parameters are named for which the method promises to keep
        account: those with a residual, those that travel exactly, but none whose method votes.
        """
        everyone = _gathered(set(self._applied))
        shares = {at: sum(at in mine for mine in everyone) for at in self._applied}
        state = self.sync.state_dict()["parameters"]
        mine = {}
        for name, summed in self._summed.items():
            applied = sum((sums[name] / shares[at] for at, sums in self._applied.items()), torch.zeros(()))
            kept = state.get(name, {}).get("residual")
            owed = _wide(kept).view_as(summed) if kept is not None else torch.zeros_like(summed)
            mine[name] = (summed / dist.get_world_size(), applied, owed / dist.get_world_size())
        rows = _gathered(mine)
        out = {}
        for name in self._summed:
            if self._promised(name, state.get(name, {})):
                computed, applied, owed = (sum(row[name][i] for row in rows) for i in range(3))
                norm = float(computed.norm())
                out[name] = float((computed - applied - owed).norm()) / (norm or 1.0)
        return out

    def misused(self) -> list[tuple[int, str]]:
        """Return, alike on all ranks, where a parameter that some rank used was left without a gradient.

        Or where one that no rank used had its gradient changed; with the number of exchanges before.
        """
        rows = _gathered((self._used, self._changed, self._has))
        used: dict[int, set[str]] = {}
        for mine, _, _ in rows:
            for at, names in mine.items():
                used.setdefault(at, set()).update(names)
        wrong = set()
        for _, changed, has in rows:
            for at, names in has.items():
                wrong |= {(at, name) for name in (used[at] - names) | (changed[at] - used[at])}
        return sorted(wrong)

    def _promised(self, name: str, state: Mapping[str, Tensor]) -> bool:
        how, numel = self.sync.method, self._parameters[name].numel()
        site = Site(shapes=(torch.Size((numel,)),), world_size=dist.get_world_size())
        votes = not how.compressor.facts(site).average.is_mean
        exact = how.lossless or numel < how.dense_below or name in self._sparse
        return exact or ("residual" in state and not votes)

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            self._sparse.add(name)
        self._summed[name] += _wide(gradient)
        self._used[self._at].add(name)

    def _gradient(self, name: str) -> Tensor | None:
        grad = self._parameters[name].grad
        return None if grad is None else _wide(grad)


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


@contextmanager
def watched(job: Job) -> Iterator[None]:
    """Let the job's ledgers see every backward pass inside the block."""
    run = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        ledgers = list(job.ledgers)
        for ledger in ledgers:
            ledger.begin()
        run(*args, **kwargs)
        for ledger in ledgers:
            ledger.end()

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def _wide(t: Tensor) -> Tensor:
    """Return a dense copy in float64."""
    t = t.detach()
    return (t.to_dense() if t.layout is not torch.strided else t).to(torch.float64, copy=True)


def _gathered(mine: Any) -> list[Any]:
    """Return what all ranks have, through the default group and nothing of Stenograd's."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    return out


_TEACHER = torch.randn(10, 3, generator=torch.Generator().manual_seed(7)) / 3
