"""Going on without lost ranks: who is asked whether others are there, and how a round ends all the same."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from stenograd.errors import LaunchError, PeerLost
from stenograd.launch.failure_detector import FailureDetector, attend
from stenograd.launch.network import own_address
from stenograd.launch.process_group import attends
from stenograd.wire.driver import Driver
from stenograd.wire.requests import gather

if TYPE_CHECKING:
    from stenograd.sync.outer import Part

__all__ = ["Survivors", "watch_ranks"]

T = TypeVar("T")


def watch_ranks(driver: Driver, owner: object) -> None:
    """Make sure that after a failure the ranks can find out who is left; ends with the owner.

    Raises:
        ConfigError: on all ranks: a loss in this group would end the processes.
        LaunchError: on all ranks: some cannot be reached by the others.
    """
    driver.stay_in_memory()
    if driver.world_size > 1 and not attends():
        driver.detector = _attend(driver)
        weakref.finalize(owner, driver.detector.close)


class Survivors:
    """Lets averages be taken on all ranks or on none, and without those that are lost meanwhile.

    A rank takes what has arrived only when it knows, by one more message, that it has arrived everywhere.
    That message may reach some ranks and not others, if a rank is lost while it is sent: those go on, and
    find out in the next round. So after a loss the others make a new group and tell each other how many
    averages they have taken, and whether the next have arrived. A rank that is behind takes what has arrived,
    because all had it when the first of them went on. Where none is behind, all take it if all have it, with
    what the lost rank sent. Otherwise the round is held again with what they have had all the time, so its
    average is the exact mean of those that are left. No local step is lost.

    Args:
        driver: the way to the other ranks.
        owner: what ends the watch for lost ranks when it is forgotten.

    Attributes:
        driver: the way to those that are left.
        events: for each loss the round, the ranks that were lost, and the seconds until training went on.
    """

    def __init__(self, driver: Driver, owner: object) -> None:
        self.driver, self.events = driver, list[dict[str, Any]]()
        self._taken = 0
        watch_ranks(driver, owner)

    def hold(self, bring: Callable[[], T], parts: Sequence[Part], sent: Part | None, number: int) -> T:
        """Return what `bring` returned, on all ranks alike: once every rank has it.

        Args:
            bring: waits for messages of the other ranks, by `driver`, and changes nothing but what it
                returns; it may be called again.
            parts: all that exchange with these ranks.
            sent: the part whose messages `bring` waits for, which then sends them again; None if it sends
                all that it waits for.
            number: of the round.

        Raises:
            PeerLost: it is not known who was lost, or another rank was lost before the others had met again.
        """
        while True:
            brought: list[T] = []
            try:
                brought.append(bring())
                self._confirm()
                break
            except PeerLost as error:
                if not error.ranks:
                    raise
                takes = self._go_on_without(error, bool(brought), number)
            for part in parts:
                # what is taken was sent; what is not is sent again
                part.move(self.driver, undo=part is sent and not takes)
            if takes:
                break
            if sent is not None:
                sent.send()
        self._taken += 1
        # Never empty: a rank that is behind has confirmed already, and otherwise all say that they have it.
        return brought[0]

    def _confirm(self) -> None:
        """Hear from every rank that everything has arrived there."""
        self.driver.run(gather(torch.zeros(1, dtype=torch.float32, device="cpu")))

    def _go_on_without(self, error: PeerLost, arrived: bool, number: int) -> bool:
        """Make a group of those that are left, and tell whether this rank is to take what has arrived."""
        start, before = time.monotonic(), self.driver
        self.driver = before.without(error.ranks)
        own = torch.tensor([self._taken, arrived], device="cpu")
        received = [other.tolist() for (other,) in self.driver.run(gather(own))]
        most = max(taken for taken, _ in received)
        takes = self._taken < most or all(other == [most, 1] for other in received)
        seconds = time.monotonic() - start
        self.events.append({"round": number, "lost": list(error.ranks), "seconds": seconds})
        warnings.warn(
            f"rank {before.name_of(before.rank)}: rank(s) {', '.join(map(str, error.ranks))} were lost in "
            f"round {number}; {self.driver.world_size} of {before.world_size} ranks go on without them",
            RuntimeWarning,
            stacklevel=9,
        )
        return takes


def _attend(driver: Driver) -> FailureDetector:
    """Let the ranks ask each other after a failure who is there, in a group that `init` did not make.

    `roll_call` knows only who left a mark in the group's store. A rank that is no neighbour of the lost one
    notices the loss much later than the neighbours, so it leaves none in time, and they would go on without
    it.

    Raises:
        LaunchError: on all ranks: some cannot be reached by the others.
    """
    one_host = len(set(driver.traffic.hosts)) == 1
    names = [driver.name_of(rank) for rank in range(driver.world_size)]
    # On one host the loopback does, even where the host's name has no address that others can use.
    detector = attend(names[driver.rank], lambda: "127.0.0.1" if one_host else own_address())
    own = "" if detector is None else detector.card
    cards = [card.decode() for card in driver.gather_bytes(own.encode())]
    if detector is not None and all(cards):
        detector.meet(dict(zip(names, cards, strict=True)))
        return detector
    if detector is not None:
        detector.close()
    silent = ", ".join(str(name) for name, card in zip(names, cards, strict=True) if not card)
    raise LaunchError(
        f"rank(s) {silent} cannot listen at the address of their host's name, so nobody could tell whether "
        "they are lost: let the name resolve, or join by stenograd.init"
    )
