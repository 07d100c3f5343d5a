"""What everything that `stenograd.distribute` and `stenograd.ddp.register` return has in common."""

from __future__ import annotations

import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from stenograd.catalog.method import Method
from stenograd.devices import refuse_capture
from stenograd.errors import StenogradError
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.stopping import requested
from stenograd.sync.handshake import Members, Wrapping, compare, describe_optimizers, entries
from stenograd.sync.replica_guard import ReplicaGuard
from stenograd.sync.steps import Passes, after_closure, warn_of_left_out, watch_others
from stenograd.sync.weights import Weights
from stenograd.tracing import MAX_EVENTS, Tracing
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather
from stenograd.wire.traffic import Traffic

__all__ = ["Sync", "as_in_training", "at_end", "next_order", "refuse_nested"]

T = TypeVar("T", bound="Sync")
F = TypeVar("F", bound=Callable[..., Any])


def as_in_training(function: F) -> F:
    """Let a function, or the steps of a generator, work inside of `torch.inference_mode()` as outside.

    What is made in that mode cannot be changed outside of it, and training changes what the function keeps.
    """
    plain: F = torch.inference_mode(False)(torch.no_grad()(function))
    return plain


class _Ends(list[tuple[int, Callable[[], None]]]):
    """What waits for the end of one backward pass: (place in the order of attaching, what to do)."""


# By the pass's number in autograd. Engines that one pass reaches must end in the same order on all ranks,
# whichever was reached first. autograd holds them with its callbacks, and drops both where a pass breaks off.
_ends: WeakValueDictionary[int, _Ends] = WeakValueDictionary()
_lock = threading.Lock()  # autograd runs one thread for each device
_orders = itertools.count()


def next_order() -> int:
    """Return a number for something that is being attached; all ranks attach in the same order."""
    return next(_orders)


def at_end(task: int, order: int, action: Callable[[], None]) -> None:
    """Call something when a backward pass ends, after whatever was attached before it; call it in the pass.

    Args:
        task: the pass's number, `torch._C._current_graph_task_id()`.
        order: of what was attached, equal on all ranks.
        action: what to do.
    """
    with _lock:
        waiting = _ends.setdefault(task, _Ends())
        waiting.append((order, action))
        first = len(waiting) == 1
    if first:
        # One callback for all: several would run in the order of arrival, which ranks need not share.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_untraced(), task, waiting))


@cache
def _untraced() -> Callable[[int, _Ends], None]:
    """Return `_run_ends`, which torch.compile would trace where it compiles a whole training step."""
    run: Callable[[int, _Ends], None] = torch.compiler.disable(_run_ends)
    return run


def _run_ends(task: int, waiting: _Ends) -> None:
    # Removed before any action runs: whatever an action attaches needs a callback of its own, because this
    # list is sorted by then.
    with _lock:
        _ends.pop(task, None)
    for _, action in sorted(waiting, key=lambda end: end[0]):
        action()


def refuse_nested() -> None:
    """Refuse a backward pass inside another one: its gradients are a part of what the outer one makes.

    Raises:
        StenogradError: autograd runs inside the backward function of something, or is being compiled, or is
            being captured as a CUDA graph.
    """
    refuse_capture()
    # Looked up, not imported: compiled autograd cannot be on before somebody has imported it.
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region):
        raise StenogradError(
            "compiled autograd is not supported, because it calls gradient hooks outside of a backward pass: "
            "compile the forward pass only (torch.compile(model)), and leave compiled_autograd off"
        )
    frame, inside = sys._getframe(), False
    # The frames tell it: autograd calls a Python backward function, which runs the engine once more.
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            inside = True
        elif inside and frame.f_code is BackwardCFunction.apply.__code__:
            raise StenogradError(
                "a backward pass inside another one, as checkpoint(use_reentrant=True) runs it, makes only "
                "some of the gradients, so they cannot be averaged yet: use checkpoint(use_reentrant=False)"
            )
        frame = frame.f_back  # type: ignore[assignment]


class Sync(ABC):
    """What `stenograd.distribute` and `stenograd.ddp.register` return, whatever the method.

    Every method has every name here, so another method's text needs no other change in a program. Its
    collectives run on a process group of its own, so whatever else the program sends at the same time, in
    hooks, in its own backward functions or in threads, is not mixed up with them.

    Attributes:
        method: the `Method` in use.

    Example:
        >>> import stenograd
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with stenograd.distribute(model, optimizer, "local:every=4") as sync:
        ...     sync.step, sync.round, sync.pending, sync.events
        (0, 0, False, [])
    """

    method: Method
    _driver: AnyDriver
    _exchange: TensorExchange
    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]
    _parameters: dict[str, nn.Parameter]
    _guard: ReplicaGuard
    _check_every: int
    _passes: Passes
    _watches: list[Any]
    _join_config: Any  # torch's, where gradients are averaged
    _wrapping: Wrapping
    _closed: bool
    _enabled: bool = True
    _warned_of_others: bool = False
    _finite: bool | Tensor | None = True  # None: not looked at yet; a tensor: nor read
    _group: Any = None
    _weighing: Weights | None = None
    _asked: bool = False  # to stop, by `stop()`
    _stopping: bool = False
    _polled: int = 0  # for `stenograd.adapters.stops`
    _jumped: int = 0  # by what loading has changed the number of exchanges

    #: Whether all ranks called `stop_on` before attaching; looked at where only `poll()` tells.
    listens: bool = False

    @property
    def traffic(self) -> Traffic:
        """This rank's totals since attaching: `payload_bytes`, `moved_bytes`, `collectives`, `wait_s`."""
        return self._driver.traffic

    @property
    def group(self) -> Any:
        """The process group that was given when attaching; None for all ranks."""
        return self._group

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._driver.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._driver.world_size

    @property
    def step(self) -> int:
        """Number of steps; equal on every rank."""
        return self._exchange.step

    @property
    def skipped(self) -> int:
        """Number of steps whose gradients were not finite, which changed nothing."""
        return self._exchange.skipped

    @property
    def finite(self) -> bool:
        """Whether the last backward pass left finite gradients; step only then."""
        return bool(self._finite)

    @property
    def repaired(self) -> int:
        """Number of checks that found the ranks' parameters unequal, and repaired them."""
        return self._guard.repaired + sum(engine.repaired for engine in self._engines())

    @property
    def enabled(self) -> bool:
        """Whether backward passes count; set it alike on all ranks, between passes."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
        for engine in self._engines():
            engine.enabled = value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes inside exchange nothing, the next one outside all.

        Every rank must use it for the same passes.
        """
        made = [(engine, engine._passes_made()) for engine in (self, *self._engines())]
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before
            for engine, passes in made:
                engine._accumulated(passes)

    def weight(self, n: float, *, reduce: str = "mean", divided: float = 1.0) -> None:
        """Let the next backward pass count n times: gradients become means over all ranks' tokens or samples.

        With g_a the gradient of a rank's pass a, whose loss is a mean over n_a tokens,

            G = sum over ranks and accumulated passes of n_a g_a / sum of n_a

        as one process would compute it from all tokens together, whatever the method. Where ranks meet in
        rounds, `.grad` is this rank's own weighted mean, and the mean of parameters or pseudo-gradients
        counts each rank by all n since the last round. Without weights all ranks count alike, and passes add
        up. Ranks send 8 bytes more for each exchange, while the backward pass goes on.

        Call it before each backward pass, on every rank, also in `no_sync()`; the ranks find out once, at the
        first exchange, that all do. A second call without a pass in between replaces the first.

        Args:
            n: of this rank's next pass, a finite number >= 0: tokens, samples. A pass that counts 0 adds
                nothing, even if its loss is NaN, as a mean over nothing is.
            reduce: what the loss is over these: their "mean", or their "sum".
            divided: what that was then divided by, such as the number of accumulated passes; > 0.

        Raises:
            ConfigError: n, reduce or divided is out of range, or this way of training cannot weigh ranks:
                gossip, pairs, eager rounds, FSDP.

        `backward()` or the round raises StenogradError if a rank gives no weight within the timeout.

        Example:
            >>> import stenograd
            >>> model = nn.Linear(4, 2)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with stenograd.distribute(model, optimizer) as sync:
            ...     sync.weight(8)
            ...     model(torch.ones(8, 4)).square().mean().backward()
        """
        self._check_weighing()
        # Only once somebody weighs: gradient hooks and 8 more bytes per exchange are for such programs alone.
        if self._weighing is None:
            self._weighing = Weights(self._driver)
            self._lend_weights()
        self._weighing.tell(n, reduce, divided, self._learning())

    def _check_weighing(self) -> None:
        """Refuse weights where ranks cannot count differently."""
        return

    def _engines(self) -> Iterable[Sync]:
        """Return the engines that work for this one; what is set here is set there."""
        return ()

    def _lend_weights(self) -> None:
        for engine in self._engines():
            engine._weighing = self._weighing

    def _learning(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients count."""
        return self._parameters.values()

    def _weigh(self, *, idle: bool = False) -> None:
        """Let the exchange that begins now count for the passes since the last; for nothing if idle."""
        if self._weighing is not None:
            self._exchange.weigh(0.0 if idle else self._weighing.take())
        elif idle and Weights.given_elsewhere(self._driver):
            self._weighing = Weights(self._driver)  # which tells the others that this rank knows
            self._exchange.weigh(0.0)

    def stop(self) -> None:
        """Ask all ranks to stop, as a signal of `stenograd.stop_on` does; `stopping` says when they know."""
        self._asked = True
        for engine in self._engines():
            engine.stop()

    @property
    def stopping(self) -> bool:
        """Whether a rank was asked to stop; it turns true on all ranks after the same step, and stays so.

        Ranks tell each other with what they exchange in any case, without another byte. So it is known when
        `backward()` returns, or where ranks meet in rounds, after the round. `poll()` asks at once. With
        gossip, in pairs, and with DDP's hook where `register` says so, only that tells (`needs_poll`).
        """
        return self._stopping

    @property
    def needs_poll(self) -> bool:
        """Whether only `poll()` tells of requests to stop, because no exchange brings them to all ranks."""
        return False

    def poll(self) -> bool:
        """Ask all ranks, which call it together, whether one was asked to stop; one small collective.

        For what no exchange tells: in evaluation, in warm-up, in long rounds, and where `needs_poll`. Call it
        outside of backward passes.

        Returns:
            `stopping`, which it sets.
        """
        # A round that one rank still owes comes first: collectives are paired in the order of issue.
        self._hold_if_due()
        own = torch.tensor([int(self._asks())], dtype=torch.uint8, device="cpu")
        self._hear(any(int(other) for (other,) in self._ask_all(own)))
        return self.stopping

    def _asks(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._asked or requested()

    def _ask_all(self, own: Tensor) -> list[tuple[Tensor, ...]]:
        """Bring every rank's tensor to every rank."""
        received: list[tuple[Tensor, ...]] = self._driver.run(gather(own))
        return received

    def _hear(self, stop: bool) -> None:
        """Take whether a rank asks to stop, as all ranks hear in the same step."""
        self._stopping |= stop

    @abstractmethod
    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches; where ranks meet in rounds, this is refused."""

    def trace(self, path: str, *, max_events: int = MAX_EVENTS) -> Tracing:
        """Trace what a `with` block does, on all ranks, to a file for Perfetto; see `Tracing`."""
        # First what is due: the others wait in that, and would take what a trace gathers for a part of it.
        due = self.before_save
        return Tracing(path, self._drivers, self._model, self._optimizers, max_events=max_events, before=due)

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides this rank's next exchanges, by parameter name; save it on every rank."""
        return self._exchange.state_dict()

    @as_in_training
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`; the next steps equal an uninterrupted run's bit for bit.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        before = self._exchanges()
        self._exchange.load_state_dict(state, anew=self._begins(state))
        self._jumped += self._exchanges() - before

    def _begins(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state was saved before anything was known of the parameters."""
        return False

    @as_in_training
    def _begin_anew(self) -> None:
        """Go on from the model as it was just loaded, on all ranks: nothing is owed, due or under way."""
        self._exchange.load_state_dict({**self._exchange.state_dict(), "parameters": {}}, anew=True)

    @property
    def round(self) -> int:
        """Number of times that the ranks have met; where gradients are averaged, every step is a round."""
        return self.step

    @property
    def left_out(self) -> int:
        """Number of rounds that left this rank or a neighbour out; only mixing with neighbours does so."""
        return 0

    @property
    def share(self) -> float:
        """This rank's push-sum weight; 1 where there are none."""
        return 1.0

    @property
    def events(self) -> list[dict[str, Any]]:
        """For each loss of ranks that was survived (lost=drop), what happened."""
        return []

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that took part in the last exchange; fewer than all only in open rounds."""
        return tuple(range(self.world_size))

    @property
    def tokens(self) -> dict[int, float]:
        """By rank, what it has brought to open rounds: passes, or the sum of its weights; else empty."""
        return {}

    @property
    def pending(self) -> bool:
        """Whether something is under way, or due, that `flush()` would finish."""
        return False

    def consensus(self) -> AbstractContextManager[None]:
        """Put the parameters to evaluate or export in place for a `with` block, on all ranks.

        Where every step averages gradients, they are in place already. Else this rank's own come back after
        the block, so to save, load or train inside is a StenogradError.
        """
        return nullcontext()

    def flush(self) -> None:
        """Finish what is under way or due. Gradient methods leave nothing under way between steps."""
        return

    @as_in_training
    def before_save(self) -> None:
        """Do what is due before anything is saved; all ranks call it, first of all.

        Where a step was skipped on one rank, it may still have a round to hold that others are waiting in.
        """
        self._hold_if_due()

    def after_load(self) -> None:
        """Do what loading a state left over, once model and optimizer are loaded, too."""
        return

    @abstractmethod
    def refresh(self) -> None:
        """Find the parameters anew, on every rank alike; needed after unfreezing some, or `model.to(...)`."""

    def close(self) -> None:
        """Detach from model and optimizer; safe to call twice."""
        if not self._closed:
            # Hooks go before the driver: one that ran after it would send on a closed group.
            self._closed = True
            if self._weighing is not None:
                self._weighing.close()
            self._detach()
            self._driver.close()

    @abstractmethod
    def _detach(self) -> None:
        """Take away all hooks, and stop all exchanges; attaching may have failed before there were any."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        """Return this object itself: a copy of a model that holds its `sync` is attached to nothing."""
        return self

    def _abandon(self) -> None:
        """Forget a backward pass that broke off: an interrupted one of one rank alone harms nobody else."""
        if self._driver.world_size > 1:
            raise StenogradError(
                "the last backward pass did not finish (an error in it), so the ranks may be out of step: "
                "restart from a checkpoint"
            )
        self._exchange.abandon()

    def _check_replicas(self) -> None:
        """Compare the replicas if this exchange is one of those after which that is asked for.

        A rank that ran out of inputs stays behind until the end: no comparing then.
        """
        due = self._check_every and self._exchanges() % self._check_every == 0
        if due and not self._passes.shadowed:
            self._guard.check(self.step)

    def _drivers(self) -> list[AnyDriver]:
        """Return all ways to other ranks, the one to all of them first."""
        return [self._driver]

    def _hold_if_due(self) -> None:
        """Hold the round that is due; gradient methods have none."""
        return

    def _passes_made(self) -> int:
        return 0

    def _exchanges(self) -> int:
        """Return how many exchanges were made, whatever came of them; where ranks meet in rounds, passes."""
        return self.step + self.skipped

    def _exchanges_here(self) -> int:
        """Return how many exchanges this process has made: the same number twice is the same exchange."""
        return self._exchanges() - self._jumped

    def _accumulated(self, before: int) -> None:
        """Note that passes since `before` were not exchanged."""
        return

    def _compare(self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        """Check that all ranks have the same model, optimizers, method and settings."""
        own = {"method": self.method.text, **settings}
        own |= describe_optimizers(self._trained, self._optimizers, alike=self.method.averages_gradients)
        compare(self._driver, own, parameters, model=self._model)

    @property
    def _trained(self) -> nn.Module:
        """The model whose parameters the optimizers hold."""
        return self._model

    def _averaged(self) -> set[int]:
        """Return the ids of the parameters that are averaged."""
        return {id(p) for p in self._parameters.values()}

    def _members_of(self, parameters: Mapping[str, nn.Parameter]) -> Members:
        """Return what finds out that these parameters were replaced."""
        return Members(self._model, parameters)

    def _held(self) -> set[int]:
        """Return the ids of all parameters whose steps concern this."""
        return self._averaged() | {id(p) for p in self._model.parameters()}

    @abstractmethod
    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        """Let a step change nothing if the last gradients were not finite."""

    def _check_step(
        self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False
    ) -> None:
        """Look at a step of one of the optimizers that were given; see `Act`."""
        return

    def _other_step(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        """Look at a step of an optimizer that was not given; warn once of parameters that nobody averages."""
        self._skip_bad(optimizer, zeros)
        self._warned_of_others = self._warned_of_others or warn_of_left_out(self, optimizer)

    def _watch(
        self,
        modules: Iterable[nn.Module],
        mean: Callable[[float], float] | None = None,
    ) -> None:
        """Follow added parameter groups, forward passes of modules, and steps, as `after_closure` says."""
        for optimizer in self._optimizers:
            # In the instance, so that other optimizers of this class keep theirs; `refuse_taken` knows
            # attached ones by it.
            optimizer.__dict__["add_param_group"] = partial(self._add_param_group, optimizer)
        called = {id(m): m for module in modules for m in entries(module)}
        self._watches = [module.register_forward_pre_hook(self._wrapping) for module in called.values()]
        # Dynamo would trace what runs while a compiled training step does.
        before = torch.compiler.disable(after_closure(self._check_step, self._exchanges_here, mean))
        self._watches += [o.register_step_pre_hook(before) for o in self._optimizers]
        self._watches += [watch_others(self)]

    @contextmanager
    def _wholly(self) -> Iterator[None]:
        """Attach in a `with` block; where that fails, detach what is attached by then."""
        self._closed = False
        try:
            yield
        # Ctrl-C included: a hook that was left behind would break the program's next plain backward pass.
        except BaseException:
            self.close()
            raise

    def _mean(self, loss: float) -> float:
        """Return the ranks' mean of a loss, the same bits everywhere; in `no_sync()` this rank's."""
        if not self.enabled or self.world_size == 1:
            return loss
        if self._join_config.enable:
            raise StenogradError(
                "LBFGS decides by the mean of all ranks' losses, and one that has run out of batches brings "
                "none: give all ranks as many, without join(), or use another optimizer"
            )
        # float64 holds the loss exactly, and "cpu" whatever torch.set_default_device says.
        own = torch.tensor([loss], dtype=torch.float64, device="cpu")
        received = [float(other) for (other,) in self._driver.run(gather(own))]
        return sum(received) / len(received)  # in rank order: LBFGS decides by its bits

    def _unwatch(self) -> None:
        for handle in self._watches:
            handle.remove()
        self._wrapping.watch(())
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)

    def _add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        type(optimizer).add_param_group(optimizer, group)  # the instance's is this function
        self.refresh()
