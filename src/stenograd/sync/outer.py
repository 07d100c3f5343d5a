"""What one exchange of a round carries, and what its average does to the parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from stenograd.catalog.method import Method
from stenograd.catalog.registry import state_kinds
from stenograd.errors import ConfigError, NonFiniteError
from stenograd.exchange.bucket_states import check_state
from stenograd.launch.detect import World
from stenograd.schedules.diloco import DiLoCo
from stenograd.schedules.rounds import Rounds
from stenograd.sync.averaging import IN_ORDER, FlatExchange, average, difference_method
from stenograd.sync.handshake import broadcast_tensors
from stenograd.wire.agreement import sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import are_finite
from stenograd.wire.node_layout import find_layout
from stenograd.wire.requests import gather

if TYPE_CHECKING:
    from stenograd.sync.gossip import Gossip

__all__ = [
    "Nodes",
    "Part",
    "by_size",
    "check_shapes",
    "forget_states",
    "fragments_of",
    "joined",
    "of_part",
    "overwrite",
]

T = TypeVar("T", bound=Tensor)
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")  # the first number in a name such as layers.3.weight


class Part:
    """Some parameters that are exchanged together, again and again, and the outer step along their average.

    With outer parameters phi, a round sends what ranks have moved since the last one, and the outer optimizer
    applies the average; see `DiLoCo` for the equations. The other rounds are outer steps, too:

    - A mean of parameters (`local`) is an outer step of 1 without momentum, taken exactly: `phi <- phi +
      mean_i C(theta_i - phi)`, `theta_i <- phi + e_i`, where e_i is what C lost of this rank's own. Where
      nothing is lost that is `mean_i theta_i`, which is then what travels, and no phi is kept. Rounding and
      sparsity cost no update: what a message loses goes with a later one.
    - In pairs the average is that of two ranks. Their mean pseudo-gradient and the distance of phi_i from the
      pair's mean phi add up to `mean(phi - theta) + phi_i - mean(phi) = phi_i - mean(theta)`, so theta is all
      that a pair exchanges, once in each direction. A rank whose parameters are not finite gives its partner
      nothing, and takes what the partner has; without a partner it goes back to its outer parameters.

    Everything is kept in float32, or float64 where the parameters have it, so that an outer step below a
    narrow weight's precision is not lost.

    Args:
        parameters: by name, alike on all ranks; equal on all ranks now.
        driver: the way to the other ranks.
        how: the method that carries what travels.
        schedule: the values of the outer step.
        chunk: largest number of elements sent at once.
        side: the way to the other ranks for what is under way while training goes on, which must not mix with
            the averages of buffers; None where nothing is. All parts of a model share it: one of them is
            under way at a time.
        pairs: what mixes with a partner, where rounds are held in pairs; all parts of a model share it.
        beside: returns tensors that are averaged in the pair together with the parameters (buffers).

    Attributes:
        lost_own: whether this rank's parameters were not finite in a round that the others could hold, or
            would not have been after it.
        passes: number of this rank's backward passes, for the ranks to compare when they exchange; None where
            they make unequally many.
        weight: what this rank counts for in the round, such as tokens; None where all count alike.
        stop: whether this rank asks all to stop by its next message.
        stopped: whether a rank has asked by what arrived.

    Reference: Koloskova et al., "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019 (CHOCO, here with everyone as neighbour and phi as what all know of all).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        how: Method,
        schedule: Rounds,
        chunk: int,
        *,
        side: AnyDriver | None = None,
        pairs: Gossip | None = None,
        beside: Callable[[], list[Tensor]] = list,
    ) -> None:
        self.parameters, self.driver = dict(parameters), driver
        self.lost_own = False
        self.passes: int | None = 0
        self.weight: float | None = None
        self.stop = self.stopped = False
        self._schedule, self._pairs, self._beside = schedule, pairs, beside
        self._diloco = schedule if isinstance(schedule, DiLoCo) else None  # None: parameters become means
        self._exact = self._diloco is None and how.lossless
        self._keeps = not self._exact or schedule.quorum > 0  # outer parameters, for those that join
        if how.lossless:
            how = IN_ORDER
        # DiLoCo keeps error feedback: its ranks start from phi again, so their next difference does not
        # hold what a message has lost.
        elif self._diloco is None:
            how = difference_method(how)
        wants = self._diloco is None and not self._exact
        self._make = partial(FlatExchange, parameters, how=how, chunk=chunk, want_errors=wants)
        self._flat = self._make(driver=side or driver)
        self._before: dict[str, Any] = {}  # of the exchange, when it last sent
        self.anchor()

    def is_finite(self) -> bool:
        """Return whether this rank's parameters are."""
        return are_finite(self.parameters.values())

    @torch.no_grad()
    def anchor(self) -> None:
        """Start from the present parameters, which are equal on all ranks, without momentum."""
        self._outer = self._flat.values() if self._keeps else []
        self._momentum = [torch.zeros_like(t) for t in self._outer] if self._diloco else []
        self._sent: list[Tensor] = []  # of eager ranks the share under way, of means what this rank had
        self._arrived: list[Tensor] = []  # averages that are to be applied later

    @torch.no_grad()
    def send(self) -> None:
        """Send what this rank has; returns at once. Pairs and eager ranks send when they merge."""
        if self._pairs is not None or (self._diloco and self._diloco.eager):
            return
        # Before anything is encoded: after a loss `move` goes back to this, and `send` sends once more.
        if self._schedule.survives:
            self._before = self._flat.exchange.state_dict()
        own = self._flat.values()
        self._flat.stop = self.stop
        if self.weight is not None:
            self._flat.exchange.weigh(self.weight)
        if self._exact:
            self._sent = own
            self._flat.lend(own, passes=self.passes)
        elif self._diloco is None:
            self._sent = own
            self._flat.send(
                # theta_i - phi
                lambda at, part, out: torch.sub(own[at][part], self._outer[at][part], out=out),
                passes=self.passes,
            )
        else:
            self._flat.send(
                # phi - theta_i, the pseudo-gradient
                lambda at, part, out: torch.sub(self._outer[at][part], own[at][part], out=out),
                passes=self.passes,
            )

    def arrive(self) -> bool:
        """Wait for what was sent and keep it for `merge`, which then needs no message.

        Returns:
            Whether all ranks' parameters were finite.
        """
        if self._arrived:
            return True
        outcome = self._flat.receive()
        self.stopped |= self._flat.stopped
        if outcome is None:
            return False
        self._arrived = self._sent if self._exact else [torch.empty_like(t) for t in self._outer]
        self._flat.put(outcome, self._arrived)
        if self._diloco is None and not self._exact:
            # What was encoded had been multiplied by the share, and errors are of that. e_i is in units of
            # the parameters.
            share = self._flat.exchange.share
            for (at, part), lost in zip(self._flat.cuts, outcome.errors, strict=True):
                if not share:  # nothing of this rank's was sent
                    self._sent[at][part] -= self._outer[at][part]
                    continue
                self._sent[at][part] = 0.0 if lost is None else lost / share if share != 1.0 else lost  # e_i
        return True

    @torch.no_grad()
    def merge(self) -> bool:
        """Wait for what was sent, make the outer step, and take (a share of) its result.

        Returns:
            Whether all ranks' parameters were finite, and are after the step; if not, nothing changed. In
            pairs always True: what one rank brings can spoil nobody else's round.

        Raises:
            PeerLost: a rank did not answer in time; in pairs, the partner, and lost=raise or nobody knows
                which.
        """
        if self._pairs is not None:
            return self._meet_partner(self._pairs)
        if self._diloco and self._diloco.eager:
            return self._turn()
        if not self.arrive():
            return False
        arrived, self._arrived = self._arrived, []
        return self._step(arrived)

    def _meet_partner(self, pairs: Gossip) -> bool:
        values = self._flat.values()
        self.lost_own = not are_finite(values)
        pairs.mix(values, carried=self._beside(), passes=self.passes)
        self.driver = pairs.driver  # another one, if ranks were lost
        # phi_i - mean(theta); see the class
        found = [outer - mean for outer, mean in zip(self._outer, values, strict=True)]
        if not (are_finite(values) and self._step(found)):
            self.lost_own = True
            self.take_outer()
        return True

    def _turn(self) -> bool:
        """Merge what was sent a round ago, with this rank's newest share in it, and send that."""
        # phi_i - theta_i
        own = [outer - local for outer, local in zip(self._outer, self._flat.values(), strict=True)]
        self.lost_own = not are_finite(own)
        if self.lost_own:  # this rank brings nothing, and goes on from its outer parameters
            own = [torch.zeros_like(t) for t in own]
        share = 1.0 / self.driver.world_size
        if self._sent:
            old = self._sent
            # A void round's averages hold nobody's share, so the next round starts as the first one did.
            if not self.arrive():
                self._sent = []
                return False
            for total, new, before in zip(self._arrived, own, old, strict=True):
                total.add_(new - before, alpha=share)  # this rank's newest in place of its old one
        else:
            self._arrived = [new * share for new in own]
        applied, self._arrived = self._arrived, []
        self._sent, self._flat.stop = own, self.stop
        # Copied, not lent: `own` is needed once more, to take it out of the average that it will be in.
        self._flat.send(lambda at, part, out: out.copy_(own[at][part]), passes=self.passes)
        if not self._step(applied):  # outer parameters are each rank's own here
            self.lost_own = True
            self.take_outer()
        return True

    def _step(self, averages: list[Tensor]) -> bool:
        """Make the outer step and take its result; False where nothing changed, see `_apply`."""
        if self._diloco is None:
            self._take_means(averages)
            return True
        if not self._apply(averages):
            return False
        self.take_outer(1.0 - self._diloco.mix)
        return True

    def _take_means(self, averages: list[Tensor]) -> None:
        """Make the outer step of 1; what is beyond a parameter's float16 stays, and goes on being sent."""
        own, self._sent = self._sent, []
        self.lost_own = False
        for i, stream in enumerate(self._flat.streams):
            target = averages[i]
            if not self._exact:
                # phi + mean_i C(theta_i - phi), and e_i
                target = torch.add(self._outer[i].add_(averages[i]), own[i])
                if not stream.holds(target):
                    self.lost_own = True
                    continue
            stream.write(target)
        if self._exact and self._keeps:
            self._outer = averages

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
        assert self._diloco is not None  # else there is no outer optimizer
        momentum, direction = self._diloco.momentum, mean
        if momentum:
            velocity.mul_(momentum).add_(mean)  # v <- m v + g
            direction = mean.add_(velocity, alpha=momentum) if self._diloco.nesterov else velocity  # g + m v
        outer.add_(direction, alpha=-self._diloco.outer_lr)  # phi <- phi - lr d

    @torch.no_grad()
    def take_outer(self, share: float = 1.0) -> None:
        """Move the parameters by `share` of their way to the outer ones."""
        for stream, outer in zip(self._flat.streams, self._outer, strict=True):
            if share == 1.0:
                stream.write(outer)
            else:
                stream.approach(outer, share)

    def retake(self) -> None:
        """Let the outer parameters be the parameters, which have just been made equal; momenta stay."""
        self._outer = self._flat.values() if self._keeps else []

    def take_common(self) -> bool:
        """Put what the ranks have in common in place, if that needs no message; else say False."""
        if self._diloco is None:
            return False
        self.wait()
        self.take_outer()
        return self._diloco.shares_outer

    def restart(self, bad: set[int]) -> Callable[[], object]:
        """Bring finite parameters for the bad ranks, and return what gives them these; called on all ranks.

        Until that is called nothing changes. Outer parameters need no message; else they are those of the
        first rank whose are finite.
        """
        if self._diloco:
            return self.take_outer if self.driver.rank in bad else bool
        good = min(set(range(self.driver.world_size)) - bad)
        tensors = [p.detach().clone() for p in self.parameters.values()]
        broadcast_tensors(self.driver, tensors, good)
        return partial(overwrite, self.parameters.values(), tensors) if self.driver.rank in bad else bool

    def common(self) -> list[Tensor]:
        """Return what is equal on all ranks between rounds: outer parameters and momenta, flat."""
        return [*self._outer, *self._momentum]

    @torch.no_grad()
    def adopt(self, values: Sequence[Tensor], *, begins: bool) -> None:
        """Take another rank's `common()`, and let this rank's steps count from there.

        Args:
            values: as `common` gave them.
            begins: whether this rank has made no steps, so that it starts from there.
        """
        held = [value.to(own.device, own.dtype) for value, own in zip(values, self.common(), strict=True)]
        outer, self._momentum = held[: len(self._outer)], held[len(self._outer) :]
        for stream, new, old in zip(self._flat.streams, outer, self._outer, strict=True):
            stream.write(new if begins else stream.read(stream.empty()).add_(new - old))
        self._outer = outer

    def clock(self) -> dict[str, int]:
        """Return how many exchanges were made, by which compressors choose what they send."""
        return {"step": self._flat.exchange.step, "skipped": self._flat.exchange.skipped}

    def equal_state(self) -> dict[tuple[str, str], Tensor]:
        """Return what the compressor keeps that is equal on all ranks, by parameter and key."""
        own, parameters = state_kinds(), self._flat.exchange.state_dict()["parameters"]
        return {(n, key): t for n, held in parameters.items() for key, t in held.items() if key not in own}

    def adopt_codec(self, clock: Mapping[str, int], state: Mapping[tuple[str, str], Tensor]) -> None:
        """Take another rank's `clock()` and `equal_state()`; what this rank owes stays."""
        found = self._flat.exchange.state_dict()["parameters"]
        parameters = {
            name: {key: state.get((name, key), t).to(t.device) for key, t in held.items()}
            for name, held in found.items()
        }
        self._flat.load({**clock, "parameters": parameters})

    def move(self, driver: AnyDriver, *, undo: bool) -> None:
        """Exchange through another driver from now on, the way to the ranks that are left.

        Args:
            driver: the new one.
            undo: whether to forget what was sent in this round, which `send` can then send again.
        """
        state = self._before if undo else self._flat.exchange.state_dict()
        self._flat.close()
        self.driver, self._flat = driver, self._make(driver=driver)
        # Without the identity: this rank's number, and how many there are, have changed.
        self._flat.load({key: state[key] for key in ("step", "skipped", "parameters")})
        if undo:
            self._arrived, self.stopped = [], False

    def wait(self) -> None:
        """Wait for what is under way, without applying it."""
        if self._flat.under_way:
            self.arrive()

    @torch.no_grad()
    def end_by_mean(self, weight: float | None) -> None:
        """End a round by the mean of the ranks' parameters, which count by weights; alike if that is None."""
        means = {name: p.detach().clone() for name, p in self.parameters.items()}
        size, share = self.driver.world_size, 1.0
        if weight is not None and (total := sum(sum_over_ranks(self.driver, [weight]))):
            share = weight * size / total
        average(list(means.values()), self.driver, share, in_order=True)
        self.end_resharded(means, size)

    @torch.no_grad()
    def end_resharded(self, own: Mapping[str, Tensor] | None, ranks: int) -> bool:
        """End a round by the mean of the parameters of the ranks that saved, after their number has changed.

        Args:
            own: the mean over the ranks that saved of their parameters, by name; None if all had the same.
            ranks: number of those ranks.

        Returns:
            Whether there was a round to end.
        """
        if self._diloco is None:
            for name, value in (own or {}).items():
                self.parameters[name].copy_(value)
            self.anchor()
            return own is not None
        self.wait()
        if own is None:
            self.take_outer()
            return False
        late, mean = self._arrived, self._flat.flat(own)
        if not self._diloco.shares_outer:
            # Each rank's outer parameters have its own share of what is under way already, but no other's.
            sent = (late and self._sent) or [torch.zeros_like(t) for t in late]
            late = [total.sub(share, alpha=1.0 / ranks) for total, share in zip(late, sent, strict=True)]
            average([*self._outer, *self._momentum, *late], self.driver, in_order=True)
        if late:
            before = [phi.clone() for phi in self._outer]
            self._settle_by(late)
            if self._diloco.eager:  # local steps count from the outer parameters
                mean = [m + (phi - was) for m, phi, was in zip(mean, self._outer, before, strict=True)]
            else:
                share = 1.0 - self._diloco.mix
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

    @property
    def _keys(self) -> tuple[str, str]:
        """What a state calls outer parameters, and what goes with them; "own" what is each rank's."""
        if self._diloco is None:  # of all ranks what this one sent so far, and the mean, which are equal
            return "mean of sent", "own sent"
        own = "" if self._diloco.shares_outer else "own "
        return f"{own}outer", f"{own}momentum"

    def state_dict(self, *, own: bool) -> dict[str, Any]:
        """Return the exchange's state, and tensors by what they are and the parameter's name.

        It waits for what is under way. In pairs, the number of mixings draws the next pairs.

        Args:
            own: whether this rank's parameters are among them, so that others can end the round under way.
        """
        self.wait()
        outer, beside = self._keys
        named = {outer: self._outer, beside: self._momentum or self._outer} if self._keeps else {}
        named |= {"own": self._flat.values()} if own else {}
        if self._diloco:
            named |= {"arrived": self._arrived} if self._arrived else {}
            named |= {"own share": self._sent} if self._sent else {}
        exchange = self._flat.exchange.state_dict()
        if self._pairs is not None:
            exchange["step"] = self._pairs.step
        return {
            "exchange": exchange,
            "tensors": {key: self._flat.by_name(values) for key, values in named.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another method, rank or model.
        """
        # Dropped: an average of what was sent before does not belong to the state that is loaded.
        self._flat.receive()
        self._flat.load(state["exchange"])
        found = {key: self._flat.flat(named) for key, named in state["tensors"].items()}
        outer, beside = self._keys
        self._outer = found.get(outer, [])
        self._momentum = found.get(beside, []) if self._diloco else []
        self._arrived, self._sent = found.get("arrived", []), found.get("own share", [])
        if self._pairs is not None:
            self._pairs.load_state_dict({"step": int(state["exchange"]["step"])})

    def exchanged(self) -> list[str]:
        """Return the names under which a compressor's state is kept."""
        return self._flat.names

    def close(self) -> None:
        """Stop the thread that sends."""
        self._flat.close()


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
    # Chunks of many parameters, whose number depends on bucket_bytes, keep nothing.
    names = [name for name in part.exchanged() if name in found or name not in part.parameters]
    codec = {name: found.get(name, {}) for name in names}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in part.parameters:
        for key, tensor in found.get(name + _IN_ROUNDS, {}).items():
            tensors.setdefault(key, {})[name] = tensor
    return {"exchange": {**state["exchanges"][number], "parameters": codec}, "tensors": tensors}


def check_shapes(parts: Sequence[Part], state: Mapping[str, Any]) -> None:
    """Refuse the state of another model.

    Raises:
        CheckpointError: names the first difference.
    """
    own = {name: p for part in parts for name, p in part.parameters.items()}
    saved: _Table = state["parameters"]
    found = {n.removesuffix(_IN_ROUNDS): ts for n, ts in saved.items() if n.endswith(_IN_ROUNDS)}
    if found:
        wanted = {name: dict.fromkeys(found.get(name, ()), p) for name, p in own.items()}
        check_state({"parameters": found}, {}, wanted)


@torch.no_grad()
def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values to tensors, one to each."""
    for t, value in zip(tensors, values, strict=True):
        t.copy_(value)


def forget_states(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Drop what the optimizers remember of parameters, so that their next steps start afresh."""
    wanted = {id(p) for p in parameters}
    for optimizer in optimizers:
        held = [(p, group) for group in optimizer.param_groups for p in group["params"] if id(p) in wanted]
        for p, group in held:
            optimizer.state.pop(p, None)
            # Before torch made missing states in its steps, it alone had them from its constructor only.
            if isinstance(optimizer, Adagrad):
                first = optimizer.defaults["initial_accumulator_value"]
                fresh = Adagrad([{**group, "params": [p]}], initial_accumulator_value=first)
                optimizer.state[p] = fresh.state[p]


def fragments_of(parameters: Mapping[str, T], count: int, layout: str = "strided") -> list[dict[str, T]]:
    """Share out named parameters to so many fragments; every fragment gets some.

    Parameters whose names hold the same first number (`layers.3.weight`) are a block, which stays together.
    What has no number, such as embeddings and the last norm, is fragment 0 where there are enough blocks for
    the others; with fewer blocks, parameters are shared out one by one, so that fragments are of like size.

    Args:
        parameters: by name, in the order of definition.
        count: number of fragments.
        layout: "strided" (block b goes to fragment b modulo their number) or "sequential".

    Raises:
        ConfigError: there are fewer parameters than fragments.

    Example:
        >>> import torch
        >>> names = ["embed", "h.0.w", "h.1.w", "h.2.w", "h.3.w", "head"]
        >>> parts = fragments_of({name: torch.ones(2) for name in names}, 3)
        >>> [list(part) for part in parts]
        [['embed', 'head'], ['h.0.w', 'h.2.w'], ['h.1.w', 'h.3.w']]
    """
    if count == 1:
        return [dict(parameters)]
    if len(parameters) < count:
        raise ConfigError(
            f"fragments must be at most the number of parameter tensors ({len(parameters)}), got {count}: "
            f"use fragments={len(parameters)}"
        )
    rest: dict[str, T] = {}
    blocks: dict[int, dict[str, T]] = {}
    for name, p in parameters.items():
        found = _BLOCK.search(name)
        if found is None:
            rest[name] = p
        else:
            blocks.setdefault(int(found[1]), {})[name] = p
    left = count - bool(rest)
    if len(blocks) < left:
        return by_size(parameters, count)
    parts: list[dict[str, T]] = [{} for _ in range(left)]
    for i, number in enumerate(sorted(blocks)):
        at = i % left if layout == "strided" else i * left // len(blocks)
        parts[at] |= blocks[number]
    return [rest, *parts] if rest else parts


def by_size(parameters: Mapping[str, T], count: int) -> list[dict[str, T]]:
    """Share out single tensors to so many parts: the largest first, always to the smallest part so far."""
    sizes, chosen = [0] * count, dict[str, int]()
    for name, p in sorted(parameters.items(), key=lambda item: -item[1].numel()):
        at = min(range(count), key=lambda i: (sizes[i], i))
        sizes[at] += max(p.numel(), 1)  # an empty one counts, so that each part gets some
        chosen[name] = at
    return [{n: p for n, p in parameters.items() if chosen[n] == at} for at in range(count)]


class Nodes:
    """Who is in this rank's node, and which part of the model it speaks for.

    With L ranks in each node, every rank exchanges 1/L of the parameters with the ranks in its place in other
    nodes, and gives its node what came of it. So all ranks' links are used, and each element crosses between
    nodes once.

    Args:
        driver: the way to all ranks.
        world: this rank's place according to the launcher.
        node_size: ranks per node, in the order of the ranks; 0 to take what the launcher says.

    Attributes:
        inside: the way to the ranks of this node.
        between: the way to those in this rank's place in other nodes.
        node, place: this rank's node, and its place in there, from 0.

    Raises:
        ConfigError: the nodes have different numbers of ranks.
    """

    inside: Driver
    between: Driver

    def __init__(self, driver: Driver, world: World, node_size: int) -> None:
        layout = find_layout(driver, world, node_size or None)
        sizes = {len(node) for node in layout.nodes}
        if len(sizes) > 1:
            raise ConfigError(
                "nodes must have equally many ranks where gradients are averaged inside, got "
                f"{layout.nodes}: start as many on each host, or give node_size="
            )
        self._driver, (self._size,) = driver, sizes
        self._nodes, self.node = layout.nodes, layout.node_of(driver.rank)
        self.place = layout.nodes[self.node].index(driver.rank)
        across = [[node[i] for node in layout.nodes] for i in range(self._size)]
        drivers = driver.split([*layout.nodes, *across], "level")
        # Two are not None, in the order of the parts: this rank's node, then its counterparts in all nodes.
        self.inside, self.between = (d for d in drivers if d is not None)

    def shares(self, parameters: Mapping[str, T]) -> list[dict[str, T]]:
        """Return the parameters that the ranks in each place exchange with other nodes."""
        return by_size(parameters, self._size)

    def share_of(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Return the parameters that this rank exchanges with other nodes; may be none."""
        return self.shares(parameters)[self.place]

    def spread(self, parameters: Mapping[str, Tensor]) -> None:
        """Give the node what each of its ranks has of the parameters that it speaks for."""
        for place, part in enumerate(self.shares(parameters)):
            broadcast_tensors(self.inside, [p.detach() for p in part.values()], place)

    def tell(self, number: int) -> list[list[int]]:
        """Return all ranks' numbers, by node and by place in it."""
        own = torch.tensor([number], device="cpu")
        received = [int(other) for (other,) in self._driver.run(gather(own))]
        return [[received[rank] for rank in node] for node in self._nodes]

    def close(self) -> None:
        """Leave the groups."""
        self.inside.close()
        self.between.close()
