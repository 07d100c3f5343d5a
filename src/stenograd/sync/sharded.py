"""Models that FSDP2 shards: each rank exchanges its shards with the ranks that hold the same ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stenograd.catalog.method import MethodLike, method
from stenograd.errors import ConfigError, MethodError
from stenograd.exchange.filling import Slot
from stenograd.exchange.tensor_exchange import Outcome
from stenograd.sync.gradients import GradientSync
from stenograd.sync.handshake import (
    Members,
    as_optimizers,
    named,
    refuse_second_momentum,
    synced_parameters,
    unwrapped,
)
from stenograd.sync.steps import bad_of
from stenograd.tracing import MAX_EVENTS, Tracing
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import are_finite
from stenograd.wire.groups import ranks_of
from stenograd.wire.requests import Rounds, gather

__all__ = ["ShardedSync", "is_sharded"]


def is_sharded(model: nn.Module) -> bool:
    """Return whether a trainable parameter is cut over ranks, as `fully_shard` does.

    Example:
        >>> is_sharded(nn.Linear(1, 1))
        False
    """
    return any(hasattr(p, "device_mesh") for p in unwrapped(model).parameters() if p.requires_grad)


class Shards(nn.Module):
    """A sharded model's local shards, under the model's names, as an engine for plain models sees them.

    FSDP may replace a shard's memory (when it pads it in the first forward pass), so tensors are looked up
    anew each time.

    Args:
        model: sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._whole = [model]  # in a list, so that it is no submodule

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and local shards."""
        for name, p in named(self._whole[0]).items():
            yield name, _local(p)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield local shards."""
        yield from (p for _, p in self.named_parameters())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's buffers, which are whole on each rank."""
        yield from self._whole[0].named_buffers()

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the model's buffers."""
        yield from self._whole[0].buffers()


class ShardedSync(GradientSync):
    """Gradient averaging between the replicas of a sharded model (hybrid sharding, HSDP).

    FSDP reduces gradients inside a group of ranks that together hold one replica. Each rank then holds
    shards of them, and this averages those with the ranks that hold the same shards of other replicas, which
    is where links are slow. A step counts only if it was finite on all shards of all replicas.

    Args:
        model: after `fully_shard(model, mesh=mesh["shard"])` on a mesh of one dimension.
        optimizer: made from the sharded parameters.
        how: a method that averages gradients in every step.
        group: the ranks that hold the same shards, `mesh["replicate"]` or its process group.
        options: as for `stenograd.distribute`.

    Raises:
        ConfigError: the group is missing or holds different shards; the model is sharded on more than one
            mesh or dimension, or only in part.
        MethodError: the method does not average gradients in every step.
    """

    _shares_memory = False  # gradients live where FSDP has put them

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        how: MethodLike = "dense",
        *,
        group: Any = None,
        timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        chosen = method(how)
        if not chosen.averages_gradients:
            raise MethodError(
                f"a sharded model (FSDP) cannot be trained with {chosen}: its ranks hold shards, not "
                "replicas of their own. Use a method that averages gradients in every step, such as topk"
            )
        self._sharded = unwrapped(model)
        mesh = _mesh(self._sharded)
        if group is None:
            raise ConfigError(
                "group must be given for a sharded model (FSDP): the ranks that hold the same shards, as in "
                'distribute(model, optimizer, method, group=mesh["replicate"])'
            )
        _check_crossing(group, mesh)
        self._shards: dict[int, nn.Parameter] = {}  # by the id of the sharded parameter
        self._owners: dict[int, Tensor] = {}  # by the id of the shard
        # A group of its own, because FSDP itself sends on the mesh's group in a backward pass.
        row = Driver.own(mesh.get_group(), timeout_s=timeout_s)
        self._row = _Verdict(row, self._shards)
        #: Tells states of different shards apart where they are saved in one folder.
        self.suffix = f"-shard{row.rank}of{row.world_size}"
        bare = as_optimizers(optimizer)
        super().__init__(Shards(self._sharded), bare, chosen, group=group, timeout_s=timeout_s, **options)

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, a file for each shard; see `Tracing`.

        "trace.json" becomes "trace-shard0of2.json" with the ranks that hold the first shards, and so on.
        """
        own = Path(path)
        path = str(own.with_name(f"{own.stem}{self.suffix}{own.suffix}"))
        return Tracing(path, self._drivers, self._sharded, self._optimizers, max_events=max_events)

    def join(self, *, enable: bool = True, **_: Any) -> AbstractContextManager[Any]:
        """Refuse uneven inputs, with which FSDP itself would wait for ever; do nothing if not `enable`.

        Raises:
            ConfigError: it is enabled.
        """
        if not enable:
            return nullcontext()
        raise ConfigError("a sharded model (FSDP) needs as many batches on every rank: cut the longer ones")

    def _check_weighing(self) -> None:
        raise ConfigError(
            "weights need plain replicas, got a sharded model (FSDP), which takes plain means inside a "
            "replica: scale the loss by n times the number of ranks, divided by the sum of all n"
        )

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some."""
        super().refresh()
        # Asked at the end of a pass, where the engine for plain models asks its sparse gradients.
        self._sparse = self._row  # type: ignore[assignment]

    def _detach(self) -> None:
        self._row.driver.close()
        super()._detach()

    @property
    def _trained(self) -> nn.Module:
        return self._sharded

    def _found(self) -> dict[str, nn.Parameter]:
        out = {}
        for name, p in synced_parameters(self._sharded, self._optimizers).items():
            shard = self._shards.get(id(p))
            # Kept for its id and its gradient. Values are read from the model, whose memory FSDP may replace.
            if shard is None or shard.shape != _local(p).shape:
                shard = self._shards[id(p)] = nn.Parameter(_local(p).detach())
                self._owners[id(shard)] = p
            out[name] = shard
        return out

    def _watch(self, modules: Iterable[nn.Module], *about: Any) -> None:
        super()._watch([self._sharded], *about)

    def _members_of(self, parameters: Mapping[str, nn.Parameter]) -> Members:
        return Members()  # FSDP itself replaces the model's parameters in each pass

    def _owner(self, parameter: nn.Parameter) -> Tensor:
        return self._owners[id(parameter)]

    def _on_gradient(self, slot: Slot, parameter: Tensor) -> None:
        """Take a shard when the next one is there: until then the user's hooks may change it."""
        with self._lock:
            task = torch._C._current_graph_task_id()
            if self._seen != task:
                self._begin_pass(task)
            slot.used = True
            if self._exchanging:
                while self._late:
                    self._take(*self._late.pop())
                self._late.append((slot, self._shards[id(parameter)]))

    @torch.no_grad()
    def _take(self, slot: Slot, parameter: Tensor) -> None:
        self._mirror(parameter)
        super()._take(slot, parameter)

    def _mirror(self, shard: Tensor) -> None:
        """Let a shard's gradient be its part of the sharded parameter's."""
        grad = self._owners[id(shard)].grad
        shard.grad = None if grad is None else _local(grad)

    @torch.no_grad()
    def _end_pass(self) -> None:
        for shard in self._parameters.values():
            self._mirror(shard)
        super()._end_pass()

    @torch.no_grad()
    def _write_back(self, outcome: Outcome) -> None:
        super()._write_back(outcome)
        # What overflowed in coding is known to the ranks with these shards only, and so are requests to stop.
        bad, stopping = self._row.both(not outcome.applied, self._stopping)
        self._finite = not bad
        self._hear(stopping)
        for shard in self._parameters.values():
            owner = self._owners[id(shard)]
            # Else the average lies in the sharded gradient already, whose memory its local part shares.
            if owner.grad is None and shard.grad is not None:
                owner.grad = _like(owner, shard.grad)
        if not self._finite and self._passes.skips:
            self._spoil()

    def _mean(self, loss: float) -> float:
        """Return the mean over all shards, too: FSDP's ranks must evaluate a closure equally often."""
        received = self._row.driver.run(
            gather(torch.tensor([super()._mean(loss)], dtype=torch.float64, device="cpu"))
        )
        found = [float(other) for (other,) in received]
        return sum(found) / len(found)  # in rank order, as of the replicas

    def _ask_all(self, own: Tensor) -> list[tuple[Tensor, ...]]:
        (found,) = self._row.each([any(int(other) for (other,) in super()._ask_all(own))])
        return [(torch.tensor([int(found)], device="cpu"),)]

    def _averaged(self) -> set[int]:
        return {id(owner) for owner in self._owners.values()}

    def _leave_bad(self) -> None:
        """Do nothing yet: what is bad is known when other shards have been asked; see `_spoil`."""

    def _spoil(self) -> None:
        """Let a gradient that is not finite in one shard be so in all, which then forget it alike."""
        shards, bad = list(self._parameters.values()), list[Tensor]()
        known = {id(shard) for shard in bad_of(shards)}
        for shard, spoilt in zip(shards, self._row.each([id(s) in known for s in shards]), strict=True):
            if spoilt and shard.grad is not None:
                shard.grad.fill_(torch.nan)
                bad.append(shard)
        # Autograd knows no shards: FSDP adds to their gradients, and says so afterwards.
        hook = partial(_before_backward, weakref.ref(self))
        self._left.take(bad, self._sharded.register_forward_hook(hook))

    @torch.no_grad()
    def _begin_backward(self) -> None:
        """Let gradients of a bad pass be zeros where they accumulate further."""
        for shard in self._parameters.values():
            self._mirror(shard)
        self._left.clear()

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        shards = self._parameters.values()
        self._passes.skip_bad(optimizer, self._averaged(), self.finite, zeros, shards)

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        self._passes.settings.look(self.method, optimizer)
        refuse_second_momentum(self.method, [optimizer])
        slots = {id(self._owners[at]): _Seen(slot) for at, slot in self._slots.items()}
        under_way = self._pass_id != -1
        received: Any = slots, under_way, self.finite
        self._passes.check_step(optimizer, *received, parameters=self._parameters.values(), zeros=zeros)


class _Seen:
    """A slot as the checks before a step see it: by the sharded gradient, not by its local part."""

    def __init__(self, slot: Slot) -> None:
        self.used = slot.used
        self._slot = slot

    def left(self, grad: Tensor | None) -> bool:
        """Return whether this is the gradient that the last exchange left."""
        return grad is not None and self._slot.left(_local(grad))


class _Verdict:
    """Agrees within a replica whether all its shards' gradients are finite.

    It stands where an engine for plain models has its sparse gradients: asked at the end of a pass, what it
    finds decides on all ranks, because each replica's ranks tell those with the same shards.

    Args:
        driver: the way to the ranks of this replica.
        shards: whose gradients to look at.
    """

    def __init__(self, driver: AnyDriver, shards: Mapping[int, nn.Parameter]) -> None:
        self.driver, self._shards = driver, shards
        self.bad = False

    def used(self) -> list[bool]:
        """Return nothing: there are no parameters beside the shards."""
        return []

    def rounds(self, used: Sequence[bool]) -> Rounds[None]:
        """Find out whether a gradient in this replica is not finite; exchange nothing with others."""
        self.bad = self.any(not are_finite(p.grad for p in self._shards.values() if p.grad is not None))
        return _nothing()

    def write_back(self, outcome: Outcome) -> None:
        """Do nothing."""

    def any(self, own: bool) -> bool:
        """Return whether it holds for a rank of this replica."""
        return self.each([own])[0]

    def both(self, one: bool, other: bool) -> tuple[bool, bool]:
        """Return for each of two whether it holds for a rank of this replica, by the message of `any`."""
        received = self.driver.run(gather(torch.tensor([one + 2 * other], device="cpu")))
        found = [int(code) for (code,) in received]
        return any(code & 1 for code in found), any(code & 2 for code in found)

    def each(self, own: Sequence[bool]) -> list[bool]:
        """Return for each of several questions whether it holds for a rank of this replica."""
        received = self.driver.run(gather(torch.tensor([int(one) for one in own], device="cpu")))
        return [any(column) for column in zip(*(other.tolist() for (other,) in received), strict=True)]


def _before_backward(sync: weakref.ref[ShardedSync], _: nn.Module, __: Any, output: Any) -> None:
    """Tell an engine when a backward pass comes to what the model has returned."""

    def begin(_: Tensor) -> None:
        if (running := sync()) is not None:
            running._begin_backward()

    for made in tree_leaves(output):
        if isinstance(made, Tensor) and made.requires_grad:
            made.register_hook(torch.compiler.disable(begin))


def _nothing() -> Rounds[None]:
    return
    yield  # never reached: it makes this a coroutine


def _local(tensor: Any) -> Any:
    """Return this rank's part of a tensor; the same object each time, without a graph.

    One that is not distributed, as a frozen parameter may be, is whole on each rank.
    """
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(owner: Any, part: Tensor) -> Tensor:
    """Return a distributed tensor like another one, of this rank's part."""
    out: Tensor = type(owner).from_local(
        part, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )
    return out


def _mesh(model: nn.Module) -> Any:
    """Return the one mesh that a model is sharded on, of one dimension.

    Raises:
        ConfigError: there are several, or it has several dimensions, or parameters are not sharded.
    """
    meshes = {}
    for name, p in named(model).items():
        if not p.requires_grad:
            continue
        mesh = getattr(p, "device_mesh", None)
        if mesh is None:
            raise ConfigError(
                f"every trainable parameter must be sharded, got {name} whole on each rank: call "
                "fully_shard on the root module, too"
            )
        # What has a mesh is a DTensor, which mypy does not know.
        if mesh.ndim != 1 or not p.placements[0].is_shard():  # type: ignore[attr-defined]
            raise ConfigError(
                f"the model must be sharded on a mesh of one dimension, got {name} on {mesh}, whose "
                'all-reduce FSDP does itself, densely: call fully_shard(model, mesh=mesh["shard"]) and pass '
                'group=mesh["replicate"]'
            )
        meshes[mesh] = name
    if len(meshes) > 1:
        raise ConfigError(
            f"the model must be sharded on one mesh, got {len(meshes)} (of {', '.join(meshes.values())}): "
            "use the same mesh in every fully_shard"
        )
    return next(iter(meshes))


def _check_crossing(group: Any, mesh: Any) -> None:
    """Check that the ranks of a group hold the same shards, so that it crosses the mesh in this rank only.

    Raises:
        ConfigError: it does not.
    """
    both = set(ranks_of(group)) & set(ranks_of(mesh))
    if len(both) != 1:
        raise ConfigError(
            "group must be ranks that hold the same shards in different replicas, got one that shares ranks "
            f"{sorted(both)} with the mesh that the model is sharded on: pass the mesh's other dimension"
        )
