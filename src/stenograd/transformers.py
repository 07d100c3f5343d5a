"""Stenograd's methods inside the Hugging Face Trainer: `stenograd.transformers.use`."""

from __future__ import annotations

from typing import Any

from stenograd.catalog.method import Method
from stenograd.errors import ConfigError, StenogradError

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ImportError(
        "stenograd.transformers needs Transformers: install it with `pip install stenograd[transformers]`"
    ) from missing

from stenograd import accelerate
from stenograd.accelerate import Attachment
from stenograd.adapters import Attached, stops

__all__ = ["use"]


def use(
    trainer: Trainer,
    method: str | Method,
    *,
    timeout_s: float = 300.0,
    check_every: int = 0,
    skip_bad_steps: bool = True,
) -> Attachment:
    """Make a Trainer exchange by a Stenograd method. Call it once, between construction and `train()`.

    Gradient accumulation, `max_grad_norm` (which clips what was averaged; with a schedule, each rank's own
    gradients; `demo` and `dion` need 0), `ddp_find_unused_parameters` and mixed precision work as before.
    Checkpoints also keep what each rank has of its own, in a folder `stenograd` inside of theirs;
    `train(resume_from_checkpoint=...)` continues from it, on as many ranks as saved it or on others.
    `traffic.as_metrics()` is added to what the Trainer logs.

    With a schedule (`local`, `diloco`, `gossip`) ranks' parameters differ between rounds: during `train()`
    they are evaluated and saved as `sync.consensus()` puts them, and they stay so when it ends.

    When `train()` ends or raises, it leaves the process groups, and threads and hooks are taken away; called
    again, it goes on from there.

    Args:
        trainer: a `transformers.Trainer` or a subclass that trains by its loop, such as those of TRL.
        method: the method, as text such as "topk:ratio=0.05" or "diloco:every=30" (see `stenograd methods`).
        timeout_s: seconds after which a silent peer is an error, > 0.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        skip_bad_steps: after an exchange that was not finite on some rank, the step changes nothing on any.

    Returns:
        What was attached: `.sync` once training has begun, `.traffic`.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: training has begun, the Trainer has several GPUs in one process, or it shards models; see
            `stenograd.accelerate.use`.

    Example:
        >>> import tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"loss": super().forward(x).sum()}
        >>> data = [{"x": torch.ones(4)}] * 8
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = TrainingArguments(
        ...         folder, use_cpu=True, report_to=[], max_steps=1, save_strategy="no", disable_tqdm=True
        ...     )
        ...     trainer = Trainer(Model(4, 2), arguments, train_dataset=data)
        ...     attached = use(trainer, "topk:ratio=0.5")
        ...     output = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> attached.sync.step
        1
    """
    if trainer.is_in_train:
        raise ConfigError(
            "use must be called before trainer.train(), whose model is prepared already and would go on "
            "densely: move the line up, right after making the Trainer"
        )
    if trainer.args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer has {trainer.args.n_gpu} GPUs in one process, which torch.nn.DataParallel would "
            "drive without exchanging anything: start one process per GPU with `torchrun --nproc-per-node "
            f"{trainer.args.n_gpu} ...`, or let it see one GPU by CUDA_VISIBLE_DEVICES=0"
        )
    options: dict[str, Any] = {"check_every": check_every, "skip_bad_steps": skip_bad_steps}
    attached = accelerate.use(trainer.accelerator, method, timeout_s=timeout_s, **options)
    _join_checkpoints(trainer, attached)
    _end_with_training(trainer, attached)
    _note_division(trainer, attached)
    # First, so that what it adds is there when the callbacks of loggers look.
    trainer.callback_handler.callbacks.insert(0, _Callback(trainer, attached))
    return attached


class _Callback(TrainerCallback):
    """Looks whether training exchanges by the method, stops it, and adds the ledger to what is logged."""

    def __init__(self, trainer: Trainer, attached: Attachment) -> None:
        self._trainer, self._attached = trainer, attached
        self._end_step, self._saved_at = trainer._maybe_log_save_evaluate, -1
        trainer._maybe_log_save_evaluate = self._log_save_evaluate

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Refuse a training whose model went past us."""
        if self._trainer.accelerator is not self._attached.accelerator:
            raise StenogradError(
                f"the Trainer has made another Accelerator since use was called (hyperparameter search does "
                f"so), so it would train without {self._attached.method}: call use on a Trainer of its own "
                "for each trial"
            )
        _ = self._attached.sync  # raises where no model was prepared
        self._saved_at = -1  # of an earlier training

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and end, on all ranks after the same step, where one was asked to stop."""
        if stops(self._attached.sync, state.global_step):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep what was saved on request, which a Trainer that keeps one would remove for the best."""
        self._saved_at = state.global_step
        if self._attached.sync.stopping and args.save_total_limit == 1:
            args.save_total_limit = 2  # until train() ends

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the ledger's totals."""
        if logs is not None:
            logs.update(self._attached.traffic.as_metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave all ranks with the parameters to export, unless those of the best checkpoint were loaded."""
        if not self._attached.rounds:
            return
        ended = Attached(self._trainer.model, self._attached.sync)
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            ended.adopt()
        elif not getattr(ended.sync.method.schedule, "quorum", 0):  # an open run goes on from what all have
            ended.begin_anew()  # a later training goes on from the best

    def _log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Save at once where all were asked to stop, and once: the time that is left is short.

        The Trainer would evaluate first, and at the end of the epoch that it leaves save over the same files.
        """
        control, at = self._trainer.control, self._trainer.state.global_step
        if control.should_training_stop and self._attached.sync.stopping:
            control.should_evaluate = False
            control.should_save = control.should_save and self._saved_at != at
        self._end_step(*args, **options)


def _end_with_training(trainer: Trainer, attached: Attachment) -> None:
    """Leave process groups, threads and hooks behind with each training, in whatever way it ends.

    The model is a plain one then. Another training wraps it anew, and goes on where this one stood.
    """
    train = trainer.train

    def train_and_close(*args: Any, **options: Any) -> Any:
        kept = trainer.args.save_total_limit
        try:
            return train(*args, **options)
        finally:
            trainer.args.save_total_limit = kept
            attached.close()
            trainer.model_wrapped = trainer.model
            trainer.is_in_train = False  # the Trainer leaves it where an error ends training

    trainer.train = train_and_close


def _note_division(trainer: Trainer, attached: Attachment) -> None:
    """Note for `attached.weight` by what the Trainer divides a loss, as Accelerate does not for it."""
    step = trainer.training_step

    def noted(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:  # as a model or function does that gets the number of tokens
            counts = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counts or trainer.compute_loss_func is not None
        attached._divided = 1 if scaled else trainer.current_gradient_accumulation_steps
        return step(model, inputs, num_items_in_batch)

    trainer.training_step = noted


def _join_checkpoints(trainer: Trainer, attached: Attachment) -> None:
    """Save and load with the optimizer, which the Trainer saves and loads on all ranks' calls, too.

    What is evaluated and saved for export in the course of training is what all ranks have in common.
    """
    save, load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

    def save_all(output_dir: str) -> None:
        save(output_dir)
        attached.save(output_dir)

    def load_all(checkpoint: str | None) -> None:
        # First the Trainer's part, which would overwrite what each rank has of its own.
        load(checkpoint)
        if checkpoint is not None:
            attached.load(checkpoint)

    def in_common(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if not trainer.is_in_train:  # rank 0 may be alone here
                return call(*args, **options)
            with attached.sync.consensus():
                return call(*args, **options)

        return called

    trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler = save_all, load_all
    if attached.rounds:
        trainer.save_model = in_common(trainer.save_model)
        trainer.evaluation_loop = in_common(trainer.evaluation_loop)
