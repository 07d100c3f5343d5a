"""Programs of several networks, optimizers or derivatives, each as its user would write it."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise

import torch
from accounts import Job
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint


def net(*sizes: int) -> nn.Sequential:
    """Return linear layers of these sizes with tanh between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def gan(job: Job, *, engines: int) -> list[float]:
    """Generator and discriminator; the generator's pass reaches the discriminator's parameters and hooks.

    Two engines: the usual loop. One engine over both: the discriminator is frozen in the generator's pass.
    """
    g, d = net(4, 32, 16, 2), net(2, 32, 16, 1)
    g_step = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_step = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.9))
    if engines == 2:
        job.attach(g, g_step)
        job.attach(d, d_step)
    else:
        both = nn.ModuleDict({"g": g, "d": d})
        job.attach(both, [g_step, d_step])
    away = []
    for step in range(job.steps):
        rng = job.generator(step)
        real = torch.randn(16, 2, generator=rng) / 2 + torch.tensor([2.0, -1.0])
        fake = g(torch.randn(16, 4, generator=rng))
        d_step.zero_grad()
        yes, no = torch.ones(16, 1), torch.zeros(16, 1)
        (bce(d(real), yes) + bce(d(fake.detach()), no)).backward()
        d_step.step()
        d.requires_grad_(engines == 2)
        g_step.zero_grad()
        bce(d(fake), yes).backward()
        g_step.step()
        d.requires_grad_(True)
        away.append((fake.mean(0) - real.mean(0)).norm().item())
    return away


def actor_critic(job: Job, *, engines: int) -> list[float]:
    """Actor and critic on a shared trunk, both losses in one backward pass; one engine each or one in all."""
    model = nn.ModuleDict({"trunk": net(10, 32, 16), "actor": nn.Linear(16, 3), "critic": net(16, 24, 1)})
    actor = torch.optim.Adam([*model["trunk"].parameters(), *model["actor"].parameters()], lr=5e-3)
    critic = torch.optim.Adam(model["critic"].parameters(), lr=5e-3)
    if engines == 2:
        owned = nn.ModuleDict({"trunk": model["trunk"], "actor": model["actor"]})
        job.attach(owned, actor)
        job.attach(model["critic"], critic)
    else:
        job.attach(model, [actor, critic])
    regrets = []
    for step in range(job.steps):
        x, y = job.batch(step, 32)
        h = torch.tanh(model["trunk"](x))
        policy = torch.distributions.Categorical(logits=model["actor"](h))
        action = torch.multinomial(policy.probs.detach(), 1, generator=job.generator(-step - 2)).squeeze(1)
        reward = y.gather(1, action[:, None]).squeeze(1)
        value = model["critic"](h).squeeze(1)
        advantage = (reward - value).detach()
        actor.zero_grad()
        critic.zero_grad()
        (mse_loss(value, reward) - (policy.log_prob(action) * advantage).mean()).backward()
        actor.step()
        critic.step()
        regrets.append((y.max(1).values - reward).mean().item())
    return regrets


# Who learns in a step. Every rank must reach the same models in a pass, or an exchange would lack a rank.
_LEARNERS = [(0, 1), (1, 2), (0, 2), (0, 1, 2)]


def three(job: Job) -> list[float]:
    """Three models that learn from each other, two or all of them in one backward pass.

    Autograd runs backward what ran last first, so a rank that calls the models in another order reaches their
    engines in another order: here it turns with the rank and with the step.

    Reference: Zhang et al., "Deep Mutual Learning", CVPR 2018.
    """
    models = [net(10, 20, 12, 3) for _ in range(3)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=5e-3) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        job.attach(model, optimizer)
    losses = []
    for step in range(job.steps):
        x, y = job.batch(step)
        learners = _LEARNERS[step % len(_LEARNERS)]
        first = (job.rank + step // len(_LEARNERS)) % len(learners)
        outs = {i: models[i](x) for i in learners[first:] + learners[:first]}
        wrong = torch.stack([mse_loss(outs[i], y) for i in learners]).mean()
        apart = torch.stack([mse_loss(outs[i], outs[j]) for i, j in combinations(learners, 2)]).mean()
        for i in learners:
            optimizers[i].zero_grad()
        (wrong + 0.1 * apart).backward()
        for i in learners:
            optimizers[i].step()
        losses.append(wrong.item())
    return losses


def penalty(job: Job) -> list[float]:
    """A penalty on the gradient by the inputs, so that the backward pass runs through a backward pass."""
    model = net(10, 32, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    job.attach(model, optimizer)

    def loss_of(step: int, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, y) + 0.01 * slope.pow(2).sum(1).mean()

    return job.learn([optimizer], loss_of)


def averaged(job: Job) -> list[float]:
    """Exponential averages and copies of the weights, evaluated meanwhile; clipping and a schedule."""
    model = net(10, 32, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.steps)
    job.attach(model, optimizer)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    best = copy.deepcopy(model)
    losses = []
    for step in range(job.steps):
        x, y = job.batch(step)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        ema.update_parameters(model)
        if step % 10 == 9:
            best = copy.deepcopy(model)
            with torch.no_grad():
                ema(x), best(x)
            mse_loss(best(x), y).backward()  # a copy has no hooks: nothing is exchanged
        losses.append(loss.item())
    job.alike += [*ema.parameters(), *best.parameters()]
    return losses


def alternating(job: Job) -> list[float]:
    """Two optimizers step in turn on heads used in turn; layers are frozen, unfrozen, and join later."""
    parts = {"trunk": net(10, 24, 16), "late": nn.Linear(16, 16), "a": net(16, 24, 3), "b": net(16, 24, 3)}
    model = nn.ModuleDict(parts)
    model["late"].requires_grad_(False)
    common = [*model["trunk"].parameters(), *model["late"].parameters()]
    first = torch.optim.AdamW([*common, *model["a"].parameters()], lr=5e-3)
    second = torch.optim.SGD(model["b"].parameters(), lr=0.05, momentum=0.9)
    sync = job.attach(model, [first, second])
    losses = []
    for step in range(job.steps):
        model["trunk"].requires_grad_(not job.steps // 4 <= step < job.steps // 2)  # frozen for a quarter
        if step == job.steps // 2:
            model["late"].requires_grad_(True)
            sync.refresh()
        x, y = job.batch(step)
        optimizer, head = (first, "a") if step % 2 == 0 else (second, "b")
        loss = mse_loss(model[head](torch.tanh(model["late"](torch.tanh(model["trunk"](x))))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def checkpointed(job: Job) -> list[float]:
    """Activations are computed again in the backward pass, segment by segment."""
    segments = nn.ModuleList([net(10, 32, 16), net(16, 24, 16), net(16, 3)])
    optimizer = torch.optim.Adam(segments.parameters(), lr=5e-3)
    job.attach(segments, optimizer)
    losses = []
    for step in range(job.steps):
        h, y = job.batch(step)
        for segment in segments:
            h = checkpoint(segment, h, use_reentrant=False)
        loss = mse_loss(h, y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sparse(job: Job) -> list[float]:
    """An embedding with sparse gradients and SparseAdam, other indices on every rank, under a dense head."""
    words = nn.Embedding(60, 8, sparse=True)
    model = nn.ModuleDict({"words": words, "head": net(16, 24, 4)})
    rows = torch.optim.SparseAdam(words.parameters(), lr=2e-2)
    rest = torch.optim.AdamW(model["head"].parameters(), lr=1e-2)
    job.attach(model, [rows, rest])

    def loss_of(step: int, *_: Tensor) -> Tensor:
        pair = torch.randint(60, (12 + job.rank, 2), generator=job.generator(step))
        label: Tensor = (pair[:, 0] % 2) * 2 + pair[:, 1] % 2
        return cross_entropy(model["head"](words(pair).flatten(1)), label)

    return job.learn([rows, rest], loss_of)
