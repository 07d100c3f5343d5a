"""What test_lightning.py runs on every rank: `SCENARIO ARGUMENTS FOLDER`; prints JSON."""

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from left_over import left_over, left_when_dropped
from lightning.fabric import Fabric, seed_everything
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning_cases import WIDE
from small_model import by_one_process, end, flat, uneven
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stenograd
from stenograd.lightning import StenogradFabricStrategy, StenogradStrategy, StopOnRequest, TrafficLogger


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDE, 64), nn.ReLU(), nn.Linear(64, WIDE))


class Task(LightningModule):
    """A regression; `bad` is the (step, rank) whose gradient is NaN, `manual` has two optimizers."""

    def __init__(self, optimizer="sgd", bad=None, manual=False):
        super().__init__()
        self.net, self.kind, self.bad = net(), optimizer, bad
        self.automatic_optimization = not manual
        self.seen = []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.bad == (index, self.global_rank):
            loss = loss * float("nan")
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def validation_step(self, batch, index):
        self.seen.append(digest(self))

    def configure_optimizers(self):
        if not self.automatic_optimization:
            return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.net[0], self.net[2])]
        if self.kind == "plain":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        if self.kind == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data(steps, without=None):
    """This rank's batches, 8 examples in each step; `without` leaves out a step on all ranks."""
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    made = torch.Generator().manual_seed(3)
    x = torch.randn(steps, 3, 8, WIDE, generator=made)  # for as many as three ranks
    y = x.roll(1, -1) * 0.5 + 0.1 * torch.randn(x.shape, generator=made)
    mine = [i for i in range(steps) if i != without]
    return DataLoader(TensorDataset(*(t[mine, rank].flatten(0, 1) for t in (x, y))), batch_size=8)


def trainer(strategy, steps, **more):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"use_distributed_sampler": False, "enable_checkpointing": False, "max_steps": steps}
    quiet["devices"] = int(os.environ["WORLD_SIZE"])
    return Trainer(accelerator="cpu", strategy=strategy, **quiet | more)


def fit(strategy, steps=50, module=None, loader=None, held_out=None, **more):
    seed_everything(1, verbose=False)
    module, training = module or Task(), trainer(strategy, steps, **more)
    training.fit(module, loader or data(steps * training.accumulate_grad_batches), held_out)
    return module, training


def digest(module):
    tensors = [p.detach() for p in module.parameters()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def told(sync, module):
    return {
        "digest": digest(module),
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
        "bytes": sync.traffic.moved_bytes,
        "step": sync.step,
        "skipped": sync.skipped,
    }


def plain(folder):
    """By Lightning's own strategy and by ours."""
    module, training = fit(StenogradStrategy("dense"))
    return {"ddp": digest(fit(DDPStrategy())[0]), "dense": told(training.strategy.sync, module)}


def trained(how, folder):
    module, training = fit(StenogradStrategy(how), precision="bf16-mixed" if how == "sign" else None)
    return told(training.strategy.sync, module)


def accumulated(how, folder):
    """12 steps of 4 batches, clipped where gradients are averaged."""
    clip = {} if how.startswith("local") else {"gradient_clip_val": 0.5}
    module, training = fit(StenogradStrategy(how), 12, accumulate_grad_batches=4, **clip)
    return told(training.strategy.sync, module)


def bad(how, optimizer, folder):
    """NaN on rank 1 in step 5; the oracle leaves that step out on both ranks."""
    warnings.simplefilter("ignore")
    clip = {"gradient_clip_val": 1.0} if not how.startswith("local") else {}
    module, training = fit(StenogradStrategy(how), 20, Task(optimizer, bad=(5, 1)), **clip)
    out = {"bad": told(training.strategy.sync, module)}
    module, training = fit(StenogradStrategy(how), 19, Task(optimizer), data(20, without=5), **clip)
    return out | {"without": told(training.strategy.sync, module)}


def manual(how, folder):
    if how == "ddp":
        return digest(fit(DDPStrategy(), 20, Task(manual=True))[0])
    module, training = fit(StenogradStrategy(how), 20, Task(manual=True))
    return told(training.strategy.sync, module)


def validated(folder):
    module = Task()
    training = trainer(StenogradStrategy("local:every=4"), 10, val_check_interval=5, num_sanity_val_steps=0)
    seed_everything(1, verbose=False)
    training.fit(module, data(10), data(1))
    return {"seen": module.seen, **told(training.strategy.sync, module)}


class Exporting(Task):
    """Exports what it is when training ends."""

    def on_train_end(self):
        self.exported = digest(self)


class Averaging(Callback):
    """Leaves an average of this rank's weights in the module, as Lightning's EMAWeightAveraging does."""

    def on_train_start(self, trainer, module):
        self.average = flat(module)

    def on_train_batch_end(self, trainer, module, *_):
        self.average = (self.average + flat(module)) / 2

    def on_train_end(self, trainer, module):
        with torch.no_grad():
            held = list(module.parameters())
            pieces = self.average.split([p.numel() for p in held])
            for p, own in zip(held, pieces, strict=True):
                p.copy_(own.view_as(p))


def exported(how, folder):
    """10 steps, which end in mid-round; and again with an average of this rank's weights in their place."""
    plain, _ = fit(StenogradStrategy(how), 10, Exporting())
    averaging = Averaging()
    averaged, _ = fit(StenogradStrategy(how), 10, callbacks=[averaging])
    found = {"plain": digest(plain), "exported": plain.exported}
    return found | {"kept": torch.equal(flat(averaged), averaging.average), "averaged": digest(averaged)}


class Looking(StochasticWeightAveraging):
    """Looks at the weights whose batch norms have looked at data."""

    def on_train_epoch_end(self, trainer, module):
        super().on_train_epoch_end(trainer, module)
        self.left = flat(module).clone()
        self.off = (self.left - flat(self._average_model)).abs().max().item()


def looked(folder):
    """4 epochs of 6 steps, of which the last ends in mid-round, and one in which batch norms look at data."""
    module, looking = Task(), Looking(swa_lrs=0.01, swa_epoch_start=1)
    module.net.insert(1, nn.BatchNorm1d(64))
    options = {"callbacks": [looking], "max_epochs": 4}
    _, training = fit(StenogradStrategy("diloco:every=5"), -1, module, data(6), data(1), **options)
    path = Path(folder, "looked.ckpt")
    training.save_checkpoint(path)  # waits until rank 0 has written it
    saved = torch.load(path, weights_only=False)["state_dict"]
    held = dict(module.named_parameters())
    kept = all(torch.equal(saved[name], p) for name, p in held.items())
    return {"kept": torch.equal(flat(module), looking.left), "saved": kept, "off": looking.off}


class Rated(Task):
    """Has a learning rate that a finder may set."""

    lr = 0.05

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def found_rate(how, folder):
    """10 steps, validated in mid-round, after a finder of learning rates has trained and gone back."""
    out, rate = {}, Rated.lr
    for name, finders in (("found", [LearningRateFinder(num_training_steps=20)]), ("given", [])):
        module = Rated()
        module.lr = rate
        more = {"val_check_interval": 5, "num_sanity_val_steps": 0, "default_root_dir": folder}
        training = trainer(StenogradStrategy(how), 10, callbacks=finders, **more)
        training.fit(module, data(20), data(1))
        rate, out[name] = module.lr, told(training.strategy.sync, module) | {"seen": module.seen[-2:]}
    return out | {"rate": rate}


class Residuals(Callback):
    """The sums of all ranks' residuals when training starts."""

    def on_train_start(self, trainer, module):
        self.sums = residual_sums(trainer.strategy.sync)


def residual_sums(sync):
    found = {}

    def walk(path, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk([*path, str(key)], inner)
        elif torch.is_tensor(value) and "residual" in path:
            total = value.double().clone()
            dist.all_reduce(total)
            found[".".join(path)] = float(total.abs().sum())

    walk([], sync.state_dict())
    return found


def stopped(how, folder):
    """12 steps with a checkpoint after 7; then 7 to 12 again from it.

    An epoch has 7 steps, because Lightning begins its data anew where it resumes within an epoch.
    """
    place, optimizer, sums = place_of(how, folder), kind_of(how), Residuals()
    keeps = ModelCheckpoint(place, filename="{step}", every_n_train_steps=7, save_top_k=-1, save_last="link")
    more = {"enable_checkpointing": True, "callbacks": [keeps]}
    module, _ = fit(StenogradStrategy(how), 12, Task(optimizer), data(7), **more)
    again, _ = resume(StenogradStrategy(how), place / "last.ckpt", Task(optimizer), callbacks=[sums])
    kept = sorted(os.listdir(place))
    return {"whole": digest(module), "resumed": digest(again), "kept": kept, "sums": sums.sums}


def asked(how, folder):
    """SIGTERM to rank 1 in the step before the fourth ends; then 12 steps from what was saved, all alike."""
    path, rank = Path(folder, f"asked-{how[:4]}.ckpt"), int(os.environ["RANK"])

    class Ask(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if rank == 1 and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with stenograd.stop_on():
        stopping = [Ask(), StopOnRequest(path)]
        _, training = fit(StenogradStrategy(how), 12, loader=data(4), callbacks=stopping, min_epochs=3)
    same = signal.getsignal(signal.SIGTERM) == before
    step = torch.load(path, weights_only=False)["global_step"]
    whole, _ = fit(StenogradStrategy(how), 12, loader=data(4))
    resumed, _ = resume(StenogradStrategy(how), path, Task(), data(4))
    digests = {"whole": digest(whole), "resumed": digest(resumed)}
    ended = {"trained": training.global_step, "least": training.fit_loop.min_epochs}
    return {**digests, **ended, "step": step, "stopping": training.strategy.sync.stopping, "same": same}


def by_hand(how, folder):
    """Ended after 7 steps and saved by hand, after fit has ended.

    All batches are the same one, because Lightning repeats the last batch where fit had ended an epoch.
    """
    path, optimizer = Path(folder, f"hand-{how[:4]}.ckpt"), kind_of(how)
    whole, _ = fit(StenogradStrategy(how), 12, Task(optimizer), data(1))
    _, training = fit(StenogradStrategy(how), 7, Task(optimizer), data(1))
    training.save_checkpoint(path)
    resumed, _ = resume(StenogradStrategy(how), path, Task(optimizer), data(1))
    return {"whole": digest(whole), "resumed": digest(resumed)}


def place_of(how, folder):
    return Path(folder, how[:4])


def kind_of(how):
    return "sgd" if how.startswith("topk") else "adam"


def resume(strategy, path, module, loader=None, **more):
    training = trainer(strategy, 12, **more)
    training.fit(module, loader or data(7), ckpt_path=str(path), weights_only=False)
    return module, training


def removed(folder):
    """What is left where only the newest of several checkpoints is kept."""
    keeps = ModelCheckpoint(Path(folder, "one"), filename="{step}", every_n_train_steps=3, save_top_k=1)
    fit(StenogradStrategy("sign"), 9, loader=data(9), enable_checkpointing=True, callbacks=[keeps])
    dist.barrier()
    return sorted(str(p.relative_to(folder)) for p in Path(folder, "one").iterdir())


def without_ours(folder):
    """A checkpoint of Lightning's own may be continued; ours without its folder may not."""
    out, path = {}, Path(folder, "plain.ckpt")
    _, training = fit(DDPStrategy(), 5, loader=data(12))
    training.save_checkpoint(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(StenogradStrategy("sign"), path, Task())
    out["said"] = [str(w.message) for w in caught if "start anew" in str(w.message)]
    _, training = fit(StenogradStrategy("sign"), 5, loader=data(12))
    training.save_checkpoint(path)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(f"{path}.stenograd").rename(Path(folder, "lost"))
    dist.barrier()
    try:
        resume(StenogradStrategy("sign"), path, Task())
    except stenograd.errors.CheckpointError as error:
        out["lost"] = str(error)
    return out


def reshard(how, folder):
    """Continue on three ranks what two have saved."""
    sums = Residuals()
    path = place_of(how, folder) / "step=7.ckpt"
    module, training = resume(StenogradStrategy(how), path, Task(kind_of(how)), callbacks=[sums])
    return {**told(training.strategy.sync, module), "sums": sums.sums}


def loop(fabric, model, optimizer, steps, every=1, start=0, bad=None):
    """Fabric's training loop, as its documentation shows it."""
    for i, (x, y) in enumerate(data(steps * every)):
        if i < start:
            continue
        last = (i + 1) % every == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss * float("nan") if bad == (i, fabric.global_rank) else loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def started(strategy, **more):
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **more)
    fabric.launch()
    model = net()
    return fabric, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def fabric_plain(folder):
    """By Fabric's own strategy and by ours."""
    out = {}
    for name, strategy in (("ddp", "ddp"), ("dense", StenogradFabricStrategy("dense"))):
        fabric, model, optimizer = started(strategy)
        loop(fabric, model, optimizer, 50)
        out[name] = digest(model)
    return out


def fabric_trained(how, folder):
    fabric, model, optimizer = started(StenogradFabricStrategy(how))
    loop(fabric, model, optimizer, 50)
    with fabric.strategy.sync.consensus():
        return told(fabric.strategy.sync, model)


def fabric_accumulated(how, folder):
    fabric, model, optimizer = started(StenogradFabricStrategy(how))
    loop(fabric, model, optimizer, 12, every=4)
    return told(fabric.strategy.sync, model)


def fabric_stopped(how, folder):
    path = Path(folder, f"fabric-{how[:4]}.ckpt")
    fabric, model, optimizer = started(StenogradFabricStrategy(how))
    loop(fabric, model, optimizer, 7)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 7})
    loop(fabric, model, optimizer, 12, start=7)
    whole = digest(model)
    fabric, model, optimizer = started(StenogradFabricStrategy(how))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state, weights_only=False)
    loop(fabric, model, optimizer, 12, start=state["step"])
    return {"whole": whole, "resumed": digest(model), "rest": sorted(rest)}


def fabric_anew(how, folder):
    """Weights of a checkpoint of Fabric's own strategy, and rounds after them that move nothing."""
    path, kept = Path(folder, f"anew-{how[:4]}.ckpt"), {}
    fabric, model, optimizer = started("ddp")
    loop(fabric, model, optimizer, 5)
    optimizer.param_groups[0]["lr"] = 0.0
    fabric.save(path, {"model": model, "optimizer": optimizer})
    for name in ("model alone", "both"):
        fabric, model, optimizer = started(StenogradFabricStrategy(how))
        optimizer.param_groups[0]["lr"] = 0.0
        loop(fabric, model, optimizer, 3)
        parts = {"model": model} if name == "model alone" else {"model": model, "optimizer": optimizer}
        fabric.load(path, parts, weights_only=False)
        loaded = digest(model)
        loop(fabric, model, optimizer, 20)
        kept[name] = digest(model) == loaded
    return kept


def fabric_from_own(folder):
    """What Fabric's own strategy saved, loaded in mid-round, whole or the weights alone, is in common."""
    path = Path(folder, "fabric-own.ckpt")
    fabric, model, optimizer = started("ddp")
    loop(fabric, model, optimizer, 3)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    found = {"saved": digest(model)}
    for what in ("whole", "weights"):
        fabric, model, optimizer = started(StenogradFabricStrategy("diloco:every=4"))
        loop(fabric, model, optimizer, 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            parts = {"model": model, "optimizer": optimizer}
            fabric.load(path, parts if what == "whole" else {"model": model}, weights_only=False)
        with fabric.strategy.sync.consensus():
            found[what] = digest(model)
    return found


def fabric_bad(folder):
    warnings.simplefilter("ignore")
    fabric, model, optimizer = started(StenogradFabricStrategy("topk:ratio=0.05"))
    loop(fabric, model, optimizer, 10, bad=(4, 1))
    return told(fabric.strategy.sync, model)


class Breaks(Callback):
    """Raises on every rank, in a step or at one of Trainer's events."""

    def __init__(self, where):
        self.where = where

    def on_train_batch_end(self, *_):
        if self.where == "step":
            raise KeyError("a user's mistake")

    def on_validation_end(self, *_):
        if self.where == "validation":
            raise KeyError("a user's mistake")

    def on_train_end(self, *_):
        if self.where == "end":
            raise KeyError("a user's mistake")


def ended(how, where, folder):
    """What is left of ours, after 6 steps or an error."""
    module = Task()
    more = {"callbacks": [Breaks(where)], "val_check_interval": 5, "num_sanity_val_steps": 0}
    training = trainer(StenogradStrategy(how), 6, **more)
    try:
        training.fit(module, data(10), data(1))
    except KeyError:
        broke = True
    else:
        broke = False
    begun = training.strategy.sync.step > 0
    out = {"left": left_over(module, *training.optimizers), "broke": broke, "begun": begun}
    try:
        training.save_checkpoint(Path(folder, "ended.ckpt"))
    except stenograd.StenogradError as error:
        return out | {"said": str(error)}
    return out | {"said": ""}


def fabric_ended(how, way, folder):
    """What is left of ours, after the strategy was torn down or all that a program holds of it is gone."""
    fabric, model, optimizer = started(StenogradFabricStrategy(how))
    loop(fabric, model, optimizer, 6)
    bare, held, sync = model.module, optimizer.optimizer, fabric.strategy.sync
    begun = sync.step > 0
    alive = left_over(bare, held)
    if way == "torn down":
        fabric.strategy.teardown()
        return {"alive": alive, "left": left_over(bare, held), "begun": begun}
    del fabric, model, optimizer, bare, held, sync
    return {"alive": alive, "left": left_when_dropped(net()), "begun": begun}


class Counted(Task):
    """Tells how many rows each batch has."""

    def training_step(self, batch, index):
        x, y = batch
        self.trainer.strategy.weight(len(x))
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def weighed(how, folder):
    """Uneven batches, counted by their rows, and how far that leads from one process with all of them."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = DataLoader([uneven(step, rank, WIDE) for step in range(12)], batch_size=None)
    module = Counted()
    training = trainer(StenogradStrategy(how), 4, accumulate_grad_batches=3)
    training.fit(module, batches)
    moved, wanted = by_one_process(net(), 12, ranks, 3, 0.05)
    return {"moved": moved, "difference": (flat(module.net) - flat(wanted)).abs().max().item()}


def launched(folder):
    """Lightning's own launcher: the names of registered strategies, the logger, and init() before fit."""
    logger = CSVLogger(folder, name="", version="log")
    training = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="stenograd_topk",
        use_distributed_sampler=False,
        max_steps=6,
        logger=logger,
        log_every_n_steps=2,
        callbacks=[TrafficLogger()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Task()
    training.fit(module, data(6))
    sync = training.strategy.sync
    worlds = {"world": dist.get_world_size(), "init": stenograd.init().world_size}
    return {**told(sync, module), **worlds, "method": str(sync.method)}


def too_early(folder):
    """Joining the ranks before Lightning has started them."""
    stenograd.init()
    training = Trainer(accelerator="cpu", devices=2, strategy="stenograd_topk", logger=False, max_steps=1)
    try:
        training.fit(Task(), data(1))
    except stenograd.errors.LaunchError as error:
        return str(error)


def clipped(folder):
    """Clipping what a method delivers in the place of gradients; what Trainer and Fabric say."""
    clipping = trainer(StenogradStrategy("demo"), 1, gradient_clip_val=1.0)
    said = [refusal(clipping.fit, Task("plain"), data(1))]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=StenogradFabricStrategy("demo"))
    fabric.launch()
    bare = net()
    prepared = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.05))
    said += [refusal(fabric.clip_gradients, *prepared, **{way: 1.0}) for way in ("max_norm", "clip_val")]
    return said


def refusal(call, *args, **options):
    """Return what a method's refusal says."""
    try:
        call(*args, **options)
    except stenograd.errors.MethodError as error:
        return str(error)


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    end(globals()[scenario](*arguments))
