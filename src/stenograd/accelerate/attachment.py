"""`use`: an Accelerator whose models exchange by a Stenograd method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from stenograd.adapters import Attached, refuse_clipping
from stenograd.catalog.method import Method
from stenograd.catalog.method import method as parse
from stenograd.checkpoint.api import MissingState
from stenograd.errors import ConfigError, StenogradError, bad_value
from stenograd.sync.handshake import as_optimizers, unwrapped
from stenograd.sync.replica_guard import check_interval
from stenograd.wire.traffic import Traffic

__all__ = ["Attachment", "optimizers_of", "refuse_sharding", "use"]

_SEEN = "_is_accelerate_prepared"  # on models that Accelerate has prepared, and gives back as they are


def use(
    accelerator: Accelerator,
    method: str | Method,
    *,
    timeout_s: float = 300.0,
    check_every: int = 0,
    skip_bad_steps: bool = True,
) -> Attachment:
    """Make an Accelerator exchange by a Stenograd method. Call it once, before `accelerator.prepare`.

    Methods that average gradients in every step become the communication hook of the DistributedDataParallel
    models that `prepare` makes. With a schedule (`local`, `diloco`, `gossip`) models stay unwrapped, and
    `prepare` gives them with their optimizers to `stenograd.distribute`; prepare both in one call. The loop
    stays as it is: `accelerator.accumulate(model)`, `accelerator.no_sync(model)`, `clip_grad_norm_`, mixed
    precision and schedulers work as before. `save_state` and `load_state` also keep what each rank has of its
    own, in a folder `stenograd` inside of theirs, on as many ranks as saved it or on others. `end_training`,
    or `close()` of what is returned, leaves the process groups and takes threads and hooks away.

    Args:
        accelerator: the `accelerate.Accelerator`; one process, several CPUs or several GPUs with plain DDP.
        method: the method, as text such as "topk:ratio=0.05" or "diloco:every=30" (see `stenograd methods`).
        timeout_s: seconds after which a silent peer is an error, > 0.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        skip_bad_steps: after an exchange that was not finite on some rank, `optimizer.step()` changes
            nothing on any. False for torch's behaviour.

    Returns:
        What was attached: `.sync` once a model is prepared, `.traffic`.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: a value is out of range, a model was prepared already, the Accelerator shards models or
            has a communication hook, or `use` was called before.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator, model = Accelerator(cpu=True), nn.Linear(4, 2)
        >>> attached = use(accelerator, "topk:ratio=0.5")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(8, 4)).sum())
        >>> optimizer.step()
        >>> attached.sync.step
        1
    """
    chosen = parse(method)
    if not timeout_s > 0:
        raise bad_value("timeout_s", "must be above 0 seconds", timeout_s, "leave it at 300")
    check_interval(check_every, repair=False)
    _refuse_late(accelerator)
    options = {"timeout_s": timeout_s, "check_every": check_every, "skip_bad_steps": skip_bad_steps}
    return Attachment(accelerator, chosen, options)


class Attachment:
    """What `use` attached to an Accelerator.

    Attributes:
        accelerator: the Accelerator.
        method: the `Method` in use.
        rounds: whether ranks train by themselves between rounds, so that their parameters differ there.
    """

    def __init__(self, accelerator: Accelerator, method: Method, options: dict[str, Any]) -> None:
        self.accelerator, self.method = accelerator, method
        self._options = options
        self._attached: list[Attached] = []
        self._waiting: list[nn.Module] = []  # prepared without an optimizer so far
        self._freed: list[Attached] = []  # by free_memory; a Trainer calls it before each training
        self._closed: list[Attached] = []  # which go on where their models are prepared again
        self._earlier: list[Traffic] = []  # of what was replaced
        self._folder = ""
        self._divided: float | None = None  # by what a Trainer divides the loss
        self.rounds = not method.averages_gradients
        wraps = accelerator.multi_device or accelerator.distributed_type == DistributedType.MULTI_CPU
        if wraps and not self.rounds:
            accelerator.ddp_handler = _handler(self, accelerator.ddp_handler)
            self._wrap_evaluated()
        else:
            # Also in a world of one, where Accelerate makes no DDP model whose hook could carry the method.
            self._replace_wrapping()
        self._join_checkpoints()
        accelerator.clip_grad_norm_ = self._clipping(accelerator.clip_grad_norm_)
        accelerator.clip_grad_value_ = self._clipping(accelerator.clip_grad_value_)
        accelerator.stenograd = self

    @property
    def sync(self) -> Any:
        """What exchanges for the model that was prepared last: a `DDPHook`, or from `distribute`.

        Raises:
            StenogradError: no model was prepared yet.
        """
        return self.syncs[-1]

    @property
    def syncs(self) -> list[Any]:
        """What exchanges, one for each prepared model, in the order of `prepare`.

        Raises:
            StenogradError: no model was prepared yet.
        """
        if not self._attached:
            raise StenogradError(
                f"no model exchanges by {self.method} yet: call accelerator.prepare(model, optimizer) first, "
                "with the Accelerator that was given to use"
            )
        return [one.sync for one in self._attached]

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank; of several models, their sum until now."""
        parts: list[Traffic] = [*self._earlier, *(one.sync.traffic for one in self._attached)]
        first, *others = parts or [Traffic()]
        for other in others:
            first = first + other
        return first

    def weight(self, n: float, *, reduce: str = "mean") -> None:
        """Let the next `accelerator.backward` count n times, whichever model it is of; see `Sync.weight`.

        Accelerate divides each loss by `gradient_accumulation_steps`, which is made up for here: gradients
        are means over the tokens or samples of all ranks and accumulated passes. So is the division of a
        Trainer, for whose own losses of tokens it is not meant: they are such means already.

        Example:
            attached.weight(batch["labels"].ne(-100).sum())
        """
        divided = self._divided or self.accelerator.gradient_accumulation_steps
        for one in self._attached:
            one.sync.weight(n, reduce=reduce, divided=divided)

    def close(self) -> None:
        """Leave the process groups, and take threads and hooks away; `accelerator.end_training` calls it.

        What was counted can still be read, and what each rank keeps can be saved. A model that is prepared
        again goes on from there. May be called twice.
        """
        self._closed = list(self._attached)  # kept, as a model prepared again takes its state from there
        for one in self._attached:
            one.sync.close()
            for model in _models_of(one):  # else another Accelerator would leave a model unwrapped
                vars(model).pop(_SEEN, None)

    def save(self, folder: str | Path) -> None:
        """Save what each rank keeps for itself into a folder; `accelerator.save_state` calls it on all ranks.

        Raises:
            CheckpointError: on every rank, if one cannot write; an earlier state is unchanged.
        """
        for name, one in self._named():
            one.save(Path(folder), name)

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote; after `accelerator.load_state`, which calls it on all ranks.

        A folder without such a state, as a run without Stenograd leaves it, gives a warning: residuals start
        from zero, and rounds from the loaded model.

        Raises:
            CheckpointError: the state is not whole or does not fit; on every rank.
        """
        for name, one in self._named():
            try:
                one.load(Path(folder), name)
            except MissingState as reason:
                one.begin_anew()
                warnings.warn(
                    f"{reason}; {self.method} begins anew from the loaded model", RuntimeWarning, stacklevel=3
                )

    def _clipping(self, clip: Any) -> Any:
        """Return one of Accelerate's ways to clip, which refuses what is not a gradient."""

        @wraps(clip)
        def clip_gradients(*args: Any, **options: Any) -> Any:
            given = signature(clip).bind(*args, **options)
            parameters, limit, *_ = given.arguments.values()
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if limit < math.inf:  # a Trainer takes the norm alone by clipping at infinity
                advice = f"leave {clip.__name__} out (in a Trainer by max_grad_norm=0)"
                refuse_clipping(self.method, held, advice)
            given.arguments["parameters"] = held
            return clip(*given.args, **given.kwargs)

        return clip_gradients

    def _named(self) -> list[tuple[str, Attached]]:
        """Return for each model the name of its folder, and what is attached to it."""
        return [
            (f"stenograd_{index}" if index else "stenograd", one) for index, one in enumerate(self._attached)
        ]

    def _join_checkpoints(self) -> None:
        """Save before Accelerate does, and load after it, for it would overwrite what rounds have loaded."""
        accelerator = self.accelerator
        load, keep = accelerator.load_state, accelerator.register_for_checkpointing
        free, end = accelerator.free_memory, accelerator.end_training
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder))

        def note(models: Any, folder: str) -> None:
            self._folder = folder  # the one that Accelerate has chosen, where load_state is given none

        def load_all(*args: Any, **options: Any) -> None:
            load(*args, **options)
            self.load(self._folder)

        def refuse_own(*objects: Any) -> None:
            if any(own is self or any(own is one.sync for one in self._attached) for own in objects):
                raise ConfigError(
                    "register_for_checkpointing would save the state of rank 0 only, and every rank has one "
                    "of its own: leave it out, accelerator.save_state saves all of them already"
                )
            keep(*objects)

        def free_all(*objects: Any) -> Any:
            self._freed = list(self._attached)  # until others are prepared, for a model may be trained again
            return free(*objects)

        def end_all() -> None:
            self.close()  # before Accelerate destroys the world
            end()

        accelerator.register_load_state_pre_hook(note)
        accelerator.load_state, accelerator.free_memory = load_all, free_all
        accelerator.end_training = end_all
        accelerator.register_for_checkpointing = refuse_own

    def _on_ddp(self, ddp_model: Any) -> None:
        """Attach to a DDP model that Accelerate has just made."""
        inner: Any = unwrapped(ddp_model).module
        self._go_on(self._drop([inner]), Attached.by_hook(ddp_model, self.method, self._options))

    def _drop(self, models: Sequence[nn.Module]) -> Attached | None:
        """Close what exchanged for models that are wrapped or attached anew, and for those freed before.

        Returns:
            What exchanged for the models, if `close()` has ended it.
        """
        before = [one for model in models for one in self._of(model)]
        gone = [one for one in self._attached if one in before or one in self._freed]
        self._attached = [one for one in self._attached if one not in gone]
        self._freed = []
        for one in gone:
            one.sync.close()
            self._earlier.append(one.sync.traffic)
        return next((one for one in before if one in self._closed), None)

    def _of(self, model: nn.Module) -> list[Attached]:
        """Return what exchanges for a model."""
        return [one for one in self._attached if any(own is model for own in _models_of(one))]

    def _go_on(self, before: Attached | None, now: Attached) -> None:
        """Take what was just attached, with the state of what it follows."""
        self._attached.append(now)
        if before is not None:
            now.sync.load_state_dict(before.sync.state_dict())
            now.sync.after_load()

    def _wrap_evaluated(self) -> None:
        """Let Accelerate wrap for training what it has prepared for evaluation before."""
        accelerator, prepare_model = self.accelerator, self.accelerator.prepare_model

        def with_ddp(model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
            learns = any(p.requires_grad for p in model.parameters())
            if learns and not evaluation_mode and not _is_wrapped(model):
                _forget(accelerator, model)
            return prepare_model(model, device_placement, evaluation_mode)

        accelerator.prepare_model = with_ddp

    def _replace_wrapping(self) -> None:
        """Let Accelerate prepare models without DDP, and attach them once their optimizers are prepared."""
        accelerator = self.accelerator
        prepare, prepare_model = accelerator.prepare, accelerator.prepare_model
        backward, no_sync = accelerator.backward, accelerator.no_sync

        def without_ddp(model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
            if not hasattr(model, _SEEN):  # by `close()`, where it was prepared before
                _forget(accelerator, model)
            # only for training does Accelerate wrap a model in DDP
            ready = prepare_model(model, device_placement=device_placement, evaluation_mode=True)
            if not evaluation_mode and any(p.requires_grad for p in ready.parameters()):
                self._waiting.append(unwrapped(ready))
            return ready

        def and_attach(*args: Any, **options: Any) -> Any:
            result = prepare(*args, **options)
            self._attach_waiting()
            return result

        def checked(loss: Any, **options: Any) -> None:
            # A model in eval mode may be prepared alone: it is not trained.
            if any(model.training for model in self._waiting):
                raise StenogradError(
                    f"a model was prepared without its optimizer, so nothing would be exchanged by "
                    f"{self.method}: call accelerator.prepare(model, optimizer) with both"
                )
            backward(loss, **options)

        @contextmanager
        def accumulating(model: Any) -> Iterator[None]:
            own = [one.sync for one in self._of(unwrapped(model))]
            with own[0].no_sync() if own else no_sync(model):
                yield

        accelerator.prepare, accelerator.prepare_model = and_attach, without_ddp
        accelerator.backward, accelerator.no_sync = checked, accumulating

    def _attach_waiting(self) -> None:
        """Attach each prepared model whose optimizers are prepared, too; those that share one, together."""
        known = [model for one in self._attached for model in _models_of(one)]
        for models, held in _by_optimizers(self.accelerator, [*known, *self._waiting]):
            runs = next((one for model in models for one in self._of(model)), None)
            before = runs.optimizers if runs is not None and runs not in self._closed else ()
            # Every `prepare` comes here, also one of a data loader alone, which changes nothing.
            if {*map(id, held)} == {*map(id, before)}:
                continue
            if before and any(o is old for o in held for old in before):
                raise ConfigError(
                    f"a model of {self.method} got a further optimizer after its first: give prepare the "
                    "model and all of its optimizers in one call"
                )
            ended = self._drop(models)
            module = models[0] if len(models) == 1 else _Together(models)
            if ended is not None and {*map(id, held)} != {*map(id, ended.optimizers)}:
                ended = None
            with nullcontext() if ended is None else ended.kept():
                self._go_on(ended, Attached.by_optimizers(module, held, self.method, self._options))
        self._waiting = [model for model in self._waiting if not self._of(model)]


class _Together(nn.ModuleList):
    """Models that one optimizer trains, and that exchange as one."""


def _handler(attachment: Attachment, old: Any) -> Any:
    """Return a handler of Accelerate's with the fields of an old one, which registers our hook.

    Its class holds the attachment, not its instance: Accelerate copies all that an instance holds, hands what
    is not default to DDP's constructor, and makes another one without arguments to know the defaults.
    """

    class Handler(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: Any) -> None:
            attachment._on_ddp(model)

    names = [f.name for f in fields(DistributedDataParallelKwargs)]
    return Handler(**{name: getattr(old, name) for name in names if old is not None})


def _refuse_late(accelerator: Accelerator) -> None:
    """Refuse an Accelerator whose models would go on as they are, or that has a hook already."""
    if hasattr(accelerator, "stenograd"):
        raise ConfigError(
            f"use must be called once per Accelerator, which exchanges by {accelerator.stenograd.method} "
            "already: leave this call out, or make another Accelerator"
        )
    refuse_sharding(accelerator)
    # Others were prepared for evaluation, as the model that a trainer of preferences refers to.
    taken = [m for m in accelerator._models if _is_wrapped(m) or optimizers_of(accelerator, m)]
    if taken:
        raise ConfigError(
            f"use must be called before accelerator.prepare, which has prepared {len(taken)} "
            "model(s) already that would go on densely: move the line up, right after making the Accelerator"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        raise bad_value(
            "comm_hook",
            "must be left out of DistributedDataParallelKwargs",
            str(hook),
            "a model has one hook; write method='fp16' or 'powersgd' instead",
        )


def optimizers_of(accelerator: Accelerator, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the prepared optimizers that hold parameters of a model."""
    own = {id(p) for p in model.parameters()}
    prepared = as_optimizers(list(accelerator._optimizers))
    return [o for o in prepared if any(id(p) in own for g in o.param_groups for p in g["params"])]


def _by_optimizers(
    accelerator: Accelerator, models: Sequence[nn.Module]
) -> list[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """Return models with the prepared optimizers that hold their parameters; those that share one, together.

    Models without an optimizer are left out.
    """
    found: list[dict[int, torch.optim.Optimizer]] = []
    unique = list({id(model): model for model in models}.values())
    for model in unique:
        held = {id(o): o for o in optimizers_of(accelerator, model)}
        shared = [others for others in found if not others.keys().isdisjoint(held)]
        found = [others for others in found if others not in shared]
        if held:
            found.append({key: o for some in (*shared, held) for key, o in some.items()})
    return [
        ([m for m in unique if any(id(o) in held for o in optimizers_of(accelerator, m))], [*held.values()])
        for held in found
    ]


def _models_of(one: Attached) -> list[nn.Module]:
    """Return the models as they were prepared."""
    return list(one.module) if isinstance(one.module, _Together) else [one.module]


def _is_wrapped(model: nn.Module) -> bool:
    return hasattr(unwrapped(model), "register_comm_hook")


def _forget(accelerator: Accelerator, model: nn.Module) -> None:
    """Let Accelerate prepare a model as if it had never seen it."""
    vars(model).pop(_SEEN, None)
    accelerator._models = [other for other in accelerator._models if other is not model]


def refuse_sharding(accelerator: Accelerator) -> None:
    """Refuse what does not keep a whole model on every rank."""
    kind = accelerator.distributed_type
    if kind != DistributedType.NO and not kind.name.startswith("MULTI_"):
        raise bad_value(
            "accelerator.distributed_type",
            "must be that of plain data-parallel training",
            kind.name,
            "leave FSDP, DeepSpeed and the others out, or train without Stenograd",
        )
    if accelerator.parallelism_config is not None:
        raise ConfigError(
            "accelerator must have no parallelism_config: tensor and context parallelism split models"
        )
