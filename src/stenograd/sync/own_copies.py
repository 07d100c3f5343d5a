"""Copies of parameters that an optimizer keeps for itself, and writes back: they follow what moves these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.comm.drivers import AnyDriver
from stenograd.data.requests import gather
from stenograd.errors import ConfigError

__all__ = ["Copies"]

_SAMPLE = 256  # elements by which a tensor is told to be a copy
_LARGEST = 4  # parameters that tell it of a key of the state; small ones may be all zeros
_DEEPEST = 6  # containers within containers in which copies outside of the state are looked for


class Copies:
    """What optimizers other than torch's keep of their parameters besides these.

    Master weights in float32, the slow weights of Lookahead, or z of schedule-free methods: such an optimizer
    does not start from what an average has left in the parameters p, and so undoes it. Whatever lies near p,
    in the optimizer's state or in its attributes, is therefore moved as p is: `c <- c + p_after - p_before`.
    That keeps what the copy knows beyond p, such as the last bits of master weights.

    Copies that cannot be found, as one flat tensor of all, show in the first step after a round, which goes
    back by what the round moved: where `d` is that, and the step moves by `s` (the one before by `s0`), then
    `s - s0` is near `-d`. Without copies it is the little by which two steps differ. Ranks whose rounds are
    undone part more and more, so it shows sooner or later; rounds 1, 2, 4, 8, ... are looked at.

    Args:
        optimizers: as they were given, with what stands around torch's.

    Example:
        >>> class Master(torch.optim.Optimizer):
        ...     def step(self, closure=None):
        ...         for p in self.param_groups[0]["params"]:
        ...             self.state[p].setdefault("wide", p.detach().double())
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = Master([w], {})
        >>> optimizer.step()
        >>> with Copies([optimizer]).follow([w]):
        ...     _ = w.data.add_(0.5)
        >>> optimizer.state[w]["wide"].tolist()
        [1.5, 1.5]
    """

    def __init__(self, optimizers: Any) -> None:
        several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._owners = [owner for given in several for owner in _foreign(given)]
        self._keys: dict[tuple[int, str], bool] = {}
        self._rounds, self._sampled = 0, list[Tensor]()
        self._start: Tensor | None = None  # where a sample of the parameters was before this step
        self._step: Tensor | None = None  # by what the last step moved it
        self._round: Tensor | None = None  # by what a round has, and no step since
        self._undone: bool | Tensor = False  # read when ranks compare it: reading makes the host wait

    @property
    def count(self) -> int:
        """Number of optimizers that may keep copies: those that are not torch's."""
        return len(self._owners)

    @contextmanager
    def follow(self, parameters: Iterable[Tensor], *, state: bool = True) -> Iterator[None]:
        """Move copies as what happens inside of a `with` block moves the parameters.

        Args:
            parameters: that may be moved.
            state: whether copies in the optimizers' states are moved, too.
        """
        with torch.no_grad():
            pairs = self._found(list(parameters), state) if self._owners else ()
            found = list({copy.data_ptr(): (p, copy) for p, copy in pairs}.values())
            before = {id(p): p.detach().clone() for p, _ in found}
        yield
        with torch.no_grad():
            for p, copy in found:
                moved = p.to(copy) - before[id(p)].to(copy)
                copy.copy_(torch.where(moved.isfinite(), copy + moved, p.to(copy)))

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take the parameters that rounds move."""
        self._sampled = sorted(parameters, key=Tensor.numel)[-_LARGEST:]
        self._start = self._step = self._round = None
        self._undone = bool(self._undone)  # they may come to lie elsewhere

    @contextmanager
    def round(self, driver: AnyDriver | None) -> Iterator[None]:
        """Look, around a round, whether the optimizers undo rounds; all ranks call it for the same ones.

        Args:
            driver: the way to all ranks; None says nothing of what was found.

        Raises:
            ConfigError: on every rank, where one has found that a step undid a round.
        """
        if not self._owners:
            yield
            return
        self._rounds += 1
        looks = driver is not None and not self._rounds & (self._rounds - 1)
        if driver is not None and looks:
            self._refuse(driver)
        before = self._sample() if looks else None
        yield
        self._round = None if before is None else self._sample() - before

    def steps(self) -> None:
        """Note from where a step starts, after the round that may come before it."""
        self._start = self._sample() if self._owners else None

    def stepped(self) -> None:
        """Note where a step has led, and whether it went back by what the round before had moved."""
        if self._start is None:
            return
        before, moved, self._round = self._step, self._round, None
        self._step = self._sample() - self._start
        if before is not None and moved is not None:
            change = self._step - before
            along, whole, length = change @ moved, moved @ moved, change @ change
            self._undone |= (along**2 > 0.9 * whole * length) & ((along / whole + 1).abs() < 0.2)

    def _sample(self) -> Tensor:
        found = [p.detach().reshape(-1)[:_SAMPLE] for p in self._sampled]
        return torch.cat([part.to(found[0].device, torch.float32) for part in found])

    def _refuse(self, driver: AnyDriver) -> None:
        told = driver.run(gather(torch.tensor([int(self._undone)], device="cpu")))
        if any(bool(theirs) for (theirs,) in told):
            kinds = ", ".join(dict.fromkeys(type(owner).__name__ for owner in self._owners))
            raise ConfigError(
                f"optimizer must start its steps from the parameters, got {kinds}, which goes on from copies "
                "of its own and so undoes every round: use another one, or keep copies in its state, one of "
                "the parameter's shape for each, which then follow the rounds"
            )

    def _found(self, parameters: list[Tensor], within_state: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters, each with a copy of it."""
        largest = sorted(parameters, key=Tensor.numel)[-_LARGEST:]
        shaped: dict[torch.Size, list[Tensor]] = {}
        for p in parameters:
            shaped.setdefault(p.shape, []).append(p)
        for number, owner in enumerate(self._owners):
            state: Mapping[Tensor, Any] = vars(owner).get("state", {}) if within_state else {}
            for p in parameters:
                for key, value in state.get(p, {}).items():
                    if _fits(value, p) and self._is_copy((number, str(key)), state, largest):
                        yield p, value
            for t in _tensors(vars(owner), _DEEPEST, set()):
                yield from [(p, t) for p in shaped.get(t.shape, ()) if _fits(t, p) and _near(t, p)][:1]

    def _is_copy(self, key: tuple[int, str], state: Mapping[Tensor, Any], largest: list[Tensor]) -> bool:
        """Return whether a key of an optimizer's state holds copies; found out once, while they are near."""
        if key not in self._keys:
            pairs = [(state[p].get(key[1]), p) for p in largest if p in state]
            self._keys[key] = any(_fits(value, p) and _near(value, p) for value, p in pairs)
        return self._keys[key]


def _foreign(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside of it, without torch's own, which keep no copies."""
    for _ in range(_DEEPEST):
        if optimizer is None or type(optimizer).__module__.startswith("torch.optim"):
            return
        if hasattr(optimizer, "__dict__"):
            yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _tensors(within: Any, deepest: int, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in containers, but for an optimizer's state and its groups of parameters."""
    if isinstance(within, Tensor):
        yield within
    elif deepest and id(within) not in seen and isinstance(within, (dict, list, tuple)):
        seen.add(id(within))
        for key, value in within.items() if isinstance(within, dict) else enumerate(within):
            if key not in ("state", "param_groups"):
                yield from _tensors(value, deepest - 1, seen)


def _fits(value: Any, p: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter)  # quantized states say that they are floating, and are not
    return plain and value.shape == p.shape and value.is_floating_point()


def _near(t: Tensor, p: Tensor) -> bool:
    """Return whether a tensor is a parameter's copy: moments are of another size than what they move."""
    if t.data_ptr() == p.data_ptr():
        return False
    mine, own = (x.detach().reshape(-1)[:_SAMPLE].double().cpu() for x in (t, p))
    return bool((mine - own).norm() <= own.norm() / 2) and bool(own.norm() > 0)
