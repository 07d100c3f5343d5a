"""Watches optimizer steps, and the backward passes before them, before the ranks can drift apart."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stenograd.errors import StenogradError
from stenograd.exchange.filling import Slot, is_own, is_returned
from stenograd.exchange.tensor_exchange import Told
from stenograd.sync.step_settings import BITS, StepSettings, refuse, tell, unequal
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import is_finite, look_at, values_of

if TYPE_CHECKING:
    from stenograd.sync.attached import Sync

__all__ = [
    "Act",
    "Changed",
    "Leftovers",
    "Passes",
    "Watch",
    "Watcher",
    "after_closure",
    "bad_of",
    "drop_bad",
    "refuse_other_passes",
    "refuse_step",
    "warn_of_left_out",
    "warn_of_skip",
    "warn_unexchanged",
    "watch_others",
    "zero_bad",
]

# What a pre-hook returns to change a step's arguments.
Changed: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]] | None


class Act(Protocol):
    """What looks at a step's gradients once they are there."""

    def __call__(self, optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False) -> None:
        """Look at the gradients of an optimizer's parameters, before the step applies them.

        Args:
            optimizer: whose step it is.
            zeros: whether bad gradients must become zeros, not None: the step computes with them already.
            again: whether the step has made gradients a second time.
        """


def after_closure(
    act: Act, exchanges: Callable[[], int], mean: Callable[[float], float] | None = None
) -> Callable[..., Changed]:
    """Return a pre-hook of an optimizer's steps that acts once the step's gradients are there.

    torch's optimizers begin with their closure, so what looks at gradients (skipping a step after a bad
    exchange, mixing by gossip) waits for its first evaluation. Others, such as SAM, first move by the
    gradients of a backward pass before the step, and evaluate the closure where that leads to: then it looks
    at both. The closure itself is evaluated when the optimizer asks for it, and as often.

    Args:
        act: what to do.
        exchanges: returns how many exchanges have been made. Where one was made outside of closures since an
            optimizer stepped last, its gradients are there.
        mean: averages a number over the ranks; None leaves losses as they are. LBFGS gets means, because it
            decides by the loss how often it evaluates the closure, with or without a line search.

    Example:
        >>> said = []
        >>> before = after_closure(lambda optimizer, **_: said.append("looked"), lambda: 0)
        >>> sgd = torch.optim.SGD([torch.zeros(1)])
        >>> _, changed = before(sgd, (sgd,), {"closure": lambda: said.append("evaluated") or 1.5})
        >>> said, changed["closure"](), said
        (['evaluated', 'looked'], 1.5, ['evaluated', 'looked'])
    """
    first, inside = exchanges(), 0  # exchanges in all, and those that closures made
    seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # outside, at the last step

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        closure, outside = _closure(args, given), exchanges() - inside
        has_gradients, seen[optimizer] = outside != seen.get(optimizer, first), outside
        if closure is None:
            act(optimizer)
            return None
        # torch's own optimizers read no gradient before their closure, so for them it may become None.
        # Others, such as SAM, compute with it first.
        zeros = has_gradients and not type(optimizer).__module__.startswith("torch.optim")
        if has_gradients:
            act(optimizer, zeros=zeros)
        evaluations = 0

        def watched() -> Any:
            nonlocal inside, evaluations
            before = exchanges()
            result = closure()
            inside, evaluations = inside + exchanges() - before, evaluations + 1
            if evaluations == 1:
                act(optimizer, zeros=zeros, again=has_gradients)
            if mean is not None and isinstance(optimizer, torch.optim.LBFGS) and result is not None:
                loss = mean(float(result))
                return torch.full_like(result, loss) if isinstance(result, torch.Tensor) else loss
            return result

        if "closure" in given:
            return tuple(args), {**given, "closure": watched}
        return (args[0], watched, *args[2:]), dict(given)

    return before


def _closure(args: Sequence[Any], given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among a step's arguments, the optimizer first; its own may take something else."""
    closure = given["closure"] if "closure" in given else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None


Watcher: TypeAlias = Callable[[torch.optim.Optimizer, Any, Any], Changed]

# Replaced, never changed: another thread, or the end of an object's life in the middle of a step, must not
# change what somebody iterates over. torch's own dictionary of hooks gets one of ours, and keeps it.
_watchers: dict[int, Watcher] = {}
_numbers = itertools.count()
_watchers_lock = threading.RLock()  # the garbage collector may end a `Watch` in the middle of such a block
_leftovers_lock = threading.Lock()
_hooked = False


class Watch:
    """Calls something before every step of every optimizer, with the arguments that torch's hooks get.

    Args:
        watcher: returns None, or changed arguments.
    """

    def __init__(self, watcher: Watcher) -> None:
        global _watchers, _hooked
        self._number = next(_numbers)
        with _watchers_lock:
            _watchers = {**_watchers, self._number: watcher}
            if not _hooked:
                register_optimizer_step_pre_hook(torch.compiler.disable(_before))
                _hooked = True

    def remove(self) -> None:
        """End it; may be called twice."""
        global _watchers
        with _watchers_lock:
            _watchers = {n: w for n, w in _watchers.items() if n != self._number}


def _before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
    changed: Changed = None
    for watcher in _watchers.values():
        new = watcher(optimizer, args, given)
        if new is not None:
            changed = args, given = new
    return changed


_taken: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[Tensor, Tensor | None]]] = WeakKeyDictionary()


def refuse_step(
    optimizer: torch.optim.Optimizer, averaged: Container[int], under_way: bool = False
) -> list[Tensor]:
    """Refuse to step within a backward pass, or by a gradient that nobody averages.

    Args:
        optimizer: about to step.
        averaged: the ids of the parameters that are averaged.
        under_way: whether a backward pass broke off.

    Returns:
        The optimizer's parameters that have a gradient.

    Raises:
        StenogradError: it is so.
    """
    if under_way or torch._C._current_graph_task_id() != -1:
        raise StenogradError(
            "an optimizer stepped during a backward pass, before gradients were averaged (or the last "
            "pass failed): step after backward() returns"
        )
    held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    for p in held:
        if p.requires_grad and id(p) not in averaged:
            raise StenogradError(
                f"a parameter of shape {tuple(p.shape)} has a gradient that was not averaged: after "
                "unfreezing parameters call sync.refresh() on every rank"
            )
    return held


def drop_bad(
    optimizer: torch.optim.Optimizer, averaged: Container[int], zeros: bool, parameters: Iterable[Tensor]
) -> None:
    """Let a step find no gradients, and let what other optimizers gather for a later step be finite.

    So optimizers leave weights, momenta and counts as they are. Gradients that accumulate over several passes
    stay bad once one is, and would make each of these passes bad for the parameters that step in between.

    Args:
        optimizer: about to step; after the step, parameters get back gradients that are the program's own
            tensors, such as views of a flat buffer.
        averaged: the ids of the parameters that are averaged.
        zeros: whether its gradients become zeros, since it computes with them already.
        parameters: those that other optimizers may hold; of theirs only bad gradients become zeros.
    """
    own = {id(p): p for g in optimizer.param_groups for p in g["params"] if id(p) in averaged}
    for p in own.values():
        if zeros and p.grad is not None:
            p.grad.zero_()
            continue
        if is_own(p):
            # The entry stays when `_give_back` has emptied it, so the hook is registered once per optimizer.
            if optimizer not in _taken:
                _taken[optimizer] = []
                optimizer.register_step_post_hook(_give_back)
            _taken[optimizer].append((p, p.grad))
        p.grad = None
    for p in bad_of(parameters):
        if id(p) not in own and p.grad is not None:
            p.grad.zero_()  # not None: its optimizer may compute with it before it asks, as SAM does


def bad_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return those parameters whose gradients are not finite, one after another."""
    return (p for p in parameters if p.grad is not None and not is_finite(p.grad))


class Leftovers:
    """Gradients of a bad pass that accumulate further: they become zeros when the next pass begins.

    `drop_bad` sees to them where an optimizer steps. A `GradScaler` leaves out the step of one that is not
    fused, and then nobody would: a gradient that another optimizer gathers for a later step would stay bad,
    and with it each pass until then. Where none of the bad gradients was cleared since, no step lies between,
    and all stay: the passes belong to one step, which is lost.

    Example:
        >>> a, b = (torch.nn.Parameter(torch.ones(1)) for _ in "ab")
        >>> left = Leftovers()
        >>> (a * b * torch.nan).backward()
        >>> left.take([a, b])
        >>> a.grad = None
        >>> (a + 2 * b).backward()
        >>> a.grad, b.grad
        (tensor([1.]), tensor([2.]))
    """

    def __init__(self) -> None:
        self._bad: list[Tensor] = []
        self._handles: list[Any] = []

    def take(self, parameters: Iterable[Tensor], handle: Any = None) -> None:
        """Take those, after a bad pass, whose gradients are not finite.

        Args:
            parameters: leaves, unless there is a handle.
            handle: of a hook by which the caller has `clear()` called when the next pass begins.
        """
        self.forget()
        self._bad = list(parameters)
        if handle is not None:
            self._handles = [handle]
            return
        # Before a gradient is added to: a hook that is called afterwards finds the new one spoilt, too. It
        # only knows of this, because the garbage collector does not see what hooks hold.
        known = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo traces it in a compiled step
        def before(_: Tensor) -> None:
            if (found := known()) is not None and not is_returned():
                found.clear()

        # What is frozen by now takes no hook, and its gradient may be bad from an earlier pass.
        self._handles = [p.register_hook(before) for p in self._bad if p.requires_grad]

    def forget(self) -> None:
        """Leave them as they are."""
        handles, self._bad, self._handles = self._handles, [], []
        for handle in handles:
            handle.remove()

    @torch.no_grad()
    def clear(self) -> None:
        """Make them zeros, unless all are still there."""
        with _leftovers_lock:  # autograd runs one thread for each device
            bad = self._bad
            self.forget()
            # An empty shard of a parameter says nothing of the others of it.
            left = [p for p in bad if p.grad is not None and not (p.grad.numel() and is_finite(p.grad))]
            for p in left if len(left) < len(bad) else ():
                p.grad.zero_()  # type: ignore[union-attr]


@torch.no_grad()
def zero_bad(
    optimizer: torch.optim.Optimizer, averaged: Container[int], sound: Tensor, parameters: Iterable[Tensor]
) -> None:
    """Let a device do what is nearest to `drop_bad`, while the host does not know whether a gradient is bad.

    Gradients become zeros, so momenta and weight decay act in the step. Asking would let the device idle.

    Args:
        optimizer: about to step; all of its gradients become zeros if not `sound`.
        averaged: the ids of the parameters that are averaged.
        sound: 0-d and boolean, on a device: whether all gradients are finite.
        parameters: those that other optimizers may hold; of theirs only bad gradients become zeros.
    """
    own = {id(p): p for g in optimizer.param_groups for p in g["params"] if id(p) in averaged}
    bad = {sound.device: sound.logical_not()}
    for p in parameters:
        if p.grad is None:
            continue
        values = values_of(p.grad)
        if id(p) in own:
            if values.device not in bad:
                # A copy to the CPU must block: the host computes with it in the next line.
                bad[values.device] = bad[sound.device].to(values.device, non_blocking=not values.is_cpu)
            values.masked_fill_(bad[values.device], 0)
        elif isinstance(fine := look_at([values]), Tensor):
            values.masked_fill_(fine.logical_not(), 0)
        elif not fine:
            values.zero_()


def _give_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Undo `drop_bad` for gradients that the program holds."""
    for p, grad in _taken[optimizer]:
        p.grad = grad
    _taken[optimizer].clear()


def warn_of_skip() -> bool:
    """Warn, once for each engine, that a step changes nothing; return True."""
    warnings.warn(
        "a gradient was not finite on some rank: this optimizer.step() changes nothing, on all ranks alike; "
        "later ones are only counted, in `skipped` (skip_bad_steps=False turns this off)",
        RuntimeWarning,
        stacklevel=6,
    )
    return True


def warn_unexchanged(cause: str, advice: str) -> bool:
    """Warn, once for each engine, that a step applies gradients of this rank alone; return True."""
    warnings.warn(
        f"optimizer.step() applies {cause}: the ranks drift apart; {advice}", RuntimeWarning, stacklevel=7
    )
    return True


def refuse_other_passes(any_flags: Sequence[bool], count: int) -> None:
    """Look at which flags all ranks have set that tell their numbers of passes; see `tell`.

    Raises:
        StenogradError: on all ranks: they are at different backward passes.
    """
    if any(unequal(any_flags)):
        raise StenogradError(
            f"the ranks are at different backward passes, this one at number {count}: use no_sync() and "
            "backward() for the same batches on every rank, and restart from a checkpoint"
        )


@dataclass(frozen=True)
class _PassFlags(Told):
    """What ranks compare at the end of a pass.

    shadow: whether this rank has run out of inputs. number, settings: of the pass and its steps; see `tell`.
    """

    shadow: list[bool]
    number: list[bool]
    settings: list[bool]


# neither a bit nor its opposite: unequal to nobody's
_SILENT = _PassFlags([False], [False] * (2 * BITS), [False] * (2 * BITS))


class Passes:
    """Counts a rank's backward passes, and knows whether its gradients are averages.

    Args:
        local: whether there are gradients from before, which were never averaged.
        skip_bad_steps: whether a step is to change nothing after an exchange that was not finite.
        settings: what the steps of all ranks must have in common.

    Attributes:
        count: number of passes begun, those without an exchange included.
        shadowed: whether in the last exchange a rank took part that had run out of inputs.
        skips: whether a step is to change nothing after an exchange that was not finite.
    """

    def __init__(
        self, local: bool = False, skip_bad_steps: bool = True, settings: StepSettings | None = None
    ) -> None:
        self.count = 0
        self.settings = settings or StepSettings()
        self.shadowed = False
        self._exchanges = 0
        self._at_step: dict[int, int] = {}  # exchanges when an optimizer stepped last, by its id
        self.skips = skip_bad_steps
        self._local, self._warned, self._warned_of_bad = local, False, False

    def begun(self) -> int:
        """Count a pass that makes its first gradient, and return its number."""
        self.count += 1
        return self.count

    def accumulated(self, before: int) -> None:
        """Note that passes since number `before` exchanged nothing."""
        self._local = self._local or self.count > before

    def flags(self, *, shadow: bool = False) -> list[bool]:
        """Return flags for the exchange that tell this pass's number modulo 16 and its settings from others.

        Each bit is sent as itself and as its opposite. Where both are set, two ranks are at different passes,
        or take steps with different settings. A rank that shadows others' exchanges has no number of its own;
        the first flag tells of it.

        Example:
            >>> Passes().flags()[:5]
            [False, False, False, False, False]
        """
        if shadow:
            return replace(_SILENT, shadow=[True]).packed()
        return _PassFlags([False], tell(self.count, BITS), self.settings.flags(self.count)).packed()

    def exchanged(self, any_flags: Sequence[bool], driver: AnyDriver) -> None:
        """Take which of all ranks' `flags` were set: gradients are averages now.

        Raises:
            StenogradError: on all ranks: they are at different backward passes.
            MismatchError: on all ranks: their losses' scales or learning rates differ.
        """
        self.shadowed = any(self._checked(any_flags, driver).shadow)
        self._exchanges += 1
        self._local = False

    def _checked(self, any_flags: Sequence[bool], driver: AnyDriver) -> _PassFlags:
        received = _SILENT.unpacked(any_flags)
        # Numbers first: the pass's number chooses which bits of the settings travel, so at different passes
        # these differ as well.
        refuse_other_passes(received.number, self.count)
        if any(unequal(received.settings)):
            refuse(driver, self.settings.read())
        return received

    def follow(self, any_flags: Sequence[bool], driver: AnyDriver) -> None:
        """Take the other ranks' number from their `flags`: this rank shadowed their pass."""
        received = self._checked(any_flags, driver)
        other = sum(bool(one) << bit for bit, one in enumerate(received.number[:BITS]))
        # flags tell it modulo 16: the next number that fits
        self.count += (other - self.count) % (1 << BITS)
        self._exchanges += 1

    def check_step(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Mapping[int, Slot],
        under_way: bool,
        finite: bool,
        *,
        parameters: Iterable[Tensor] = (),
        zeros: bool = False,
    ) -> None:
        """Refuse to step on gradients that were not averaged; take those away that are not finite.

        Args:
            optimizer: about to step.
            slots: of the parameters that are exchanged, by id.
            under_way: whether a backward pass is, or broke off.
            finite: whether the last exchange was.
            parameters: as in `drop_bad`.
            zeros: whether those become zeros, because the step computes with them already.

        Raises:
            StenogradError: a pass is under way or failed, or a gradient was not averaged.
        """
        held = refuse_step(optimizer, slots, under_way)
        if not self.skip_bad(optimizer, slots, finite, zeros, parameters) and held:
            self._warn_of_local(optimizer, held, slots)

    def skip_bad(
        self,
        optimizer: torch.optim.Optimizer,
        slots: Container[int],
        finite: bool,
        zeros: bool,
        parameters: Iterable[Tensor] = (),
    ) -> bool:
        """Let a step change nothing if it may not apply what the last exchange left, and tell whether."""
        bad = self.skips and not finite
        if bad:
            drop_bad(optimizer, slots, zeros, parameters)
            self._warned_of_bad = self._warned_of_bad or warn_of_skip()
        return bad

    def _warn_of_local(
        self, optimizer: torch.optim.Optimizer, held: Sequence[Tensor], slots: Mapping[int, Slot]
    ) -> None:
        """Warn once where a step applies what was never averaged."""
        before = self._at_step.get(id(optimizer), 0)
        self._at_step[id(optimizer)] = self._exchanges
        if self._warned:
            return
        if self._local:
            cause = "gradients of this rank alone, from no_sync() or from before distribute()"
            advice = "end accumulation with a backward pass outside no_sync(), or call zero_grad() first"
        elif self._exchanges == before and any(_by_hand(p, slots) for p in held):
            cause = "gradients that no backward() made, such as those of torch.autograd.grad"
            advice = "let loss.backward() make them, or average them yourself"
        else:
            return
        self._warned = warn_unexchanged(cause, advice)


def _by_hand(parameter: Tensor, slots: Mapping[int, Slot]) -> bool:
    """Return whether neither a backward pass nor an exchange left the gradient that a parameter has."""
    slot = slots.get(id(parameter))
    return slot is not None and not slot.used and not slot.left(parameter.grad)


_NAMED = 3  # parameters that a warning lists


def watch_others(sync: Sync, *, averages_losses: bool = False) -> Watch:
    """Look at the steps of all optimizers of this process, but for those that `sync` was given.

    Those that hold parameters of its model are told to `sync._other_step`, once their gradients are there.

    Args:
        sync: is not kept alive by this.
        averages_losses: whether a closure's losses are averaged over the ranks; see `after_closure`.

    Returns:
        What ends it by `remove()`.
    """
    weak = weakref.ref(sync)
    known: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()

    def act(optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False) -> None:
        if (running := weak()) is not None:
            running._other_step(optimizer, zeros)

    def exchanges() -> int:
        return 0 if (running := weak()) is None else running._exchanges_here()

    def mean(loss: float) -> float:
        return loss if (running := weak()) is None else running._mean(loss)

    watch = after_closure(act, exchanges, mean if averages_losses else None)

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        running = weak()
        if running is None or any(optimizer is o for o in running._optimizers):
            return None
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if known.get(optimizer, (0, False))[0] != count:  # a new one, or one that got parameters
            ids = running._held()
            holds = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            known[optimizer] = count, holds
        return watch(optimizer, args, given) if known[optimizer][1] else None

    handle = Watch(before)
    weakref.finalize(sync, handle.remove).atexit = False
    return handle


def warn_of_left_out(sync: Sync, optimizer: torch.optim.Optimizer) -> bool:
    """Warn where a step changes parameters of the model that nobody averages, and tell whether it does."""
    moved = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    moved -= sync._averaged()
    names = [n for n, p in sync._model.named_parameters() if id(p) in moved and p.requires_grad]
    if not names:
        return False
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return warn_unexchanged(
        f"this rank's own gradients of {', '.join(names[:_NAMED])}{more}, which no optimizer given to "
        "distribute() holds",
        "give it all optimizers, in a list; after close() a model can be attached anew",
    )
