"""DASO between nodes: how often it averages there, which group sends, and how that reaches the whole node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stenograd.catalog.method import Method, MethodLike, method
from stenograd.errors import CheckpointError
from stenograd.exchange.flat_parameters import Stream, by_kind
from stenograd.sync.averaging import FlatExchange, difference_method, not_finite
from stenograd.sync.copies import Copies
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.node_layout import Layout
from stenograd.wire.traffic import Traffic

__all__ = ["BLOCKING", "AcrossNodes", "InFlight", "ParameterAverager", "Plan", "Skips", "spread"]

_FIRST_SKIPS = 4  # as in Heat, which uses 4 even where max_global_skips is lower


class Skips(NamedTuple):
    """How often DASO averages until the next epoch.

    global_skip: batches from one exchange between nodes to the next; 0 for an exact one after every batch.
    local_skip: batches from one average of gradients inside the node to the next; 1 for every batch.
    batches_to_wait: batches from sending to merging.
    """

    global_skip: int = 0
    local_skip: int = 0
    batches_to_wait: int = 0

    def is_local_sync(self, batch: int, last_batch: int) -> bool:
        """Return whether gradients are averaged inside the node in a batch.

        They are while an exchange is in flight, in every `local_skip`-th batch, and in the last batch.

        Example:
            >>> [Skips(8, 2, 2).is_local_sync(b, 19) for b in range(9)]
            [True, True, True, False, True, False, True, False, True]
        """
        if self.global_skip == 0 or self.local_skip <= 1 or batch == last_batch:
            return True
        since_sent = batch % self.global_skip
        return since_sent <= self.batches_to_wait or batch % self.local_skip == 0


# Exact averages after every batch. On MNIST (2 hosts of 2 workers, 100 Mbit/s) such an epoch takes 55 to
# 56 s, and an epoch of cycling 20.5 s (docs/heat.md), so it is kept for the start and the end of a training.
BLOCKING = Skips()


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases of a training: warm-up, cycling, cool-down.

    Exchanges are exact and follow every batch in warm-up and cool-down. Cycling starts with
    `Skips(min(4, max_global_skips), 1, 1)`. When the loss stops improving, the skips shrink by
    `skip_reduction_factor` and the wait by one, none below 1. At a global skip of 1 they start over from
    `max_global_skips`, with `max_global_skips // local_skip_factor` (at least 1) as local skip and wait.

    Args:
        total_epochs, warmup_epochs, cooldown_epochs: lengths of the training, its start and its end.
        max_global_skips: where cycles start; 0 for no cycling at all.
        skip_reduction_factor: at least 2.
        local_skip_factor: at least 1.

    Example:
        >>> plan, skips = Plan(40, warmup_epochs=4), Skips()
        >>> for epoch in range(1, 17):  # the loss never improves: a plateau every third time
        ...     skips = plan.after_epoch(epoch, skips, lambda epoch=epoch: epoch in (7, 10, 13, 16))
        ...     if epoch in (3, 4, 7, 10, 13, 16):
        ...         print(epoch, *skips)
        3 0 0 0
        4 4 1 1
        7 2 1 1
        10 1 1 1
        13 8 2 2
        16 4 1 1
    """

    total_epochs: int
    warmup_epochs: int = 4
    cooldown_epochs: int = 4
    max_global_skips: int = 8
    skip_reduction_factor: int = 2
    local_skip_factor: int = 4

    @property
    def cycles(self) -> bool:
        """Whether any epoch lies between warm-up and cool-down."""
        return self.warmup_epochs + self.cooldown_epochs < self.total_epochs

    def first(self) -> Skips:
        """Return the skips of the first epoch."""
        return self._start() if self.warmup_epochs == 0 and self.cycles else BLOCKING

    def after_epoch(self, epoch: int, skips: Skips, is_plateau: Callable[[], bool]) -> Skips:
        """Return the skips for the next epoch.

        Args:
            epoch: number of finished epochs.
            skips: those of the last epoch.
            is_plateau: returns whether the loss stopped improving; called once per epoch, only while cycling.
        """
        cycling = self.warmup_epochs <= epoch < self.total_epochs - self.cooldown_epochs
        if not cycling or self.max_global_skips == 0:
            return BLOCKING
        if epoch == self.warmup_epochs or skips == BLOCKING:  # or the plan was changed meanwhile
            skips = self._start()
        if not is_plateau():
            return skips
        if skips.global_skip > 1:
            fewer = max(1, skips.global_skip // self.skip_reduction_factor)
            local = max(1, skips.local_skip // self.skip_reduction_factor)
            # merged when the next is sent at the latest
            return Skips(fewer, local, min(fewer, max(1, skips.batches_to_wait - 1)))
        again = max(1, self.max_global_skips // self.local_skip_factor)
        return Skips(self.max_global_skips, again, again)

    def _start(self) -> Skips:
        first = min(_FIRST_SKIPS, self.max_global_skips)
        return Skips(first, 1, 1) if first else BLOCKING


class InFlight(NamedTuple):
    """An exchange that was sent but not merged yet.

    group: the group that sent. wait: batches from sending to merging. due: the batch after which to merge.
    """

    group: int
    wait: int
    due: int


class AcrossNodes:
    """Averages parameters between nodes; all ranks call the same methods in the same order.

    Group i has one worker of each node, and the groups take turns. A member broadcasts what it receives
    inside its node. With one node there are no groups, and nothing to do.

    Args:
        driver: the way to all ranks.
        layout: the ranks of each node.
        parameters: what is averaged, by name.
        how: the method that writes differences.
        chunk: largest number of elements sent at once.
        log: called with the kind of each event and the group.
        copies: what the optimizer keeps of the parameters, which follows them.
    """

    def __init__(
        self,
        driver: Driver,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        how: Method,
        chunk: int,
        log: Callable[[str, int], None],
        copies: Copies,
    ) -> None:
        self._copies = copies
        self.layout, self.parameters, self._log = layout, dict(parameters), log
        self.node_number = layout.node_of(driver.rank)
        count = layout.group_count
        drivers = driver.split([*layout.nodes, *(layout.group(i) for i in range(count))])
        node_driver = drivers[self.node_number]
        assert node_driver is not None  # a rank is in its own node
        self.node_driver = node_driver
        weight = layout.weights[self.node_number]  # by workers, so that exact averages are means over workers
        members = {i: d for i, d in enumerate(drivers[len(layout.nodes) :]) if d is not None}
        # A worker of a smaller node is in several groups, and keeps an h and an H for each.
        self._averagers = {
            i: ParameterAverager(self.parameters, d, how, weight=weight, chunk=chunk)
            for i, d in members.items()
        }
        self.turn = 0
        self.in_flight: InFlight | None = None
        self.anchor()

    @property
    def one_node(self) -> bool:
        """Whether there is only one node."""
        return len(self.layout.nodes) == 1

    @property
    def chunks(self) -> list[slice]:
        """The chunks in sending order, as slices of all parameters in a row; none with one node."""
        averager = next(iter(self._averagers.values()), None)
        return [] if averager is None else averager.chunks

    @property
    def between(self) -> Traffic:
        """Traffic of this rank to other nodes."""
        return sum((a.driver.traffic for a in self._averagers.values()), Traffic())

    def anchor(self) -> None:
        """Start a new epoch: all ranks have equal parameters now, and the first group sends next."""
        self.turn = 0
        for averager in self._averagers.values():
            averager.anchor()

    def send(self, wait: int, due: int) -> None:
        """Pack the parameters, merge the exchange in flight, then send; merged `wait` batches later."""
        group = self._take_turn()
        self._log("send", group)
        own = self._averagers.get(group)
        if own is not None:
            own.pack()  # before merging, as Heat does: what is sent does not hold this batch's merge
        self.merge()
        if own is not None:
            own.send()
        self.in_flight = InFlight(group, wait, due)

    def merge(self) -> None:
        """Merge the exchange in flight: `p <- (w p + sum of the sent) / (n + w)`, w = 2 wait or 1."""
        if self.in_flight is None:
            return
        (group, wait, _), self.in_flight = self.in_flight, None
        self._log("merge", group)
        nodes = len(self.layout.nodes)
        own = self._averagers.get(group)
        # Heat's weight: the longer the wait, the newer are this rank's own parameters than the sent ones.
        with self._copies.follow(self.parameters.values()):
            # Outside the group nobody knows whether it was finite; the member's word counts in `spread`.
            self._spread(group, own is None or own.merge(nodes / (nodes + (2 * wait or 1))))

    def replace(self) -> None:
        """Merge the exchange in flight; then set all parameters to the exact mean over the nodes."""
        self.merge()  # first: at an epoch's end Heat packs over the exchange in flight, and loses it
        group = self._take_turn()
        self._log("send", group)
        own = self._averagers.get(group)
        with self._copies.follow(self.parameters.values()):
            finite = own is None or own.replace()
            self._log("replace", group)
            self._spread(group, finite)

    def discard(self) -> None:
        """Wait for the exchange in flight, and drop it."""
        for averager in self._averagers.values():
            averager.discard()
        self.in_flight = None

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next exchanges; the one in flight is waited for, and merged later."""
        averagers = {str(i): averager.state_dict() for i, averager in self._averagers.items()}
        flying = None if self.in_flight is None else list(self.in_flight)
        return {"turn": self.turn, "in_flight": flying, "groups": averagers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()` of the same rank and layout."""
        for i, averager in self._averagers.items():
            averager.load_state_dict(state["groups"][str(i)])
        self.turn = int(state["turn"])
        self.in_flight = None if state["in_flight"] is None else InFlight(*state["in_flight"])

    def close(self) -> None:
        """Stop the threads and leave the groups."""
        for averager in self._averagers.values():  # threads before the groups by which they send
            averager.close()
            averager.driver.close()
        self.node_driver.close()

    def _take_turn(self) -> int:
        group = self.turn
        self.turn = (group + 1) % max(1, self.layout.group_count)
        return group

    def _spread(self, group: int, finite: bool) -> None:
        node = self.layout.nodes[self.node_number]
        spread(self.parameters, self.node_driver, group % len(node), finite)
        if self.layout.group_count > 1:
            self._log("broadcast", group)


class ParameterAverager:
    """Averages parameters over a group: `replace` exactly, `send` and `merge` while training goes on.

    A message holds the difference from what this rank sent so far, `q = C(p - h)`, `h <- h + q`, and all
    ranks keep the mean of what was sent, `H <- H + mean(q)`. So rounding and sparsity cost no update: what a
    message loses goes with a later one, and updates far below a weight's own precision survive. The merge,
    `p <- p + share (H + (p_sent - h) - p)`, then keeps the ranks' mean whatever the compressor; with a
    lossless one it is `p <- p + share (mean(p_sent) - p)`, and p itself travels. Then h follows p, `h <- h +
    share (H - h)`, which leaves the mean of all h at H: without it, what is sent seldom is merged often.

    Parameters travel in float32, or float64 where they have it, in chunks.

    Args:
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks.
        how: how differences are written; see `difference_method`.
        weight: this rank's weight in the average; the ranks' weights have mean 1.
        chunk: largest number of elements sent at once; a remainder goes first. Methods that are neither dense
            nor a cast cut between parameters only.

    Reference: Koloskova et al., "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019 (CHOCO, here with everyone as neighbour and with h moved).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        driver: AnyDriver,
        how: MethodLike,
        *,
        weight: float = 1.0,
        chunk: int = 10_000_000,
    ) -> None:
        self.driver = driver.private()
        self.method = difference_method(how)
        self.weight = weight
        self._parameters, self._chunk = parameters, chunk
        self._lossless = self.method.lossless
        self._flat = FlatExchange(
            parameters, self.driver, self.method, chunk=chunk, want_errors=not self._lossless
        )
        self._exact: FlatExchange | None = None  # made when first used
        self._packed: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._own: list[Tensor] = []
        self._mean: list[Tensor] = []
        self._arrived = False

    @property
    def chunks(self) -> list[slice]:
        """What travels at once, in this order, as slices of all parameters in a row."""
        return self._flat.chunks

    @torch.no_grad()
    def anchor(self) -> None:
        """Count differences from the present parameters, which must be equal on all ranks."""
        if not self._lossless:
            self._own = self._flat.values()
            self._mean = [values.clone() for values in self._own]

    @torch.no_grad()
    def pack(self) -> None:
        """Read the parameters that the next `send` shall send."""
        if not self._packed:
            self._packed = [stream.empty() for stream in self._flat.streams]
        for stream, packed in zip(self._flat.streams, self._packed, strict=True):
            stream.read(packed)

    @torch.no_grad()
    def send(self) -> None:
        """Send what `pack` read; returns at once. What was sent before must have been merged."""
        self._packed, self._sent = self._sent, self._packed  # what was sent is merged, so its memory is free

        def fill(at: int, part: slice, out: Tensor) -> None:
            if self._lossless:
                out.copy_(self._sent[at][part])
            else:
                torch.sub(self._sent[at][part], self._own[at][part], out=out)  # p - h

        self._flat.send(fill, self.weight)

    @torch.no_grad()
    def merge(self, share: float) -> bool:
        """Wait for what was sent, and move the parameters by `share` of their way to the average.

        Those that float16 could not hold there stay; the difference goes on being sent.

        Returns:
            Whether all ranks' parameters were finite; if not, nothing moved.
        """
        self._await_arrival()
        arrived, self._arrived = self._arrived, False
        if arrived:
            for stream, target in zip(self._flat.streams, self._sent, strict=True):
                if stream.holds(target):
                    stream.approach(target, share)  # p + share (H + (p_sent - h) - p)
            for own, mean_ in zip(self._own, self._mean, strict=True):
                own.lerp_(mean_, share)  # h + share (H - h)
        return arrived

    def discard(self) -> None:
        """Wait for what was sent, and forget it."""
        self._await_arrival()
        self._arrived = False

    @torch.no_grad()
    def replace(self) -> bool:
        """Make the parameters the exact average if it is finite, and tell whether it is."""
        if self._exact is None:
            self._exact = FlatExchange(self._parameters, self.driver, method("dense"), chunk=self._chunk)
        values = self._exact.values()
        self._exact.lend(values, self.weight)
        outcome = self._exact.receive()
        if outcome is None:  # every rank keeps its own, for whoever wants to save what is left
            return False
        self._exact.put(outcome, values)
        for stream, found in zip(self._exact.streams, values, strict=True):
            stream.write(found)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next exchange, an unmerged one included; waits for it."""
        self._await_arrival()
        return {
            "exchange": self._flat.exchange.state_dict(),
            "mine": [t.clone() for t in self._own],
            "mean": [t.clone() for t in self._mean],
            "arrived": [t.clone() for t in self._sent] if self._arrived else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is of another method, rank or model.
        """
        sizes = [sum(stream.numels) for stream in self._flat.streams]
        for key in ("mine", "mean", "arrived"):
            if state[key] and [t.numel() for t in state[key]] != sizes:
                raise CheckpointError(f"the state's {key} is of another model: load it into the same model")
        # What is in flight now must not arrive over what is loaded.
        self._await_arrival()
        self._flat.exchange.load_state_dict(state["exchange"])
        self._own, self._mean = self._taken(state["mine"]), self._taken(state["mean"])
        self._arrived = bool(state["arrived"])
        if self._arrived:
            self._sent = self._taken(state["arrived"])

    def close(self) -> None:
        """Stop the threads that send."""
        self._flat.close()
        if self._exact is not None:
            self._exact.close()

    def _taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [stream.empty().copy_(t) for t, stream in zip(tensors, self._flat.streams, strict=False)]

    @torch.no_grad()
    def _await_arrival(self) -> None:
        """Wait for the exchange in flight and work out where it leads."""
        outcome = self._flat.receive()
        if outcome is None:
            return
        for index, (at, part) in enumerate(self._flat.cuts):
            sent, mean_, lost = self._sent[at][part], outcome.averages[index], outcome.errors[index]
            if self._lossless:
                sent.copy_(mean_)
                continue
            # what was sent was multiplied by it
            lost = torch.zeros_like(sent) if lost is None else lost / self.weight
            torch.sub(sent, lost, out=self._own[at][part])  # h + q = p_sent - lost
            torch.add(self._mean[at][part].add_(mean_), lost, out=sent)  # H + mean(q), and p_sent - h
        self._arrived = True


@torch.no_grad()
def spread(parameters: Mapping[str, Tensor], driver: AnyDriver, source: int, finite: bool) -> None:
    """Give every rank of a node the parameters of one of them, if they are fit for it.

    Args:
        parameters: by name, alike on all ranks.
        driver: the way to the ranks of the node.
        source: the rank in the node whose parameters all take.
        finite: there: whether an average was finite; elsewhere without meaning.

    Raises:
        NonFiniteError: on every rank, if it was not.
    """
    verdict = torch.full(
        (1,), float(finite), dtype=torch.float32, device=next(iter(parameters.values())).device
    )
    driver.broadcast(verdict, source, counted=True)  # first, so that all raise instead of taking NaN
    if not verdict.item():
        raise not_finite("parameters")
    # After the verdict, so that a node of one rank raises like the others.
    if driver.world_size == 1:
        return
    for part in by_kind(parameters):
        stream = Stream(part)
        values = stream.empty()
        if driver.rank == source:
            stream.read(values)
        driver.broadcast(values, source, counted=True)
        if driver.rank != source:
            stream.write(values)
