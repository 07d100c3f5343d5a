"""Random trainings with faults: what must hold whatever is combined."""

import os
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import ALL_METHODS, flat
from torch import nn

import stenograd
from stenograd.testing.pool import RanksFailed

IN = 12


@dataclass(frozen=True)
class Plan:
    """One training: what `happens` at a step and to which rank, and at which the last rank is killed."""

    method: str
    widths: tuple
    dtype: str
    bucket_bytes: int
    ranks: int
    steps: int
    happens: dict
    killed: int | None
    seed: int

    def model(self, rank):
        torch.manual_seed(self.seed + rank)  # rank 0's weights must win
        pairs = pairwise([IN, *self.widths, 1])
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers).to(getattr(torch, self.dtype))

    def attach(self, model, optimizer):
        timeout_s = 120 if self.killed is None else 20  # a busy machine is no fault here
        return stenograd.distribute(
            model, optimizer, self.method, bucket_bytes=self.bucket_bytes, timeout_s=timeout_s
        )

    def backward(self, model, step, salt, poison=False):
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + salt)
        x = torch.randn(8, IN, generator=generator, dtype=torch.float64).to(getattr(torch, self.dtype))
        loss = (model(x) - x.sum(1, keepdim=True).sign()).square().mean()
        (loss * float("nan") if poison else loss).backward()


EVENTS = st.tuples(st.sampled_from(["nan", "no_sync", "reload", "slow"]), st.integers(0, 1))
PLANS = st.builds(
    Plan,
    method=st.sampled_from(ALL_METHODS),
    widths=st.lists(st.sampled_from([1, 3, 16, 33, 64]), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    bucket_bytes=st.sampled_from([64, 1000, 8192, 4 << 20]),
    ranks=st.integers(2, 4),
    steps=st.integers(20, 60),
    happens=st.dictionaries(st.integers(1, 59), EVENTS, max_size=8),
    killed=st.none() | st.integers(2, 19),
    seed=st.integers(0, 1 << 30),
)


def _train(rank, plan):
    """Train, and return this rank's parameters and the number of steps that were applied."""
    warnings.simplefilter("ignore")
    model = plan.model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = plan.attach(model, optimizer)
    for step in range(plan.steps):
        event, whom = plan.happens.get(step, ("", 0))
        if step == plan.killed and rank == plan.ranks - 1:
            os._exit(9)
        if event == "slow" and rank == whom:
            time.sleep(0.05)
        if event == "reload":
            saved, steps = sync.state_dict(), optimizer.state_dict()
            sync.close()
            sync = plan.attach(model, optimizer)
            sync.load_state_dict(saved)
            optimizer.load_state_dict(steps)
        if event == "no_sync":
            with sync.no_sync():
                plan.backward(model, step, rank + 100)
        else:
            optimizer.zero_grad()
        plan.backward(model, step, rank, poison=event == "nan" and rank == whom)
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        assert finite == (event != "nan"), f"step {step}: finite {finite} after {event or 'nothing'}"
        if finite:
            optimizer.step()
        else:
            optimizer.zero_grad()
    out = flat(model), sync.step
    sync.close()
    return out


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_replicas_are_equal_and_exactly_the_bad_steps_are_skipped(pool):
    """150 trainings of 40 steps each: 6,000 steps. The survivors of a killed rank name it."""

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(plan=PLANS)
    def check(plan):
        if plan.killed is not None:
            with pytest.raises(RanksFailed) as failed:
                pool.run(plan.ranks, _train, plan, timeout_s=180)
            *others, _ = said = [failed.value.errors.get(rank, "") for rank in range(plan.ranks)]
            assert all(f"rank(s) {plan.ranks - 1} " in text for text in others), said
            return
        ranks = pool.run(plan.ranks, _train, plan, timeout_s=180)
        bad = sum(event == "nan" for step, (event, _) in plan.happens.items() if step < plan.steps)
        for parameters, applied in ranks:
            assert torch.equal(parameters, ranks[0][0])
            assert parameters.isfinite().all()
            assert applied == plan.steps - bad

    check()
