"""Under torchrun, one store outlives restarts: agree on a name for this start that earlier ones did not have.

`TORCHELASTIC_RESTART_COUNT` will not do. Each agent counts its own restarts, and when workers are started
again because nodes came or went, it counts none.
"""

from __future__ import annotations

import secrets
import time

from stenograd.errors import LaunchError
from stenograd.launch.barrier import Store, store_errors
from stenograd.launch.detect import World

__all__ = ["agree_on_start"]

_POLL_S = 0.01


def agree_on_start(store: Store, world: World, limit_s: float, deadline: float) -> str:
    """Return a name that is equal on all ranks of this start and was never used before.

    Rank 0 draws it and answers every request in the store, also those that dead ranks of earlier starts left,
    until all ranks of this start have said that they know it. The agents have stopped earlier ranks by then.

    Args:
        store: the agents' own.
        world: this rank's place.
        limit_s: what was waited for, for the message.
        deadline: of `time.monotonic`, until which to wait.

    Raises:
        LaunchError: ranks did not come in time.
    """
    mine = secrets.token_hex(8)
    with store_errors():
        return (
            _tell(store, world, mine, limit_s, deadline)
            if world.rank == 0
            else _ask(store, world, mine, limit_s, deadline)
        )


def _tell(store: Store, world: World, name: str, limit_s: float, deadline: float) -> str:
    told, known = 0, [f"stenograd/start/{name}/{rank}" for rank in range(1, world.world_size)]
    while known and not store.check(known):
        requests = store.add("stenograd/start/requests", 0)
        while told < requests and store.check([f"stenograd/start/request/{told + 1}"]):
            told += 1
            token = store.get(f"stenograd/start/request/{told}").decode()
            store.set(f"stenograd/start/answer/{token}", name)
        if time.monotonic() > deadline:
            absent = [rank + 1 for rank, key in enumerate(known) if not store.check([key])]
            raise _late(world, absent, limit_s)
        time.sleep(_POLL_S)
    return name


def _ask(store: Store, world: World, token: str, limit_s: float, deadline: float) -> str:
    number = store.add("stenograd/start/requests", 1)
    store.set(f"stenograd/start/request/{number}", token)
    while not store.check([f"stenograd/start/answer/{token}"]):
        if time.monotonic() > deadline:
            raise _late(world, [0], limit_s)
        time.sleep(_POLL_S)
    name = store.get(f"stenograd/start/answer/{token}").decode()
    store.set(f"stenograd/start/{name}/{world.rank}", "1")
    return name


def _late(world: World, absent: list[int], limit_s: float) -> LaunchError:
    return LaunchError(
        f"{world.world_size - len(absent)} of {world.world_size} ranks came within {limit_s:g} s, missing: "
        f"{', '.join(map(str, absent[:16]))}; look for errors of those ranks, or wait longer with timeout_s"
    )
