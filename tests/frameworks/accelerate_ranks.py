"""What test_accelerate.py runs on every rank: `SCENARIO ARGUMENTS FOLDER`; prints JSON."""

import math
import sys
import warnings
from pathlib import Path

import accelerate.local_sgd
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from left_over import left_over, left_when_dropped
from small_model import by_one_process, digest, end, flat, net, uneven
from torch import nn

import stenograd
import stenograd.accelerate


class Run:
    """One training: a fresh Accelerator, with a method or without."""

    def __init__(self, method=None, accumulate=1, seed=0, handlers=(), **options):
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, kwargs_handlers=list(handlers)
        )
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        if method is not None:
            self.attached = stenograd.accelerate.use(self.accelerator, method, timeout_s=120, **options)
        bare = net(seed)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(bare, optimizer)
        self.bare = bare

    def train(self, batches, bad=None, after=lambda: None):
        for number in batches:
            torch.manual_seed(1000 * number + self.rank)
            x, y = torch.randn(4, 64), torch.randn(4, 64)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - y).square().mean()
                if (number, self.rank) == bad:
                    loss = loss * float("nan")
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            after()
        return self


def dense(folder):
    """50 optimizer steps of 4 batches each, with Accelerate's own DDP and with ours."""
    own = Run(accumulate=4).train(range(200))
    ours = Run("dense", accumulate=4).train(range(200))
    return {
        "difference": (flat(own.bare) - flat(ours.bare)).abs().max().item(),
        "moved": (flat(own.bare) - flat(net())).abs().max().item(),
        "exchanges": ours.attached.sync.step,
        "bytes": ours.attached.traffic.moved_bytes,
    }


def weighed(method, folder):
    """Uneven batches, counted by their rows, and how far that leads from one process with all of them."""
    run = Run(method, accumulate=3)
    run.optimizer.param_groups[0]["momentum"] = 0.0
    for step in range(12):
        x, y = uneven(step, run.rank)
        with run.accelerator.accumulate(run.model):
            run.attached.weight(len(x))
            run.accelerator.backward((run.model(x) - y).square().mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    moved, wanted = by_one_process(net(), 12, run.ranks, 3, 0.05)
    return {"moved": moved, "difference": (flat(run.bare) - flat(wanted)).abs().max().item()}


def accumulated_rounds(folder):
    rounds = Run("local:every=2", accumulate=4).train(range(32))
    return {"passes": rounds.attached.sync.step, "rounds": rounds.attached.sync.round}


def trained(method, folder):
    """22 steps."""
    run = Run(method).train(range(22))
    in_common, sent = digest(run.bare), run.attached.traffic.moved_bytes
    if run.attached.rounds:
        with run.attached.sync.consensus():
            in_common = digest(run.bare)
    wrapped = hasattr(run.model, "require_backward_grad_sync")
    return {"own": digest(run.bare), "common": in_common, "bytes": sent, "wrapped": wrapped}


def stopped(method, folder):
    """12 steps, and 6 of them after a stop at a point where `local` is in mid-round."""
    place = Path(folder, method.partition(":")[0])
    run = Run(method).train(range(6))
    state = run.attached.sync.state_dict()
    torch.save((flat(run.bare), state), Path(folder, f"{place.name}-rank{run.rank}.pt"))
    run.accelerator.save_state(str(place))
    whole = digest(run.train(range(6, 12)).bare)
    again = Run(method, seed=7)
    again.accelerator.load_state(str(place))
    return {"whole": whole, "resumed": digest(again.train(range(6, 12)).bare)}


def resharded_residuals(folder):
    """On other ranks than those that saved: what is owed, and where training leads."""
    top = Run("topk:ratio=0.05", seed=7)
    top.accelerator.load_state(str(Path(folder, "topk")))
    owed = torch.cat(
        [s["residual"].reshape(-1) for _, s in sorted(top.attached.sync.state_dict()["parameters"].items())]
    )
    owed = top.accelerator.reduce(owed.double(), reduction="sum")
    before = [torch.load(Path(folder, f"topk-rank{r}.pt"))[1]["parameters"] for r in (0, 1)]
    wanted = sum(
        torch.cat([s["residual"].reshape(-1) for _, s in sorted(parameters.items())]).double()
        for parameters in before
    )
    return {
        "owed": (owed - wanted).abs().max().item(),
        "owed at all": wanted.abs().max().item(),
        "after": digest(top.train(range(6, 9)).bare),
    }


def resharded_rounds(folder):
    """On other ranks than those that saved: where training starts."""
    local = Run("local:every=4", seed=7)
    local.accelerator.load_state(str(Path(folder, "local")))
    saved = [torch.load(Path(folder, f"local-rank{r}.pt"))[0] for r in (0, 1)]
    return {
        "mean": (flat(local.bare) - (saved[0] + saved[1]) / 2).abs().max().item(),
        "ranks differed": (saved[0] - saved[1]).abs().max().item(),
    }


def bad(folder):
    """One NaN on rank 1, and the same training without that step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        one = Run("topk:ratio=0.05").train(range(8), bad=(3, 1))
    without = Run("topk:ratio=0.05").train([0, 1, 2, 4, 5, 6, 7])
    return {"bad": digest(one.bare), "without": digest(without.bare), "skipped": one.attached.sync.skipped}


def local_sgd(folder):
    """8 steps by Accelerate's LocalSGD and by ours, averaging every 3 and at the end; then compressed."""
    runs = []
    for kind in (accelerate.local_sgd.LocalSGD, stenograd.accelerate.LocalSGD):
        run = Run()
        with kind(accelerator=run.accelerator, model=run.model, local_sgd_steps=3) as local:
            run.train(range(8), after=local.step)
        runs.append(run)
    theirs, ours = runs
    few = Run(accumulate=2)
    with stenograd.accelerate.LocalSGD(few.accelerator, few.model, 2, method="bf16") as local:
        few.train(range(12), after=local.step)
        rounds = local.sync.round
    own = few.accelerator.no_sync.__func__ is Accelerator.no_sync
    return {
        "difference": (flat(theirs.bare) - flat(ours.bare)).abs().max().item(),
        "common": digest(ours.bare),
        "rounds of 6 steps": rounds,
        "bf16 common": digest(few.bare),
        "put back": own,
    }


def ended(method, way, folder):
    """What is left of ours, after 6 steps and an end of some kind; then 2 steps more, prepared again."""
    run = Run(method).train(range(6))
    alive, sent = left_over(run.bare, run.optimizer.optimizer), run.attached.traffic.moved_bytes
    out = {"alive": alive, "steps": run.attached.sync.step}
    if way == "dropped":
        del run
        return out | {"left": left_when_dropped(net())}
    if way == "end of training":
        run.accelerator.end_training()
        return out | {"left": left_over(run.bare, run.optimizer.optimizer)}
    run.attached.close()
    out["left"] = left_over(run.bare, run.optimizer.optimizer)
    held = run.optimizer.optimizer
    run.accelerator.free_memory()
    run.model, run.optimizer = run.accelerator.prepare(run.bare, held)
    run.train(range(6, 8))
    more = run.attached.traffic.moved_bytes - sent
    whole = digest(Run(method).train(range(8)).bare)
    out |= {"steps": run.attached.sync.step, "more": more > 0}
    return out | {"after": digest(run.bare), "whole": whole}


def from_own(folder):
    """What a run without a method saved, loaded in mid-round and where something is owed."""
    place = str(Path(folder, "own"))
    own = Run(seed=3).train(range(2))
    own.accelerator.save_state(place)
    rounds, top = Run("diloco:every=4").train(range(6)), Run("topk:ratio=0.05").train(range(2))
    for run in (rounds, top):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run.accelerator.load_state(place)
    found = {"saved": digest(own.bare), "loaded": digest(rounds.bare)}
    with rounds.attached.sync.consensus():
        found["common"] = digest(rounds.bare)
    parameters = top.attached.sync.state_dict()["parameters"].values()
    return found | {"owed": sum(t["residual"].abs().sum().item() for t in parameters)}


def local_sgd_ended(way, folder):
    """What is left of ours where the block ends by an error, or its last round fails."""
    run = Run()
    try:
        with stenograd.accelerate.LocalSGD(run.accelerator, run.model, 4) as local:
            run.train(range(6))
            alive = left_over(run.bare, run.optimizer.optimizer)
            if way == "round":
                local.sync.refresh = lambda: {}["a peer is lost"]
            else:
                raise KeyError(way)
    except KeyError:
        return {"alive": alive, "left": left_over(run.bare, run.optimizer.optimizer)}


def shared(method, folder):
    """8 steps of two models that one optimizer trains, 2 batches each; then 2 more, prepared again."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    attached = stenograd.accelerate.use(accelerator, method, timeout_s=120)
    torch.manual_seed(0)
    both = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 32)])
    held, before = torch.optim.SGD(both.parameters(), lr=0.05, momentum=0.9), flat(both)
    moved = []
    for batches in (range(16), range(16, 20)):
        first, second, optimizer = accelerator.prepare(*both, held)
        for number in batches:
            torch.manual_seed(1000 * number + accelerator.process_index)
            with accelerator.accumulate(first, second):
                accelerator.backward(second(torch.tanh(first(torch.randn(4, 64)))).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        moved.append((flat(both) - before).abs().max().item())
        attached.close()
        accelerator.free_memory()
    return {"steps": attached.sync.step, "moved": moved, "digest": digest(both)}


def evaluated(folder):
    """A model that is prepared for evaluation before `use`, and one that is before it is trained."""
    accelerator = Accelerator(cpu=True)
    fixed, bare = accelerator.prepare_model(net(1), evaluation_mode=True), net()
    attached = stenograd.accelerate.use(accelerator, "topk:ratio=0.05", timeout_s=120)
    seen = accelerator.prepare_model(bare, evaluation_mode=True)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.05))
    for number in range(3):
        torch.manual_seed(1000 * number + accelerator.process_index)
        x = torch.randn(4, 64)
        accelerator.backward((model(x) - fixed(x)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    found = {"unwrapped": seen is bare, "steps": [one.step for one in attached.syncs]}
    return found | {"models": len(accelerator._models), "digest": digest(bare)}


def said(call):
    """Return the class and text of what a call raises, or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    ours = ("no state of a method", "no exchange has averaged")
    return "; ".join(str(one.message) for one in caught if any(text in str(one.message) for text in ours))


def refused(folder):
    """What must not pass in silence."""
    plain, ours, rounds = Run(), Run("topk:ratio=0.05"), Run("local:every=4")
    plain.train(range(1))
    plain.accelerator.save_state(str(Path(folder, "plain")))
    rounds.accelerator.save_state(str(Path(folder, "rounds")))
    alone = Accelerator(cpu=True)
    stenograd.accelerate.use(alone, "local:every=4")
    half = alone.prepare(net())
    two = net()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (two[0], two[2])]
    again = Accelerator(cpu=True)
    stenograd.accelerate.use(again, "local:every=4")
    again.prepare(two, halves[0])
    fp16 = DistributedDataParallelKwargs(comm_hook="fp16")
    other = Run("local:every=8").accelerator
    use = stenograd.accelerate.use
    along = Accelerator(cpu=True)
    use(along, "demo")
    bare = net()
    pair, sharing = [nn.Linear(4, 4), nn.Linear(4, 2)], Accelerator(cpu=True)
    shared, *_ = sharing.prepare(*pair, torch.optim.SGD(nn.ModuleList(pair).parameters(), lr=0.1))
    directed, _ = along.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))

    def dense_after_all():
        with accelerate.local_sgd.LocalSGD(ours.accelerator, ours.model, 4) as local:
            ours.train(range(2), after=local.step)

    return {
        "dense after all": said(dense_after_all),
        "direction": said(lambda: along.clip_grad_norm_(directed.parameters(), max_norm=1.0)),
        "its elements": said(lambda: along.clip_grad_value_(directed.parameters(), 0.1)),
        "its norm": said(lambda: along.clip_grad_norm_(directed.parameters(), math.inf)),
        "late": said(lambda: use(plain.accelerator, "dense")),
        "twice": said(lambda: use(ours.accelerator, "dense")),
        "hook": said(lambda: Run("dense", handlers=[fp16])),
        "rank 0 only": said(lambda: ours.accelerator.register_for_checkpointing(ours.attached.sync)),
        "no optimizer": said(lambda: alone.backward(half(torch.ones(1, 64)).sum())),
        "later optimizer": said(lambda: again.prepare(halves[1])),
        "name": said(lambda: use(Accelerator(cpu=True), "tpk")),
        "timeout": said(lambda: use(Accelerator(cpu=True), "dense", timeout_s=0)),
        "interval": said(lambda: use(Accelerator(cpu=True), "dense", check_every=-1)),
        "early": said(lambda: use(Accelerator(cpu=True), "dense").sync),
        "no state": said(lambda: Run("topk:ratio=0.05").accelerator.load_state(str(Path(folder, "plain")))),
        "other method": said(lambda: other.load_state(str(Path(folder, "rounds")))),
        "local and local": said(
            lambda: stenograd.accelerate.LocalSGD(rounds.accelerator, rounds.model, 4).__enter__()
        ),
        "another model": said(lambda: stenograd.accelerate.LocalSGD(sharing, shared, 4).__enter__()),
        "steps": said(lambda: stenograd.accelerate.LocalSGD(plain.accelerator, plain.model, 0)),
        "schedule": said(
            lambda: stenograd.accelerate.LocalSGD(plain.accelerator, plain.model, 4, method="diloco")
        ),
    }


def handler(folder):
    """Fields that a user gave to Accelerate's own."""
    given = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
    kept = Run("dense", handlers=[given]).train(range(1))
    return [kept.model.find_unused_parameters, kept.model.gradient_as_bucket_view]


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, *arguments = sys.argv[1:]
    end(globals()[scenario](*arguments))
