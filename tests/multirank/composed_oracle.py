"""What a dense training of `compositions` must give, by loops over copies of a model in one process."""

import math

import torch
from compositions import (
    EVERY,
    MIX,
    MOMENTUM,
    OUTER_LR,
    PAIRS_MOMENTUM,
    batches,
    built,
    is_bad,
    loss_of,
)

from stenograd.topology import DirectedOnePeer, RandomPairs, Ring


def mean_in_order(tensors):
    """Return the mean, each share rounded before it is added."""
    return sum(t * (1.0 / len(tensors)) for t in tensors)


class Plain:
    """What dense training must give, in one process: copies of the model, loops over ranks, torch's SGD."""

    def __init__(self, row):
        self.row, self.world = row, row.world
        self.models, self.optimizers = map(list, zip(*(built(row) for _ in range(self.world)), strict=True))
        self.nodes = [[0, 1], [2, 3]] if row.whom == "nodes" else [[r] for r in range(self.world)]
        if row.when == "each step":
            self.nodes = [list(range(self.world))]
        names = [n for n, _ in self.models[0].named_parameters()]
        blocks = [n for n in names if n.startswith("layers.")]
        ends = [n for n in names if n not in blocks]
        self.fragments = [ends, blocks] if row.when == "streaming" else [names]
        lone = row.whom == "pairs"
        owners = range(self.world) if lone else range(1)
        self.outer = [{n: p.detach().float().clone() for n, p in self.named(0).items()} for _ in owners]
        mu = PAIRS_MOMENTUM if lone else MOMENTUM
        make = lambda outer, group: torch.optim.SGD(  # noqa: E731
            [outer[n] for n in group], lr=OUTER_LR, momentum=mu, nesterov=True
        )
        self.sgd = [[make(outer, group) for group in self.fragments] for outer in self.outer]
        self.flying, self.rounds = {}, 0

    def named(self, rank):
        """Return a rank's parameters by name."""
        return dict(self.models[rank].named_parameters())

    def run(self, first, last):
        """Train from one step to another."""
        for step in range(first, last):
            fits = self.gradients(step)
            if self.row.when == "gossip":
                self.mix(step)
            for rank, optimizers in enumerate(self.optimizers):
                for optimizer in optimizers if fits[rank] else []:
                    optimizer.step()
            with torch.no_grad():
                self.meet(step + 1)
        return self

    def gradients(self, step):
        """Make gradients, average them inside nodes, and tell which ranks may step."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            *early, final = batches(self.row, rank, step)
            for seed in early:
                loss_of(model, seed).backward()
            loss = loss_of(model, final)
            (loss * math.nan if is_bad(self.row, rank, step) else loss).backward()
        for node in self.nodes:
            for same in zip(*(self.models[r].parameters() for r in node), strict=True):
                grad = mean_in_order([p.grad for p in same]) if len(node) > 1 else same[0].grad
                for p in same:
                    p.grad = grad.clone()
        return [all(p.grad.isfinite().all() for p in model.parameters()) for model in self.models]

    @torch.no_grad()
    def mix(self, step):
        """Make every parameter the weighted sum of neighbours', in rank order."""
        graph = {"onepeer": DirectedOnePeer(), "ring": Ring()}.get(self.row.whom)
        for same in zip(*(m.parameters() for m in self.models), strict=True):
            old = [p.detach().clone() for p in same]
            for rank, p in enumerate(same):
                row = graph.weights(rank, self.world, step) if graph else {}
                row = row or dict.fromkeys(range(self.world), 1 / self.world)
                total = torch.zeros_like(p, dtype=torch.float32)
                for other in sorted(row):
                    total.add_(old[other], alpha=row[other])
                p.copy_(total)

    def meet(self, t):
        """Hold the rounds that a step makes due."""
        if self.row.when == "local" and t % EVERY == 0:
            for same in zip(*(m.parameters() for m in self.models), strict=True):
                mean = mean_in_order([same[node[0]].float() for node in self.nodes])
                for p in same:
                    p.copy_(mean)
        if self.row.when not in ("diloco", "streaming"):
            return
        delay = int(self.row.when == "streaming")
        for f in [f for f, sent in self.flying.items() if t >= sent[0] + delay]:
            self.take(f, [self.flying.pop(f)[1]])
        for f in range(len(self.fragments)):
            if (t - f * EVERY // len(self.fragments)) % EVERY == 0:
                found = self.deltas(f)
                if delay:
                    self.flying[f] = (t, found[0])
                else:
                    self.take(f, found)

    def deltas(self, f):
        """Return the outer optimizers' gradients of a fragment."""
        owned = [self.named(rank) for rank in range(self.world)]
        if self.row.whom != "pairs":
            phi, ones = self.outer[0], [owned[node[0]] for node in self.nodes]
            means = {n: mean_in_order([phi[n] - own[n].float() for own in ones]) for n in self.fragments[f]}
            return [means]
        partners = [RandomPairs().partner(rank, self.world, self.rounds) for rank in range(self.world)]
        self.rounds += 1
        found = []
        for rank, other in enumerate(partners):
            pair = sorted({rank, rank if other is None else other})
            means = {n: mean_in_order([owned[r][n].float() for r in pair]) for n in owned[rank]}
            found.append({n: self.outer[rank][n] - mean for n, mean in means.items()})
        return found

    def take(self, f, gradients):
        """Make outer steps, and take (a share of) what came."""
        for outer, optimizers, grads in zip(self.outer, self.sgd, gradients, strict=True):
            for n, grad in grads.items():
                outer[n].grad = grad
            optimizers[f].step()
        mix = MIX if self.row.when == "streaming" else 0.0
        for rank in range(self.world):
            outer = self.outer[rank % len(self.outer)]
            for n, p in self.named(rank).items():
                if n in self.fragments[f]:
                    p.copy_(p.float().lerp(outer[n], 1.0 - mix) if mix else outer[n])

    @torch.no_grad()
    def ended(self):
        """Return where all start who end the round under way: by the mean of all; nothing if unknown."""
        if self.row.when == "streaming":
            return {}
        owned = [self.named(rank) for rank in range(self.world)]
        means = {n: mean_in_order([own[n].float() for own in owned]) for n in owned[0]}
        if self.row.when != "diloco":
            return means
        phi, sgd = self.outer[0], self.sgd[0][0]
        for n, mean in means.items():
            outers = [outer[n] for outer in self.outer]
            momenta = [mine[0].state[p]["momentum_buffer"] for mine, p in zip(self.sgd, outers, strict=True)]
            momenta[0].copy_(mean_in_order(momenta))
            phi[n].copy_(mean_in_order(outers))
            phi[n].grad = phi[n] - mean
        sgd.step()
        return phi
