"""Programs that do collectives of their own beside Stenograd's, or run out of data on some ranks first."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from accounts import BUCKET_BYTES, Job
from program_networks import net
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import stenograd


def clip(job: Job) -> list[float]:
    """Two encoders and a loss over all ranks' pairs, gathered with gradients on the default group."""
    model = nn.ModuleDict({"image": net(10, 32, 8), "text": net(3, 48, 8)})
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    job.attach(model, optimizer)

    def loss_of(step: int, x: Tensor, y: Tensor) -> Tensor:
        images = nn.functional.normalize(model["image"](x), dim=1)
        texts = nn.functional.normalize(model["text"](y), dim=1)
        every_image = torch.cat(differentiable.all_gather(images))
        every_text = torch.cat(differentiable.all_gather(texts))
        scale, place = model.scale.exp(), torch.arange(len(x)) + job.rank * len(x)
        loss = cross_entropy(scale * images @ every_text.T, place)
        return loss + cross_entropy(scale * texts @ every_image.T, place)

    return job.learn([optimizer], loss_of)


class Exchanged(nn.Module):
    """An expert on each rank, this rank's own, and tokens that travel to their expert and back."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.expert = net(features, 24, features)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Send each token to the rank that is chosen for it."""
        order = chosen.argsort()
        to = torch.bincount(chosen, minlength=dist.get_world_size())
        come = torch.empty_like(to)
        dist.all_to_all_single(come, to)
        there = _exchange(tokens[order], come.tolist(), to.tolist())
        back = _exchange(self.expert(there), to.tolist(), come.tolist())
        return back[order.argsort()]


def mixture(job: Job) -> list[float]:
    """Experts on ranks of their own behind differentiable all-to-all, and others that idle in some steps."""
    model = nn.ModuleDict({"stem": net(10, 32, 12), "router": nn.Linear(12, job.world), "head": net(12, 3)})
    model["shared"] = nn.ModuleList(net(12, 12) for _ in range(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    job.attach(model, optimizer)
    private = Exchanged(12)
    own = torch.optim.Adam(private.parameters(), lr=5e-3)

    def loss_of(step: int, x: Tensor, y: Tensor) -> Tensor:
        h = model["stem"](x)
        gates = model["router"](h).softmax(1)
        weight, chosen = gates.max(1)
        h = h + weight[:, None] * private(h, chosen)
        h = h + model["shared"][(step // 2 + (job.rank if step % 4 == 3 else 0)) % 3](h)
        return mse_loss(model["head"](torch.tanh(h)), y)

    return job.learn([optimizer, own], loss_of)


def metrics(job: Job) -> list[float]:
    """Norms reduced over the default group in tensor hooks, and in hooks on what was accumulated."""
    model = net(10, 32, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    job.attach(model, optimizer)
    norms: list[Tensor] = []

    def computed(gradient: Tensor) -> None:
        norms.append(gradient.norm())
        dist.all_reduce(norms[-1])

    def accumulated(parameter: Tensor) -> None:
        norms.append(parameter.grad.norm())
        dist.all_reduce(norms[-1], dist.ReduceOp.MAX)

    for p in model.parameters():
        p.register_hook(computed)
        p.register_post_accumulate_grad_hook(accumulated)
    losses = job.learn([optimizer], lambda step, x, y: mse_loss(model(x), y))
    assert len(norms) == 2 * job.steps * len(list(model.parameters()))
    return losses


class _Centred(torch.autograd.Function):
    """Takes the mean over all ranks' rows off: `y = x - mean(x)`, as batch normalisation over ranks does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Center x (rows, features)."""
        total = x.sum(0)
        dist.all_reduce(total)
        return x - total / (len(x) * dist.get_world_size())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Differentiate the sum of all ranks' losses, to which this rank's rows add by the mean."""
        total = gradient.sum(0)
        dist.all_reduce(total)
        return gradient - total / (len(gradient) * dist.get_world_size())


def backward_sum(job: Job) -> list[float]:
    """An all-reduce on the default group in a backward function, between the gradients of two models."""
    # No biases before the mean is taken off: their gradients would be zero.
    trunk = nn.ModuleList([nn.Linear(10, 20, bias=False), nn.Linear(20, 12, bias=False)])
    head = net(12, 20, 3)
    both = [trunk, head]
    optimizers = [torch.optim.Adam(model.parameters(), lr=5e-3) for model in both]
    for model, optimizer in zip(both, optimizers, strict=True):
        job.attach(model, optimizer)

    def loss_of(step: int, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(_Centred.apply(trunk[0](x)))  # the trunk's first layer gets its gradient after the sum
        return mse_loss(head(_Centred.apply(trunk[1](h))), y)

    return job.learn(optimizers, loss_of)


def beside_a_thread(job: Job) -> list[float]:
    """A thread of the user's that does collectives on the default group all the while."""
    model = net(10, 32, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    job.attach(model, optimizer)
    totals: list[float] = []

    def count() -> None:
        for i in range(5 * job.steps):
            total = torch.full((1 + i % 300,), float(job.rank))
            dist.all_reduce(total)
            totals.append(float(total[0]))

    thread = threading.Thread(target=count)
    thread.start()
    losses = job.learn([optimizer], lambda step, x, y: mse_loss(model(x), y))
    thread.join()
    assert totals == [sum(range(job.world))] * (5 * job.steps)
    return losses


class Branches(nn.Module):
    """A trunk, and a branch that is left out where it is not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = net(10, 32, 16), net(16, 24, 16), net(16, 3)

    def forward(self, x: Tensor, *, use: bool) -> Tensor:
        """Return the head's outputs."""
        h = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.branch(h)) if use else h)


def ddp(job: Job, *, unused: bool = False, accumulate: int = 1, **options: Any) -> list[float]:
    """DistributedDataParallel with the hook; the branch is unused in alternate steps, or on one rank only."""
    options |= {"find_unused_parameters": unused, "bucket_cap_mb": BUCKET_BYTES / 2**20}
    model = DistributedDataParallel(Branches(), **options)
    job.watch(model.module, stenograd.ddp.register(model, job.method, timeout_s=60.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(job.steps):
        use = not unused or (step % 2 == 1 and (step % 4 == 1 or job.rank == 0))
        optimizer.zero_grad()
        for i in range(accumulate):
            x, y = job.batch(step * accumulate + i)
            with model.no_sync() if i < accumulate - 1 else nullcontext():
                loss = mse_loss(model(x, use=use), y)
                (loss / accumulate).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def uneven(job: Job) -> list[float]:
    """Two epochs in which the ranks have different numbers of batches; another rank is the last in each."""
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Tanh(), net(32, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = job.attach(model, optimizer)
    losses = []
    for epoch in range(2):
        batches = job.steps // 2 - 2 * ((job.rank + epoch) % job.world)
        with Join([sync]) if epoch == 0 else sync.join():
            for i in range(batches):
                x, y = job.batch(epoch * job.steps + i)
                loss = mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    job.alike += [*model.buffers(), *(optimizer.state[p]["momentum_buffer"] for p in model.parameters())]
    return losses


def ddp_uneven(job: Job) -> list[float]:
    """DistributedDataParallel's own `join` with the hook."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=BUCKET_BYTES / 2**20)
    job.watch(model.module, stenograd.ddp.register(model, job.method, timeout_s=60.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(2):
        with model.join():
            for i in range(job.steps // 2 - 2 * ((job.rank + epoch) % job.world)):
                x, y = job.batch(epoch * job.steps + i)
                loss = mse_loss(model(x, use=True), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


def _exchange(tokens: Tensor, come: list[int], go: list[int]) -> Tensor:
    out = tokens.new_empty(sum(come), tokens.shape[1])
    return differentiable.all_to_all_single(out, tokens, come, go)
