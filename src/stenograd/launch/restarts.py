"""A name for each start of a torchrun job, because one store outlives all restarts.

`TORCHELASTIC_RESTART_COUNT` cannot be that name: each agent counts its own restarts, and when workers are
started again because nodes came or went, it counts none.
"""

from __future__ import annotations

import secrets
import time

from stenograd.launch.barrier import Store, missing_ranks, store_errors
from stenograd.launch.detect import World

__all__ = ["agree_on_start"]

_POLL_S = 0.01


def agree_on_start(store: Store, world: World, limit_s: float, deadline: float) -> str:
    """Return a name that is equal on all ranks of this start and was never used before.

    Rank 0 draws it and answers every request in the store, also those that dead ranks of earlier starts left,
    until all ranks of this start have confirmed that they know it. The agents have stopped earlier ranks by
    then.

    Args:
        store: the agents' own.
        world: rank and number of ranks.
        limit_s: how long ranks may take, for the message.
        deadline: on `time.monotonic`'s clock, when to give up.

    Raises:
        LaunchError: ranks did not come in time.
    """
    with store_errors():
        wait = _answer_requests if world.rank == 0 else _request_name
        return wait(store, world, secrets.token_hex(8), limit_s, deadline)


def _answer_requests(store: Store, world: World, name: str, limit_s: float, deadline: float) -> str:
    answered, confirmations = 0, [f"stenograd/start/{name}/{rank}" for rank in range(1, world.world_size)]
    while confirmations and not store.check(confirmations):
        requests = store.add("stenograd/start/requests", 0)
        while answered < requests and store.check([f"stenograd/start/request/{answered + 1}"]):
            answered += 1
            token = store.get(f"stenograd/start/request/{answered}").decode()
            store.set(f"stenograd/start/answer/{token}", name)
        if time.monotonic() > deadline:
            absent = [rank + 1 for rank, key in enumerate(confirmations) if not store.check([key])]
            raise missing_ranks(absent, world.world_size, "came", limit_s)
        time.sleep(_POLL_S)
    return name


def _request_name(store: Store, world: World, token: str, limit_s: float, deadline: float) -> str:
    number = store.add("stenograd/start/requests", 1)
    store.set(f"stenograd/start/request/{number}", token)
    while not store.check([f"stenograd/start/answer/{token}"]):
        if time.monotonic() > deadline:
            raise missing_ranks([0], world.world_size, "came", limit_s)
        time.sleep(_POLL_S)
    name = store.get(f"stenograd/start/answer/{token}").decode()
    store.set(f"stenograd/start/{name}/{world.rank}", "1")
    return name
