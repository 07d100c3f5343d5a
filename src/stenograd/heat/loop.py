"""DASO's batches: the optimizer's step, then the exchanges that are due inside and between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stenograd.comm.driver import Driver
from stenograd.data.finite import is_finite
from stenograd.errors import StenogradError, bad_value
from stenograd.heat.across import AcrossNodes
from stenograd.heat.arguments import check_arguments
from stenograd.heat.cycle import Plan, Skips
from stenograd.heat.scaling import step_together
from stenograd.sync.gradient_sync import GradientSync
from stenograd.sync.parameter_averaging import average

__all__ = ["Loop"]


def _skip(name: str) -> property:
    """Return a property that reads and sets one of the loop's skips."""
    return property(
        lambda loop: getattr(loop._skips, name),
        lambda loop, batches: setattr(loop, "_skips", loop._skips._replace(**{name: batches})),
    )


def _planned(name: str) -> property:
    """Return a property that reads and sets one of the plan's numbers; it counts from the next epoch on."""

    def change(loop: Loop, number: int) -> None:
        check_arguments({name: number})
        plan, untouched = loop._plan, loop.epoch == loop.current_batch == 0
        loop._plan = replace(plan, **{name: number})
        if untouched and loop._skips == plan.first():
            loop._skips = loop._plan.first()

    return property(lambda loop: getattr(loop._plan, name), change)


class Loop:
    """Counts batches and epochs, and averages when it is time; `DASO` adds the interface.

    Attributes:
        epoch, current_batch: finished epochs, and finished batches of the present one.
        last_batch: index of an epoch's last batch.
        events: (epoch, batch, kind, group) of each event, if recorded.
        skipped: batches in which this rank did not step because a gradient was not finite.
        global_skip: batches from one exchange between nodes to the next; 0 for an exact one after each batch.
        local_skip: batches from one average of gradients inside the node to the next.
        batches_to_wait: batches from sending to merging.
        total_epochs, warmup_epochs, cooldown_epochs, max_gs, skip_reduction_factor, local_skip_factor: the
            plan's; set them alike on all ranks.
    """

    epoch: int
    current_batch: int
    events: list[tuple[int, int, str, int | None]]
    _across: AcrossNodes
    _sync: GradientSync
    _skips: Skips
    global_skip, local_skip, batches_to_wait = (_skip(name) for name in Skips._fields)
    total_epochs, warmup_epochs, cooldown_epochs = map(
        _planned, ("total_epochs", "warmup_epochs", "cooldown_epochs")
    )
    max_gs, skip_reduction_factor, local_skip_factor = map(
        _planned, ("max_global_skips", "skip_reduction_factor", "local_skip_factor")
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        driver: Driver,
        plan: Plan,
        node_size: int,
        record_events: bool,
        average_buffers: bool,
    ) -> None:
        self.local_optimizer, self.scheduler, self._driver = optimizer, scheduler, driver
        self._plan, self.loc_gpus = plan, node_size
        self.record_events, self.average_buffers = record_events, average_buffers
        self.amp = False
        self.scaler: Any = None
        self.skipped = 0
        self.last_batch: int | None = None
        self._model: nn.Module | None = None
        self._replaced = False
        self._begin()

    def step(self) -> None:
        """Step the optimizer and the scheduler, then run the exchange that is due after this batch.

        Raises:
            StenogradError: no model was set.
            ConfigError: last_batch was not set, or is past already; a ValueError.
            NonFiniteError: a rank's parameters were not finite when they were to be averaged.
            PeerLost: a rank did not answer in time.
        """
        self._check_model()
        batch, last = self.current_batch, self.last_batch
        if not isinstance(last, int) or isinstance(last, bool) or last < batch:
            rule = f"must be the index of the epoch's last batch, at least {batch} now"
            raise bad_value("last_batch", rule, last, "set daso.last_batch = number_of_batches - 1")
        self._step_optimizer()
        if batch == last:
            self._end_epoch()
            return
        if not self._across.one_node:
            self._exchange(batch, last)
        self.current_batch = batch + 1
        self._set_local(self._skips.is_local_sync(batch + 1, last))

    def _begin(self) -> None:
        self.epoch = self.current_batch = 0
        self.events = []
        self._skips = self._plan.first()
        self._syncs_locally = True

    def _check_model(self) -> None:
        if self._replaced:
            raise StenogradError(
                "DASO was replaced: another one was given its model or optimizer: use that one, or take "
                "both back with set_model(model)"
            )
        if self._model is None:
            raise StenogradError("DASO has no model: call set_model(model), or use DataParallelMultiGPU")

    def _step_optimizer(self) -> None:
        """Step the optimizer, and the scheduler with it; a gradient that is not finite skips the optimizer.

        Without a GradScaler the scheduler steps even then: between exchanges the other ranks do not learn of
        the skip, and learning rates must stay equal.
        """
        stepped = True
        if self.scaler is not None:
            stepped = step_together(self.scaler, self.local_optimizer, self._driver)
        else:
            params = (p for group in self.local_optimizer.param_groups for p in group["params"])
            finite = (
                self._sync.finite  # the exchange has looked at the gradients already
                if self._sync.enabled
                else all(is_finite(p.grad) for p in params if p.grad is not None)
            )
            if finite:
                self.local_optimizer.step()
            self.skipped += not finite
        if stepped and self.scheduler is not None:
            self.scheduler.step()

    def _exchange(self, batch: int, last: int) -> None:
        """Send, merge or average exactly, whatever is due after a batch that is not the epoch's last."""
        across, (skip, _, wait) = self._across, self._skips
        if skip == 0 or (wait == 0 and batch % skip == 0):
            across.replace()
        elif batch % skip == 0:
            # Fixed when sent. Heat computes it anew in each batch: with skip 8, wait 2 and last batch 19 it
            # merges what batch 16 sent at 19 instead of 18, and with skip 2 and wait 1 after two batches.
            wait = min(wait, skip, last - batch)
            across.send(wait, due=batch + wait)
        elif across.in_flight is not None and batch >= across.in_flight.due:
            across.merge()

    def _end_epoch(self) -> None:
        """Make all ranks equal: merge the exchange in flight, then average exactly."""
        if not self._across.one_node:
            self._across.replace()
            self._across.anchor()
        if self.average_buffers and self._model is not None:
            average([b for b in self._model.buffers() if b.is_floating_point()], self._driver)
        self.epoch, self.current_batch = self.epoch + 1, 0
        self._set_local(True)

    def _set_local(self, on: bool) -> None:
        """Switch averaging inside the node on or off, from the next backward pass on."""
        on = on or self._across.one_node  # one node never averages parameters, so it skips no gradients
        if on != self._syncs_locally:
            self._log("local_on" if on else "local_off", None)
        self._syncs_locally = on
        self._sync.enabled = on and self.loc_gpus > 1

    def _log(self, kind: str, group: int | None) -> None:
        if self.record_events:
            self.events.append((self.epoch, self.current_batch, kind, group))
