"""Gradients at the edges of a type, through every face, and what a training must keep whatever they are."""

import hashlib
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.errors import NonFiniteError

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BUCKET = 600  # bytes: the matrix is larger in every type, the others share some
SHAPES = {"matrix": (24, 20), "odd": (7, 3), "none": (0,), "vector": (150,), "rare": (5,)}
LR = 0.5  # halves are exact, and half of the largest number fits beside any weight


def normal(seed, scale=1.0):
    """Return a tensor of every shape."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) * scale for n, s in SHAPES.items()}


class Given(nn.Module):
    """Gets any gradient that is asked for, bit for bit; only rank 0 uses the parameter `rare`."""

    def __init__(self, dtype):
        super().__init__()
        for name, value in normal(1).items():
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, rank):
        return {name: p * 1 for name, p in self.named_parameters() if name != "rare" or rank == 0}


def backward(model, rank, gradients):
    """Make the gradients that are given."""
    out = model(rank)
    torch.autograd.backward(list(out.values()), [gradients[n].to(t.dtype) for n, t in out.items()])


def cases(dtype, rank):
    """Yield (name, this rank's gradients, ranks whose are not finite): each edge, then an ordinary one."""
    top = 0.97 * torch.finfo(dtype).max
    number = 0

    def ordinary():
        nonlocal number
        number += 1
        return normal(100 * number + rank)

    def edge(name, value):
        given = ordinary()
        given[name].view(-1)[4] = value
        return given

    yield "ordinary", ordinary(), ()
    yield "infinity", edge("odd", math.inf if rank == 1 else 0.0), (1,)
    yield "ordinary", ordinary(), ()
    yield "minus infinity", edge("matrix", -math.inf if rank == 1 else 0.0), (1,)
    yield "NaN", edge("vector", math.nan if rank == 0 else 0.0), (0,)
    yield "infinities that cancel", edge("matrix", math.inf if rank else -math.inf), (0, 1, 2, 3)
    yield "ordinary", ordinary(), ()
    for name in ("matrix", "odd"):
        yield "one rank has nearly the largest", edge(name, 0.0 if rank else top), ()
        yield "all have nearly the largest", edge(name, top), ()
        yield "of other signs", edge(name, -top if rank % 2 else top), ()
    yield "ordinary", ordinary(), ()
    yield (
        "everywhere on one rank",
        {n: t if rank else t.clamp(-1, 1) * top for n, t in ordinary().items()},
        (),
    )
    yield "everywhere", {n: t.clamp(-1, 1) * top for n, t in ordinary().items()}, ()
    yield "ordinary", ordinary(), ()


def digest(tensors):
    """Return what differs where a bit does."""
    return hashlib.sha256(
        b"".join(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def is_fit(model):
    """Tell whether every weight is finite."""
    return all(bool(p.isfinite().all()) for p in model.parameters())


def steps(driver, face, how, dtype):
    """Take one step for each case from the same weights; return what came of each on this rank."""
    model, start = Given(dtype), Given(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if face == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20, find_unused_parameters=True)
        sync = stenograd.ddp.register(model, how, timeout_s=30)
    else:
        sync = stenograd.distribute(model, optimizer, how, group=driver, bucket_bytes=BUCKET, timeout_s=30)
    everyone = zip(*(cases(dtype, rank) for rank in range(sync.world_size)), strict=True)
    found = []
    for same in everyone:
        name, given, bad = same[sync.rank]
        with torch.no_grad():
            for p, value in zip(model.parameters(), start.parameters(), strict=True):
                p.copy_(value)
        optimizer.zero_grad()
        skipped = sync.skipped
        backward(model, sync.rank, given)
        optimizer.step()
        done = {"case": name, "bad": bool(set(bad) & set(range(sync.world_size))), "finite": sync.finite}
        done |= {"skipped": sync.skipped - skipped, "fit": is_fit(model), "bits": digest(model.parameters())}
        off = roundings(model, start, [gradients for _, gradients, _ in same], dtype) if sync.finite else 0.0
        found.append(done | {"off": off})
    sync.close()
    return found, digest(start.parameters())


def roundings(model, start, gradients, dtype):
    """Return how far a step is from `w - lr mean_r g_r` in float64, in roundings of the largest term."""
    off, plain = 0.0, model.module if isinstance(model, DistributedDataParallel) else model
    for name, p in plain.named_parameters():
        given = [g[name].to(dtype).double() for g in gradients]
        if name == "rare":
            given[1:] = [torch.zeros_like(g) for g in given[1:]]
        if p.numel():
            was = dict(start.named_parameters())[name].detach().double()
            wanted = was - LR * sum(g / len(given) for g in given)
            size = torch.stack([was.abs(), *(g.abs() for g in given)]).amax(0)
            off = max(off, float(((p.detach().double() - wanted).abs() / size).max()))
    return off / torch.finfo(dtype).eps


def rounds(driver, text, dtype):
    """Give each case to one pass and go on with ordinary ones until ranks have met twice; weights are large.

    Steps are so short that nothing exact leaves the type's range: weights are up to half of the largest
    number, and with an outer momentum of 0.9 a step of 1/64 adds up to less than a quarter.
    """
    model = Given(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64)
    schedule = stenograd.method(text).schedule
    sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=BUCKET, timeout_s=30)
    period = schedule.period(1 / 64) if getattr(schedule, "qsr", 0) else schedule.every
    passes, found = getattr(schedule, "after", 0) + 2 * max(period, 2), []
    for number, (name, given, bad) in enumerate(cases(dtype, sync.rank)):
        begin(model, dtype)
        sync.refresh()
        skipped, held = sync.skipped, sync.round
        done = {"case": name, "bad": bad, "fit": True, "ended": False}
        try:
            for i in range(passes):
                optimizer.zero_grad()
                backward(model, sync.rank, given if i == 0 else normal(10_000 * number + 10 * i + sync.rank))
                optimizer.step()
                done["fit"] &= is_fit(model)
            sync.flush()
            done |= {"skipped": sync.skipped - skipped, "rounds": sync.round - held}
            done["fit"] &= is_fit(model)
            with sync.consensus():
                done["common"] = digest(model.parameters())
                done["fit"] &= is_fit(model)
        except NonFiniteError:
            done |= {"ended": True, "rounds": sync.round - held}
            done["fit"] &= is_fit(model)
        found.append(done)
        if done["ended"]:
            break
    sync.close()
    return found


@torch.no_grad()
def begin(model, dtype):
    """Start from weights of which some are half of the largest number."""
    half = torch.finfo(dtype).max / 2
    for (name, p), value in zip(model.named_parameters(), Given(dtype).parameters(), strict=True):
        p.copy_(value)
        if p.numel() > 4 and name != "rare":
            p.view(-1)[4], p.view(-1)[3] = half, -half
