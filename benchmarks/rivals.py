"""The ways to train that are compared: no exchange, DistributedDataParallel's hooks, Stenograd's methods.

And the one training loop of the benchmarks, for random batches (`Rival`) and for a task (`Trainee`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise, repeat
from typing import Any

import torch
import torch.distributed as dist
from harness import settled_bytes, slowest
from scenarios import WORKS, loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd import simulate, tasks
from stenograd.catalog.method import for_any_optimizer
from stenograd.launch.network import address_towards

__all__ = [
    "DDP_HOOKS",
    "EPFML",
    "FLOOR",
    "RIVALS",
    "TORCHFT",
    "Attached",
    "Points",
    "Rival",
    "Spent",
    "Trainee",
    "check_names",
    "in_parts",
    "is_here",
]

Points = Sequence[Mapping[str, Any]]  # one rival's epoch, seconds, host_bytes, counted_bytes, loss, accuracy

FLOOR = "none"  # every rank trains for itself
RIVALS = [FLOOR, "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", *for_any_optimizer()]
_ONE_BUCKET_MB = 1 << 20
_EVAL_BATCH = 500


def check_names(names: list[str]) -> None:
    """Check the rivals' names before anything is started.

    Raises:
        MethodError: a name is none of the others' and no Stenograd method either.
        ValueError: its package is not here.
    """
    for name in names:
        if name in EPFML and not is_here(name):
            raise ValueError(f"{name} needs github.com/epfml/powersgd: put its folder into PYTHONPATH")
        if name == TORCHFT and not is_here(name):
            raise ValueError(f"{name} needs torchft: pip install torchft")
        if name not in (FLOOR, TORCHFT) and name not in DDP_HOOKS and name not in EPFML:
            stenograd.method(name)


def is_here(name: str) -> bool:
    """Return whether the package of a rival is installed; Stenograd's and torch's own are."""
    package = "powersgd" if name in EPFML else "torchft" if name == TORCHFT else "torch"
    return importlib.util.find_spec(package) is not None


class Attached:
    """A model attached to the other ranks.

    Args:
        name: "none", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "epfml-powersgd" (which sends both
            factors of rank 4 each step), "epfml-powersgd-1" (one in turns), "torchft-diloco" (a round in ten
            steps), or a Stenograd method such as "topk:ratio=0.01".
        model: the model; `module` is what to call in its place.
        optimizer: over the model's parameters.

    Raises:
        RuntimeError, TypeError, ValueError: DDP refuses this hook on this machine.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = model
        self._sync: Any = None
        if name in DDP_HOOKS:
            self.module = DDP_HOOKS[name](model)
        elif name in EPFML:
            _epfml_powersgd(model, optimizer, EPFML[name])
        elif name == TORCHFT:
            self._held = _torchft_diloco(model, optimizer)
        elif name != FLOOR:
            _compile(name)
            self._sync = stenograd.distribute(model, optimizer, name)

    def consensus(self) -> AbstractContextManager[None]:
        """Put the parameters to evaluate in place for a `with` block, on all ranks."""
        return nullcontext() if self._sync is None else self._sync.consensus()

    @property
    def moved_bytes(self) -> int | None:
        """Bytes that this rank sent by Stenograd's own count; None for the others, which do not count."""
        return self._sync.traffic.moved_bytes if self._sync is not None else None

    def close(self) -> None:
        """Detach."""
        if self._sync is not None:
            self._sync.close()


class Rival:
    """One way to train, with a model and an optimizer of its own.

    Args:
        name: see `Attached`.
        model: equal on all ranks.
        optimizer: over its parameters.
        loss_of: returns the loss of a module on a batch.
        scheduler: takes a step after each of the optimizer's, if there is one.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: Any,
        loss_of: Callable[[nn.Module, Any], Tensor],
        scheduler: Any = None,
    ) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.attached = Attached(name, model, optimizer)
        self._loss_of, self._scheduler = loss_of, scheduler
        self.batch: Any = None

    @classmethod
    def on(cls, work: str, name: str, rank: int) -> Rival:
        """Return a rival that trains one of `WORKS`, always on the same random batch."""
        model, *batch = WORKS[work].make(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rival = cls(name, model, optimizer, lambda module, pair: loss(module(pair[0]), pair[1]))
        rival.batch = batch
        return rival

    def train(self, batches: Iterable[Any]) -> tuple[list[float], list[Tensor]]:
        """Take a step for each batch; return the milliseconds and the losses of all."""
        taken_ms, losses = [], []
        for batch in batches:
            start = time.perf_counter()
            self.optimizer.zero_grad()
            found = self._loss_of(self.attached.module, batch)
            found.backward()
            self.optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            taken_ms.append((time.perf_counter() - start) * 1e3)
            losses.append(found.detach())
        return taken_ms, losses

    def steps(self, count: int) -> list[float]:
        """Train so many times on the batch and return the milliseconds of each step."""
        taken_ms, _ = self.train(repeat(self.batch, count))
        self.optimizer.zero_grad()  # gradients of thirteen rivals would fill the memory
        return taken_ms


@dataclass
class Spent:
    """What training took.

    Attributes:
        seconds: of the slowest rank, evaluation excluded.
        host_bytes: sent by rank 0's host, read from its interface.
        counted_bytes: sent by rank 0, by Stenograd's count; None where nobody counts.
        loss: mean over this rank's batches of the last piece.
    """

    seconds: float = 0.0
    host_bytes: int = 0
    counted_bytes: int | None = None
    loss: float = float("nan")


class Trainee(Rival):
    """A rival with a share of a task's data; those with equal seeds see the same batches.

    Args:
        name: see `Attached`.
        task: MNIST, with SINGA's recipe, or text, with nanoGPT's.
        seed: of the weights, the shards and the order of the samples.
        steps: of an epoch; None for as many as show every sample once, or as the recipe says.
        epochs: after which the learning rate ends; None for the recipe's.
    """

    def __init__(
        self, name: str, task: tasks.Task, seed: int, steps: int | None = None, epochs: int | None = None
    ) -> None:
        self.task, self._seed, self.spent = task, seed, Spent()
        model = task.model(seed)
        if task.name == "mnist" and name not in EPFML:  # which views weights as matrices, and cannot these
            model.to(memory_format=torch.channels_last)  # faster convolutions on CPU
        recipe, size, steps = task.recipe, task.train_size, steps or task.recipe.steps_per_epoch
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.per_epoch = tasks.steps_per_epoch(size, self._ranks, recipe.batch_size, steps)
        self._shard = tasks.shard(size, self._rank, self._ranks, shuffle=True, seed=seed)
        optimizer = recipe.make_optimizer(model)
        scheduler = recipe.make_scheduler(optimizer, self.per_epoch * (epochs or recipe.epochs))
        super().__init__(name, model, optimizer, self._loss, scheduler)

    def _loss(self, module: nn.Module, indices: Tensor) -> Tensor:
        found: Tensor = self.task.loss(module, *self.task.train_batch(indices))[0]
        return found

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """Return this rank's batches of an epoch, as sample numbers."""
        size, order = self.task.recipe.batch_size, {"epoch": epoch, "seed": self._seed, "shuffle": True}
        return tasks.batches(self._shard, size, steps=self.per_epoch, **order)

    def learn(self, batches: Iterable[Tensor]) -> None:
        """Take a step for each batch and add what that took to `spent`."""
        before, start = settled_bytes(), time.perf_counter()
        _, losses = self.train(batches)
        seconds = time.perf_counter() - start
        self.spent.host_bytes += settled_bytes() - before
        self.spent.seconds += slowest(seconds)
        self.spent.counted_bytes = self.attached.moved_bytes
        self.spent.loss = float(torch.stack(losses).mean())

    @torch.no_grad()
    def scores(self) -> tuple[float, float]:
        """Return the mean loss of evaluation samples and the share that is right, each judged on one rank."""
        sums = torch.zeros(3, dtype=torch.float64)
        with self.attached.consensus():
            for indices in tasks.eval_batches(self.task.eval_size, self._rank, self._ranks, _EVAL_BATCH):
                loss, right, count = self.task.loss(self.model, *self.task.eval_batch(indices))
                sums += torch.tensor([loss.item() * count, right, count], dtype=torch.float64)
        dist.all_reduce(sums)
        loss_sum, right_sum, count_sum = sums.tolist()
        return loss_sum / count_sum, right_sum / count_sum

    def replicas_equal(self) -> bool:
        """Return whether all ranks have the same parameters, to the bit."""
        mine = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        return slowest(float(not torch.equal(mine, theirs))) == 0


def in_parts(
    trainees: Sequence[Trainee],
    args: argparse.Namespace,
    after: Callable[[Trainee, int], dict[str, Any]] = lambda trainee, epoch: {},
) -> dict[str, list[dict[str, Any]]]:
    """Let trainees take turns; what `after` returns for a trainee and an epoch goes into its point."""
    points: dict[str, list[dict[str, Any]]] = {trainee.name: [] for trainee in trainees}
    for epoch in range(args.epochs):
        batches = [_parts(list(trainee.batches(epoch)), args.parts) for trainee in trainees]
        for part in range(args.parts):
            for trainee, mine in zip(trainees, batches, strict=True):
                trainee.learn(mine[part])
                more = after(trainee, epoch)
                loss, accuracy = trainee.scores()
                where = {"epoch": epoch + (part + 1) / args.parts, "accuracy": accuracy, "eval_loss": loss}
                points[trainee.name].append(where | asdict(trainee.spent) | more)
            if dist.get_rank() == 0:
                print(_progress(points), flush=True)
    for trainee in trainees:
        trainee.attached.close()
    return points


def _parts(batches: list[Any], count: int) -> list[list[Any]]:
    """Cut an epoch's batches in nearly equal parts."""
    cuts = [len(batches) * part // count for part in range(count + 1)]
    return [batches[start:end] for start, end in pairwise(cuts)]


def _progress(points: Mapping[str, Points]) -> str:
    told = [
        f"{n} {100 * p[-1]['accuracy']:.2f} %, {p[-1]['eval_loss']:.4f} after {p[-1]['seconds']:.1f} s"
        for n, p in points.items()
    ]
    return f"epoch {next(iter(points.values()))[-1]['epoch']:.2f}: {', '.join(told)}"


def _compile(name: str) -> None:
    """Exchange a few numbers in this process, so that kernels are compiled or loaded before time counts."""
    shapes, generator = [torch.Size((64, 64)), torch.Size((64,))], torch.Generator().manual_seed(0)
    xs = [torch.randn(64 * 65, generator=generator) for _ in range(dist.get_world_size())]
    simulate.exchange(stenograd.method(name).compressor, xs, shapes=shapes)


def _ddp_cast(hook: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
        return wrapped

    return wrap


def _ddp_powersgd(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    # With several buckets on gloo the ranks' collectives get out of step, and the run hangs or aborts.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB)
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=4,
        start_powerSGD_iter=2,  # the least it takes; by default the first 1,000 steps are dense
    )
    # DDP compares annotations with its own classes; a lambda has none.
    wrapped.register_comm_hook(state, lambda state, bucket: _powersgd_on_one_bucket(state, bucket))
    return wrapped


def _powersgd_on_one_bucket(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    if bucket.index() or not bucket.is_last():
        raise RuntimeError("DDP's PowerSGD hook must get one bucket, or the run hangs: raise bucket_cap_mb")
    return powerSGD_hook(state, bucket)


DDP_HOOKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp-fp16": _ddp_cast("fp16_compress_hook"),
    "ddp-bf16": _ddp_cast("bf16_compress_hook"),
    "ddp-powersgd": _ddp_powersgd,
}

EPFML = {"epfml-powersgd": 2, "epfml-powersgd-1": 1}  # factors that are sent each step


def _epfml_powersgd(model: nn.Module, optimizer: torch.optim.Optimizer, factors: int) -> None:
    """Let a step exchange gradients by the package of PowerSGD's authors, as its `optimizer_step` does.

    The gradients hold what was left out when a step has ended, so nobody may set them to zero.
    """
    from powersgd import Config, PowerSGD

    held = list(model.parameters())
    settings = Config(rank=4, num_iters_per_step=factors, start_compressing_after_num_steps=0)
    exchange = PowerSGD(held, settings)
    left: list[Tensor] = []

    def before(*_: object) -> None:
        left[:] = [p.grad for p in held if p.grad is not None]
        for p, mean in zip(held, exchange.aggregate(left), strict=True):
            p.grad = mean

    def after(*_: object) -> None:
        for p, residual in zip(held, left, strict=True):
            p.grad = residual

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


TORCHFT, _TORCHFT_EVERY = "torchft-diloco", 10
_HOUR = timedelta(hours=1)  # in which the other rivals take their turns


def _torchft_diloco(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Let every tenth step hold a round of torchft's DiLoCo; each rank is a replica of one process.

    Rank 0's process has the lighthouse, where replicas meet before each round.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, size = dist.get_rank(), dist.get_world_size()
    address = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"), 1)
    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=size) if rank == 0 else None
    found = [lighthouse and f"http://{address}:{lighthouse.address().rpartition(':')[2]}"]
    dist.broadcast_object_list(found, 0)
    c10d: Any = dist
    store = c10d.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    state: dict[str, Any] = {}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_HOUR),
        load_state_dict=state.update,
        state_dict=lambda: state,
        min_replica_size=size,
        use_async_quorum=False,
        timeout=_HOUR,
        quorum_timeout=_HOUR,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=found[0],
        replica_id=f"replica{rank}",
        hostname=address,
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    rounds = DiLoCo(manager, [model], optimizer, outer, _TORCHFT_EVERY, pin_memory=False)
    rounds.__enter__()
    return lighthouse, store, manager, rounds
