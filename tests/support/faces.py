"""Every way to train on several ranks behind one interface, for what all of them promise alike."""

import io

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd import mlbench, singa
from stenograd.heat import DataParallel, DataParallelOptimizer
from support.training import SMALL_BUCKETS, flat, shards

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


class Face:
    """One rank's training, here by `distribute`; subclasses say how others are attached, step and are saved.

    Args:
        rank: of `world` ranks.
        model: what is trained; each rank may begin with other weights.
        keys: what the face takes.
    """

    def __init__(self, rank, world, model, **keys):
        self.rank, self.world, self.model, self.net = rank, world, model, model
        self.attach(**keys)

    def attach(self, how="dense", optimizer=(torch.optim.SGD, SGD), **options):
        self.optimizer = optimizer[0](self.model.parameters(), **optimizer[1])
        self.sync = self.synced(how, {"bucket_bytes": SMALL_BUCKETS, "timeout_s": 30, **options})
        self.parts = [self.model, self.optimizer, self.sync]

    def synced(self, how, options):
        return stenograd.distribute(self.model, self.optimizer, how, **options)

    def loss(self, number, scale=1.0):
        """Return the loss on this rank's part of a batch."""
        xs, ys = shards(number, self.world)
        return nn.functional.mse_loss(self.net(xs[self.rank]), ys[self.rank]) * scale

    def step(self, loss):
        """Take one step, given what computes the loss."""
        self.optimizer.zero_grad()
        loss().backward()
        self.optimizer.step()

    def train(self, numbers, bad=(), scheduler=None):
        """Train on batches; `bad` has factors of rank 1's losses, by batch. Return the weights."""
        for number in numbers:
            scale = bad[number] if number in bad and self.rank == 1 else 1.0
            self.step(lambda n=number, s=scale: self.loss(n, s))
            if scheduler is not None:
                scheduler.step()
        return self.weights()

    def weights(self):
        """Return all parameters in a row."""
        return flat(self.model)

    @property
    def skipped(self):
        """How many steps were lost."""
        return self.sync.skipped

    def save(self):
        """Return a checkpoint's file."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], file)
        return file

    def load(self, saved):
        """Go on from there; no code in the file runs."""
        saved.seek(0)
        for part, state in zip(self.parts, torch.load(saved, weights_only=True), strict=True):
            part.load_state_dict(state)

    def close(self):
        """End it."""
        self.sync.close()


class Hook(Face):
    """DDP with a communication hook."""

    def synced(self, how, options):
        cap_mb, odd = options.pop("bucket_bytes") / 2**20, isinstance(self.model, Odd)
        self.net = DistributedDataParallel(self.model, bucket_cap_mb=cap_mb, find_unused_parameters=odd)
        return stenograd.ddp.register(self.net, how, **options)

    def load(self, saved):
        self.train([0])  # DDP makes other buckets after its first step
        super().load(saved)


class Heat(Face):
    """Heat's DataParallel, whose last update may wait for the next forward pass."""

    def attach(self, blocking=False, **keys):
        self.blocking = blocking
        super().attach(**keys)
        self.parts = [self.net, self.outer, self.sync]

    def synced(self, how, options):
        self.outer = DataParallelOptimizer(self.optimizer)
        self.net = DataParallel(self.model, None, self.outer, self.blocking, method=how, **options)
        return self.net.sync

    def step(self, loss):
        self.outer.zero_grad()
        loss().backward()
        self.outer.step()

    def weights(self):
        self.net.flush()
        return flat(self.model)

    def close(self):
        self.net.close()


def _custom(face, keys):
    inner, arguments = keys.pop("inner")
    optimizer = inner(face.model.parameters(), **arguments)
    return mlbench.CustomCentralizedOptimizer(face.model, face.world, optimizer, average_world=True, **keys)


def _sparsified(face, keys):
    groups = [{"params": [p], "lr": 0.05 + 0.01 * i} for i, p in enumerate(face.model.parameters())]
    more = {"weight_decay": 1e-3, "random_sparse": True, "world_size": face.world, **keys}
    return mlbench.CentralizedSparsifiedSGD(groups, lr=0.1, **more)


ADAM = {"lr": 0.01, "weight_decay": 1e-2, "amsgrad": True}
MLBENCHS = {
    "sgd": lambda face, keys: mlbench.CentralizedSGD(face.world, face.model, **SGD, **keys),
    "adam": lambda face, keys: mlbench.CentralizedAdam(face.world, face.model, **ADAM, **keys),
    "custom": _custom,
    "powersgd": lambda face, keys: mlbench.PowerSGD(face.model, **SGD, world_size=face.world, rank=2, **keys),
    "sparsified": _sparsified,
}


class MLBench(Face):
    """An optimizer of MLBench's, which holds all state but the model's."""

    def attach(self, kind, **keys):
        self.optimizer = MLBENCHS[kind](self, keys)
        self.parts = [self.model, self.optimizer]

    @property
    def skipped(self):
        return getattr(self.optimizer, "aggregation", self.optimizer).skipped

    def close(self):
        pass


class FP16(MLBench):
    """MLBench's optimizer of half-precision models, which holds the model's weights in float32 as well."""

    def attach(self, **keys):
        self.model = self.net = self.model.bfloat16()
        self.optimizer = mlbench.FP16Optimizer(self.model, self.world, average_world=True, **keys)
        self.optimizer.set_optimizer(torch.optim.SGD([self.optimizer.fp32_params], lr=0.05, momentum=0.9))
        self.parts = [self.optimizer]

    def loss(self, number, scale=1.0):
        xs, ys = shards(number, self.world)
        return nn.functional.mse_loss(self.net(xs[self.rank].bfloat16()).float(), ys[self.rank]) * scale

    def step(self, loss):
        self.optimizer.zero_grad()
        self.optimizer.backward_loss(loss())
        self.optimizer.step()


SINGAS = {
    "plain": lambda opt, loss, n: opt.backward_and_update(loss, n),
    "half": lambda opt, loss, n: opt.backward_and_update_half(loss, n, clipping=True, clip_Value=1.0),
    "partial": lambda opt, loss, n: opt.backward_and_partial_update(loss, n),
    "top-k": lambda opt, loss, n: opt.backward_and_sparse_update(loss, n, 0.1, topK=True),
    "threshold": lambda opt, loss, n: opt.backward_and_sparse_update(loss, n, 0.01),
}


class Singa(Face):
    """SINGA's DistOpt in one of its modes."""

    def attach(self, mode="plain", kind="singa", threshold=100, timeout_s=30):
        inner = {
            "singa": lambda: singa.SGD(**SGD),
            "torch": lambda: torch.optim.SGD(self.model.parameters(), **SGD),
            "adam": lambda: singa.Adam(lr=singa.ExponentialDecay(0.01, 3, 0.5)),
            "torch's adam": lambda: torch.optim.Adam(self.model.parameters(), lr=0.01),
        }[kind]()
        self.sync = singa.DistOpt(inner, timeout_s=timeout_s)
        self.sync.synchronize(self.model)
        self.mode, self.threshold = SINGAS[mode], threshold

    def step(self, loss):
        self.mode(self.sync, loss(), self.threshold)

    def save(self):
        file = io.BytesIO()
        self.sync.save(file)
        return {name: t.clone() for name, t in self.model.state_dict().items()}, file

    def load(self, saved):
        saved[1].seek(0)
        self.model.load_state_dict(saved[0])
        self.sync.load(saved[1])


class Odd(nn.Module):
    """Tied, frozen, unused, half-used, scalar, empty and bfloat16 parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

    def forward(self, x, extra):
        x = self.frozen(self.tied(torch.tanh(self.first(x)))) * self.narrow.float() * self.scalar
        x = x + self.empty.sum()
        return self.sometimes(x) if extra else x
