"""Truth about bytes: what a rank handed to collectives, and what those moved."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.wire import Op

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Totals of one rank since it was attached.

    Args:
        payload_bytes: bytes handed to collectives; indices, scales, padding and control flags included.
        moved_bytes: bytes that those collectives make this rank send: `2 (N-1)/N` times the payload for a
            ring all-reduce, `N-1` times for an all-gather, `(N-1)/N` times for an all-to-all, once per peer
            for an exchange with neighbours.
        collectives: number of collectives.
        wait_s: seconds in which communication was waited for.
    """

    payload_bytes: int = 0
    moved_bytes: int = 0
    collectives: int = 0
    wait_s: float = 0.0

    def count(self, op: Op, nbytes: int, world_size: int, peers: int = 0) -> None:
        """Add one collective; `peers` counts those of an exchange with neighbours.

        Example:
            >>> traffic = Traffic()
            >>> traffic.count(Op.MEAN, 300, 3)
            >>> traffic.payload_bytes, traffic.moved_bytes
            (300, 400)
        """
        self.payload_bytes += nbytes
        self.moved_bytes += moved_bytes(op, nbytes, world_size, peers)
        self.collectives += 1

    def count_broadcast(self, nbytes: int, place: int, world_size: int) -> None:
        """Add one broadcast along a binomial tree, of which this rank is number `place` from the root.

        Example:
            >>> root, leaf = Traffic(), Traffic()
            >>> root.count_broadcast(100, 0, 4), leaf.count_broadcast(100, 3, 4)
            (None, None)
            >>> root.moved_bytes, root.payload_bytes, leaf.moved_bytes, leaf.payload_bytes
            (200, 100, 0, 0)
        """
        reach = [1 << i for i in range((world_size - 1).bit_length())]
        children = sum(place < step and place + step < world_size for step in reach)
        self.payload_bytes += nbytes if place == 0 else 0
        self.moved_bytes += children * nbytes
        self.collectives += 1

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.payload_bytes + other.payload_bytes,
            self.moved_bytes + other.moved_bytes,
            self.collectives + other.collectives,
            self.wait_s + other.wait_s,
        )


def moved_bytes(op: Op, nbytes: int, world_size: int, peers: int = 0) -> int:
    """Return the bytes that one rank sends for a collective over `nbytes` of payload a rank."""
    if op is Op.MEAN:
        return round(2 * (world_size - 1) / world_size * nbytes)
    if op is Op.SCATTER:
        return round((world_size - 1) / world_size * nbytes)
    return (peers if op is Op.EXCHANGE else world_size - 1) * nbytes
