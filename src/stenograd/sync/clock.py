"""Rounds: every rank trains by itself, and after some backward passes all meet."""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.catalog.method import MethodLike, method
from stenograd.errors import ConfigError, StenogradError
from stenograd.launch.process_group import join
from stenograd.stopping import watches
from stenograd.sync.attached import Sync, as_in_training, at_end, next_order, refuse_nested
from stenograd.sync.copies import Copies
from stenograd.sync.gradients import GradientSync
from stenograd.sync.handshake import (
    Wrapping,
    as_optimizers,
    broadcast_model,
    entries,
    refuse_taken,
    synced_parameters,
    unwrapped,
)
from stenograd.sync.outer import Nodes, overwrite
from stenograd.sync.replica_guard import ReplicaGuard, check_interval
from stenograd.sync.steps import Leftovers, bad_of, drop_bad, refuse_step, zero_bad
from stenograd.wire.carried import Carried, in_memory
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import look_at, read
from stenograd.wire.traffic import Traffic

__all__ = ["RoundSync", "beside"]

_FORMAT = 2  # of state_dict(); a reader refuses others
_graph_task = torch._C._current_graph_task_id


def _on_gradient(sync: weakref.ref[RoundSync], _: Tensor) -> None:
    running = sync()
    if running is not None:
        running._on_gradient(_graph_task())


def _uncompiled(hold: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Keep Dynamo out of what holds rounds; where it must have one graph, its error says why it cannot."""
    why = (
        "what is due where ranks meet in rounds is done before the forward pass, so it cannot be one graph: "
        "compile the model without fullgraph=True, or only the layers in it"
    )
    try:
        return torch.compiler.disable(hold, reason=why)  # type: ignore[no-any-return]
    except TypeError:  # before torch 2.7
        return torch.compiler.disable(hold)  # type: ignore[no-any-return]


class _BeforeForward:
    """A forward pre-hook that holds what is due; in a copy of the module it does nothing."""

    def __init__(self, sync: RoundSync | None = None) -> None:
        self._hold = None if sync is None else _uncompiled(sync._before_forward)

    def __reduce__(self) -> Any:
        return _BeforeForward, ()

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._hold is not None:
            self._hold(module)


class RoundSync(Sync):
    """Base of what lets ranks train by themselves and meets in rounds; made by `stenograd.distribute`.

    The clock counts finished backward passes outside `no_sync()`, because all ranks make equally many of
    those, while one rank may skip an optimizer step. What a pass made due is done when all given optimizers
    have stepped after it; if a step was skipped or optimizers step in turn, before the next training forward
    pass of the model (or, in a container without one, of what it contains), or by `flush()`.

    A subclass builds what it exchanges in `_build`, says in `_is_due` which passes make something due, and
    does that in `_meet`.

    Attributes:
        round: number of rounds held; equal on every rank.
    """

    round: int = 0  # a number here, and a property where every step is a round
    # Passes at the start whose gradients are averaged; how they are inside nodes, with a node's ranks (0: as
    # launched), or None. Both are set in `_check_settings`.
    _dense_passes: int = 0
    _levels: tuple[str, int] | None = None
    _looks: bool = True  # whether a round refuses parameters that were replaced
    _shown: bool = False  # whether `consensus()` has put this rank's own parameters aside

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        how: MethodLike,
        *,
        group: Any = None,
        bucket_bytes: int,
        timeout_s: float = 300.0,
        check_every: int = 0,
        repair: bool = False,
        check_buffers: bool = False,
        skip_bad_steps: bool = True,
    ) -> None:
        self.method = method(how)
        self._each_round = self.method.each_round()
        self._model, self._optimizers = unwrapped(model), as_optimizers(optimizer)
        self._copies = Copies(optimizer)
        refuse_taken(self._model, self._optimizers)
        check_interval(check_every, repair)
        if any(isinstance(o, torch.optim.LBFGS) for o in self._optimizers):  # passes would not tell steps
            raise ConfigError(
                "optimizer must step once per backward pass where ranks meet in rounds, got LBFGS: use "
                "another"
            )
        if others := [type(o).__name__ for o in self._optimizers if hasattr(o, "join_hook")]:
            raise ConfigError(
                f"optimizer must step by this rank's gradients where ranks meet in rounds, got {others[0]}, "
                "which takes part of each step from other ranks: use the one inside of it"
            )
        synced_parameters(self._model, self._optimizers)  # complain before connecting
        self._check_settings(check_every)
        self.listens = self.needs_poll and watches()  # which ranks must know of each other to ask by turns
        world = join(timeout_s=timeout_s, open_run=True)  # `distribute` refuses what needs all ranks
        self._group = group
        # A group of its own: what the program sends in its backward passes would be paired with rounds.
        self._driver = Driver.own(group, timeout_s=timeout_s)
        self._bucket_bytes, self._check_every = bucket_bytes, check_every
        self._checks = {"check_every": check_every, "repair": repair, "check_buffers": check_buffers}
        self._skips, self._left = skip_bad_steps, Leftovers()
        self._settings = str((check_every, repair, check_buffers, skip_bad_steps))
        self.round = self._skipped = self._counted = 0
        self._begun = 0  # passes, those that broke off included
        self._order, self._seen = next_order(), -1
        self._warned = self._warned_of_passes = False
        self._trains = True  # the model's mode in the last backward pass
        self._stepped_at = self._passes_per_step = 0
        self._due: list[int] = []  # local passes after which something is to be done
        self._finite = True
        self._unread: list[Tensor] = []  # for each pass since the last round, as `_finite`
        self._stepped: set[int] = set()
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        self._gradients: GradientSync | None = None
        self._nodes: Nodes | None = None
        self._watches, self._wrapping = [], Wrapping(self)
        self._guard = ReplicaGuard(
            self._model, self._driver, repair=repair, check_buffers=check_buffers, follow=self._copies.follow
        )
        with self._wholly():
            # First, because gradients may be averaged inside nodes.
            if self._levels is not None:
                self._nodes = Nodes(self._driver, world, self._levels[1])
            # Before `refresh` and `_attend`: the inner engine refuses an attached model or optimizer.
            self._average_gradients(dense=self._dense_passes > 0)
            self.refresh()
            self._attend(model)

    def _average_gradients(self, *, dense: bool) -> None:
        """Average gradients from now on: over all ranks, or else inside nodes, where these are a level."""
        self._dense, how = dense, "dense"
        driver: Driver | None = None
        if dense:
            driver = beside(self._driver, "gradients")
        elif self._levels is not None and self._nodes is not None:
            # Not the node's own way, which outlives the engine.
            how, driver = self._levels[0], beside(self._nodes.inside, "gradients")
        if driver is not None:  # the engine closes it
            kept: dict[str, Any] = {"bucket_bytes": self._bucket_bytes, "timeout_s": driver.timeout_s}
            kept |= self._checks if dense else {}  # else only some ranks' replicas are equal
            self._gradients = GradientSync(
                self._model, self._optimizers, how, group=driver, skip_bad_steps=self._skips, **kept
            )
            # A request that was made before there was this engine must travel with its first pass.
            self._gradients._asked = self._asked
            self._gradients.enabled = self._enabled
            self._lend_weights()

    def _attend(self, model: nn.Module) -> None:
        """Follow the optimizers' steps and the model's forward passes."""
        self._watch({id(model): model, id(self._model): self._model}.values())
        after = torch.compiler.disable(self._after_step)
        self._watches += [o.register_step_post_hook(after) for o in self._optimizers]
        forward, modules = _BeforeForward(self), list(entries(self._model))
        self._watches += [module.register_forward_pre_hook(forward) for module in modules]

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank; with two levels, the sum of both until now."""
        if self._nodes is None:
            return self._driver.traffic
        return self._driver.traffic + self._nodes.inside.traffic + self._nodes.between.traffic

    def _drivers(self) -> list[AnyDriver]:
        levels = [] if self._nodes is None else [self._nodes.inside, self._nodes.between]
        return [self._driver, *levels, *(driver for one in self._engines() for driver in one._drivers())]

    @property
    def step(self) -> int:
        """Number of this rank's backward passes outside `no_sync()`; equal on every rank, but by time."""
        return self._counted

    @property
    def skipped(self) -> int:
        """Number of this rank's passes outside `no_sync()` that left a gradient which was not finite.

        Steps after them change nothing, whoever finds out: this, GradScaler, or a fused optimizer. On a GPU
        the host does not ask whether a gradient is finite before a step, which would let the device idle:
        bad gradients become zeros there, so the step still moves by its momenta and its weight decay.
        """
        self._count_bad()
        return self._skipped + (0 if self._gradients is None else self._gradients.skipped)

    def _exchanges(self) -> int:
        return self._counted

    @property
    def finite(self) -> bool:
        """Whether the last backward pass of this rank left finite gradients; step only then."""
        if self._gradients is not None:  # alike on all ranks that average gradients
            return self._gradients.finite
        self._finite = bool(self._look())  # where that is on a device, the host waits
        return self._finite

    def _look(self) -> bool | Tensor:
        """Return whether the last pass of this rank left finite gradients; of a device without asking it."""
        if self._finite is None:
            self._finite = look_at(p.grad for p in self._parameters.values() if p.grad is not None)
        return self._finite

    @property
    def pending(self) -> bool:
        """Whether something is due."""
        return bool(self._due)

    @property
    def stopping(self) -> bool:
        """Whether a rank was asked to stop, true on all ranks after the same step; read it after the step.

        Ranks tell each other in rounds, and in every step while gradients are averaged over all of them.
        Reading it first holds the round that is due where a step was skipped. Where ranks meet some others
        only (gossip, pairs), `poll()` tells.
        """
        if self._due and not self._closed:
            self._hold_if_due()
        return super().stopping or (self._dense and self._gradients is not None and self._gradients.stopping)

    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`.

        A round that has begun is ended by the ranks' mean. Where all have equal parameters, as when the
        program has loaded some, these stay. A mixing of gossip that is due is held. Then all ranks start from
        rank 0's, as at the beginning, and from nothing owed.
        """
        self._refuse_shown()
        self._looks = False  # what a look refuses is what this mends
        try:
            self._end_begun()
        finally:
            self._looks = True
        self._start()

    @as_in_training
    def _begin_anew(self) -> None:
        self._refuse_shown()
        self._due.clear()
        self._start()
        for engine in self._engines():
            engine._begin_anew()

    def _start(self) -> None:
        """Find the parameters, and let all ranks start from rank 0's."""
        parameters = synced_parameters(self._model, self._optimizers)
        settings = {"bucket_bytes": self._bucket_bytes, "settings": self._settings}
        settings["optimizers that may keep copies"] = self._copies.count
        if self.listens:
            settings["a call of stop_on() before distribute()"] = True
        self._compare(parameters, settings)
        self._carried = Carried(self._model)
        # Master weights and the like must take over what rank 0's values change.
        with self._copies.follow(self._model.parameters()):
            broadcast_model(self._driver, self._model)
        if self._gradients is not None:
            self._gradients.refresh()
        self._parameters = parameters
        # whatever the parameters are, float32 or wider travels
        itemsize = max(4, *(p.element_size() for p in parameters.values()))
        self._build(parameters, max(self._bucket_bytes // itemsize, 1))
        for handle in self._handles:
            handle.remove()
        # A weak reference, because Python's garbage collector does not see what tensors' hooks hold.
        hook = partial(_on_gradient, weakref.ref(self))
        # Not `disable`, whose wrapper costs a microsecond for each gradient.
        torch._dynamo.decorators.skip(_on_gradient)
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters.values()]
        self._wrapping.watch(parameters.values(), self._members_of(parameters))
        self._copies.watch(parameters.values())

    @as_in_training
    def flush(self) -> None:
        """Finish what is under way or due; ranks differ all the same: export inside `consensus()`."""
        self._hold_if_due()

    def join(self, *, enable: bool = True, **_: Any) -> AbstractContextManager[Any]:
        """Refuse ranks with different numbers of batches; do nothing if not `enable`.

        Raises:
            StenogradError: a rank without batches would have nothing to average.
        """
        if not enable:
            return nullcontext()
        raise StenogradError(
            f"{self.method} needs as many batches on every rank: drop the rest of longer inputs, or average "
            "gradients in every step (leave out what stands before the slash), where join() works"
        )

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._left.forget()
        self._close_gradients()
        self._unwatch()
        self._dismantle()  # parts before nodes, by whose groups they send
        if self._nodes is not None:
            self._nodes.close()

    @property
    @abstractmethod
    def _schedule(self) -> Any:
        """The method's schedule."""

    @abstractmethod
    def _build(self, parameters: Mapping[str, nn.Parameter], chunk: int) -> None:
        """Make what exchanges these parameters, which are equal on all ranks now."""

    @abstractmethod
    def _dismantle(self) -> None:
        """Stop what `_build` made."""

    @abstractmethod
    def _is_due(self, t: int) -> bool:
        """Return whether something is to be done after local pass t, counted from 1."""

    @abstractmethod
    def _meet(self, t: int) -> None:
        """Do what pass t made due, on all ranks."""

    def _begin_rounds(self) -> None:
        """Start to count local passes: the ranks' parameters are equal now."""

    def _end_begun(self) -> None:
        """Finish what is due, and end what has begun since the ranks last met: no rank's steps are lost."""
        self.flush()

    def _check_settings(self, check_every: int) -> None:
        """Refuse what the method cannot do; nothing is connected yet."""

    def _buffers(self) -> list[Tensor]:
        return [] if self._schedule.buffers == "keep" else self._carried.now()

    def _engines(self) -> list[GradientSync]:
        """Return the engine that averages gradients, here or inside nodes, if one does."""
        return [] if self._gradients is None else [self._gradients]

    def _identity(self) -> dict[str, Any]:
        self._refuse_shown()
        where = {"rank": self.rank, "world_size": self.world_size}
        return {"format": _FORMAT, "method": self.method.text, **where}

    @contextmanager
    def _aside(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let tensors be changed in a `with` block of `consensus()`, after which they are as before."""
        own, before, self._shown = [t.clone() for t in tensors], self._shown, True
        try:
            yield
        finally:
            self._shown = before
            overwrite(tensors, own)

    def _refuse_shown(self) -> None:
        """Refuse, inside of `consensus()`, what is done with this rank's own parameters.

        Raises:
            StenogradError: these are put aside.
        """
        if self._shown:
            raise StenogradError(
                "inside consensus() the model has what all ranks have in common, and this rank's own "
                "parameters come back after it: save, load and train outside of it (a backward pass that is "
                "not for training belongs in sync.no_sync())"
            )

    def _take_counters(self, state: Mapping[str, Any]) -> None:
        """Take what a saved state knows of passes and rounds; nothing is due after it."""
        self._jumped += int(state["passes"]) - self._counted
        self._counted = self._begun = int(state["passes"])
        self.round = int(state["round"])
        # So that `skipped`, which adds the inner engine's count, is the number that was saved.
        self._skipped = int(state["own"]["skipped"]) - (self.skipped - self._skipped)
        self._due, self._finite, self._unread = [], True, []
        self._stepped.clear()

    def _begun_by(self, t: int) -> int:
        """Return how many passes had begun by local pass t, broken ones included, for ranks to compare.

        More may have begun since: after a skipped step, a forward pass that calls no hook holds nothing.
        """
        return self._begun - self._counted + self._dense_passes + t

    def _average_elsewhere(self, *, dense: bool) -> None:
        """Average gradients over all ranks from now on, or else inside nodes, where these are a level."""
        self._close_gradients()
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)  # ours, or the new engine would refuse it
        self._wrapping.watch(())  # likewise
        # A new engine gives all ranks the buffers of the first; statistics are each rank's own.
        held = map(in_memory, self._model.buffers())
        buffers = [(buffer, buffer.clone()) for buffer in held]
        self._average_gradients(dense=dense)
        for buffer, own in buffers:
            buffer.copy_(own)
        # Both anew: closing the old engine took `add_param_group` away, or the new one has set its own.
        self._wrapping.watch(self._parameters.values(), self._members_of(self._parameters))
        for optimizer in self._optimizers:
            optimizer.__dict__["add_param_group"] = partial(self._add_param_group, optimizer)

    def _close_gradients(self) -> None:
        """Stop averaging gradients, over whichever ranks."""
        if self._gradients is not None:
            self._skipped += self._gradients.skipped
            self._guard.repaired += self._gradients.repaired
            self._gradients._weighing = None  # they stay in use
            # Of an engine inside a node only its ranks have heard; all others hear in a round.
            self._hear(self._dense and self._gradients.stopping)
            self._gradients.close()
            self._gradients = None

    def _on_gradient(self, task: int) -> None:
        """Note a backward pass when it makes its first gradient."""
        with self._lock:
            if task == self._seen:
                return
            self._seen = task
            self._begun += self._enabled
        refuse_nested()
        self._driver.check_groupless()
        self._finite = None
        if self._enabled:
            self._refuse_shown()
            at_end(task, self._order, self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._counted += 1
        self._trains = self._model.training
        if self._weighing is not None:
            self._weighing.ended = True
        if self._gradients is None:  # a GradScaler may leave out the step that could tell
            found = self._look()
            if isinstance(found, Tensor):
                self._unread.append(found)
            elif not found:
                self._skipped += 1
                if self._skips:
                    self._left.take(bad_of(self._parameters.values()))
        t = self._counted - self._dense_passes
        if not self._due:  # else steps after an earlier pass count: optimizers may step in turn
            self._stepped.clear()
        # 0 comes once, after the last dense pass. It is only noted here: the engine that it closes has not
        # ended this pass yet.
        if t == 0 or (t > 0 and self._is_due(t)):
            self._due.append(t)

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        self._wrapping.look_before_step()
        refuse_step(optimizer, self._averaged())
        self._skip_bad(optimizer, zeros)
        if self._weighing is not None:
            self._weighing.end(self._learning())
        self._copies.steps()

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        """Let a step whose gradients are not finite change nothing; only this rank skips it."""
        if self._gradients is not None or not self._skips:
            return  # where gradients are averaged, `_gradients` skips steps
        found = self._look()
        if isinstance(found, Tensor):
            zero_bad(optimizer, self._averaged(), found, self._parameters.values())
        elif not found:
            drop_bad(optimizer, self._averaged(), zeros, self._parameters.values())
            self._warn_of_bad("this optimizer.step() changes nothing on this rank")

    def _around_round(self) -> AbstractContextManager[None]:
        """Look, around a round, whether optimizers undo it."""
        drops = self._schedule.lost == "drop"  # a rank, in the middle of it
        return self._copies.round(None if drops else self._driver)

    def _count_bad(self) -> None:
        """Read how many passes since the last time left bad gradients on a device; the host waits for it."""
        unread, self._unread = self._unread, []
        if unread and (count := sum(not sound for (sound,) in read(unread, torch.bool))):
            self._skipped += count
            if self._skips:
                self._warn_of_bad("a step since the last round took zeros in place of this rank's gradients")

    def _warn_of_bad(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a gradient of rank {self.rank} was not finite: {what}; later ones are only counted, in "
                "`skipped` (skip_bad_steps=False turns this off)",
                RuntimeWarning,
                stacklevel=5,
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        if self._counted > self._stepped_at:  # else another optimizer has stepped after this pass
            self._count_passes()
        if len(self._stepped) == len(self._optimizers):
            self._copies.stepped()
            if self._due:
                self._hold_if_due()

    def _count_passes(self) -> None:
        """Warn once if two steps running have seen several passes each: accumulation, not a skipped step."""
        before, self._passes_per_step = self._passes_per_step, self._counted - self._stepped_at
        self._stepped_at = self._counted
        if before == self._passes_per_step > 1 and not self._warned_of_passes and self.world_size > 1:
            self._warned_of_passes = True
            warnings.warn(
                f"optimizer.step() sees {before} backward passes, and {self.method} counts passes, so rounds "
                f"come {before} times as often as they would by steps: put all but the last pass of a step "
                "inside sync.no_sync()",
                UserWarning,
                stacklevel=4,
            )

    def _before_forward(self, module: nn.Module) -> None:
        """Do what a skipped step left due, before the parameters are used again."""
        # Some train in eval mode, to keep statistics: then all passes that make gradients are for training.
        if (module.training or not self._trains) and torch.is_grad_enabled():
            self._hold_if_due()

    @torch.no_grad()
    def _hold_if_due(self) -> None:
        self.after_load()  # a loaded state may have a round to end, which comes before those that are due
        while self._due and not self._closed:  # what ended before a round is saved as it is
            if self._looks:
                self._wrapping.look()
            t = self._due.pop(0)
            if t == 0:
                if self._dense:
                    self._average_elsewhere(dense=False)
                self._begin_rounds()
                continue
            with self._around_round():
                self._meet(t)
            self._count_bad()  # only here: in a round the host waits anyway, and between rounds it must not


def beside(driver: AnyDriver, what: str) -> Driver:
    """Return a driver over the same ranks whose collectives mix with nobody's; both have one ledger."""
    own: Driver
    (own,) = driver.split([range(driver.world_size)], what)  # every rank is in the one part
    own.traffic, own.tracer = driver.traffic, driver.tracer
    return own
