"""DASO's exchanges between nodes: which group sends, what is in flight, and how it reaches the whole node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.comm.node_layout import Layout
from stenograd.comm.traffic import Traffic
from stenograd.sync.averaging import ParameterAverager, spread
from stenograd.sync.own_copies import Copies

__all__ = ["AcrossNodes", "InFlight"]


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
        mine = self._averagers.get(group)
        if mine is not None:
            mine.pack()  # before merging, as Heat does: what is sent does not hold this batch's merge
        self.merge()
        if mine is not None:
            mine.send()
        self.in_flight = InFlight(group, wait, due)

    def merge(self) -> None:
        """Merge the exchange in flight: `p <- (w p + sum of the sent) / (n + w)`, w = 2 wait or 1."""
        if self.in_flight is None:
            return
        (group, wait, _), self.in_flight = self.in_flight, None
        self._log("merge", group)
        nodes = len(self.layout.nodes)
        mine = self._averagers.get(group)
        # Heat's weight: the longer the wait, the newer are this rank's own parameters than the sent ones.
        with self._copies.follow(self.parameters.values()):
            self._spread(group, mine is None or mine.merge(nodes / (nodes + (2 * wait or 1))))

    def replace(self) -> None:
        """Merge the exchange in flight; then set all parameters to the exact mean over the nodes."""
        self.merge()  # first: at an epoch's end Heat packs over the exchange in flight, and loses it
        group = self._take_turn()
        self._log("send", group)
        mine = self._averagers.get(group)
        with self._copies.follow(self.parameters.values()):
            finite = mine is None or mine.replace()
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
        for averager in self._averagers.values():
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
