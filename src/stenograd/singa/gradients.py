"""Compute gradients of a loss in backward order, and average them while backward goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.errors import CheckpointError, ConfigError, TensorTypeError, bad_value
from stenograd.singa.exchanges import Exchanges
from stenograd.singa.fusion import Fusion, Group
from stenograd.singa.graph import Walker, backward, parameters_of
from stenograd.singa.slots import AS_SAVED, some
from stenograd.sync.handshake import compare

__all__ = ["Gradients"]


class Gradients:
    """Runs backward passes, and keeps parameters and their residuals by name.

    A parameter without a given name is called by its number in the order first seen, which is backward order.

    Args:
        driver: the way to the other ranks.
    """

    def __init__(self, driver: Driver) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.units: list[Group] = []
        self.corrected = False
        self._driver = driver
        self._exchanges = Exchanges(driver)
        self._names: dict[int, str] = {}
        self._expected: dict[str, tuple[int, ...]] = {}
        self._walker = Walker()
        self._compared = False
        self._loaded = False  # and no step since

    def name(self, parameter: Tensor, name: str | None = None) -> str:
        """Return a parameter's name; a new parameter gets the given name, or its number.

        Raises:
            CheckpointError: state was loaded for a parameter of this name and another shape.
        """
        known = self._names.get(id(parameter))
        if known is not None:
            return known
        number = len(self.parameters)
        while str(number) in self.parameters:  # a given name may be a number
            number += 1
        name = name or str(number)
        if name in self.parameters:
            raise _taken(name)
        self._check_shape(name, parameter)
        self._names[id(parameter)] = name
        self.parameters[name] = parameter
        return name

    def register(self, members: Sequence[tuple[str | None, Tensor]]) -> None:
        """Name parameters; one known by another name or its number is renamed, and its residual with it.

        Raises:
            ConfigError: two parameters would have one name.
            CheckpointError: state was loaded for a parameter of such a name and another shape.
        """
        known = [(self._names.get(id(parameter)), name) for name, parameter in members]
        renamed = {old: new for old, new in known if old is not None and new is not None and old != new}
        if renamed:
            self._rename(renamed)
        for name, parameter in members:
            self.name(parameter, name)

    def averaged(self, loss: Tensor, threshold: int, how: Method) -> tuple[list[Tensor], bool]:
        """Run backward and average all gradients; groups travel while backward goes on.

        Args:
            loss: what to differentiate.
            threshold: of the fusion rule, in elements.
            how: the method by which gradients travel.

        Returns:
            The parameters in backward order, with averages in `grad`; and whether all averages are finite.
        """
        fusion = Fusion(threshold)
        self._compare_ranks(loss, threshold, how)
        self._exchanges.begin(how, self._known(loss))
        walked: list[Tensor] = []
        groups: list[Group] = []

        def submit(group: Group) -> None:
            self._exchanges.submit(group, [_gradient(self.parameters[name]) for name in group])
            groups.append(group)

        @torch.no_grad()
        def on_gradient(parameter: Tensor) -> None:
            walked.append(parameter)
            if group := fusion.add(self.name(parameter), _gradient(parameter)):
                submit(group)

        backward(loss, on_gradient, self._walker)
        for group in fusion.rest():
            submit(group)
        averages, finite = self._exchanges.finish()
        for name, average in averages.items():
            _gradient(self.parameters[name]).copy_(average)
        if isinstance(how.compressor, ErrorFeedback):
            self.units, self.corrected = groups, True
        return walked, finite

    def local(self, loss: Tensor, threshold: int) -> tuple[list[Tensor], list[Group]]:
        """Run backward without averaging; return the parameters in backward order, and their groups."""
        fusion = Fusion(threshold)
        self._compare_ranks(loss, threshold, None)
        walked: list[Tensor] = []
        backward(loss, walked.append, self._walker)
        groups = [fusion.add(self.name(p), p) for p in walked]
        return walked, [group for group in groups if group] + fusion.rest()

    def accumulations(self) -> list[Tensor]:
        """Return copies of the residuals, flat, one per group in the order of the last corrected step."""
        states = self._exchanges.residuals()
        return [torch.cat([states[name]["residual"].reshape(-1) for name in unit]) for unit in self.units]

    def state(self) -> dict[str, Any]:
        """Return copies of the residuals, and the parameters' names and shapes."""
        return {
            "parameters": self._expected | {name: tuple(p.shape) for name, p in self.parameters.items()},
            "residuals": self._exchanges.residuals(),
            "units": [list(unit) for unit in self.units],
            "corrected": self.corrected,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a saved state fits the parameters seen so far.

        Raises:
            CheckpointError: one has another shape.
        """
        for name, shape in state["parameters"].items():
            mine = tuple(self.parameters[name].shape) if name in self.parameters else tuple(shape)
            if mine != tuple(shape):
                raise CheckpointError(
                    f"parameter {name} has shape {mine}, got {tuple(shape)}: load it into the same model"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a saved `state()`, also before any parameter was seen."""
        self._expected = {name: tuple(shape) for name, shape in state["parameters"].items()}
        self._loaded = True
        self._exchanges.load(state["residuals"])
        self.units = [list(unit) for unit in state["units"]]
        self.corrected = bool(state["corrected"])

    def close(self) -> None:
        """Stop the thread of the exchanges."""
        self._exchanges.close()

    def _rename(self, new: Mapping[str, str]) -> None:
        parameters: dict[str, Tensor] = {}
        for old, parameter in self.parameters.items():
            name = new.get(old, old)
            if name in parameters:
                raise _taken(name)
            if old in new and name not in new:  # else the expected shape is of another, renamed one
                self._check_shape(name, parameter)
            parameters[name] = parameter
        residuals = {new.get(old, old): state for old, state in self._exchanges.residuals().items()}
        self._exchanges.load(residuals)
        self.parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._expected = {name: shape for name, shape in self._expected.items() if name not in new}
        self.units = [[new.get(old, old) for old in unit] for unit in self.units]

    def _check_shape(self, name: str, parameter: Tensor) -> None:
        shape = tuple(parameter.shape)
        if self._expected.get(name, shape) != shape:
            raise CheckpointError(
                f"parameter {name} was saved with shape {self._expected[name]}, got {shape}: load the state "
                "into the same model, and name parameters with register(model.named_parameters(), {})"
            )

    def _check_names(self, names: AbstractSet[str]) -> None:
        """Check, in the first step after loading, that no new name is used while a saved one waits."""
        strange, waiting = names - self._expected.keys(), self._expected.keys() - self.parameters.keys()
        if strange and waiting:
            raise CheckpointError(
                f"state was saved for parameters {some(self._expected)}, got {some(strange)}: {AS_SAVED}"
            )
        self._loaded = False

    def _known(self, loss: Tensor) -> Sequence[str]:
        """Return the names of the loss's parameters, or none while no residuals are kept for later."""
        return [self.name(p) for p in parameters_of(loss)] if self._exchanges.resting else []

    def _compare_ranks(self, loss: Tensor, threshold: int, how: Method | None) -> None:
        """Check, before the first step, that all ranks have the same parameters, mode and threshold."""
        if self._compared and not self._loaded:
            return
        parameters = {self.name(p): p for p in parameters_of(loss)}
        if self._loaded:
            self._check_names(parameters.keys())
        if not self._compared:
            compare(self._driver, {"threshold": threshold, "mode": str(how)}, parameters)
            self._compared = True


def _taken(name: str) -> ConfigError:
    advice = "register each parameter once, under a name of its own"
    return bad_value("name", "must be of one parameter", name, advice)


def _gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; refuse one that is missing, sparse or not real."""
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided or not grad.is_floating_point():
        kind = "none" if grad is None else f"{grad.dtype}, {grad.layout}"
        raise TensorTypeError(
            f"gradients must be dense and real, got {kind}: use floating-point parameters and sparse=False"
        )
    return grad
