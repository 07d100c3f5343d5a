"""The replica guard: are all ranks' parameters still equal, bit for bit?"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.arguments import whole
from stenograd.errors import ReplicaDivergence, bad_value
from stenograd.kernels.hash import hash_tensor
from stenograd.wire.carried import in_memory
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather

__all__ = ["ReplicaGuard", "check_interval"]

_NAMED = 5  # tensors that an error names one by one


class ReplicaGuard:
    """Compares the ranks' replicas by their hashes: one small gather, and a second only on a difference.

    A bit that flipped in memory, a rank that loaded other weights or took a step of its own: training goes on
    and nobody sees it. Every tensor is hashed to 64 bits (see `stenograd.kernels.hash`) and the hashes
    to one, which the ranks compare. A flipped bit is always found; other differences are missed with a chance
    of about 2**-64. `stenograd.distribute(..., check_every=100)` does this after every 100th exchange.

    Parameters are compared, frozen ones too. Buffers only if asked for, since batch-norm statistics are each
    rank's own in data-parallel training; likewise the optimizers' state.

    Args:
        model: whose replicas to compare.
        driver: the way to the other ranks, or a process group, or None for all ranks. Nothing else may be
            under way on it during a check.
        repair: overwrite the differing tensors by the lowest rank's of the majority and warn, instead of
            raising. What no majority of the ranks agrees on, with two ranks any difference, is still an
            error: nobody knows who is right.
        check_buffers: compare buffers too.
        optimizers: compare the tensors of their states too.
        timeout_s: seconds after which a silent peer is an error, where no driver is given.
        follow: takes parameters that are repaired, and returns a context in which something moves with them,
            such as `Copies.follow`.

    Attributes:
        checks: number of checks so far.
        repaired: number of checks that found a difference and repaired it.

    Example:
        >>> from stenograd.launch.process_group import init, shutdown
        >>> _ = init()
        >>> guard = ReplicaGuard(nn.Linear(2, 1))
        >>> guard.check(), guard.checks  # alone, so nothing differs
        ([], 1)
        >>> shutdown()
    """

    def __init__(
        self,
        model: nn.Module,
        driver: Any = None,
        *,
        repair: bool = False,
        check_buffers: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        timeout_s: float = 300.0,
        follow: Callable[[Iterable[Tensor]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = model
        self._driver = driver if isinstance(driver, AnyDriver) else Driver(driver, timeout_s=timeout_s)
        self._repair, self._check_buffers, self._optimizers = repair, check_buffers, list(optimizers)
        self._follow = follow
        self.checks = 0
        self.repaired = 0
        self._equal_at: int | None = None

    @torch.no_grad()
    def check(self, step: int | None = None) -> list[str]:
        """Compare the replicas; all ranks call it at the same place.

        Args:
            step: the number that messages shall give; None counts checks.

        Returns:
            The names of the tensors that were repaired; none where all were equal.

        Raises:
            ReplicaDivergence: on every rank, naming tensors, ranks and step: they differ, and `repair` is off
                or no majority agrees.
            PeerLost: a rank did not answer.
        """
        self.checks += 1
        step = self.checks if step is None else step
        tensors = dict(self._tensors())
        hashes = _hashes(tensors)
        names = []
        in_order = [h for _, h in sorted(zip(tensors, hashes, strict=True))]  # of names, not of definition
        if not self._agree(in_order, step):
            names = self._resolve(tensors, hashes, step)
        self._equal_at = step
        return names

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        if self._check_buffers:
            yield from ((f"buffer {name}", b) for name, b in self._model.named_buffers())
        names = {id(p): name for name, p in self._model.named_parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for i, (p, state) in enumerate(optimizer.state.items()):
                of = f"{names.get(id(p), f'parameter {i}')} in optimizer {number}"
                yield from ((f"{k} of {of}", t) for k, t in state.items() if isinstance(t, Tensor))

    def _agree(self, hashes: Sequence[int], step: int) -> bool:
        """Return, alike on all ranks, whether all have the same hashes at the same step."""
        all_hashes = hash_tensor(torch.tensor(hashes, dtype=torch.int64, device="cpu"))  # hashes have 64 bits
        # equal replicas at different steps are no agreement
        own = torch.stack([all_hashes, torch.tensor(step, device="cpu")])
        everyone = torch.stack([row for (row,) in self._driver.run(gather(own))])
        return bool((everyone == everyone[0]).all())

    def _resolve(self, tensors: Mapping[str, Tensor], hashes: Sequence[int], step: int) -> list[str]:
        """Find out what differs, then repair it or raise."""
        own = json.dumps({"step": step, "hashes": dict(zip(tensors, hashes, strict=True))})
        received = [json.loads(text) for text in self._driver.gather_bytes(own.encode())]
        steps = [row["step"] for row in received]
        if len(set(steps)) > 1:
            raise ReplicaDivergence(
                f"the ranks are at different steps, {steps}: check them at the same", step
            )
        by_name = {
            name: [row["hashes"].get(name) for row in received] for row in received for name in row["hashes"]
        }
        odd = {name: _majority(row) for name, row in by_name.items() if len(set(row)) > 1}
        minorities = {
            name: tuple(r for r, h in enumerate(by_name[name]) if h != by_name[name][source])
            for name, source in odd.items()
            if source is not None
        }
        message = self._message(by_name, odd, minorities, step)
        unclear = len(minorities) < len(odd) or any(name not in tensors for name in odd)
        if unclear or not self._repair:
            raise ReplicaDivergence(message + _advice(unclear), step, {n: minorities.get(n, ()) for n in odd})
        with self._follow([tensors[name] for name in odd]):
            # In the order of `received`, which is alike on all ranks: each broadcast is a collective.
            for name, source in odd.items():
                assert source is not None  # else it would be unclear
                self._driver.broadcast(in_memory(tensors[name].detach()), source, counted=True)
        self.repaired += 1
        if self._driver.rank in {0, *(r for ranks in minorities.values() for r in ranks)}:
            sources = sorted({source for source in odd.values() if source is not None})
            copied = f"repaired with the tensors of rank(s) {', '.join(map(str, sources))}"
            warnings.warn(f"{message}: {copied}", RuntimeWarning, stacklevel=4)
        return list(odd)

    def _message(
        self,
        by_name: Mapping[str, Sequence[int]],
        odd: Mapping[str, int | None],
        minorities: Mapping[str, tuple[int, ...]],
        step: int,
    ) -> str:
        # Not a step that is still to come: a checkpoint was loaded since.
        known = self._equal_at is not None and self._equal_at <= step
        since = f" (equal at step {self._equal_at})" if known else ""
        parts = []
        for name in list(odd)[:_NAMED]:
            if name in minorities:
                parts.append(f"{name} on rank(s) {', '.join(map(str, minorities[name]))}")
            else:
                groups: dict[int, list[int]] = {}
                for rank, value in enumerate(by_name[name]):
                    groups.setdefault(value, []).append(rank)
                sides = " against ".join(f"rank(s) {', '.join(map(str, g))}" for g in groups.values())
                parts.append(f"{name}, {sides} without a majority")
        more = f"; and {len(odd) - _NAMED} more tensors" if len(odd) > _NAMED else ""
        return f"replicas differ at step {step}{since}: {'; '.join(parts)}{more}"


def check_interval(check_every: int, repair: bool) -> None:
    """Refuse values that `stenograd.distribute` cannot do.

    Raises:
        ConfigError: check_every is no whole number of at least 0, or repair is asked for without checks.

    Example:
        >>> check_interval(100, repair=True)
    """
    whole("check_every", check_every, "0 is for never, and 100 costs little", least=0)
    if repair and not check_every:
        raise bad_value("check_every", "must be at least 1 with repair", check_every, "use 100")


def _hashes(tensors: Mapping[str, Tensor]) -> list[int]:
    hashed = [hash_tensor(t) for t in tensors.values()]
    # On one device first: reading them one by one, the host would wait for each.
    return [int(h) for h in torch.stack([h.to(hashed[0].device) for h in hashed]).tolist()] if hashed else []


def _majority(values: Sequence[Any]) -> int | None:
    """Return the lowest rank of more than half that have the same value, or None."""
    value, count = Counter(values).most_common(1)[0]
    return list(values).index(value) if 2 * count > len(values) and value is not None else None


def _advice(unclear: bool) -> str:
    if unclear:
        return ": go back to a checkpoint; with three ranks or more, and repair=True, a majority can decide"
    return ": go back to a checkpoint, or use repair=True to overwrite the minority"
