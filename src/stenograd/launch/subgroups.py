"""Process groups of our own, so that our collectives never share a sequence with anybody else's.

Two users of one group pair their messages in the order of issue, which may differ from rank to rank: with two
models reached by one backward pass it does, and gloo then aborts the process.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from stenograd.launch.gloo_threads import waiting_loops
from stenograd.launch.network import unshared

__all__ = ["Ranks", "leave", "make_group"]

Ranks = Sequence[int]

# How many groups were made from each group. All its ranks make them in the same order, so the number is equal
# on all of them and can stand in the new group's name without any communication.
_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def make_group(parent: Any, ranks: Ranks, what: str, timeout_s: float) -> Any:
    """Make a process group of some of a group's ranks; every rank of the parent calls it, in the same order.

    `torch.distributed.new_group` cannot do this for a part of the world. Its names count the groups that a
    rank is in, so ranks that are in different numbers of groups would wait for each other under two names,
    and a group that is made again would find the addresses of the old one. Here the name holds the parent's
    name and a count of the groups made from that parent.

    Args:
        parent: the group that holds the ranks; None for the whole world.
        ranks: the members, as numbered in the world.
        what: what the group is for; part of its name.
        timeout_s: seconds after which a collective of the group fails, and so does making it.

    Returns:
        The group; None where this rank is not a member.
    """
    whole = parent if parent is not None else dist.distributed_c10d._get_default_group()
    counts = _made.setdefault(whole, Counter())
    counts[what] += 1
    if dist.get_rank() not in ranks:
        return None
    return _connect(whole, sorted(ranks), f"stenograd/{whole.group_name}/{what}/{counts[what]}", timeout_s)


def leave(group: Any) -> None:
    """Destroy a group on this rank; nothing happens if it is gone already."""
    # The program may destroy the world at the same time, and this may run while Python collects garbage.
    with contextlib.suppress(ValueError, KeyError, AttributeError, RuntimeError):
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Let torch connect a new group afresh, where it would split the communicator of the default group.

    It splits where that is bound to a device (`init_process_group(device_id=...)`). NCCL then waits for every
    rank of the world, members or not; ours are called by members alone, and by survivors of a lost rank.
    """
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def _connect(parent: Any, ranks: list[int], name: str, timeout_s: float) -> Any:
    """Do what `new_group` does for members, under a name of our choice, with the parent's backend."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    number, deadline = ranks.index(dist.get_rank()), time.monotonic() + timeout_s
    backend, timeout = dist.get_backend(parent), timedelta(seconds=timeout_s)
    with waiting_loops(), unshared(), _unbound(c10d._get_default_group()):
        group, _ = c10d._new_process_group_helper(
            len(ranks), number, ranks, backend, store, name, timeout=timeout
        )
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        # A rank that left the group at once would break the connections that others are still making.
        connected, everyone = f"{name}/connected", f"{name}/everyone"
        if store.add(connected, 1) == len(ranks):
            store.set(everyone, "1")
        # One limit for both waits; stores take 0 for none at all.
        store.wait([everyone], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return group
