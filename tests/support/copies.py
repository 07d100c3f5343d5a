"""Separate copies of a model in one process, trained by a schedule's rule as its equations say.

Everything is computed in the model's own type, float64 in the tests, and in the order of the ranks. What a
lossy codec makes of a tensor is asked of the codec; what is done with it is written here.
"""

import copy

import torch

import stenograd
from stenograd.compression.feedback import ErrorFeedback
from stenograd.schedules.diloco import DiLoCo
from stenograd.schedules.gossip import Gossip
from stenograd.schedules.local import Local
from stenograd.simulate import exchange
from stenograd.sync.outer import by_size, fragments_of
from stenograd.topology import RandomPairs, mixing_matrix

SECOND = ("exp_avg_sq",)


def mean_of(tensors):
    """Return the mean, in the order of the ranks."""
    return sum(t / len(tensors) for t in tensors)


def carried(rows, weights, own):
    """Return a buffer's mean: equal elements stay, only finite ones count, and where none is `own` stays."""
    wide = [row.double() for row in rows]
    fit = [row.isfinite() for row in wide]
    total = sum(w * torch.where(ok, row, 0.0) for w, row, ok in zip(weights, wide, fit, strict=True))
    weight = sum(w * ok for w, ok in zip(weights, fit, strict=True))
    mean = torch.where(weight > 0, total / weight, own.double())
    equal = torch.stack([row == wide[0] for row in wide]).all(0)
    return torch.where(equal, wide[0], mean).to(own.dtype)


def memory(t):
    """Return what of an expanded tensor is in memory."""
    return t[tuple(slice(1) if stride == 0 else slice(None) for stride in t.stride())] if t.dim() else t


class Channel:
    """What ranks exchange by a codec, one flat tensor each, and what the codec remembers."""

    def __init__(self, compressor, shapes):
        self.compressor, self.shapes, self.states, self.step = compressor, shapes, None, 0

    def __call__(self, flats):
        """Return the average, and what every rank's message says."""
        done = exchange(
            self.compressor, flats, self.states, shapes=self.shapes, step=self.step, want_error=True
        )
        self.states, self.step = [d.state for d in done], self.step + 1
        return done[0].average, [x - d.error for x, d in zip(flats, done, strict=True)]


class Copies:
    """All ranks of a training.

    Args:
        text: the method.
        world: number of ranks.
        built: makes a model and its optimizer.
        loss_of: `loss_of(model, rank, step)`.
    """

    def __init__(self, text, world, built, loss_of):
        how = stenograd.method(text)
        self.rule, self.world, self.loss_of = how.schedule, world, loss_of
        self.models, self.optimizers = map(list, zip(*(built() for _ in range(world)), strict=True))
        self.names = list(self.named(0))
        size = getattr(self.rule, "node_size", 0) or 1
        self.nodes = [list(range(first, first + size)) for first in range(0, world, size)]
        self.lossless, self.common = how.lossless, True
        self.step = self.rounds = self.mixings = 0  # mixings: of pairs, where each fragment is one
        self.skipped = [0] * world
        self.codec = None if how.lossless else how.compressor
        if not isinstance(self.rule, DiLoCo) and isinstance(self.codec, ErrorFeedback):
            self.codec = self.codec.inner  # differences carry what a message leaves out
        self.after = getattr(self.rule, "after", 0)
        self.anchor()

    def named(self, rank):
        return dict(self.models[rank].named_parameters())

    @torch.no_grad()
    def anchor(self):
        """Begin to count: all copies are equal now."""
        start = {n: p.detach().clone() for n, p in self.named(0).items()}
        self.flying = {}
        if isinstance(self.rule, Gossip):
            self.known = [flat(start, self.names) for _ in range(self.world)]
            self.channel = self.codec and Channel(self.codec, shapes_of(start, self.names))
            return
        if isinstance(self.rule, DiLoCo):
            parts = fragments_of(start, self.rule.fragments, self.rule.layout)
        else:
            parts = [start]
        self.parts = [list(part) for part in parts]
        # Each rank of a node speaks for a part of its own, which a codec sees by itself.
        self.cuts = [[list(cut) for cut in by_size(part, len(self.nodes[0])) if cut] for part in parts]
        self.channels = {
            tuple(cut): Channel(self.codec, shapes_of(start, cut))
            for cuts in self.cuts
            for cut in cuts
            if self.codec
        }
        self.sent = {n: p.clone() for n, p in start.items()}  # of `local` with a codec: h, equal on all ranks
        self.next = self.period()
        lone = isinstance(self.rule, DiLoCo) and (self.rule.eager or self.rule.topology == "pairs")
        self.phi = [{n: p.clone() for n, p in start.items()} for _ in range(self.world if lone else 1)]
        self.old = None
        if isinstance(self.rule, DiLoCo):
            keys = {
                "lr": self.rule.outer_lr,
                "momentum": self.rule.momentum,
                "nesterov": self.rule.nesterov and self.rule.momentum > 0,
            }
            self.outer = [
                [torch.optim.SGD([phi[n] for n in part], **keys) for part in self.parts] for phi in self.phi
            ]

    def period(self):
        if not getattr(self.rule, "qsr", 0):
            return getattr(self.rule, "every", 1)
        lr = self.optimizers[0].param_groups[0]["lr"]
        return max(self.rule.every, int((self.rule.qsr / lr) ** 2))

    def run(self, steps):
        """Train."""
        for _ in range(steps):
            for rank, model in enumerate(self.models):
                model.zero_grad()
                self.loss_of(model, rank, self.step).backward()
            self.share_gradients()
            self.step += 1
            t = self.step - self.after
            mixes = isinstance(self.rule, Gossip) and t % self.rule.every == 0
            if mixes and self.rule.order == "combine-then-adapt":
                self.mix()
            fit = [
                all(p.grad.isfinite().all() for p in m.parameters() if p.grad is not None)
                for m in self.models
            ]
            for rank in range(self.world):
                if fit[rank]:
                    self.optimizers[rank].step()
                self.skipped[rank] += not fit[rank]
            self.rounds += not isinstance(self.rule, (Gossip, Local, DiLoCo)) and all(fit)
            if mixes and self.rule.order == "adapt-then-combine":
                self.mix()
            if t == 0 and self.after:
                self.anchor()
            if t > 0 and isinstance(self.rule, (Local, DiLoCo)):
                self.common = False
                self.meet(t)
        return self

    def share_gradients(self):
        """Average gradients over all ranks before rounds begin, and inside nodes then."""
        every_step = not isinstance(self.rule, (Gossip, Local, DiLoCo)) or self.step < self.after
        for node in [range(self.world)] if every_step else self.nodes:
            for same in zip(*(self.models[r].parameters() for r in node), strict=True):
                if same[0].grad is not None and len(node) > 1:
                    mean = mean_of([p.grad for p in same])
                    for p in same:
                        p.grad = mean.clone()

    @torch.no_grad()
    def mix(self):
        """x_i <- sum_j W_ij x_j, or by estimates: x_i <- x_i + gamma sum_j W_ij (h_j - h_i)."""
        matrix = mixing_matrix(self.rule.topology(self.world), self.world, self.rounds)
        xs = [flat(self.named(r), self.names) for r in range(self.world)]
        if self.codec:
            _, messages = self.channel([x - h for x, h in zip(xs, self.known, strict=True)])
            self.known = [h + q for h, q in zip(self.known, messages, strict=True)]
        sources = self.known if self.codec else xs
        for rank, x in enumerate(xs):
            if self.codec:
                gamma = self.rule.consensus
                new = x + gamma * sum(
                    w * (h - self.known[rank]) for w, h in zip(matrix[rank], sources, strict=True)
                )
            else:
                new = sum(w * other for w, other in zip(matrix[rank], sources, strict=True))
            put(self.named(rank), self.names, new)
        if self.rule.buffers == "average":
            self.mix_buffers(matrix)
        self.rounds += 1

    def mix_buffers(self, matrix):
        """Mix buffers with the same weights, by the rule for buffers."""
        before = [[b.clone() for b in held] for held in self.buffers()]
        for rank, held in enumerate(self.buffers()):
            near = [r for r in range(self.world) if matrix[rank, r]]
            for i, b in enumerate(held):
                b.copy_(
                    carried(
                        [before[r][i] for r in near], [float(matrix[rank, r]) for r in near], before[rank][i]
                    )
                )

    def buffers(self):
        """Return all ranks' floating buffers."""
        return [[memory(b) for b in m.buffers() if b.is_floating_point()] for m in self.models]

    @torch.no_grad()
    def meet(self, t):
        """Do what pass t makes due."""
        if isinstance(self.rule, Local):
            if t == self.next:
                self.average()
                self.end(0)
                self.next, self.common = t + self.period(), self.lossless
            return
        for f in [f for f, (sent, _) in self.flying.items() if t >= sent + self.rule.delay]:
            self.take(f, self.flying.pop(f)[1])
        for f in range(self.rule.fragments):
            if (t - f * (self.rule.every // self.rule.fragments)) % self.rule.every == 0:
                found = self.pseudo_gradients(f)
                if self.rule.delay:
                    self.flying[f] = t, found
                else:
                    self.take(f, found)

    def average(self):
        """p <- mean p; with a codec q = C(p - h), p <- p - q + mean q, and h <- h + mean q."""
        firsts = [node[0] for node in self.nodes]
        for cut in self.cuts[0]:
            xs = [flat(self.named(r), cut) for r in firsts]
            if self.codec:
                h = flat(self.sent, cut)
                mean, messages = self.channels[tuple(cut)]([x - h for x in xs])
                news = [x - (h + q) + (h + mean) for x, q in zip(xs, messages, strict=True)]
                put(self.sent, cut, h + mean)
            else:
                news = [mean_of(xs)] * len(xs)
            for node, new in zip(self.nodes, news, strict=True):
                for rank in node:
                    put(self.named(rank), cut, new)

    def pseudo_gradients(self, f):
        """Return what each owner's outer optimizer is fed for a fragment, by name."""
        firsts = [node[0] for node in self.nodes]
        if self.rule.topology == "pairs":
            found = []
            for rank in range(self.world):
                pair = self.pair_of(rank)
                means = {n: mean_of([self.named(r)[n].detach() for r in pair]) for n in self.parts[f]}
                found.append({n: self.phi[rank][n] - mean for n, mean in means.items()})
            return found
        new = [
            {n: self.phi[i if self.rule.eager else 0][n] - self.named(r)[n].detach() for n in self.parts[f]}
            for i, r in enumerate(firsts)
        ]
        if not self.rule.eager:
            return [self.averaged(f, new)]
        # What came in a round is used in the next, each rank with its own share replaced by its newest.
        mean, old = self.old or ({n: torch.zeros_like(t) for n, t in new[0].items()}, None)
        found = []
        for i, mine in enumerate(new):
            before = old[i] if old else {n: torch.zeros_like(t) for n, t in mine.items()}
            found.append({n: mean[n] + (mine[n] - before[n]) / self.world for n in mine})
        self.old = self.averaged(f, new), new
        return found

    def pair_of(self, rank):
        """Return who meets in a rank's pair, in order; alone, the rank itself."""
        other = RandomPairs().partner(rank, self.world, self.mixings)
        return sorted({rank, rank if other is None else other})

    def averaged(self, f, deltas):
        """Return the mean of pseudo-gradients, by the codec where there is one."""
        if not self.codec:
            return {n: mean_of([d[n] for d in deltas]) for n in self.parts[f]}
        found = {n: torch.empty_like(t) for n, t in deltas[0].items()}
        for cut in self.cuts[f]:
            put(found, cut, self.channels[tuple(cut)]([flat(d, cut) for d in deltas])[0])
        return found

    def take(self, f, gradients):
        """Make outer steps, move (a part of the way) to the outer parameters, and end the round."""
        for phi, optimizers, grads in zip(self.phi, self.outer, gradients, strict=True):
            for n, grad in grads.items():
                phi[n].grad = grad
            optimizers[f].step()
        for rank in range(self.world):
            phi = self.phi[rank % len(self.phi)]
            for n in self.parts[f]:
                p = self.named(rank)[n]
                p.copy_(self.rule.mix * p + (1 - self.rule.mix) * phi[n])
        self.end(f)
        self.mixings += 1
        shared = self.rule.fragments == 1 and len(self.phi) == 1
        self.common = shared and not self.rule.delay

    def end(self, f):
        """Do what belongs to a round: momenta and buffers."""
        if self.rule.states == "reset":
            for rank, optimizer in enumerate(self.optimizers):
                for n in self.parts[f]:
                    optimizer.state.pop(self.named(rank)[n], None)
        if f:
            return
        self.rounds += 1
        if self.rule.buffers == "average":
            self.average_buffers()
        if self.rule.states == "average" and self.rounds % self.rule.states_every == 0:
            self.average_states(second=self.rounds % (2 * self.rule.states_every) == 0)

    def average_buffers(self):
        groups = [list(range(self.world))] * self.world
        if getattr(self.rule, "topology", "all") == "pairs":
            groups = [self.pair_of(rank) for rank in range(self.world)]
        before = [[b.clone() for b in held] for held in self.buffers()]
        for rank, held in enumerate(self.buffers()):
            for i, b in enumerate(held):
                rows = [before[r][i] for r in groups[rank]]
                own = before[rank][i] if len(rows) < self.world else rows[0]
                b.copy_(carried(rows, [1 / len(rows)] * len(rows), own))

    def average_states(self, second):
        for name in self.names:
            states = [o.state[self.named(r)[name]] for r, o in enumerate(self.optimizers)]
            for key, value in states[0].items():
                if torch.is_tensor(value) and value.dim() and (second or key not in SECOND):
                    mean = mean_of([s[key] for s in states])
                    for s in states:
                        s[key].copy_(mean)

    @torch.no_grad()
    def consensus(self):
        """Return what all ranks have in common: the outer parameters, or the mean; and buffers."""
        found = copy.deepcopy(self.models)
        if not isinstance(self.rule, (Gossip, Local, DiLoCo)) or (
            self.common and not isinstance(self.rule, Gossip)
        ):
            return [m.state_dict() for m in found]
        owned = self.phi if isinstance(self.rule, DiLoCo) else [self.named(r) for r in range(self.world)]
        means = {n: mean_of([own[n].detach() for own in owned]) for n in self.names}
        for model in found:
            for n, p in model.named_parameters():
                p.copy_(means[n])
            if self.rule.buffers == "average":
                floating = [memory(b) for b in model.buffers() if b.is_floating_point()]
                for i, b in enumerate(floating):
                    rows = [held[i] for held in self.buffers()]
                    b.copy_(carried(rows, [1 / self.world] * self.world, rows[0]))
        return [m.state_dict() for m in found]

    @torch.no_grad()
    def ended(self):
        """Return where all start who end the round under way: the mean, or the outer step towards it."""
        means = {n: mean_of([self.named(r)[n].detach() for r in range(self.world)]) for n in self.names}
        if not isinstance(self.rule, DiLoCo):
            return means
        (phi, *others), (outer, *_) = self.phi, [sgds[0] for sgds in self.outer]
        for n, mean in means.items():
            momenta = [
                sgds[0].state[own[n]]["momentum_buffer"]
                for own, sgds in zip(self.phi, self.outer, strict=True)
            ]
            momenta[0].copy_(mean_of(momenta))
            phi[n].copy_(mean_of([own[n] for own in (phi, *others)]))
            phi[n].grad = phi[n] - mean
        outer.step()
        return phi


def flat(tensors, names):
    """Return named tensors in a row."""
    return torch.cat([tensors[n].detach().reshape(-1) for n in names])


def put(tensors, names, values):
    """Write what `flat` returned."""
    for n, piece in zip(names, values.split([tensors[n].numel() for n in names]), strict=True):
        tensors[n].copy_(piece.view(tensors[n].shape))


def shapes_of(tensors, names):
    """Return the shapes of named tensors."""
    return [tensors[n].shape for n in names]
