"""Put what was saved into a training's parts: a rank's own state, or its share of other ranks' states."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stenograd.catalog.registry import state_kinds
from stenograd.checkpoint.files import Found, read_rank
from stenograd.compression.contract import Kind, Replaced, StateKind
from stenograd.devices import restore_random_state
from stenograd.errors import CheckpointError, bad_value

__all__ = [
    "Joint",
    "Stateful",
    "alike",
    "held",
    "load_parts",
    "reshard",
    "reshard_rank",
    "share_of",
]

_OWN = "own"  # the first word of what each rank has of its own in a round, whose mean is kept, too
_NEIGHBOURS = "neighbours"  # what a rank knows of some others: of no use to new ranks
_CUDA_STATE_BYTES = 16  # a CUDA generator's state: its seed and its offset, 8 bytes each


class Stateful(Protocol):
    """An object that can be saved and loaded: a scheduler, a sampler, a `GradientSync`."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Continue from a saved state."""


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Turn the states of all N ranks into those of N' ranks, as `Compressor.state_kinds` says of each.

    A residual is what a rank still owes to the average. The new ranks share the sum of the old ones evenly:

        r'_j = (r_0 + ... + r_{N-1}) / N'    for every new rank j

    so `sum_j r'_j = sum_i r_i`, element by element up to one rounding of `r'_j` (6e-8 relative in float32;
    the sum itself is taken in float64). Averages divide by the world size, so a residual weighs 1/N in the
    old average and 1/N' in the new one: what is owed from before weighs as much as a gradient that is
    computed now, and the pending update `sum(r) / N` becomes N / N' times what it was.

    This holds for every method, two-phase and sparse all-reduce included: there a rank that encodes what it
    has averaged keeps that loss, times N, in the same residual, so that it enters the sum like the rest.

    Of what each rank has of its own in a round (its parameters, what it has sent), new ranks get the mean,
    and end the round with it. What ranks that gossip know of their neighbours is left out.

    DGC's accumulated velocity and its momentum are owed in the same way, and follow the same rule. What all
    know of a rank under EF21 becomes the mean G on every new rank, so that G stays its mean, and its moving
    average of gradients becomes the mean of the old ranks'.

    Everything else (PowerSGD's Q, counters of steps) is equal on all ranks and copied. Random choices depend
    on (seed, step, bucket, rank) alone, so new ranks need no state for theirs.

    Args:
        states: `sync.state_dict()` of all ranks, in rank order.
        world_size: N', the new number of ranks, at least 1.

    Returns:
        One state per new rank, for `sync.load_state_dict`.

    Raises:
        ConfigError: world_size is below 1.
        CheckpointError: the states are not those of all ranks after the same step, or something other than
            residuals differs from rank to rank.

    Example:
        >>> def state(rank, lost):
        ...     about = {"format": 1, "method": "topk", "step": 3, "skipped": 0, "world_size": 2}
        ...     return {**about, "rank": rank, "parameters": {"w": {"residual": torch.tensor(lost)}}}
        >>> new = reshard([state(0, [1.0, 0.0]), state(1, [2.0, 6.0])], world_size=3)
        >>> new[2]["rank"], new[2]["world_size"], new[2]["parameters"]["w"]["residual"]
        (2, 3, tensor([1., 2.]))
    """
    if world_size < 1:
        raise bad_value("world_size", "must be at least 1", world_size, "give the new number of ranks")
    first = reshard_rank(states, 0, world_size)
    return [{**copy.deepcopy(first), "rank": rank} for rank in range(world_size)]


def reshard_rank(states: Iterable[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state of one new rank; see `reshard`.

    Raises:
        CheckpointError: as in `reshard`.
    """
    joint = Joint()
    for state in states:
        joint.add(state)
    return joint.share(rank, world_size)


class Joint:
    """Adds up the states of all ranks, one after another, so that only one need be in memory at a time.

    It holds the sums of the residuals in float64, and copies of what is equal on all ranks.

    Example:
        >>> about = {"format": 1, "method": "topk", "step": 3, "world_size": 2}
        >>> joint = Joint()
        >>> for rank, lost in enumerate([1.0, 2.0]):
        ...     joint.add({**about, "rank": rank, "parameters": {"w": {"residual": torch.tensor([lost])}}})
        >>> joint.share(rank=0, world_size=1)["parameters"]
        {'w': {'residual': tensor([3.])}}
    """

    def __init__(self) -> None:
        self._count = 0
        self._about: dict[str, Any] = {}
        self._layout: dict[str, dict[str, tuple[int, ...]]] = {}
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._own: list[Any] = []
        self._kinds = state_kinds()

    def add(self, state: Mapping[str, Any]) -> None:
        """Add the next rank's state.

        Raises:
            CheckpointError: it is not the next rank's, was saved at another time, or differs where all ranks
                must be equal.
        """
        if not isinstance(state.get("parameters"), Mapping):
            raise CheckpointError(
                "only a state of stenograd.distribute can be re-sharded: load it on as many ranks as saved it"
            )
        if self._count == 0:
            self._about = {key: value for key, value in state.items() if key not in ("parameters", _OWN)}
            self._layout = _layout(state)
        self._check(state)
        for name, tensors in state["parameters"].items():
            for key, tensor in tensors.items():
                where, kind = (name, key), self._kind(key)
                summed = kind in (Kind.SUM, Kind.MEAN)
                # Ranks may differ in what `share` makes anew from another key, and in what is cleared: the
                # one is left out here, the other compared as zeros.
                if isinstance(kind, Replaced):
                    continue
                tensor = torch.zeros_like(tensor) if kind is Kind.CLEAR else tensor
                if self._count == 0:
                    # float64, so that the sum over many ranks costs one rounding, when it is shared out.
                    self._dtypes[where] = tensor.dtype
                    self._tensors[where] = (
                        torch.zeros_like(tensor, dtype=torch.float64) if summed else tensor.clone()
                    )
                if summed:
                    self._tensors[where] += tensor
                elif not alike(self._tensors[where], tensor):
                    raise CheckpointError(
                        f"{key} of {name} differs from rank to rank and there is no rule for it: "
                        f"load it on {self._about['world_size']} ranks"
                    )
        if _OWN in state:
            self._own.append({key: value for key, value in state[_OWN].items() if key != _NEIGHBOURS})
        self._count += 1

    def share(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return the state of one of `world_size` new ranks; see `reshard`.

        Raises:
            CheckpointError: not all ranks' states were added.
        """
        if not 0 <= rank < world_size:
            raise bad_value("rank", f"must be in 0..{world_size - 1}", rank, "number the ranks from 0")
        if self._count == 0 or self._count != self._about["world_size"]:
            raise self._wrong_order(f"{self._count} states")
        parameters: dict[str, dict[str, Tensor]] = {name: {} for name in self._layout}
        for (name, key), tensor in self._tensors.items():
            kind = self._kind(key)
            if kind in (Kind.SUM, Kind.MEAN):
                divisor = world_size if kind is Kind.SUM else self._count
                parameters[name][key] = (tensor / divisor).to(self._dtypes[name, key])
            else:
                parameters[name][key] = tensor.clone()
        for name, keys in self._layout.items():
            for key in keys:
                if isinstance(kind := self._kind(key), Replaced):
                    parameters[name][key] = parameters[name][kind.by].clone()
        about = {**self._about, "rank": rank, "world_size": world_size, "resharded": True}
        about["saved_by"] = self._count
        own = {_OWN: self._own[min(rank, self._count - 1)]} if self._own else {}
        return {**about, **own, "parameters": parameters}

    def _kind(self, key: str) -> StateKind | None:
        """Return what becomes of state of a key; None for what is equal on all ranks."""
        return Kind.MEAN if key.split(" ")[0] == _OWN else self._kinds.get(key)

    def _check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not the next rank's, or was not saved together with the others."""
        rank, world_size = state.get("rank"), state.get("world_size")
        if (rank, world_size) != (self._count, self._about.get("world_size")):
            raise self._wrong_order(f"rank {rank} of {world_size} as number {self._count}")
        for key in self._about.keys() | state.keys() - {"parameters"}:
            if key not in ("rank", _OWN) and state.get(key) != self._about.get(key):
                raise CheckpointError(
                    f"{key} is {self._about.get(key)!r} on rank 0 and {state.get(key)!r} on rank "
                    f"{self._count}: give states that were saved together"
                )
        if _layout(state) != self._layout:
            raise CheckpointError(
                f"ranks 0 and {self._count} saved different parameters: give states of one model, and load "
                "those of rounds between nodes (inside=...), where a node's ranks hold different parts, on "
                "as many ranks as saved them"
            )

    def _wrong_order(self, got: str) -> CheckpointError:
        ranks = self._about.get("world_size")
        return CheckpointError(
            f"re-sharding needs the state of every rank in rank order, got {got}, saved by {ranks} ranks"
        )


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


def _layout(state: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {
        name: {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        for name, tensors in state["parameters"].items()
    }


def held(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[list[str]]:
    """Return the names of each optimizer's parameters in its order, by which its state is numbered.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> held(layer, [torch.optim.SGD([layer.bias, layer.weight])])
        [['bias', 'weight']]
    """
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    return [[names.get(id(p), "?") for p in params] for params in groups]


def load_parts(
    content: Mapping[str, Any],
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    parts: Mapping[str, Stateful],
    generators: Mapping[str, torch.Generator],
) -> None:
    """Load every part; sync first, because it checks before it changes anything.

    It sends nothing, since it may fail on one rank alone: what a sync has to do with others is left to its
    `after_load`.

    Args:
        content: what was saved; a model of None and random states of None were not.
        model: None leaves it alone.
        optimizers: as many as were saved.
        parts: sync, scheduler and sampler, as far as they were saved.
        generators: the caller's own, by name.

    Raises:
        CheckpointError: the content does not fit what is given.
    """
    if missing := sorted({"model", "optimizer", "random", "generators"} - content.keys()):
        raise _misfit(f"it lacks {', '.join(missing)}", "load what save_checkpoint wrote")
    present = {name for name in ("sync", "scheduler", "sampler") if name in content}
    saved = present | ({"model"} if content["model"] is not None else set())
    for name in sorted(saved ^ (parts.keys() | ({"model"} if model is not None else set()))):
        what = "was saved but is not given now" if name in saved else "is given now but was not saved"
        raise _misfit(f"{name} {what}")
    counts = len(content["optimizer"]), len(optimizers)
    if counts[0] != counts[1] or content["generators"].keys() != generators.keys():
        names = sorted(content["generators"]), sorted(generators)
        had = f"it holds {counts[0]} optimizers and generators {names[0]}"
        raise _misfit(f"{had}, but {counts[1]} and {names[1]} are given")
    if model is not None:
        _check_order(content.get("held", []), held(model, optimizers), {*model.state_dict()})
    try:
        if "sync" in parts:
            parts["sync"].load_state_dict(content["sync"])
        if model is not None:
            model.load_state_dict(content["model"])
        for optimizer, state in zip(optimizers, content["optimizer"], strict=True):
            optimizer.load_state_dict(state)
        for name in parts.keys() - {"sync"}:
            parts[name].load_state_dict(content[name])
        if content["random"] is not None:
            restore_random_state(content["random"])
        for name, generator in generators.items():
            generator.set_state(content["generators"][name])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as cause:
        raise _misfit(" ".join(str(cause).split())[:200]) from cause


def _misfit(reason: str, advice: str = "give what was saved") -> CheckpointError:
    return CheckpointError(f"the checkpoint does not fit: {reason}: {advice}")


def _check_order(saved: Sequence[Sequence[str]], given: Sequence[Sequence[str]], known: set[str]) -> None:
    """Refuse to give a parameter another one's state: torch's optimizers number what they keep."""
    # strict=False: a checkpoint of an earlier version holds no names.
    for number, (other, own) in enumerate(zip(saved, given, strict=False)):
        # Of other models, and of other numbers of parameters, `load_state_dict` says more.
        if other != own and len(other) == len(own) and known.issuperset(other):
            at = next(i for i, (a, b) in enumerate(zip(other, own, strict=True)) if a != b)
            what = f"optimizer {number} holds its parameters in another order than when it was saved"
            raise _misfit(f"{what}, {own[at]} in the place of {other[at]}", "create it from the same order")


def share_of(found: Found, rank: int, world_size: int) -> dict[str, Any]:
    """Make the content of one of `world_size` ranks from what another number of ranks saved.

    One rank's file is mapped at a time, and only what is needed of it is read: one rank that took over from
    eight, with files of 61 MB each, needed 140 to 150 MB, and 570 to 640 MB when it read all files whole.
    """
    first = found.content
    new, joint, generators = dict(first), Joint(), list[dict[str, Tensor]]()
    for number in range(found.manifest.world_size):
        content = read_rank(found.folder, found.manifest, number, mapped=True)
        if "sync" in first:
            joint.add(content["sync"])
        if not alike(first.get("sampler"), content.get("sampler")):
            raise CheckpointError(
                f"the sampler's state differs from rank to rank, so it cannot be loaded on "
                f"{world_size} ranks: load it on {found.manifest.world_size}, or let it count the "
                "samples of all ranks together"
            )
        # Copies, because these tensors are parts of a mapped file.
        generators.append({name: state.clone() for name, state in content["generators"].items()})
    if "sync" in first:
        new["sync"] = joint.share(rank, world_size)
    if first["random"] is not None:
        cuda = [_derived(state, rank) for state in first["random"]["cuda"]]
        new["random"] = {"cpu": _derived(first["random"]["cpu"], rank), "cuda": cuda}
    new["generators"] = {
        name: _generator_state([states[name] for states in generators], rank) for name in generators[0]
    }
    return new


def _generator_state(states: Sequence[Tensor], rank: int) -> Tensor:
    """Return the state if all ranks had the same; otherwise the rank's own, or a new one for a new rank.

    One rank's may have been private or common. It is copied: ranks that should draw alike and do not would
    mix up their data.
    """
    if all(torch.equal(states[0], state) for state in states):
        return states[0]
    return states[rank] if rank < len(states) else _derived(states[0], rank)


def _derived(state: Tensor, rank: int) -> Tensor:
    """Derive a generator's state from another one and the rank; rank 0 keeps it as it is."""
    if rank == 0:
        return state
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    if state.numel() == _CUDA_STATE_BYTES:
        return torch.tensor([*digest[:8], *bytes(8)], dtype=torch.uint8, device="cpu")  # a seed, at offset 0
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator.get_state()
