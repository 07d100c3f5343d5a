"""Saved states for another number of ranks: what each new rank starts from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import CheckpointError, bad_value

__all__ = ["SUMMED", "alike", "reshard", "reshard_rank"]

SUMMED = frozenset({"residual"})  # keys of state whose sum over the ranks is kept; all others are equal


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Turn the states of all N ranks into those of N' ranks.

    A residual is what a rank still owes to the average. The new ranks share the sum of the old ones evenly:

        r'_j = (r_0 + ... + r_{N-1}) / N'    for every new rank j

    so `sum_j r'_j = sum_i r_i`, element by element up to one rounding of `r'_j` (6e-8 relative in float32;
    the sum itself is taken in float64). Averages divide by the world size, so a residual weighs 1/N in the
    old average and 1/N' in the new one: what is owed from before weighs as much as a gradient that is
    computed now, and the pending update `sum(r) / N` becomes N / N' times what it was.

    This holds for every method, two-phase and sparse all-reduce included: there a rank that encodes what it
    has averaged keeps that loss, times N, in the same residual, so that it enters the sum like the rest.

    Everything else (PowerSGD's Q, counters of steps) is equal on all ranks and copied. Random choices depend
    on (seed, step, bucket, rank) alone, so ranks that are new have theirs without any state.

    Args:
        states: `sync.state_dict()` of all ranks, in rank order.
        world_size: N', the number of ranks to come, at least 1.

    Returns:
        One state a new rank, for `sync.load_state_dict`.

    Raises:
        ConfigError: world_size is below 1.
        CheckpointError: the states are not those of all ranks of one world after one step, or hold something
            other than residuals that differs from rank to rank.

    Example:
        >>> def state(rank, lost):
        ...     about = {"format": 1, "method": "topk", "step": 3, "skipped": 0, "world_size": 2}
        ...     return {**about, "rank": rank, "parameters": {"w": {"residual": torch.tensor(lost)}}}
        >>> new = reshard([state(0, [1.0, 0.0]), state(1, [2.0, 6.0])], world_size=3)
        >>> new[2]["rank"], new[2]["world_size"], new[2]["parameters"]["w"]["residual"]
        (2, 3, tensor([1., 2.]))
    """
    if world_size < 1:
        raise bad_value("world_size", "must be at least 1", world_size, "give the number of ranks to come")
    first = reshard_rank(states, 0, world_size)
    return [{**copy.deepcopy(first), "rank": rank} for rank in range(world_size)]


def reshard_rank(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of one new rank; see `reshard`.

    Raises:
        CheckpointError: as in `reshard`.
    """
    if not 0 <= rank < world_size:
        raise bad_value("rank", f"must be in 0..{world_size - 1}", rank, "number the ranks from 0")
    _check_set(states)
    first = states[0]
    parameters = {
        name: {key: _joined(states, name, key, world_size) for key in tensors}
        for name, tensors in first["parameters"].items()
    }
    return {**first, "rank": rank, "world_size": world_size, "parameters": parameters}


def alike(a: Any, b: Any) -> bool:
    """Return whether two states are equal, tensors bit for bit.

    Example:
        >>> alike({"w": torch.ones(2)}, {"w": torch.ones(2)}), alike([1, 2], [1, 3])
        (True, False)
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def _check_set(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that are not those of all ranks at one time."""
    places = [(state.get("rank"), state.get("world_size")) for state in states]
    if not states or places != [(rank, len(states)) for rank in range(len(states))]:
        raise CheckpointError(
            f"to re-shard, give the state of every rank in rank order, got (rank, world size) {places}"
        )
    for rank, state in enumerate(states):
        for key in states[0].keys() | state.keys():
            equal = key in ("rank", "world_size", "parameters") or state.get(key) == states[0].get(key)
            if not equal:
                raise CheckpointError(
                    f"{key} is {states[0].get(key)!r} on rank 0 and {state.get(key)!r} on rank {rank}: "
                    "give states that were saved together"
                )
        if _layout(state) != _layout(states[0]):
            raise CheckpointError(f"ranks 0 and {rank} saved different parameters: give states of one model")


def _layout(state: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {
        name: {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        for name, tensors in state["parameters"].items()
    }


def _joined(states: Sequence[Mapping[str, Any]], name: str, key: str, world_size: int) -> Tensor:
    tensors: list[Tensor] = [state["parameters"][name][key] for state in states]
    if key not in SUMMED:
        if not all(alike(tensors[0], tensor) for tensor in tensors):
            raise CheckpointError(
                f"{key} of {name} differs from rank to rank and there is no rule for it: "
                f"load it on {len(states)} ranks"
            )
        return tensors[0].clone()
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / world_size).to(tensors[0].dtype)
