"""Put what a rank saved, or its share of what other ranks saved, into a training's parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stenograd.checkpoint.collective import Found
from stenograd.checkpoint.reshard import Joint, alike
from stenograd.comm.drivers import AnyDriver
from stenograd.devices import restore_random_state
from stenograd.errors import CheckpointError

__all__ = ["Stateful", "after_load", "held", "load_parts", "share_of"]

_CUDA_STATE_BYTES = 16  # a CUDA generator's state: its seed and its offset, 8 bytes each


class Stateful(Protocol):
    """An object that can be saved and loaded: a scheduler, a sampler, a `GradientSync`."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Continue from a saved state."""


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

    It sends nothing, since it may fail on one rank alone. When all have done it, call `after_load(sync)`.

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
        raise CheckpointError(
            f"the checkpoint does not fit: it lacks {', '.join(missing)}: load what save_checkpoint wrote"
        )
    saved = {name for name in ("sync", "scheduler", "sampler") if name in content}
    for name in sorted(saved ^ parts.keys()):
        what = "was saved but is not given now" if name in saved else "is given now but was not saved"
        raise CheckpointError(f"the checkpoint does not fit: {name} {what}: give what was saved")
    counts = len(content["optimizer"]), len(optimizers)
    if counts[0] != counts[1] or content["generators"].keys() != generators.keys():
        names = sorted(content["generators"]), sorted(generators)
        raise CheckpointError(
            f"the checkpoint does not fit: it holds {counts[0]} optimizers and generators {names[0]}, "
            f"but {counts[1]} and {names[1]} are given: give what was saved"
        )
    if (model is None) != (content["model"] is None):
        what = "saved but is not given now" if model is None else "given now but was not saved"
        raise CheckpointError(f"the checkpoint does not fit: the model was {what}: give what was saved")
    if model is not None:
        _check_order(content.get("held", []), held(model, optimizers))
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
        reason = " ".join(str(cause).split())[:200]
        raise CheckpointError(f"the checkpoint does not fit: {reason}: give what was saved") from cause


def after_load(sync: Any) -> None:
    """Do what loading left over, which may need all ranks."""
    getattr(sync, "after_load", bool)()


def _check_order(saved: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> None:
    """Refuse to give a parameter another one's state: torch's optimizers number what they keep.

    Raises:
        CheckpointError: an optimizer holds its parameters in another order than when it was saved.
    """
    for number, (theirs, mine) in enumerate(zip(saved, given, strict=False)):
        if theirs != mine and sorted(theirs) == sorted(mine):  # of other models `load_state_dict` says more
            at = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
            raise CheckpointError(
                f"the checkpoint does not fit: optimizer {number} holds its parameters in another order than "
                f"when it was saved, {mine[at]} in the place of {theirs[at]}: create it from the same order"
            )


def share_of(found: Found, driver: AnyDriver) -> dict[str, Any]:
    """Make this rank's content from what another number of ranks saved.

    One rank's file is mapped at a time, and only what is needed of it is read: one rank that took over from
    eight, with files of 61 MB each, needed 140 to 150 MB, and 570 to 640 MB when it read all files whole.
    """
    first, rank = found.content, driver.rank
    new, joint, generators = dict(first), Joint(), list[dict[str, Tensor]]()
    for content in found.each():
        if "sync" in first:
            joint.add(content["sync"])
        if not alike(first.get("sampler"), content.get("sampler")):
            raise CheckpointError(
                f"the sampler's state differs from rank to rank, so it cannot be loaded on "
                f"{driver.world_size} ranks: load it on {found.manifest.world_size}, or let it count the "
                "samples of all ranks together"
            )
        generators.append({name: state.clone() for name, state in content["generators"].items()})
    if "sync" in first:
        new["sync"] = joint.share(rank, driver.world_size)
    if first["random"] is not None:
        new["random"] = {"cpu": _derived(first["random"]["cpu"], rank), "cuda": []}
    new["generators"] = {
        name: _generator_state([states[name] for states in generators], rank) for name in generators[0]
    }
    return new


def _generator_state(states: Sequence[Tensor], rank: int) -> Tensor:
    """Return the state if all ranks had the same; otherwise the rank's own, or a new one for a new rank."""
    if all(torch.equal(states[0], state) for state in states):
        return states[0]
    return states[rank] if rank < len(states) else _derived(states[0], rank)


def _derived(state: Tensor, rank: int) -> Tensor:
    """Derive a generator's state from another one and the rank; rank 0 keeps it as it is."""
    if rank == 0:
        return state
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    if state.numel() == _CUDA_STATE_BYTES:
        return torch.tensor([*digest[:8], *bytes(8)], dtype=torch.uint8, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator.get_state()
