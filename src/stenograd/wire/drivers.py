"""What an exchange needs of a driver: real ranks, simulated ones, or whoever else answers requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from stenograd.wire.requests import Reply, Request, Rounds
from stenograd.wire.traffic import Label, Tally, Traffic

__all__ = ["AnyDriver", "AnyPending", "Observer"]

T = TypeVar("T")


class Observer(Protocol):
    """Whoever watches a driver: a trace, or a recorder of programs."""

    def add(self, kind: str, start: float, end: float, /, **about: Any) -> None:
        """Hear that something lasted from `start` to `end`, by `time.perf_counter`."""

    def ready(self, bucket: int, parameter: Tensor) -> None:
        """Hear that a parameter's gradient is complete; it goes to a bucket, or to none, which is -1."""

    def full(self, bucket: int) -> None:
        """Hear that a bucket has all its gradients, and that its turn has come."""

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread do a job, and see so what waits for what."""


class AnyPending(Protocol):
    """A collective under way.

    Attributes:
        tally: where its seconds are counted.
        start: when it was asked for, by `time.perf_counter`.
    """

    tally: Tally
    start: float

    def wait(self) -> Reply:
        """Wait for the result; raises PeerLost if it does not come in time."""


@runtime_checkable
class AnyDriver(Protocol):
    """One rank's way to the others; `Driver` is the real one, `simulate.ranks` makes simulated ones.

    Attributes:
        rank: this rank in the group.
        world_size: number of ranks in it.
        timeout_s: seconds after which a collective counts as lost.
        traffic: what was sent.
        tracer: who is told what happens, while somebody watches.
    """

    rank: int
    world_size: int
    timeout_s: float
    traffic: Traffic
    tracer: Observer | None

    def start(self, request: Request, label: Label = ...) -> AnyPending:
        """Issue a request without waiting for it; it is counted under the label."""

    def run(self, rounds: Rounds[T], label: Label = ...) -> T:
        """Drive one coroutine to its end."""

    def spent(self, on: str, tally: Tally, start: float, label: Label, end: float | None = None) -> None:
        """Count seconds of computing, "encode" or "decode", since `start`."""

    def broadcast(self, tensor: Tensor, source: int = 0, *, counted: bool = False) -> None:
        """Overwrite a tensor with that of rank `source`."""

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Bring every rank's message of any length to every rank."""

    def private(self) -> AnyDriver:
        """Return a driver over the same ranks whose collectives mix with nobody else's."""

    def split(self, parts: Sequence[Sequence[int]], what: str = ...) -> Sequence[Any]:
        """Make a driver for each of several parts of this group, None where this rank is not in it."""

    def name_of(self, rank: int) -> int:
        """Return the number in the whole world of a rank of this group."""

    def announce(self, what: str) -> None:
        """Tell the other ranks that this one does something from now on; waits for nobody."""

    def announced(self, what: str) -> bool:
        """Return whether a rank has announced it."""

    def unannounced(self, what: str, grace_s: float) -> list[int]:
        """Return the ranks that have not announced it within the time."""

    def check_groupless(self) -> None:
        """Refuse to go on alone once the program has joined other ranks."""

    def stay_in_memory(self) -> None:
        """Let all messages travel from the CPU's memory, where a lost rank is an error in time."""

    def close(self) -> None:
        """Leave the group, if it is the driver's own."""
