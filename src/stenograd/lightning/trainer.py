"""The strategy for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stenograd.adapters import refuse_clipping, stops
from stenograd.errors import ConfigError, LaunchError
from stenograd.lightning.exchanging import Exchanging, copied, drop_others, pytorch, register_names
from stenograd.stopping import alone

__all__ = ["StenogradStrategy", "StopOnRequest", "TrafficLogger"]


class StenogradStrategy(Exchanging, pytorch.strategies.DDPStrategy):
    """Trains by a Stenograd method; otherwise what `DDPStrategy` is.

    Methods that average gradients in every step run as the hook of DistributedDataParallel, on any device
    (`DDPStrategy` itself calls hooks on CUDA only). Methods with a schedule ("local:every=8", "diloco",
    "gossip") leave the model unwrapped; validation, checkpoints and what `fit` leaves behind then hold the
    consensus of all ranks.

    What each rank keeps for itself is saved in a folder beside each checkpoint, `NAME.ckpt.stenograd`, and
    loaded from there, on another number of ranks, too.

    Args:
        method: as text such as "topk:ratio=0.05"; see `stenograd methods`.
        timeout_s: seconds after which a silent peer is an error, > 0.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        repair: overwrite parameters that differ by the majority's and warn, instead of raising.
        check_buffers: compare and repair buffers too.
        skip_bad_steps: after an exchange that was not finite on some rank, the optimizers change nothing.
        ddp_options: for `DDPStrategy`: `process_group_backend`, `timeout`, `start_method`, ..., and where the
            model is wrapped those of DistributedDataParallel, such as `find_unused_parameters`.

    Attributes:
        sync: the hook or synchronisation of the last `fit`, with `traffic`, `skipped`, `trace(...)`; None
            before.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: another communication hook is given, or an option that would have no effect.

    Example:
        trainer = Trainer(devices=2, strategy=StenogradStrategy("topk:ratio=0.05"))
    """

    strategy_name = "stenograd"

    _fitting = False
    _replaced = False  # whether a callback exports weights of its own, and batch norms look at data with them
    _loaded_path: Any = None

    @property
    def sync(self) -> Any:
        """The hook or synchronisation of the last `fit`; None before."""
        return self._attached[-1].sync if self._attached else None

    def weight(self, n: float, *, reduce: str = "mean") -> None:
        """Let this training step count n times, called in `training_step`; see `Sync.weight`.

        The Trainer divides each loss by `accumulate_grad_batches`, which is made up for here: gradients are
        means over the tokens or samples of all ranks and accumulated batches.

        Example:
            self.trainer.strategy.weight(batch["labels"].ne(-100).sum())
        """
        module = self.lightning_module
        divided = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.sync.weight(n, reduce=reduce, divided=divided)

    def setup_environment(self) -> None:
        """Join the ranks, and make sure that all are there."""
        super().setup_environment()
        if dist.get_world_size() != self.world_size:
            raise LaunchError(
                f"the Trainer has {self.world_size} ranks, but torch.distributed was initialised before with "
                f"{dist.get_world_size()}: leave stenograd.init() out before trainer.fit(), or start the "
                "program with torchrun"
            )

    def setup(self, trainer: Any) -> None:
        """Attach the method, where the Trainer is about to fit."""
        self._fitting = trainer.state.fn == pytorch.trainer.states.TrainerFn.FITTING
        if self._fitting:
            # What an earlier `fit` attached would go on exchanging beside the new one.
            self._close()
            self._attached.clear()
            self._replaced = False
        super().setup(trainer)
        if self._fitting and trainer.gradient_clip_val:
            parameters = self.lightning_module.parameters()
            refuse_clipping(self._method, parameters, "leave gradient_clip_val out of the Trainer")
        # After super, which makes the optimizers.
        if self._fitting and self._in_rounds:
            self._attach(self.lightning_module, self.optimizers)
            if not any(isinstance(callback, _Result) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, _Result())

    def configure_ddp(self) -> None:
        """Wrap the model, but for methods in rounds."""
        if not self._in_rounds:
            super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        self._attach_ddp(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`, as a forward pass of what is attached."""
        if not self._in_rounds:
            return super().training_step(*args, **kwargs)
        # Through the module's own call, so that its forward hooks run: they hold a round that is due after a
        # step was skipped.
        module = self.lightning_module
        self._replaced |= getattr(module.trainer.fit_loop, "_skip_backward", False)
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: passes inside exchange nothing and do not count."""
        with self.sync.no_sync() if self._attached and self._in_rounds else super().block_backward_sync():
            yield

    def on_validation_start(self) -> None:
        """Put the consensus in place while training is validated."""
        super().on_validation_start()
        if self._fitting:
            self.show_result()

    def on_validation_end(self) -> None:
        """Put this rank's own parameters back."""
        super().on_validation_end()
        if self._fitting and self._attached:
            self._attached[-1].hide()

    def on_train_start(self) -> None:
        """Exchange, also where a callback has trained before and gone back, as a finder of rates does."""
        super().on_train_start()
        self._fitting = True
        if self._attached and self._in_rounds:
            self._attached[-1].hide()
            self.sync.enabled = True

    def show_result(self) -> None:
        """Put the consensus in place, before callbacks and the module are called at the end of training."""
        if self._attached and self._in_rounds and not self._replaced:
            self._attached[-1].show()

    def on_train_end(self) -> None:
        """Leave the consensus in the model; what is trained later by hand is not exchanged."""
        super().on_train_end()
        self._fitting = False
        self.show_result()
        if self._attached and self._in_rounds:
            self.sync.enabled = False

    def on_exception(self, exception: BaseException) -> None:
        """Stop exchanging: the other ranks may not come any more."""
        super().on_exception(exception)
        self._close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, for methods in rounds the consensus; all ranks call it."""
        state: dict[str, Any]
        if not self._attached or not self._in_rounds or self._replaced:
            state = super().lightning_module_state_dict()
            return state
        with self._attached[-1].shown():
            state = super().lightning_module_state_dict()
            return copied(state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save the checkpoint, and what each rank keeps beside it, unless it holds the weights only."""
        with self._saved_beside(filepath, "optimizer_states" in checkpoint) as names:
            super().save_checkpoint({**checkpoint, **names}, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint; what each rank keeps is loaded after the optimizers."""
        self._loaded_path = checkpoint_path
        return dict(super().load_checkpoint(checkpoint_path, *args, **kwargs))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers and then what each rank keeps, which for methods in rounds replaces them."""
        super().load_optimizer_state_dict(checkpoint)
        if self._attached:
            # A copy, because `_load_beside` takes its own entry out.
            self._load_beside(self._loaded_path, dict(checkpoint))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint and what lies beside it."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            drop_others(filepath, [])


class _Result(pytorch.callbacks.Callback):
    """The first callback: others may export what training has led to, or replace it."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.show_result()


class TrafficLogger(pytorch.callbacks.Callback):
    """Logs bytes, collectives and seconds waited, as sums since training began, of rank 0.

    They are written as often as everything else (`Trainer(log_every_n_steps=...)`).

    Args:
        prefix: begins every name, before a slash.

    Example:
        trainer = Trainer(strategy=StenogradStrategy("topk:ratio=0.05"), callbacks=[TrafficLogger()])
    """

    def __init__(self, prefix: str = "traffic") -> None:
        self._prefix = prefix

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a strategy that has no ledger.

        Raises:
            ConfigError: the strategy is not one of Stenograd's.
        """
        _refuse_other(trainer, type(self).__name__)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the totals so far."""
        pl_module.log_dict(trainer.strategy.sync.traffic.as_metrics(self._prefix))


class StopOnRequest(pytorch.callbacks.Callback):
    """Saves, and ends `fit`, on all ranks after the same step, where one was asked to stop.

    Call `stenograd.stop_on()` before making the Trainer. While it trains, these signals are requests only:
    Lightning itself would raise in the middle of an epoch at SIGTERM. After `fit`,
    `trainer.strategy.sync.stopping` tells whether it was ended so.

    Args:
        path: of the checkpoint; None for "stopped.ckpt" in the Trainer's `default_root_dir`.

    Example:
        stop = stenograd.stop_on()
        trainer = Trainer(strategy=StenogradStrategy("topk:ratio=0.05"), callbacks=[StopOnRequest()])
        trainer.fit(module, data)
        if trainer.strategy.sync.stopping:
            sys.exit(stop.status)
    """

    def __init__(self, path: Any | None = None) -> None:
        self._path = path
        self._saved = False
        self._undo: Callable[[], object] = bool  # does nothing

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals that Lightning has taken.

        Raises:
            ConfigError: the strategy is not one of Stenograd's.
        """
        _refuse_other(trainer, type(self).__name__)
        self._saved, self._undo = False, alone()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Save once, and let `fit` end, whatever `min_epochs` and `min_steps` say."""
        sync = trainer.strategy.sync
        # Not by `global_step`, which counts steps of optimizers: a rank may leave some out.
        if not self._saved and stops(sync, sync.step):
            self._saved = trainer.should_stop = True
            trainer.save_checkpoint(self._path or Path(trainer.default_root_dir, "stopped.ckpt"))
            loop, give_back = trainer.fit_loop, self._undo
            least = loop.min_epochs, loop.epoch_loop.min_steps
            loop.min_epochs = loop.epoch_loop.min_steps = None  # until then it would go on

            def undo() -> None:
                loop.min_epochs, loop.epoch_loop.min_steps = least
                give_back()

            self._undo = undo

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the signals back."""
        self._undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the signals back."""
        self._undo()


def _refuse_other(trainer: Any, callback: str) -> None:
    if getattr(trainer.strategy, "sync", None) is None:
        raise ConfigError(
            f"{callback} needs strategy=StenogradStrategy(...), got "
            f"{type(trainer.strategy).__name__}: use that, or leave the callback out"
        )


register_names(pytorch.strategies.StrategyRegistry.register, StenogradStrategy)
