"""Copies that optimizers other than torch's keep of their parameters, which averages must move, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.errors import ConfigError
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather

__all__ = ["Copies"]

_SAMPLE = 256  # elements by which a tensor is told to be a copy
_LARGEST = 4  # parameters that tell it of a key of the state; small ones may be all zeros
_UNDONE = 0.05  # largest share of a round's squared length that a step which undoes it may leave
_LEAST = 3  # rounds that must be undone
_DEEPEST = 6  # containers within containers in which copies outside of the state are looked for


class Copies:
    """What optimizers other than torch's keep of their parameters besides these.

    Master weights in float32, the slow weights of Lookahead, or z of schedule-free methods: such an optimizer
    does not start from what an average has left in the parameters p, and so undoes it. Whatever lies near p,
    in the optimizer's state or in its attributes, is therefore moved as p is: `c <- c + p_after - p_before`.
    That keeps what the copy knows beyond p, such as the last bits of master weights.

    Copies that cannot be found, as one flat tensor of all, show in the first step after a round, which goes
    back by what the round moved: where `d` is that, and the step moves by `s` (the one before by `s0`, after
    a round by `d0`, if any), then `s - s0` is near `d0 - d`. Without copies it is the little by which two
    steps differ, or noise: so at least three rounds running must be undone when ranks ask each other.

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
        self._last: tuple[Tensor, Tensor | None] | None = None  # by what a step moved it, and a round before
        self._round: Tensor | None = None  # by what rounds have, and no step since
        self._counts: int | Tensor = 0  # rounds that were undone, and others; reading makes the host wait

    @property
    def count(self) -> int:
        """Number of optimizers that may keep copies: those that are not torch's."""
        return len(self._owners)

    @contextmanager
    def follow(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Move copies as what happens inside of a `with` block moves the parameters.

        Args:
            parameters: that may be moved.
        """
        with torch.no_grad():
            # Found before the parameters move: afterwards their copies are not near them.
            pairs = self._found(parameters)
            # By memory: a tensor to which two ways lead must move once.
            found = list({copy.data_ptr(): (p, copy) for p, copy in pairs}.values())
            before = {id(p): p.detach().clone() for p, _ in found}
        yield
        with torch.no_grad():
            for p, copy in found:
                # In the copy's type: a difference rounded to 16 bits would spoil master weights.
                moved = p.to(copy) - before[id(p)].to(copy)
                # From NaN or infinity no difference leads back: such a copy starts anew from its parameter.
                copy.copy_(torch.where(moved.isfinite(), copy + moved, p.to(copy)))

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Take the parameters that rounds move."""
        self._sampled = sorted(parameters, key=Tensor.numel)[-_LARGEST:]
        self._start = self._last = self._round = None
        self._counts = 0  # they may come to lie elsewhere

    @contextmanager
    def round(self, driver: AnyDriver | None) -> Iterator[None]:
        """Look, around a round, whether the optimizers undo rounds; all ranks call it for the same ones.

        Args:
            driver: the way to all ranks; None where nothing is looked at.

        Raises:
            ConfigError: on every rank, where one has found that steps undo rounds.
        """
        # Alike on all ranks, since `refresh` compares how many there are: `_refuse` is a collective.
        if not self._owners or driver is None:
            yield
            return
        self._rounds += 1
        if not self._rounds & (self._rounds - 1):  # powers of two
            self._refuse(driver)
        before = self._sample()
        yield
        moved, self._start = self._sample() - before, None
        self._round = moved if self._round is None else self._round + moved

    def steps(self) -> None:
        """Note from where the optimizers' steps start, after the round that may come before them."""
        if self._owners and self._start is None:
            self._start = self._sample()

    def stepped(self) -> None:
        """Note where a step has led, and whether it went back by what the round before had moved."""
        if self._start is None:
            return
        before, moved, step = self._last, self._round, self._sample() - self._start
        self._last, self._round, self._start = (step, moved), None, None
        if before is None or moved is None:
            return
        change, moved = step - before[0], moved if before[1] is None else moved - before[1]
        left, whole = change + moved, moved @ moved
        undone = left @ left < _UNDONE * whole
        self._counts = self._counts + torch.stack([undone, (whole > 0) & ~undone])

    def _sample(self) -> Tensor:
        found = [p.detach().reshape(-1)[:_SAMPLE] for p in self._sampled]
        return torch.cat([part.to(found[0].device, torch.float32) for part in found])

    def _refuse(self, driver: AnyDriver) -> None:
        undone, others = self._counts.tolist() if isinstance(self._counts, Tensor) else (0, 0)
        self._counts = 0 if others else self._counts
        received = driver.run(gather(torch.tensor([int(undone >= _LEAST and not others)], device="cpu")))
        if any(bool(other) for (other,) in received):
            kinds = ", ".join(dict.fromkeys(type(owner).__name__ for owner in self._owners))
            raise ConfigError(
                f"optimizer must start its steps from the parameters, got {kinds}, which goes on from copies "
                "of its own and so undoes every round: use another one, or keep copies in its state, one of "
                "the parameter's shape for each, which then follow the rounds"
            )

    def of(self, parameters: Iterable[Tensor]) -> set[int]:
        """Return the ids of the copies that there are of some parameters."""
        return {id(copy) for _, copy in self._found(parameters)}

    def _found(self, given: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters, each with a copy of it."""
        if not self._owners:
            return
        parameters = list(given)
        largest = sorted(parameters, key=Tensor.numel)[-_LARGEST:]
        for number, owner in enumerate(self._owners):
            state: Mapping[Tensor, Any] = vars(owner).get("state", {})
            for p in parameters:
                for key, value in state.get(p, {}).items():
                    if _is_apart(value, p) and self._is_copy((number, str(key)), state, largest):
                        yield p, value
            yield from _kept(owner, parameters)

    def _is_copy(self, key: tuple[int, str], state: Mapping[Tensor, Any], largest: list[Tensor]) -> bool:
        """Return whether a key of an optimizer's state holds copies; found out once, while they are near."""
        if key not in self._keys:
            pairs = [(state[p].get(key[1]), p) for p in largest if p in state]
            apart = [(value, p) for value, p in pairs if _is_apart(value, p)]
            if not apart:
                return False
            self._keys[key] = any(_near(value, p) for value, p in apart)
        return self._keys[key]


def _foreign(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside of it, without torch's own, which keep no copies."""
    for _ in range(_DEEPEST):
        if optimizer is None or type(optimizer).__module__.startswith("torch.optim"):
            return
        if hasattr(optimizer, "__dict__"):
            yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _held(optimizer: Any) -> list[Tensor]:
    """Return an optimizer's parameters in its order; of what stands around one, those of that."""
    for _ in range(_DEEPEST):
        if hasattr(optimizer, "param_groups"):
            return [p for group in optimizer.param_groups for p in group["params"]]
        optimizer = getattr(optimizer, "optimizer", None)
    return []


def _kept(owner: Any, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters, each with a copy of it that an optimizer keeps in an attribute.

    Layers that are alike, such as norms, have parameters as near to each other as to their own copies. So an
    attribute with as many tensors of a shape as the optimizer has parameters is taken to have their order.
    """
    held = _held(owner)
    wanted, alike = {id(p) for p in parameters}, dict[torch.Size, list[Tensor]]()
    for p in held:
        alike.setdefault(p.shape, []).append(p)
    own = {p.data_ptr() for p in (*parameters, *held)}
    for name, value in vars(owner).items():
        found = dict[torch.Size, list[Tensor]]()
        for t in _tensors({name: value}, _DEEPEST, set()):
            # A list of the parameters themselves has no copies, nor have frozen ones in it.
            frozen = isinstance(t, nn.Parameter) and not t.requires_grad
            if _fits(t, t) and not frozen and t.data_ptr() not in own:
                found.setdefault(t.shape, []).append(t)
        for shape, copies in found.items():
            of = alike.get(shape, [])
            if len(copies) != len(of):
                of = [min(of, key=partial(_distance, t)) for t in copies if of]
            pairs = zip(of, copies, strict=bool(of))
            yield from ((p, t) for p, t in pairs if id(p) in wanted and _near(t, p))


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


def _is_apart(value: Any, p: Tensor) -> bool:
    # SAM keeps a copy while it moves the parameter on, and then lets that lie in the copy's memory.
    return _fits(value, p) and bool(value.data_ptr() != p.data_ptr())


def _first(t: Tensor) -> Tensor:
    return t.detach().reshape(-1)[:_SAMPLE].double().cpu()


def _distance(t: Tensor, p: Tensor) -> float:
    return float((_first(t) - _first(p)).norm())


def _near(t: Tensor, p: Tensor) -> bool:
    """Return whether a tensor is a parameter's copy: moments are of another size than what they move."""
    size = float(_first(p).norm())
    # Parameters of zeros only tell nothing: moments would be as near.
    return size > 0 and _distance(t, p) <= size / 2
