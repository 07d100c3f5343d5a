"""What tests of Ray Train run on every worker, and torchrun on every rank; the last line is JSON.

With "ray" as its first argument this is the driver: it trains with 2 workers, again with 2 from the
checkpoints that Ray keeps of that, and with 3.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch
from small_model import digest, flat, net

import stenograd

METHODS = ("topk:ratio=0.05", "sign", "powersgd:rank=1", "local:every=4", "diloco:every=10")
KEPT = ("topk:ratio=0.05", "local:every=4")


class Run:
    """One training: by a method, or with `wrap` by somebody's DistributedDataParallel."""

    def __init__(self, method=None, accumulate=1, seed=0, wrap=lambda model: model):
        self.rank, self.accumulate = torch.distributed.get_rank(), accumulate
        self.bare = net(seed)
        self.model = wrap(self.bare)
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.05, momentum=0.9)
        if method is not None:
            self.sync = stenograd.distribute(self.model, self.optimizer, method, timeout_s=120)
        self.whole = {"model": self.bare, "optimizer": self.optimizer, "sync": getattr(self, "sync", None)}

    def train(self, batches, bad=None):
        quiet = getattr(self, "sync", self.model).no_sync if self.accumulate > 1 else None
        for number in batches:
            torch.manual_seed(1000 * number + self.rank)
            x, y = torch.randn(4, 64), torch.randn(4, 64)
            last = (number + 1) % self.accumulate == 0
            with contextlib.nullcontext() if last else quiet():
                loss = (self.model(x) - y).square().mean()
                ((loss * float("nan")) if (number, self.rank) == bad else loss).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def dense():
    """50 steps of 4 batches."""
    ours = Run("dense", accumulate=4).train(range(200))
    sent = ours.sync.traffic.moved_bytes
    return {"common": digest(ours.bare), "bytes": sent, "exchanges": ours.sync.step}


def trained(method):
    """22 steps of one batch."""
    run = Run(method).train(range(22))
    sent = run.sync.traffic.moved_bytes
    with run.sync.consensus():
        found = {"common": digest(run.bare), "bytes": sent}
    return found | {"own": digest(run.bare)}


def methods():
    """Train by each method."""
    return {"dense": dense} | {method: partial(trained, method) for method in METHODS}


def plain():
    """The same 50 steps by the DistributedDataParallel that Ray wraps the model in."""
    from ray.train.torch import prepare_model

    own = Run(wrap=prepare_model, accumulate=4).train(range(200))
    return {"digest": digest(own.bare), "moved": (flat(own.bare) - flat(net())).abs().max().item()}


def bad_step():
    """One NaN on rank 1, and the same training without that step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        bad = Run("topk:ratio=0.05").train(range(8), bad=(3, 1))
    without = Run("topk:ratio=0.05").train([0, 1, 2, 4, 5, 6, 7])
    return {"bad": digest(bad.bare), "without": digest(without.bare), "skipped": bad.sync.skipped}


def stopped(method):
    """6 steps, after which Ray keeps a checkpoint (`local` is in mid-round), and 6 more."""
    from ray import train
    from ray.train import Checkpoint

    run = Run(method).train(range(6))
    state = run.sync.state_dict()["parameters"] if method == KEPT[0] else {}
    kept = {"flat": flat(run.bare), "residuals": {name: s["residual"] for name, s in state.items()}}
    with tempfile.TemporaryDirectory() as folder:
        stenograd.save_checkpoint(folder, step=6, extra=kept, **run.whole)
        train.report({"method": method}, checkpoint=Checkpoint.from_directory(folder))
    return digest(run.train(range(6, 12)).bare)


def resumed(method, checkpoint):
    """Go on from what Ray kept: where training starts, what is owed, and where it leads."""
    run = Run(method, seed=7)
    with checkpoint.as_directory() as folder:
        loaded = stenograd.load_checkpoint(folder, **run.whole)
        files = sorted(Path(folder).glob("*-rank*.pt"))
        kept = [torch.load(path)["content"]["extra"] for path in files]
    mean = sum(one["flat"] for one in kept) / len(kept)
    found = {
        "start": (flat(run.bare) - mean).abs().max().item(),
        "ranks differed": (kept[0]["flat"] - kept[1]["flat"]).abs().max().item(),
        "resharded": loaded.resharded,
    }
    if method == KEPT[0]:
        owed = _line(s["residual"] for _, s in sorted(run.sync.state_dict()["parameters"].items()))
        torch.distributed.all_reduce(owed)
        wanted = sum(_line(t for _, t in sorted(one["residuals"].items())) for one in kept)
        found |= {"owed": (owed - wanted).abs().max().item(), "owed at all": wanted.abs().max().item()}
    found["after"] = digest(run.train(range(6, 12)).bare)
    with run.sync.consensus():
        return found | {"common": digest(run.bare)}


def _line(tensors):
    return torch.cat([t.reshape(-1) for t in tensors]).double()


def said(call):
    """Return the class and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def hooked():
    """Two steps by the hook of a model that Ray has wrapped."""
    from ray.train.torch import prepare_model

    run = Run(wrap=prepare_model)
    hook = stenograd.ddp.register(run.model, "topk:ratio=0.05")
    return {"digest": digest(run.train(range(2)).bare), "bytes": hook.traffic.moved_bytes}


def wrapped_after():
    """Train a model that Ray wraps after it was given to `distribute`."""
    from ray.train.torch import prepare_model

    run = Run("topk")
    run.model = prepare_model(run.bare)
    run.train(range(1))


def refused():
    """What must not pass in silence."""
    from ray.train.torch import prepare_model

    return {"wrapped": said(lambda: Run("topk", wrap=prepare_model)), "wrapped after": said(wrapped_after)}


def two():
    """What two workers of Ray are asked for, by name."""
    kept = {f"stopped {method}": partial(stopped, method) for method in KEPT}
    return methods() | kept | {"plain": plain, "bad": bad_step, "hooked": hooked, "refused": refused}


def answers(parts):
    """Return what each part has found, or how it failed."""
    found = {}
    for name, part in parts.items():
        try:
            found[name] = {"found": part()}
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    return found


def drive(folder):
    """Train in Ray three times, and return what the workers of each training found, in rank order."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)

    def work(config):
        torch.set_num_threads(1)
        kept = config["from"]
        found = answers({how: partial(resumed, how, at) for how, at in kept.items()} if kept else two())
        rank = train.get_context().get_world_rank()
        Path(folder, f"{config['name']}-{rank}.json").write_text(json.dumps(found))

    def fit(name, workers, checkpoints=None):
        result = TorchTrainer(
            work,
            train_loop_config={"name": name, "from": checkpoints},
            scaling_config=ScalingConfig(num_workers=workers),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(name=name, storage_path=folder),
        ).fit()
        found[name] = [json.loads(Path(folder, f"{name}-{r}.json").read_text()) for r in range(workers)]
        return {metrics["method"]: kept for kept, metrics in result.best_checkpoints}

    found = {}
    kept = fit("two", 2)
    fit("again", 2, kept)
    fit("three", 3, kept)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "ray":
        answer = drive(sys.argv[2])
    else:
        stenograd.init(timeout_s=120)
        answer = answers(methods())
    print(json.dumps(answer), flush=True)
