"""Trainings that combine a codec, a schedule, partners, an optimizer, a precision and an event.

Every axis is a choice that a program makes by itself, so any two of them must work together, or be refused.
"""

import copy
import itertools
import math
import os
import random
from typing import NamedTuple

import torch
from support.copies import Copies
from torch import nn

import stenograd
from stenograd.errors import PeerLost
from stenograd.simulate import ranks

AXES = {
    "codec": ["dense", "e3m0", "topk", "sign", "powersgd"],
    "when": ["each step", "local", "diloco", "streaming", "gossip"],
    "whom": ["all", "pairs", "onepeer", "ring", "nodes"],
    "accumulation": ["none", "two batches"],
    "optimizer": ["SGD", "AdamW", "Muon and AdamW"],
    "precision": ["float32", "bfloat16", "GradScaler"],
    "event": ["nothing", "resumed", "4 to 2", "killed", "one NaN"],
}
# Two choices that do not go together: what a program would write, and what it is told.
REFUSED = {
    ("each step", "pairs"): ("dense:topology=pairs", "dense has no key 'topology'"),
    ("each step", "onepeer"): ("dense:graph=onepeer", "dense has no key 'graph'"),
    ("each step", "ring"): ("topk:graph=ring", "topk has no key 'graph'"),
    ("each step", "nodes"): ("dense:inside=dense", "dense has no key 'inside'"),
    ("local", "pairs"): ("local:topology=pairs", "local has no key 'topology'"),
    ("local", "onepeer"): ("local:graph=onepeer", "local has no key 'graph'"),
    ("local", "ring"): ("local:graph=ring", "local has no key 'graph'"),
    ("diloco", "onepeer"): ("diloco:graph=onepeer", "diloco has no key 'graph'"),
    ("diloco", "ring"): ("diloco:graph=ring", "diloco has no key 'graph'"),
    ("streaming", "pairs"): ("diloco:every=4,delay=1,mix=0.5,topology=pairs", "leave out delay"),
    ("streaming", "onepeer"): ("diloco:delay=1,graph=onepeer", "diloco has no key 'graph'"),
    ("streaming", "ring"): ("diloco:delay=1,graph=ring", "diloco has no key 'graph'"),
    ("gossip", "pairs"): ("gossip:graph=pairs", "graph must be one of onepeer"),
    ("gossip", "nodes"): ("gossip:inside=dense", "gossip has no key 'inside'"),
    ("powersgd", "gossip"): ("gossip:graph=ring,consensus=0.1/powersgd", "use topk, sign, qsgd"),
    ("e3m0", "pairs"): ("diloco:topology=pairs/lowbit", "use topology=all, or leave the codec out"),
    ("topk", "pairs"): ("noloco/topk", "use topology=all, or leave the codec out"),
    ("sign", "pairs"): ("noloco/sign", "use topology=all, or leave the codec out"),
    ("powersgd", "pairs"): ("noloco/powersgd", "use topology=all, or leave the codec out"),
    ("e3m0", "onepeer"): ("gossip:consensus=0.5/lowbit", "use graph=ring, torus or exponential"),
    ("topk", "onepeer"): ("gossip:consensus=0.1/topk", "use graph=ring, torus or exponential"),
    ("sign", "onepeer"): ("gossip:consensus=0.3/sign", "use graph=ring, torus or exponential"),
    ("powersgd", "onepeer"): ("gossip:consensus=0.3/powersgd", "use topk, sign, qsgd"),
    ("powersgd", "ring"): ("gossip:graph=ring,consensus=0.3/powersgd", "use topk, sign, qsgd"),
    ("nodes", "4 to 2"): ("", "load those of rounds between nodes .* on as many ranks"),  # told at loading
}
STEPS, CUT, EVERY, BAD, VICTIM_DIES = 13, 6, 4, (1, 5), 5
MOMENTUM = 0.5  # of pairs, where more would make ranks part
_CODECS = {
    "dense": "dense",
    "e3m0": "lowbit:block=64",
    "topk": "topk:ratio=0.2",
    "sign": "sign:dense_below=0",
    "powersgd": "powersgd:rank=2",
}
_CONSENSUS = {"e3m0": 0.8, "topk": 0.2, "sign": 0.3}


class Row(NamedTuple):
    """One choice on every axis."""

    codec: str = "dense"
    when: str = "each step"
    whom: str = "all"
    accumulation: str = "none"
    optimizer: str = "SGD"
    precision: str = "float32"
    event: str = "nothing"

    @property
    def world(self):
        """Two ranks where sums over more could be rounded in any order; else an odd number of them."""
        if self.whom == "nodes" or self.event == "4 to 2":
            return 4
        return 2 if "killed" not in self.event and (self.when == "each step" or "power" in self.codec) else 3

    @property
    def drops(self):
        """Whether the others can go on without a lost rank."""
        if self.event != "killed" or self.when in ("each step", "streaming") or self.whom == "nodes":
            return False
        return self.when == "diloco" or self.codec == "dense"

    @property
    def text(self):
        """The method."""
        keys = {"local": f"every={EVERY}", "diloco": f"every={EVERY}", "gossip": "", "each step": ""}
        keys["streaming"] = f"every={EVERY},fragments=2,delay=1,mix=0.5"
        found = [keys[self.when]]
        if self.when == "gossip":
            found.append(f"graph={'complete' if self.whom == 'all' else self.whom}")
            found += [f"consensus={_CONSENSUS[self.codec]}"] if self.codec != "dense" else []
        found += ["inside=dense", "node_size=2"] if self.whom == "nodes" else []
        found += ["topology=pairs", f"momentum={MOMENTUM}"] if self.whom == "pairs" else []
        found += ["lost=drop"] if self.drops else []
        name = {"streaming": "diloco"}.get(self.when, self.when)
        if self.when == "each step":
            return _CODECS[self.codec]
        return f"{name}:{','.join(filter(None, found))}/{_CODECS[self.codec]}"


def pairs_of(row):
    """Return all pairs of choices in a row."""
    return frozenset(itertools.combinations(row, 2))


def covering_rows():
    """Choose rows until every pair of choices that is not refused is in one; always the row with most new."""
    candidates = [Row(*choice) for choice in itertools.product(*AXES.values())]
    allowed = [row for row in candidates if not pairs_of(row) & REFUSED.keys()]
    random.Random(1).shuffle(allowed)  # or rows that are equally good would begin alike
    numbers = {pair: i for i, pair in enumerate(sorted(set().union(*map(pairs_of, allowed))))}
    masks = [sum(1 << numbers[pair] for pair in pairs_of(row)) for row in allowed]
    left, rows = (1 << len(numbers)) - 1, []
    while left:
        at = max(range(len(allowed)), key=lambda i: (masks[i] & left).bit_count())
        rows.append(allowed[at])
        left &= ~masks[at]
    return rows


class Net(nn.Module):
    """Four layers, so that there are blocks for fragments and matrices for Muon and PowerSGD."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 4)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def built(row):
    """Return a model and its optimizers."""
    model = Net().to({"bfloat16": torch.bfloat16, "float64": torch.float64}.get(row.precision, torch.float32))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    if row.optimizer == "SGD":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)]
    if row.optimizer == "AdamW":
        return model, [torch.optim.AdamW(model.parameters(), lr=0.01)]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]


def loss_of(model, seed, count=12):
    """Return the loss on a batch whose classes are the largest of the first four inputs."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    out = model(x.to(model.last.weight.dtype))
    return nn.functional.cross_entropy(
        out.to(torch.promote_types(out.dtype, torch.float32)), x[:, :4].argmax(1)
    )


@torch.no_grad()
def evaluated(model):
    """Return the loss on 200 samples that nobody trains on."""
    return float(loss_of(model, 77_777, 200))


def batches(row, rank, step):
    """Return the seeds of a rank's batches in a step."""
    return [1000 * step + 10 * rank + part for part in range(1 + (row.accumulation == "two batches"))]


def is_bad(row, rank, step):
    """Tell whether this gradient is NaN."""
    return row.event == "one NaN" and (rank, step) == BAD


class Together:
    """Several optimizers of one model as one."""

    def __init__(self, optimizers):
        self.all, self.param_groups = optimizers, optimizers[0].param_groups

    def step(self):
        for optimizer in self.all:
            optimizer.step()


def copies(row):
    """Return separate copies of the model, which train as the row says."""

    def both():
        model, optimizers = built(row)
        return model, Together(optimizers)

    def loss(model, rank, step):
        scale = math.nan if is_bad(row, rank, step) else 1.0
        return scale * sum(loss_of(model, seed) for seed in batches(row, rank, step))

    return Copies(row.text, row.world, both, loss)


class Training:
    """A rank's model, optimizers, scaler and synchronisation."""

    def __init__(self, row, driver=None):
        self.row = row
        self.model, self.optimizers = built(row)
        scaled = row.precision == "GradScaler"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scaled)
        self.sync = stenograd.distribute(
            self.model, self.optimizers, row.text, group=driver, bucket_bytes=1500, timeout_s=20
        )
        self.parts = {"model": self.model, "optimizer": self.optimizers, "sync": self.sync}

    def steps(self, first, last):
        """Train; the last rank may die."""
        rank, victim = self.sync.rank, (self.row.world - 1, VICTIM_DIES)
        for step in range(first, last):
            if self.row.event == "killed" and (rank, step) == victim:
                os._exit(9)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            *early, final = batches(self.row, rank, step)
            for seed in early:
                with self.sync.no_sync():
                    self.scaler.scale(loss_of(self.model, seed)).backward()
            loss = loss_of(self.model, final)
            self.scaler.scale(loss * math.nan if is_bad(self.row, rank, step) else loss).backward()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()

    def found(self):
        """Return what there is to compare."""
        with self.sync.consensus():
            common = copy.deepcopy(self.model.state_dict())
            loss = evaluated(self.model)
        state = self.sync.state_dict()
        own = copy.deepcopy(self.model.state_dict())
        owed = {n: t["residual"].clone() for n, t in state["parameters"].items() if "residual" in t}
        done = {"common": common, "own": own, "loss": loss, "owed": owed, "skipped": self.sync.skipped}
        traffic = self.sync.traffic
        done |= {"payload": traffic.payload_bytes, "collectives": traffic.collectives}
        return done | {"round": getattr(self.sync, "round", 0)}


def whole(driver, row):
    """Train without interruption."""
    training = Training(row, driver)
    training.steps(0, STEPS)
    done = training.found()
    training.sync.close()
    return done


def simulated(row):
    """The same with ranks that are threads of this process."""
    return ranks(row.world, lambda driver: whole(driver, row))


def on_rank(rank, row):
    """Train a rank of its own process."""
    return whole(None, row)


def resumed(rank, row, folder):
    """Save in mid-round, build everything anew, load, and go on."""
    begin(rank, row, folder)
    return go_on(rank, row, folder)[1]


def begin(rank, row, folder):
    """Train until the cut, and save."""
    training = Training(row)
    training.steps(0, CUT)
    state = training.scaler.state_dict()
    stenograd.save_checkpoint(folder, step=CUT, extra=state, timeout_s=30, **training.parts)
    done = training.found()
    training.sync.close()
    return done


def go_on(rank, row, folder):
    """Load, and train to the end; return what there was after loading, too."""
    training = Training(row)
    loaded = stenograd.load_checkpoint(folder, timeout_s=30, **training.parts)
    training.scaler.load_state_dict(loaded.extra)
    training.sync.after_load()
    start = training.found() if loaded.resharded else None
    training.steps(CUT, STEPS)
    done = training.found()
    training.sync.close()
    return start, done


def bereaved_to(rank, folder, row):
    """Train while the last rank dies; write the error's ranks, or what came of it without that rank."""
    training = Training(row)
    try:
        training.steps(0, STEPS)
    except PeerLost as error:
        torch.save(error.ranks, folder / str(rank))
        return
    done = training.found() | {"world": training.sync.world_size, "events": training.sync.events}
    torch.save(done, folder / str(rank))
    training.sync.close()
