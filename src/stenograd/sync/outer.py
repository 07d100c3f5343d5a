"""What one exchange of a round carries, and what its average does to the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.drivers import AnyDriver
from stenograd.data.finite import are_finite
from stenograd.errors import CheckpointError, NonFiniteError
from stenograd.schedules.diloco import DiLoCo
from stenograd.sync.averaging import IN_ORDER, FlatExchange, ParameterAverager, average
from stenograd.sync.gossip import Gossip
from stenograd.sync.handshake import broadcast_tensors

__all__ = [
    "LocalPart",
    "OuterPart",
    "PairPart",
    "Part",
    "check_shapes",
    "joined",
    "of_part",
]


class Part(ABC):
    """Some parameters that are exchanged together, again and again.

    Attributes:
        lost_own: whether this rank's parameters were not finite in a round that the others could hold, or
            would not have been after it.
        passes: number of this rank's backward passes, for the ranks to compare when they exchange.
    """

    def __init__(self, parameters: Mapping[str, Tensor], driver: AnyDriver) -> None:
        self.parameters, self.driver = dict(parameters), driver
        self.lost_own = False
        self.passes = 0

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self.parameters)

    @property
    def under_way(self) -> bool:
        """Whether something was sent that is to be merged later."""
        return False

    def is_finite(self) -> bool:
        """Return whether this rank's parameters are."""
        return are_finite(self.parameters.values())

    @abstractmethod
    def anchor(self) -> None:
        """Start from the present parameters, which are equal on all ranks."""

    @abstractmethod
    def send(self) -> None:
        """Send what this rank has; returns at once."""

    @abstractmethod
    def merge(self) -> bool:
        """Wait for what was sent and apply it; False if some rank's was not finite, and nothing changed."""

    @abstractmethod
    def arrive(self) -> bool:
        """Wait for what was sent and keep it for `merge`, which then needs no message.

        Returns:
            Whether all ranks' parameters were finite.
        """

    @abstractmethod
    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exchange through another driver from now on.

        Args:
            driver: the way to the ranks that are left.
            undo: whether to forget what was sent, which `send` can then send again.
        """

    @abstractmethod
    def take_common(self) -> bool:
        """Put what the ranks have in common in place, if that needs no message; else say False."""

    @abstractmethod
    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Bring finite parameters for the bad ranks, and return what gives them these; called on all ranks.

        Until that is called nothing changes.
        """

    @abstractmethod
    def settle(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """End a round by the mean of the parameters of the ranks that saved, after their number has changed.

        Args:
            own: the mean, by name; None if all had the same when they saved.
            ranks: their number.

        Returns:
            Whether there was a round to end.
        """

    @abstractmethod
    def exchanged(self) -> list[str]:
        """Return the names under which a compressor's state is kept."""

    @abstractmethod
    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return the exchange's state, and tensors by what they are and the parameter's name.

        Args:
            own: whether this rank's parameters are among them, so that others can end the round under way.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`."""

    @abstractmethod
    def close(self) -> None:
        """Stop what sends."""


class LocalPart(Part):
    """Parameters that become their mean: exactly, or by compressed differences."""

    def __init__(self, parameters: Mapping[str, Tensor], driver: AnyDriver, how: Method, chunk: int) -> None:
        super().__init__(parameters, driver)
        self._exact = how.lossless
        self._make = partial(ParameterAverager, parameters, how=how, chunk=chunk)
        self._averager = self._make(driver=driver)
        self._values: list[Tensor] | None = None
        self._arrived = False
        self.anchor()

    def anchor(self) -> None:
        """Count differences from here."""
        self._averager.anchor()

    def send(self) -> None:
        """Send differences; exact means are sent and taken in one go."""
        if not self._exact:
            self._averager.pack()
            self._averager.send(self.passes)

    def arrive(self) -> bool:
        """Wait for the exact mean."""
        self._values, self._arrived = self._averager.exact(in_order=True, passes=self.passes), True
        return self._values is not None

    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exact means leave no state behind."""
        self._averager.close()
        self.driver, self._averager = driver, self._make(driver=driver)
        self._arrived = self._arrived and not undo

    def merge(self) -> bool:
        """Take the mean."""
        if not self._exact:
            sound = self._averager.merge(1.0)
            self.lost_own = sound and self._averager.stayed
            return sound
        if not self._arrived:
            self.arrive()
        values, self._values, self._arrived = self._values, None, False
        return self._averager.take(values)

    def take_common(self) -> bool:
        """There is nothing in common between rounds."""
        return False

    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Bring the parameters of the first rank whose are finite."""
        good = min(set(range(self.driver.world_size)) - bad)
        tensors = [p.detach().clone() for p in self.parameters.values()]
        broadcast_tensors(self.driver, tensors, good)
        return partial(self._take, tensors) if self.driver.rank in bad else bool

    @torch.no_grad()
    def _take(self, tensors: list[Tensor]) -> None:
        for p, value in zip(self.parameters.values(), tensors, strict=True):
            p.copy_(value)

    def settle(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """Take the mean, and count differences from it."""
        for name, value in (own or {}).items():
            self.parameters[name].copy_(value)
        self.anchor()
        return own is not None

    def exchanged(self) -> list[str]:
        """Return the names of what travels."""
        return self._averager.exchanged()

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return the exchange's state, this rank's parameters, and what was sent so far."""
        return self._averager.by_name(own=own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`."""
        self._averager.load_by_name(state)

    def close(self) -> None:
        """Stop the threads that send."""
        self._averager.close()


class OuterPart(Part):
    """Pseudo-gradients of some parameters, and the outer optimizer's step; see `DiLoCo` for the equations.

    Everything is kept in float32, or float64 where the parameters have it, so that an outer step below a
    narrow weight's precision is not lost.

    Args:
        parameters: by name, alike on all ranks; equal on all ranks now.
        driver: the way to the other ranks.
        how: the method that carries pseudo-gradients.
        schedule: the values of the outer step.
        chunk: largest number of elements sent at once.
        side: the way to the other ranks for what is under way while training goes on, which must not mix with
            the averages of buffers; None where nothing is. All parts of a model share it: one of them is
            under way at a time.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        how: Method,
        schedule: DiLoCo,
        chunk: int,
        side: AnyDriver | None = None,
    ) -> None:
        super().__init__(parameters, driver)
        self._schedule = schedule
        method = IN_ORDER if how.lossless else how
        self._make = partial(FlatExchange, parameters, how=method, chunk=chunk)
        self._flat = self._make(driver=side or driver)
        self._before: dict[str, Any] = {}  # of the exchange, when it last sent
        self.anchor()

    @torch.no_grad()
    def anchor(self) -> None:
        """Start from the present parameters, without momentum."""
        self._outer = self._flat.values()
        self._momentum = [torch.zeros_like(t) for t in self._outer]
        self._sent: list[Tensor] = []  # eager only: this rank's share in what is under way
        self._arrived: list[Tensor] = []  # averages that are to be applied later, in a state that was loaded

    @property
    def under_way(self) -> bool:
        """Whether something was sent and not applied yet."""
        return self._flat.under_way or bool(self._arrived)

    @torch.no_grad()
    def send(self) -> None:
        """Send `phi - theta`; eager ranks send it when they merge what they sent before."""
        if self._schedule.eager:
            return
        own = self._flat.values()
        if self._schedule.lost == "drop":
            self._before = self._flat.exchange.state_dict()
        self._flat.send(
            lambda at, part, out: torch.sub(self._outer[at][part], own[at][part], out=out),
            passes=self.passes,
        )

    def arrive(self) -> bool:
        """Wait for what was sent, for `merge` to apply."""
        return self._await_arrival()

    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exchange through another driver; with `undo` as if nothing had been sent in this round."""
        state = self._before if undo else self._flat.exchange.state_dict()
        self._flat.close()
        self.driver, self._flat = driver, self._make(driver=driver)
        self._flat.load({key: state[key] for key in ("step", "skipped", "parameters")})
        if undo:
            self._arrived = []

    @torch.no_grad()
    def merge(self) -> bool:
        """Wait for what was sent, make the outer step, and take (a share of) its result.

        Returns:
            Whether all ranks' parameters were finite, and are after the step; if not, nothing changed.
        """
        if self._schedule.eager:
            return self._turn()
        if not self._await_arrival():
            return False
        arrived, self._arrived = self._arrived, []
        return self._step(arrived)

    def _turn(self) -> bool:
        """Merge what was sent a round ago, with this rank's newest share in it, and send that."""
        own = [outer - mine for outer, mine in zip(self._outer, self._flat.values(), strict=True)]
        self.lost_own = not are_finite(own)
        if self.lost_own:  # this rank brings nothing, and goes on from its outer parameters
            own = [torch.zeros_like(t) for t in own]
        share = 1.0 / self.driver.world_size
        if self._sent:
            old = self._sent
            if not self._await_arrival():
                self._sent = []
                return False
            for total, new, before in zip(self._arrived, own, old, strict=True):
                total.add_(new - before, alpha=share)
        else:
            self._arrived = [new * share for new in own]
        applied, self._arrived = self._arrived, []
        self._send_eagerly(own)
        if not self._step(applied):  # outer parameters are each rank's own here
            self.lost_own = True
            self.take_outer()
        return True

    def take_common(self) -> bool:
        """Take the outer parameters; say whether they are equal on all ranks."""
        self.wait()
        self.take_outer()
        return self._schedule.shares_outer

    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Take the outer parameters, which need no message."""
        return self.take_outer if self.driver.rank in bad else bool

    @torch.no_grad()
    def take_outer(self, share: float = 1.0) -> None:
        """Move the parameters by `share` of their way to the outer ones."""
        for stream, outer in zip(self._flat.streams, self._outer, strict=True):
            if share == 1.0:
                stream.write(outer)
            else:
                stream.approach(outer, share)

    def wait(self) -> None:
        """Wait for what is under way, without applying it."""
        if self._flat.under_way:
            self._await_arrival()

    def exchanged(self) -> list[str]:
        """Return the names under which a compressor's state is kept."""
        return self._flat.names

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return what decides the next rounds, by parameter name; waits for what is under way."""
        self.wait()
        mine = "" if self._schedule.shares_outer else "own "  # of each rank: see `stenograd.reshard`
        named = {f"{mine}outer": self._outer, f"{mine}momentum": self._momentum}
        named |= {"own": self._flat.values()} if own else {}
        named |= {"arrived": self._arrived} if self._arrived else {}
        named |= {"own share": self._sent} if self._sent else {}
        return {
            "exchange": self._flat.exchange.state_dict(),
            "tensors": {key: self._flat.by_name(values) for key, values in named.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another method, rank or model.
        """
        self._flat.receive()
        self._flat.load(state["exchange"])
        found = {key: self._flat.flat(named) for key, named in state["tensors"].items()}
        mine = "" if self._schedule.shares_outer else "own "
        self._outer, self._momentum = found.get(f"{mine}outer", []), found.get(f"{mine}momentum", [])
        self._arrived, self._sent = found.get("arrived", []), found.get("own share", [])

    @torch.no_grad()
    def settle(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """Finish the round with the mean of what other ranks had: after their number has changed.

        Args:
            own: the mean over the ranks that saved of their parameters, by name; None if all had the outer.
            ranks: number of those ranks.

        Returns:
            Whether there was a round to finish.
        """
        self.wait()
        if own is None:
            self.take_outer()
            return False
        late, mean = self._arrived, self._flat.flat(own)
        if not self._schedule.shares_outer:
            # Each rank's outer parameters have its own share of what is under way already, but no other's.
            sent = self._sent or [torch.zeros_like(t) for t in late]
            late = [total.sub(share, alpha=1.0 / ranks) for total, share in zip(late, sent, strict=True)]
            average([*self._outer, *self._momentum, *late], self.driver, in_order=True)
        if late:
            before = [phi.clone() for phi in self._outer]
            self._settle_by(late)
            if self._schedule.eager:  # local steps count from the outer parameters
                mean = [m + (phi - was) for m, phi, was in zip(mean, self._outer, before, strict=True)]
            else:
                share = 1.0 - self._schedule.mix
                mean = [m.lerp(phi, share) for m, phi in zip(mean, self._outer, strict=True)]
        self._arrived, self._sent = [], []
        self._settle_by([phi - m for phi, m in zip(self._outer, mean, strict=True)])
        self.take_outer()
        return True

    def _settle_by(self, averages: list[Tensor]) -> None:
        if not self._apply(averages):
            raise NonFiniteError(
                "the outer step that ends the round under way is beyond what float16 holds: continue on as "
                "many ranks as saved, from an earlier checkpoint, or with a smaller outer_lr"
            )

    def close(self) -> None:
        """Stop the thread that sends."""
        self._flat.close()

    def _send_eagerly(self, own: list[Tensor]) -> None:
        self._sent = own
        self._flat.send(lambda at, part, out: out.copy_(own[at][part]), passes=self.passes)

    def _await_arrival(self) -> bool:
        """Wait for what was sent, and keep the averages; False where a rank's parameters were not finite."""
        if self._arrived:
            return True
        outcome = self._flat.receive()
        if outcome is None:
            return False
        self._arrived = [torch.empty_like(t) for t in self._outer]
        for (at, part), mean in zip(self._flat.cuts, outcome.averages, strict=True):
            self._arrived[at][part] = mean
        return True

    def _step(self, averages: list[Tensor]) -> bool:
        """Make the outer step and take its result; False where nothing changed, see `_apply`."""
        if not self._apply(averages):
            return False
        self.take_outer(1.0 - self._schedule.mix)
        return True

    def _apply(self, averages: list[Tensor]) -> bool:
        """Make the outer optimizer's step, as torch.optim.SGD does; the averages are overwritten.

        Returns:
            False where float16 parameters cannot hold the result; then nothing has changed. Where the outer
            parameters are equal on all ranks, so is this.
        """
        tried = {}  # copies, since a step that is not taken must leave no trace in the momentum
        for i, stream in enumerate(self._flat.streams):
            if stream.is_narrow:
                tried[i] = self._outer[i].clone(), self._momentum[i].clone()
                self._descend(*tried[i], averages[i])
                if not stream.holds(tried[i][0]):
                    return False
        for i, mean in enumerate(averages):
            if i in tried:
                self._outer[i], self._momentum[i] = tried[i]
            else:
                self._descend(self._outer[i], self._momentum[i], mean)
        return True

    def _descend(self, outer: Tensor, velocity: Tensor, mean: Tensor) -> None:
        momentum, direction = self._schedule.momentum, mean
        if momentum:
            velocity.mul_(momentum).add_(mean)
            direction = mean.add_(velocity, alpha=momentum) if self._schedule.nesterov else velocity
        outer.add_(direction, alpha=-self._schedule.outer_lr)


class PairPart(OuterPart):
    """Some parameters, and an outer optimizer of each rank's own that is fed what its pair has found.

    The pair's mean pseudo-gradient and the distance of phi_i from the pair's mean phi add up to

        mean(phi - theta) + phi_i - mean(phi) = phi_i - mean(theta)

    so theta is all that a pair has to exchange, once in each direction.

    A rank whose parameters are not finite gives its partner nothing, and takes what the partner has; see
    `mixing`. Without a partner it goes back to its outer parameters.

    Args:
        parameters: by name, alike on all ranks; equal on all ranks now.
        driver: the way to the other ranks.
        pairs: what mixes with a partner; fragments share it.
        schedule: the values of the outer step.
        chunk: see `OuterPart`.
        beside: returns tensors that are averaged in the pair together with the parameters (buffers).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        pairs: Gossip,
        schedule: DiLoCo,
        chunk: int,
        beside: Callable[[], list[Tensor]],
    ) -> None:
        super().__init__(parameters, driver, IN_ORDER, schedule, chunk)
        self._pairs, self._beside = pairs, beside

    def send(self) -> None:
        """Send nothing yet: a pair exchanges what it has in `merge`."""

    @torch.no_grad()
    def merge(self) -> bool:
        """Exchange parameters with the partner, and make the outer step.

        Returns:
            True: what one rank brings can spoil nobody else's round.

        Raises:
            PeerLost: the partner did not answer in time, and lost=raise or nobody knows which.
        """
        values = self._flat.values()
        self.lost_own = not are_finite(values)
        self._pairs.mix(values, carried=self._beside(), passes=self.passes)
        self.driver = self._pairs.driver  # another one, if ranks were lost
        found = [outer - mean for outer, mean in zip(self._outer, values, strict=True)]
        if not (are_finite(values) and self._step(found)):
            self.lost_own = True
            self.take_outer()
        return True

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return what decides the next rounds; the number of mixings draws the next pairs."""
        state = super().state_dict(own=own)
        return {**state, "exchange": {**state["exchange"], "step": self._pairs.step}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; see `OuterPart.load_state_dict`."""
        super().load_state_dict(state)
        self._pairs.load_state_dict({"step": int(state["exchange"]["step"])})


_IN_ROUNDS = " in rounds"  # behind a parameter's name: what rounds keep of it, not its compressor
_Table = Mapping[str, Mapping[str, Tensor]]


def joined(parts: Sequence[Part], *, own: bool) -> dict[str, Any]:
    """Return the counters of the parts' exchanges, and all tensors by name and by what they are.

    Args:
        parts: each with parameters of its own.
        own: whether this rank's parameters are among the tensors.
    """
    parameters: dict[str, dict[str, Tensor]] = {}
    exchanges = []
    for part in parts:
        state = part.state_dict(own=own)
        exchanges.append({key: state["exchange"][key] for key in ("step", "skipped")})
        parameters |= {name: dict(tensors) for name, tensors in state["exchange"]["parameters"].items()}
        for key, named in state["tensors"].items():
            for name, tensor in named.items():
                parameters.setdefault(name + _IN_ROUNDS, {})[key] = tensor
    return {"exchanges": exchanges, "parameters": parameters}


def of_part(part: Part, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one part out of `joined`, as it gave it."""
    found: _Table = state["parameters"]
    codec = {name: found[name] for name in part.exchanged() if name in found}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in part.names:
        for key, tensor in found.get(name + _IN_ROUNDS, {}).items():
            tensors.setdefault(key, {})[name] = tensor
    return {"exchange": {**state["exchanges"][number], "parameters": codec}, "tensors": tensors}


def check_shapes(parts: Sequence[Part], state: Mapping[str, Any]) -> None:
    """Refuse the state of another model.

    Raises:
        CheckpointError: names the first difference.
    """
    mine = {name: p.shape for part in parts for name, p in part.parameters.items()}
    saved: _Table = state["parameters"]
    found = {n.removesuffix(_IN_ROUNDS): ts for n, ts in saved.items() if n.endswith(_IN_ROUNDS)}
    for name in sorted(found.keys() ^ mine.keys()) if found else ():
        raise CheckpointError(
            f"checkpoint and model differ in parameter {name!r}: load it into the same model"
        )
    for name, tensors in found.items():
        for key, tensor in tensors.items():
            if tensor.shape != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's {key} of {name} must have shape {tuple(mine[name])}, got "
                    f"{tuple(tensor.shape)}: load it into the same model"
                )
