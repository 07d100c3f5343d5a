"""What happens once when ranks meet: compare what must be equal, then take rank 0's weights."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _functional_call

from stenograd.catalog.method import Method
from stenograd.errors import ConfigError, MethodError, MismatchError, StenogradError, TensorTypeError
from stenograd.kernels.backend import wanted
from stenograd.version import __version__
from stenograd.wire.carried import form_of, in_memory, refuse_unfit
from stenograd.wire.drivers import AnyDriver

__all__ = [
    "REFRESH",
    "Members",
    "Wrapping",
    "as_optimizers",
    "broadcast_model",
    "broadcast_tensors",
    "compare",
    "describe_optimizers",
    "entries",
    "named",
    "own_host",
    "refuse_second_momentum",
    "refuse_taken",
    "several",
    "synced_parameters",
    "unwrapped",
]

REFRESH = "call sync.refresh() on every rank, with optimizers that hold what the model has now"
_state = attrgetter("_cdata", "dtype", "is_cpu")  # torch may swap the inside, `_cdata`, and keep the object


class Members:
    """A forward pre-hook that refuses a model whose attached parameters were replaced, or have another type.

    Nobody would average the gradients of the new ones. Every forward pass that makes gradients compares
    places and parameters in loops of C, 0.03 us each; only where something differs it looks by name. Types,
    and insides that torch can swap, take 0.2 us each, so only the first and the last are looked at, but for
    programs that let torch swap them.

    Args:
        model: None for a hook that does nothing, as in a copy of the model.
        parameters: what was attached, by name.
        remedy: what to do, for the error.
        rehooks: whether gradient hooks may be set anew where torch has swapped a parameter's inside
            (`torch.utils.swap_tensors`), which leaves them behind.

    Raises:
        StenogradError: when called, if it is so; it names the parameter.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> look = Members(layer, dict(layer.named_parameters()))
        >>> look()
        >>> layer.weight = nn.Parameter(torch.ones(1, 1))
        >>> look()
        Traceback (most recent call last):
        stenograd.errors.StenogradError: parameter weight is not the one that was attached, so ...
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        *,
        remedy: str = REFRESH,
        rehooks: bool = True,
    ) -> None:
        self._model, self._parameters = model, parameters
        self._remedy, self._rehooks = remedy, rehooks
        self._swaps = any(type(p) is not nn.Parameter for p in parameters.values())
        self._types = {name: (p.dtype, p.device) for name, p in parameters.items()}
        self._take()

    def __reduce__(self) -> Any:
        return Members, ()

    def __call__(self, *_: Any) -> None:
        """Look, if this is a forward pass that makes gradients."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.look(self._swaps or torch.__future__.get_swap_module_params_on_conversion())

    def look(self, thoroughly: bool = True) -> None:
        """Look at all places, and if so, at all types and insides."""
        if not self._same(thoroughly):
            self._find()

    def _take(self) -> None:
        """Note where the parameters are now."""
        ours = {id(p) for p in self._parameters.values()}
        modules = [] if self._model is None else list(self._model.modules())
        held = [(m._parameters, key) for m in modules for key, p in m._parameters.items() if id(p) in ours]
        links = [(m._modules, key, child) for m in modules for key, child in m._modules.items()]
        self._seen = [_state(owner[key]) for owner, key in held]
        # Parameters first: `_same` reads the types of the first `len(self._seen)` only.
        indices: list[tuple[dict[str, Any], str]] = [*held, *((parent, key) for parent, key, _ in links)]
        self._holders, self._names = [holder for holder, _ in indices], [name for _, name in indices]
        self._members = [holder[name] for holder, name in indices]
        self._paths = {path: p for path, p in self._now().items() if id(p) in ours}
        self._inside = {name: p._cdata for name, p in self._parameters.items()}
        if self._rehooks:
            for p in self._parameters.values():
                if (hooks := p._post_accumulate_grad_hooks) is not None:
                    p._post_accumulate_grad_hooks = hooks  # C++ takes them over only when they are set

    def _now(self) -> dict[str, nn.Parameter]:
        return {} if self._model is None else dict(self._model.named_parameters(remove_duplicate=False))

    def _same(self, thoroughly: bool) -> bool:
        found: Iterator[Any] = map(dict.get, self._holders, self._names)
        if not all(map(is_, found, self._members)):
            return False
        count = len(self._seen)
        if thoroughly:
            return list(map(_state, self._members[:count])) == self._seen
        return not count or all(_state(self._members[i]) == self._seen[i] for i in (0, count - 1))

    def _find(self) -> None:
        """Find out what has changed."""
        if _in_functional_call():
            return  # other tensors stand in for the parameters until it ends
        ours, now = {id(p) for p in self._parameters.values()}, self._now()
        for path in self._paths:
            found = now.get(path)
            if isinstance(found, nn.Parameter) and found.requires_grad and id(found) not in ours:
                raise StenogradError(
                    f"parameter {path} is not the one that was attached, so nobody averages its gradient "
                    f"(a layer was replaced, or load_state_dict was given assign=True): {self._remedy}"
                )
        for name, p in self._parameters.items():
            if (p.dtype, p.device) != self._types[name]:
                dtype, device = self._types[name]
                raise StenogradError(
                    f"parameter {name} was {dtype} on {device} when it was attached and is {p.dtype} on "
                    f"{p.device} now: call model.to(...) before, or {self._remedy}"
                )
            if p._cdata != self._inside[name] and not self._rehooks:
                raise StenogradError(
                    f"parameter {name} was swapped for another one, which hooks do not follow: {self._remedy}"
                )
        self._take()


def entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what a program calls: the module, or what it contains where it has no forward pass of its own."""
    if type(module).forward is not nn.Module.forward:
        yield module
    else:
        for child in module.children():
            yield from entries(child)


def _in_functional_call() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _functional_call.__code__:
            return True
        frame = frame.f_back
    return False


# of torch.compile, activation checkpointing, and FSDP's first version
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # which backends can add
_BROADCAST_BYTES = 25 << 20  # per message, DDP's size: 10,000 small tensors one by one took a minute


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside what frameworks put around one (Fabric, `torch.compile`).

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> unwrapped(torch.compile(layer)) is layer
        True
    """
    for name in ("_forward_module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return model


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by names that do not depend on what layers are wrapped in.

    `torch.compile` and activation checkpointing put a part of their own into the names of what they wrap. A
    state saved with such names would not load into the plain model. Where leaving these parts out would make
    two names equal, they stay.

    Example:
        >>> list(named(nn.Sequential(torch.compile(nn.Linear(1, 1, bias=False)))))
        ['0.weight']
    """
    full = dict(model.named_parameters())
    short = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in full]
    return dict(zip(short, full.values(), strict=True)) if len(set(short)) == len(full) else full


def as_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list, without what frameworks put around them.

    Raises:
        TypeError: something is no optimizer of torch, and holds none as `.optimizer`.
    """
    return [_bare(optimizer) for optimizer in several(given)]


def several(given: Any) -> list[Any]:
    """Return one or several optimizers as a list, with what stands around torch's."""
    one = hasattr(given, "param_groups") or not isinstance(given, Iterable)
    return [given] if one else list(given)


def refuse_second_momentum(how: Method, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer with momentum where the method has momentum of its own: it would act twice.

    The first beta of Adam and its like is a momentum.

    Raises:
        MethodError: names the optimizer and its momentum.

    Example:
        >>> from stenograd.catalog.method import method
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        >>> refuse_second_momentum(method("dgc"), [sgd])
        Traceback (most recent call last):
        stenograd.errors.MethodError: dgc has momentum of its own, and SGD has momentum=0.9: ...
    """
    if not how.own_momentum:
        return
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = {key: group[key] for key in ("momentum", "betas") if group.get(key)}
            if not (own.get("momentum") or own.get("betas", (0,))[0]):
                continue
            if any(how.moves(p.shape) for p in group["params"]):
                said = " and ".join(f"{key}={value}" for key, value in own.items())
                raise MethodError(
                    f"{how} has momentum of its own, and {type(optimizer).__name__} has {said}: set the "
                    "optimizer's momentum to 0, and use torch.optim.SGD in place of Adam and its like (dgc "
                    "takes the momentum over as dgc:momentum=0.9)"
                )


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    # A wrapper may be an Optimizer by its class and have no hooks of its own: torch's __init__ never ran.
    while not isinstance(optimizer, torch.optim.Optimizer) or "_optimizer_step_pre_hooks" not in vars(
        optimizer
    ):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            kind = type(optimizer)
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {kind.__module__}.{kind.__qualname__}: pass "
                "the optimizer inside of it, or step by one of torch's"
            )
        optimizer = inner
    return optimizer


def refuse_taken(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a model whose gradients somebody else averages or shards already.

    Raises:
        ConfigError: a part of it is wrapped in DistributedDataParallel or FSDP, an optimizer is attached, or
            another optimizer that holds some of the same parameters.
    """
    # An attached optimizer has it in the instance; see `Sync._watch`.
    if any("add_param_group" in vars(optimizer) for optimizer in optimizers):
        raise ConfigError("optimizer must be attached once, got one attached already: close() the first")
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if any(wrapping.watches(held) for wrapping in Wrapping.everyone()):
        raise ConfigError(
            "model must be attached once, got one whose gradients are averaged already, for another "
            "optimizer: they would travel twice; close() the first, or give both optimizers in one call"
        )
    for name, module in model.named_modules():
        sharded = any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False))
        if sharded or hasattr(module, "register_comm_hook"):
            kind = f"{type(module).__name__} as {name}" if name else type(module).__name__
            raise ConfigError(
                f"model must be a plain module, got {kind}, which exchanges gradients itself: with "
                "DistributedDataParallel use stenograd.ddp.register(ddp_model, method) instead, or do not "
                "wrap the model"
            )


class Wrapping:
    """A forward pre-hook that refuses a pass inside DistributedDataParallel, which averages gradients again.

    And one through parameters that are no longer those that were attached; see `Members`.

    DDP's averages would overwrite ours: training would go on exactly as with DDP alone, at DDP's bytes.

    Args:
        keeps: something that shall live as long as the module whose hook this is. A copy of the module, or a
            pickled one, has nothing to watch and keeps nothing.

    Raises:
        ConfigError: when called, if the pass is inside a DDP model with one of the parameters to `watch`.
    """

    _all: ClassVar[weakref.WeakSet[Wrapping]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, keeps: object = None) -> None:
        self._keeps = keeps
        self._own: dict[int, Tensor] = {}  # torch cannot swap (`model.to`) what has a weak reference
        self._harmless: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._members = Members()
        self._looked = False
        with self._lock:
            self._all.add(self)

    @classmethod
    def everyone(cls) -> list[Wrapping]:
        """Return all that there are in this process."""
        with cls._lock:
            return list(cls._all)

    def watch(self, parameters: Iterable[Tensor], members: Members | None = None) -> None:
        """Take the parameters that are averaged here; none when that has ended."""
        self._own, self._harmless = {id(p): p for p in parameters}, weakref.WeakSet()
        self._members = members or Members()

    def look(self) -> None:
        """Look at all that `Members` knows."""
        self._members.look()

    def look_before_step(self) -> None:
        """Look at the parameters if no forward pass did, because all were compiled."""
        if not self._looked:
            self._members()
        self._looked = False

    def watches(self, ids: set[int]) -> bool:
        """Return whether some of the parameters with these ids are averaged here."""
        return not ids.isdisjoint(self._own)

    def __reduce__(self) -> Any:
        return Wrapping, ()

    def __call__(self, *_: Any) -> None:
        """Look which DDP model's forward pass this is."""
        if torch.compiler.is_compiling():
            return  # seen in passes that are not compiled; in others this must not break the graph
        self._looked = True
        self._members()
        active = DistributedDataParallel._active_ddp_module
        # A pass in no_sync() says nothing of later ones, so its model is not noted as harmless.
        if active is None or active in self._harmless or not active.require_backward_grad_sync:
            return
        if self.watches(set(map(id, active.parameters()))):
            raise ConfigError(
                "the model runs inside DistributedDataParallel, which averages its gradients densely again, "
                "so nothing would be saved: use stenograd.ddp.register(ddp_model, method) instead of "
                "distribute, or train the model without DistributedDataParallel"
            )
        self._harmless.add(active)


def synced_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that the optimizers hold, by name, in the order of definition.

    A trainable parameter that no optimizer holds is left alone: it never moves. It joins when it is added
    with `optimizer.add_param_group`.

    Raises:
        ConfigError: the model has no trainable parameter, or an optimizer holds one that is not the model's.
        TensorTypeError: a parameter is complex.
    """
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}
    trainable = {name: p for name, p in named(model).items() if p.requires_grad}
    if not trainable:
        raise ConfigError(
            "model must have trainable parameters, got none: call requires_grad_() on some of them"
        )
    strangers = held - {id(p) for p in model.parameters()}
    if strangers:
        raise ConfigError(
            f"optimizer must hold the model's parameters, got {len(strangers)} of {len(held)} not in it: "
            "create the optimizer from model.parameters(), after moving or replacing layers"
        )
    synced = {name: p for name, p in trainable.items() if id(p) in held}
    if not synced:
        raise ConfigError(
            "optimizer must hold the model's parameters, got none of them: pass model.parameters()"
        )
    for name, p in synced.items():
        if p.is_complex():
            raise TensorTypeError(
                f"parameter {name} must be real, got {p.dtype}: keep real and imaginary parts"
            )
        if p.dtype not in _DTYPES:
            raise TensorTypeError(
                f"parameter {name} must be of 16, 32 or 64 bits, got {p.dtype}, which backends cannot add: "
                "keep master weights in bfloat16 or float32"
            )
    return synced


def _described(
    settings: Mapping[str, Any], parameters: Mapping[str, Tensor], model: nn.Module | None
) -> dict[str, Any]:
    """Return what must be equal on all ranks, by what it is: versions and kernels, settings, tensors."""
    # Ranks with other kernels would get averages that differ in the last bits.
    own = {"stenograd version": __version__, "torch version": ".".join(torch.__version__.split(".")[:2])}
    tensors = {f"parameter {n}": form_of(p) for n, p in parameters.items()}
    if model is not None:
        synced = {id(p) for p in parameters.values()}
        others = ((n, p) for n, p in model.named_parameters() if id(p) not in synced)
        tensors |= {f"parameter {n}": f"{form_of(p)}, not averaged" for n, p in others}
        tensors |= {f"buffer {n}": form_of(b) for n, b in model.named_buffers()}
    return {**own, "kernels": wanted(), "parameters": len(parameters), **tensors, **settings}


def describe_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, alike: bool
) -> dict[str, str]:
    """Return what must be equal on all ranks of optimizers: which parameters they hold, in which groups.

    Args:
        model: names their parameters.
        optimizers: in the order in which they were given.
        alike: whether all ranks must take the same steps; then settings such as the learning rate, and
            whether there is a state, must be equal, too.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> describe_optimizers(layer, [torch.optim.SGD(layer.parameters(), lr=0.5)], alike=False)
        {'optimizer 0': 'SGD', "optimizer 0's weight": 'in group 0'}
    """
    names = {id(p): name for name, p in named(model).items()}
    found: dict[str, str] = {}
    for i, optimizer in enumerate(optimizers):
        found[f"optimizer {i}"] = type(optimizer).__name__
        if alike:
            found[f"whether optimizer {i} has a state"] = str(bool(optimizer.state))
        for g, group in enumerate(optimizer.param_groups):
            found |= {f"optimizer {i}'s {names.get(id(p), '?')}": f"in group {g}" for p in group["params"]}
            plain = {key: _plain(value) for key, value in group.items() if alike and key != "params"}
            found |= {f"{k} of optimizer {i}'s group {g}": v for k, v in plain.items() if v is not None}
    return found


def _plain(value: Any) -> str | None:
    """Return a setting as text, if it is a number or a few; others may look different on equal ranks."""
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() == 1 else None
    parts = value if isinstance(value, (tuple, list)) else [value]
    return str(value) if all(isinstance(part, (bool, int, float)) for part in parts) else None


def compare(
    driver: AnyDriver,
    settings: Mapping[str, Any],
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    model: nn.Module | None = None,
) -> None:
    """Check that every rank describes the same thing; also find out who is on which host, for `traffic`.

    Args:
        driver: the way to the other ranks.
        settings: JSON-able values by what they are, such as "method"; versions and kernels are added.
        parameters: whose names, shapes and types are compared, in this order.
        model: whose other parameters, and whose buffers, are compared likewise: they are broadcast, too.

    Raises:
        MismatchError: on every rank, naming the first difference and the two ranks; the order counts, too.
        TensorTypeError: on every rank: a tensor is not fit to travel; see `wire.carried.refuse_unfit`.

    Versions of torch that differ in their last part only, as 2.13.0 and 2.13.1 do, are a warning on rank 0.
    """
    own = json.dumps(_described(settings, parameters, model))
    digest = hashlib.sha256(own.encode()).hexdigest()  # describing 10,000 tensors takes a megabyte
    messages = driver.gather_bytes(json.dumps([own_host(), digest, torch.__version__]).encode())
    about: list[list[str]] = [json.loads(text) for text in messages]
    driver.traffic.hosts = [host for host, _, _ in about]
    builds = sorted({build for _, _, build in about})
    if all(other == digest for _, other, _ in about):
        if len(builds) > 1 and driver.rank == 0:
            warnings.warn(
                f"the ranks run different builds of torch ({', '.join(builds)}), whose results may differ in "
                "the last bits: install the same one everywhere",
                RuntimeWarning,
                stacklevel=2,
            )
        # Not before this: ranks that have the same tensors raise all together, and none waits.
        refuse_unfit({f"parameter {name}": p for name, p in parameters.items()})
        if model is not None:
            refuse_unfit(_carried(model))
        return
    received: list[dict[str, Any]] = [json.loads(text) for text in driver.gather_bytes(own.encode())]
    first = received[0]
    for rank, other in enumerate(received[1:], start=1):
        for what in [*first, *(k for k in other if k not in first)]:
            a, b = first.get(what, "nothing"), other.get(what, "nothing")
            if a != b:
                raise MismatchError(
                    f"ranks differ in {what}: rank 0 has {a}, rank {rank} has {b}: make them equal"
                )
        for a, b in zip(first, other, strict=True):  # what travels by position would change places
            if a != b:
                raise MismatchError(
                    f"ranks differ in the order of tensors: where rank 0 has {a}, rank {rank} has {b}: "
                    "register parameters and buffers, and add parameters to optimizers, in the same order"
                )


@torch.no_grad()
def broadcast_model(driver: AnyDriver, model: nn.Module, source: int = 0) -> None:
    """Overwrite all parameters and buffers with those of one rank.

    Raises:
        TensorTypeError: one of them is not fit to travel; see `wire.carried.refuse_unfit`.
    """
    carried = _carried(model)
    refuse_unfit(carried)
    tensors = {id(t): t.detach() for t in carried.values()}
    broadcast_tensors(driver, list(tensors.values()), source)


@torch.no_grad()
def broadcast_tensors(driver: AnyDriver, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Overwrite tensors with those of one rank, many small ones in one message.

    Args:
        driver: the way to the other ranks.
        tensors: dense, of any types and shapes, alike on all ranks; what `expand` repeats travels once.
        source: whose values all take.
    """
    if driver.world_size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for t in map(in_memory, tensors):
        kind, nbytes = (t.dtype, t.device), t.numel() * t.element_size()
        parts = kinds.setdefault(kind, [[]])
        sizes[kind] = sizes.get(kind, 0) + nbytes
        if parts[-1] and sizes[kind] > _BROADCAST_BYTES:
            parts.append([])
            sizes[kind] = nbytes
        parts[-1].append(t)
    for parts in kinds.values():
        for part in parts:
            flat = torch.cat([t.reshape(-1) for t in part])
            driver.broadcast(flat, source)
            if driver.rank != source:
                pieces = flat.split([t.numel() for t in part])
                torch._foreach_copy_(part, [p.view(t.shape) for p, t in zip(pieces, part, strict=True)])


def _carried(model: nn.Module) -> dict[str, Tensor]:
    """Return all that a model holds, by what messages call it."""
    found: dict[str, Tensor] = {f"parameter {name}": p for name, p in model.named_parameters()}
    return found | {f"buffer {name}": b for name, b in model.named_buffers()}


def own_host() -> str:
    """Name this host, or its part with a network of its own: from there, others are across a link."""
    try:
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # not Linux
        network = 0
    return f"{socket.gethostname()}/{network}"
