"""Finds out in the next forward pass that a model's parameters are no longer those that were attached."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter, is_
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _functional_call

from stenograd.errors import StenogradError

__all__ = ["REFRESH", "Members", "entries"]

REFRESH = "call sync.refresh() on every rank, with optimizers that hold what the model has now"
_state = attrgetter("_cdata", "dtype", "is_cpu")


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
        places: list[tuple[dict[str, Any], str]] = [*held, *((parent, key) for parent, key, _ in links)]
        self._holders, self._names = [holder for holder, _ in places], [name for _, name in places]
        self._members = [holder[name] for holder, name in places]
        self._places = {path: p for path, p in self._now().items() if id(p) in ours}
        self._inside = {name: p._cdata for name, p in self._parameters.items()}
        if self._rehooks:
            for p in self._parameters.values():
                if (hooks := p._post_accumulate_grad_hooks) is not None:
                    p._post_accumulate_grad_hooks = hooks

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
        for path in self._places:
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
