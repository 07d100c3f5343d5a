"""Heat's DASO: average every batch inside a node, and every few batches, without waiting, between nodes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.arguments import choice, number, typed
from stenograd.catalog.method import MethodLike, method
from stenograd.errors import CheckpointError, ConfigError, StenogradError, bad_value
from stenograd.heat.across import AcrossNodes, Plan, Skips
from stenograd.heat.plateau import DetectMetricPlateau
from stenograd.launch.process_group import join
from stenograd.sync.averaging import average_buffers, difference_method
from stenograd.sync.copies import Copies
from stenograd.sync.gradients import GradientSync
from stenograd.sync.handshake import broadcast_model, compare, describe_optimizers, synced_parameters
from stenograd.sync.step_settings import step_together
from stenograd.wire.agreement import sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.finite import are_finite
from stenograd.wire.groups import is_group
from stenograd.wire.node_layout import find_layout
from stenograd.wire.traffic import Traffic

__all__ = ["DASO"]

_FORMAT = 1  # of state_dict(); a reader refuses others
# The method that stands for each downcast_type. It writes differences of parameters, not parameters: an
# update of 1e-4 of a weight vanishes in a bfloat16 weight, and survives in a bfloat16 difference.
_CAST_METHODS = {torch.bfloat16: "bf16", torch.half: "fp16", torch.float: "dense"}
_LEAST = {  # of the arguments that are whole numbers
    "total_epochs": 1,
    "warmup_epochs": 0,
    "cooldown_epochs": 0,
    "max_global_skips": 0,
    "sending_chunk_size": 1,
    "skip_reduction_factor": 2,
    "local_skip_factor": 1,
}


def _skip(name: str) -> property:
    """Return a property that reads and sets one of DASO's skips."""
    return property(
        lambda daso: getattr(daso._skips, name),
        lambda daso, batches: setattr(daso, "_skips", daso._skips._replace(**{name: batches})),
    )


def _planned(name: str) -> property:
    """Return a property that reads and sets one of the plan's numbers; it counts from the next epoch on."""

    def change(daso: DASO, number: int) -> None:
        _check_arguments({name: number})
        plan, untouched = daso._plan, daso.epoch == daso.current_batch == 0
        daso._plan = replace(plan, **{name: number})
        if untouched and daso._skips == plan.first():
            daso._skips = daso._plan.first()  # afterwards epoch_loss_logic chooses them

    return property(lambda daso: getattr(daso._plan, name), change)


class DASO:
    """Distributed asynchronous and selective optimization: average within and between nodes at two rates.

    Inside a node every batch's gradients are averaged. Between nodes parameters are averaged: exactly after
    each batch in the first `warmup_epochs` and the last `cooldown_epochs`; in between every `global_skip`
    batches, while training goes on for `batches_to_wait` batches. One worker of each node sends, a different
    one each time, merges what arrives from the n nodes, `p <- (w p + sum_i p_i(sent)) / (n + w)` with `w = 2
    batches_to_wait`, and broadcasts the result inside its node. An epoch's last batch ends with an exact
    average, after which all ranks are equal. The skips shrink while the loss does not improve; see
    `epoch_loss_logic`. With one node there is nothing to average between nodes.

    The loop: `daso.set_model(model)` (or `DataParallelMultiGPU(model, daso)`); in each epoch
    `daso.last_batch = n - 1`, for each batch `daso.zero_grad()`, forward, backward, `daso.step()`; then
    `daso.epoch_loss_logic(loss)`. All ranks train on the same number of batches.

    Args:
        local_optimizer: a torch optimizer that holds the model's parameters.
        total_epochs: length of the training, at least 1.
        comm: a process group of torch.distributed; None for all ranks.
        warmup_epochs: epochs with an exact exchange after each batch, at the start; 0 cycles from batch 0.
        cooldown_epochs: the same at the end.
        scheduler: a learning-rate scheduler, or a callable that makes one from the optimizer; steps once
            after every step of the optimizer.
        stability_level: relative change of the loss that counts as improvement, at least 0.
        max_global_skips: largest number of batches between two exchanges; 0 for an exact one after every
            batch.
        sending_chunk_size: elements sent at once, at least 1.
        downcast_type: torch.bfloat16, torch.half or torch.float: how the cycling phase's exchanges travel.
        use_mpi_groups: taken for compatibility; process groups are used either way.
        skip_reduction_factor: divides the skips when the loss is stable, at least 2.
        local_skip_factor: a cycle starts with `local_skip = global_skip // local_skip_factor`, at least 1.
        verbose: whether `print0` prints.
        node_size: ranks per node, in the order of the ranks; None asks the launcher.
        nodes: the ranks of each node, such as [[0, 1, 2], [3]], instead of node_size. In averages a node
            counts by its number of ranks.
        local_method: how gradients travel inside a node.
        global_method: how differences of parameters travel in the cycling phase; None for downcast_type.
        average_buffers: whether floating-point buffers (batch-norm statistics) are averaged at epoch ends.
        record_events: whether `events` lists what happens, as (epoch, batch, kind, group); the kinds are
            send, merge, replace, broadcast, local_on and local_off (whose group is None).
        timeout_s: seconds after which a silent peer is an error, above 0.

    Attributes:
        epoch, current_batch: finished epochs, and finished batches of the present one.
        last_batch: index of an epoch's last batch (n - 1); set it. The number of batches n works too, if
            `epoch_loss_logic` is called at the end of the epoch.
        global_skip, local_skip, batches_to_wait: the present skips; 0 in warm-up and cool-down.
        total_epochs, warmup_epochs, cooldown_epochs, max_gs, skip_reduction_factor, local_skip_factor: the
            plan's; set them alike on all ranks.
        events: (epoch, batch, kind, group) of each event, if recorded.
        skipped: batches in which this rank did not step because a gradient was not finite.
        stability: the `DetectMetricPlateau` in use.
        amp, scaler: whether a GradScaler was added, and which.
        loc_gpus: number of ranks in this node.
        split, split_val, split_inds: whether parameters are sent in chunks, the largest number of elements
            of a chunk, and the chunks.

    Raises:
        TypeError: an argument is of the wrong type.
        ConfigError: an argument is outside its range, or the ranks do not fill the nodes; a ValueError.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), total_epochs=20)
        >>> daso.set_model(model)
        >>> daso.last_batch = 1
        >>> for _ in range(2):
        ...     daso.zero_grad()
        ...     loss = model(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     daso.step()
        >>> daso.epoch_loss_logic(loss)
        >>> daso.epoch
        1
        >>> daso.close()

    Reference: Coquelin et al., "Accelerating neural network training with distributed asynchronous and
    selective optimization (DASO)", Journal of Big Data 9, 2022.
    """

    epoch: int
    current_batch: int
    skipped: int
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
        local_optimizer: torch.optim.Optimizer,
        total_epochs: int,
        comm: Any = None,
        warmup_epochs: int = 4,
        cooldown_epochs: int = 4,
        scheduler: Any = None,
        stability_level: float = 0.05,
        max_global_skips: int = 8,
        sending_chunk_size: int = 10_000_000,
        downcast_type: torch.dtype = torch.bfloat16,
        use_mpi_groups: bool = True,
        skip_reduction_factor: int = 2,
        local_skip_factor: int = 4,
        verbose: bool = False,
        *,
        node_size: int | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        local_method: MethodLike = "dense",
        global_method: MethodLike | None = None,
        average_buffers: bool = False,
        record_events: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        # First: `locals()` must hold the arguments and nothing else.
        _check_arguments({name: value for name, value in locals().items() if name != "self"})
        counts = (max_global_skips, skip_reduction_factor, local_skip_factor)
        plan = Plan(total_epochs, warmup_epochs, cooldown_epochs, *counts)
        schedule = _made_scheduler(scheduler, local_optimizer)
        self._local_method = method(local_method)
        chosen = _CAST_METHODS[downcast_type] if global_method is None else global_method
        self._global_method = difference_method(chosen)
        world = join(timeout_s=timeout_s)
        driver = Driver(comm, timeout_s=timeout_s)
        self._layout = find_layout(driver, world, node_size, nodes)
        driver = driver.private()  # after all checks: a rank that raises would leave the others connecting
        self.local_optimizer, self.scheduler = local_optimizer, schedule
        self._driver, self._plan = driver, plan
        self.loc_gpus = len(self._layout.nodes[self._layout.node_of(driver.rank)])
        self.record_events, self.average_buffers = record_events, average_buffers
        self.amp = False
        self.scaler: torch.amp.GradScaler | None = None
        self.last_batch: int | None = None
        self._model: nn.Module | None = None
        self._replaced = False
        self._passes = 0  # of the engine inside the node, at the last step
        self._stepping = self._warned = False
        self._begin()
        self.comm, self.verbose = comm, verbose
        self._cast_dtype, self._split_val = downcast_type, sending_chunk_size
        self.params_ref = local_optimizer.param_groups[0]["params"]
        self.stability = DetectMetricPlateau(patience=2, threshold=stability_level)
        if not self._plan.cycles:
            warnings.warn(
                f"DASO never skips an exchange: {warmup_epochs} epochs of warm-up and {cooldown_epochs} of "
                f"cool-down fill all {total_epochs}",
                stacklevel=2,
            )

    @property
    def traffic(self) -> Traffic:
        """Traffic of this rank, inside its node and to other nodes."""
        if self._model is None:
            return self._driver.traffic + Traffic()
        inside = self._sync.traffic + self._across.node_driver.traffic
        return self._driver.traffic + inside + self._across.between

    @property
    def traffic_between_nodes(self) -> Traffic:
        """Traffic of this rank to other nodes, from averaging parameters."""
        return self._across.between if self._model is not None else Traffic()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The local optimizer's groups."""
        return self.local_optimizer.param_groups

    @property
    def split(self) -> bool | None:
        """Whether parameters, more than `split_val` elements, are sent in chunks; None without a model."""
        return None if self._model is None else len(self._across.chunks) > 1

    @property
    def split_inds(self) -> list[slice] | None:
        """The chunks in sending order, as slices of all parameters in a row; None if there is only one."""
        return list(self._across.chunks) if self.split else None

    @property
    def split_val(self) -> int:
        """The largest number of elements sent at once; set it before the model is set."""
        return self._split_val

    @split_val.setter
    def split_val(self, elements: int) -> None:
        self._check_unset("split_val", elements)
        _check_arguments({"sending_chunk_size": elements})
        self._split_val = elements

    @property
    def cast_dtype(self) -> torch.dtype:
        """How the cycling phase's exchanges travel, if not by a `global_method`; set it before the model."""
        return self._cast_dtype

    @cast_dtype.setter
    def cast_dtype(self, dtype: torch.dtype) -> None:
        self._check_unset("cast_dtype", dtype)
        _check_arguments({"downcast_type": dtype})
        self._cast_dtype, self._global_method = dtype, difference_method(_CAST_METHODS[dtype])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks in `scaler.step(daso)`, by which a rank would skip a batch alone."""
        raise ConfigError(
            "a GradScaler must be given to DASO, with which all ranks skip a step or none: call "
            "daso.add_scaler(scaler) once, and daso.step() instead of scaler.step(daso) and scaler.update()"
        )

    def add_scaler(self, scaler: Any) -> None:
        """Use a `torch.amp.GradScaler`: `step` steps and updates it, and all ranks skip a step together.

        Raises:
            TypeError: scaler is not a GradScaler.
        """
        kind = torch.amp.GradScaler
        self.amp, self.scaler = True, typed("scaler", scaler, kind, "a torch.amp.GradScaler", "pass one")

    def set_model(self, model: nn.Module) -> None:
        """Train this model: broadcast rank 0's parameters and buffers, and register gradient hooks.

        Call it again, between epochs, after unfreezing parameters or adding some to the optimizer. A DASO
        that was given this model, or has the same optimizer, is replaced; it need not be closed.

        Raises:
            TypeError: model is not a module.
            ConfigError: it has nothing to train, or the optimizer holds other parameters.
            MismatchError: the ranks' models or settings differ.
        """
        typed("model", model, nn.Module, "a torch.nn.Module", "pass the model to train")
        parameters = synced_parameters(model, [self.local_optimizer])
        settings = {
            "nodes": [list(node) for node in self._layout.nodes],
            "DASO's plan": repr(self._plan),
            "global_method": self._global_method.text,
            "sending_chunk_size": self.split_val,
        }
        settings |= describe_optimizers(model, [self.local_optimizer], alike=False)
        # Before anything is given up: where ranks differ, all keep what they had.
        compare(self._driver, settings, parameters, model=model)
        self.close()
        _take_over(model, self.local_optimizer)  # after close(), or this DASO would give itself up
        copies = Copies(self.local_optimizer)
        with copies.follow(model.parameters()):
            broadcast_model(self._driver, model)
        across = AcrossNodes(
            self._driver, self._layout, parameters, self._global_method, self.split_val, self._log, copies
        )
        sync = None
        try:
            sync = GradientSync(
                model,
                self.local_optimizer,
                self._local_method,
                group=across.node_driver.group,
                timeout_s=self._driver.timeout_s,
            )
            self._across, self._sync = across, sync
            self._model, self._replaced, self._passes = model, False, 0
            for thing in (model, self.local_optimizer):
                _held[thing] = weakref.ref(self), weakref.ref(sync)
            self._set_local(True)
            watch = partial(_warn_of_step, weakref.ref(self))
            self._watch = self.local_optimizer.register_step_pre_hook(watch)
        except BaseException:  # CTRL-C, too: threads and groups must not stay
            self._model = None
            if sync is not None:
                sync.close()
            across.close()
            raise

    def step(self) -> None:
        """Step the optimizer and the scheduler, then run the exchange that is due after this batch.

        Raises:
            StenogradError: no model was set, or parameters were added or unfrozen since.
            ConfigError: last_batch was not set, or is past already; a ValueError.
            NonFiniteError: a rank's parameters were not finite when they were to be averaged.
            PeerLost: a rank did not answer in time.
        """
        self._check_model()
        self._check_parameters()
        self._driver.check_groupless()
        batch, last = self.current_batch, self.last_batch
        if not isinstance(last, int) or isinstance(last, bool) or last < batch:
            rule = f"must be the index of the epoch's last batch, at least {batch} now"
            raise bad_value("last_batch", rule, last, "set daso.last_batch = number_of_batches - 1")
        self._stepping = True
        try:
            self._step_optimizer()
        finally:
            self._stepping = False
        if batch == last:
            self._end_epoch()
            return
        if not self._across.one_node:
            self._exchange(batch, last)
        self.current_batch = batch + 1
        self._set_local(self._skips.is_local_sync(batch + 1, last))

    def epoch_loss_logic(self, loss: Tensor | float, loss_globally_averaged: bool = False) -> None:
        """End the epoch, unless its last batch has done so, and choose the next epoch's skips from the loss.

        Args:
            loss: the epoch's loss on this rank.
            loss_globally_averaged: whether it is already the mean over all ranks.

        Raises:
            TypeError: the loss is neither a number nor a tensor of one element.
        """
        given: Any = loss  # numbers of numpy are no floats
        if not (isinstance(given, Tensor) and given.numel() == 1) and not isinstance(given, Real):
            raise TypeError(f"loss must be a number or a tensor of one element, got {loss!r}: take its mean")
        if self.current_batch > 0:
            self._check_model()
            self._end_epoch()
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        if not loss_globally_averaged:
            # all ranks must choose the same skips
            value = sum_over_ranks(self._driver, [value])[0] / self._driver.world_size
        before = self._skips
        self._skips = self._plan.after_epoch(
            self.epoch, before, lambda: self.stability.test_if_improving(value)
        )
        if self._skips != before:
            self.print0(f"epoch {self.epoch}: loss {value:.4g}, {self._skips}")

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Reset the gradients of the local optimizer's parameters, to zeros as in Heat, or to None."""
        self.local_optimizer.zero_grad(set_to_none=set_to_none)

    def print0(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0, if verbose."""
        if self.verbose and self._driver.rank == 0:
            print(*args, **kwargs)

    def reset(self) -> None:
        """Go back to the state of a new instance, on all ranks.

        The model, the scaler, the scheduler, `last_batch` and the optimizer's own state (momentum) stay. The
        exchange in flight between nodes is dropped, and rank 0's parameters are broadcast again.
        """
        if self._replaced:
            self._check_model()
        if self._model is not None:
            self._across.discard()
            self.set_model(self._model)
        self.stability.reset()
        self._begin()
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next steps, except the model; save it on every rank.

        The exchange in flight is waited for and saved, to be merged when it is due, so a resumed run equals
        an uninterrupted one bit for bit in every phase.
        """
        self._check_model()
        return {
            **self._identity(),
            "epoch": self.epoch,
            "current_batch": self.current_batch,
            "last_batch": self.last_batch,
            "skips": list(self._skips),
            "skipped": self.skipped,
            "stability": self.stability.get_state(),
            "across": self._across.state_dict(),
            "local": self._sync.state_dict(),
            "optimizer": self.local_optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`, after `set_model` and `add_scaler`; load the model yourself.

        Raises:
            CheckpointError: the state is of another format, rank, layout or method; it has a scheduler or a
                scaler and this DASO has none, or the reverse; or a part does not fit. Nothing is changed.
        """
        self._check_model()
        for key, wanted in self._identity().items():
            if state.get(key) != wanted:
                raise CheckpointError(
                    f"the state's {key} must be {wanted!r}, got {state.get(key)!r}: load it on its own rank"
                )
        for part in ("scheduler", "scaler"):
            saved, given = state.get(part) is not None, getattr(self, part) is not None
            if saved != given:
                what = "was saved but is not given now" if saved else "is given now but was not saved"
                raise CheckpointError(f"the state does not fit: a {part} {what}: use one in both or in none")
        # Whether a part fits shows only when it is loaded. If one does not, the earlier state comes back.
        before = self.state_dict()
        try:
            self._load_parts(state)
        except (AttributeError, CheckpointError, LookupError, RuntimeError, TypeError, ValueError) as cause:
            self._load_parts(before)
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
            raise CheckpointError(
                f"the state does not fit ({reason}): load it into a DASO like the one that saved it; "
                "nothing was changed"
            ) from cause

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        self._across.load_state_dict(state["across"])
        self._sync.load_state_dict(state["local"])
        self.local_optimizer.load_state_dict(state["optimizer"])
        for part in ("scheduler", "scaler"):
            if getattr(self, part) is not None:
                getattr(self, part).load_state_dict(state[part])
        self.stability.set_state(state["stability"])
        self.epoch, self.current_batch = int(state["epoch"]), int(state["current_batch"])
        self.skipped = int(state.get("skipped", 0))  # older states have none
        self.last_batch, self._skips = state["last_batch"], Skips._make(state["skips"])
        self._set_local(self._skips.is_local_sync(self.current_batch, self.last_batch or 0))

    def close(self) -> None:
        """Detach from the model, stop the threads and leave the groups; a second call does nothing."""
        if self._model is not None:
            self._watch.remove()
            self._sync.close()  # first: it sends by a group of the other's
            self._across.close()
            self._model = None

    def give_up(self) -> None:
        """Close because another DASO takes over; the exchange in flight between nodes is dropped."""
        if self._model is not None:
            self._across.discard()
            self.close()
            self._replaced = True

    def _check_unset(self, name: str, value: object) -> None:
        if self._model is not None:
            raise bad_value(name, "must be set before set_model", value, "close() first, or pass it to DASO")

    def _identity(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "rank": self._driver.rank,
            "nodes": [list(node) for node in self._layout.nodes],
            "global_method": self._global_method.text,
        }

    def _begin(self) -> None:
        self.epoch = self.current_batch = self.skipped = 0
        self.events, self._skips = [], self._plan.first()
        self._syncs_locally = True

    def _check_model(self) -> None:
        if self._replaced:
            raise StenogradError(
                "DASO was replaced: another one was given its model or optimizer: use that one, or take "
                "both back with set_model(model)"
            )
        if self._model is None:
            raise StenogradError("DASO has no model: call set_model(model), or use DataParallelMultiGPU")

    def _check_parameters(self) -> None:
        held = self._sync._parameters if self._across.one_node else self._across.parameters
        averaged = {id(p) for p in held.values()}
        for group in self.local_optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and id(p) not in averaged:
                    raise StenogradError(
                        f"a parameter of shape {tuple(p.shape)} was unfrozen, or added to the optimizer, "
                        "after set_model, and would not be averaged: call daso.set_model(model) anew, on all "
                        "ranks and between epochs"
                    )

    def _step_optimizer(self) -> None:
        """Step the optimizer, and the scheduler with it; a gradient that is not finite skips the optimizer.

        A rank without a backward pass in this batch counts as one whose gradients are zeros.

        Without a GradScaler the scheduler steps even then: between exchanges the other ranks do not learn of
        the skip, and learning rates must stay equal.
        """
        passes, scaler = self._sync._passes_made(), self.scaler
        scaled = scaler is not None and scaler.is_enabled()
        if self._sync.enabled and passes == self._passes:  # the others of this node wait for gradients
            self._sync.take_part()
        self._passes = self._sync._passes_made()
        if scaler is not None:
            stepped = step_together(scaler, self.local_optimizer, self._driver, self)
        if not scaled:
            params = (p for group in self.local_optimizer.param_groups for p in group["params"])
            stepped = (
                self._sync.finite  # the exchange has looked at the gradients already
                if self._sync.enabled
                else are_finite(p.grad for p in params if p.grad is not None)
            )
            if stepped:
                self.local_optimizer.step()
        self.skipped += not stepped
        if self.scheduler is not None and (stepped or not scaled):
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
            self._across.anchor()  # differences count from what is equal everywhere
        if self.average_buffers and self._model is not None:
            average_buffers(self._model, self._driver)
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


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check types and ranges of DASO's arguments, given by name.

    Raises:
        TypeError: one is of the wrong type.
        ConfigError: one is outside its range; a ValueError.

    Example:
        >>> _check_arguments({"total_epochs": 0})
        Traceback (most recent call last):
        stenograd.errors.ConfigError: total_epochs must be at least 1, got 0: raise it
    """
    for name, value in arguments.items():
        if name in _LEAST:
            typed(name, value, int, "a whole number", "round it")
            number(name, value, "raise it", least=_LEAST[name], finite=False)
        elif name in ("use_mpi_groups", "verbose"):
            typed(name, value, bool, "True or False", "choose one")
        elif name == "stability_level":
            number(name, typed(name, value, (int, float), "a number", "0.05 is 5 %"), "0.05 is 5 %", least=0)
        elif name == "local_optimizer":
            typed(name, value, torch.optim.Optimizer, "a torch.optim.Optimizer", "pass SGD, Adam, ...")
        elif name == "comm":
            check_comm(value)
        elif name == "downcast_type":
            typed(name, value, torch.dtype, "a torch.dtype", "use torch.bfloat16")
            choice(name, value, _CAST_METHODS, "choose one, or give global_method")


def check_comm(comm: Any) -> None:
    """Refuse what is neither None nor a process group."""
    if comm is not None and not is_group(comm):
        what = "a process group of torch.distributed, or None for all ranks"
        raise TypeError(f"comm must be {what}, got {comm!r}: give torch.distributed.new_group(...)")


def _made_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate scheduler to step: the given one, or the one that the given factory makes.

    Args:
        scheduler: a scheduler of torch, or a callable that takes the optimizer and returns one.
        optimizer: DASO's local optimizer.

    Raises:
        TypeError: it is neither a scheduler nor a factory, or it needs the loss to step.
        ConfigError: it schedules another optimizer.
    """
    if scheduler is None:
        return None
    kind = torch.optim.lr_scheduler.LRScheduler
    made = scheduler if isinstance(scheduler, kind) or not callable(scheduler) else scheduler(optimizer)
    wanted = "a learning-rate scheduler, or a callable that makes one from the optimizer"
    typed("scheduler", made, kind, wanted, "pass StepLR(local_optimizer, ...), or the like")
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "scheduler must step without a loss, got ReduceLROnPlateau: leave it out here, and call its "
            "step(loss) yourself once per epoch"
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            "scheduler must schedule local_optimizer, got one of another: make it from that one"
        )
    return made


def _warn_of_step(daso: weakref.ref[DASO], *_: Any) -> None:
    """Warn once where the local optimizer steps by itself, so that nodes are never averaged."""
    owner = daso()
    if owner is not None and not (owner._stepping or owner._warned or owner._across.one_node):
        owner._warned = True
        warnings.warn(
            "DASO's local_optimizer stepped outside of daso.step(), which alone averages between nodes: they "
            "drift apart; call daso.step() instead, or daso.close() to train without it",
            RuntimeWarning,
            stacklevel=3,
        )


# Who trains a model or moves it by an optimizer: the last DASO that was given them, and its hooks, which stay
# on the model when that DASO is collected without `close()`.
_held: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[DASO], weakref.ref[GradientSync]]]
_held = weakref.WeakKeyDictionary()


def _take_over(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the present owner of the model or the optimizer give them up; all ranks call it."""
    for thing in (model, optimizer):
        owner, sync = (ref() for ref in _held.pop(thing, (lambda: None, lambda: None)))
        if isinstance(owner, DASO):
            owner.give_up()
        if isinstance(sync, GradientSync):
            sync.close()
