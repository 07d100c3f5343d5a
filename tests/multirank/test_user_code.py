"""What users already have keeps working: clipping, schedulers, scalers, closures, checkpointing."""

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards
from torch import nn
from torch.utils.checkpoint import checkpoint

import stenograd


def _loop(model, optimizer, batches):
    """Adam with gradient clipping and a schedule."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return flat(model)


def _clipped(rank, world_size):
    model = mlp(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with stenograd.distribute(model, optimizer, "dense", bucket_bytes=SMALL_BUCKETS, timeout_s=30):
        cuts = [shards(s, world_size) for s in range(8)]
        return _loop(model, optimizer, [(xs[rank], ys[rank]) for xs, ys in cuts])


def test_clipping_adam_and_a_schedule_equal_a_single_process(pool):
    model = mlp(0)
    cuts = [shards(s, 3) for s in range(8)]
    oracle = _loop(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        [(torch.cat(xs), torch.cat(ys)) for xs, ys in cuts],
    )
    for parameters in pool.run(3, _clipped, 3):
        torch.testing.assert_close(parameters, oracle, rtol=1e-5, atol=1e-5)


def _scaled(rank, method):
    """Rank 0's loss overflows in step 2."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scales = []
    with stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30) as sync:
        for s in range(5):
            xs, ys = shards(s, 2)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(xs[rank]), ys[rank])
            scaler.scale(loss * (float("inf") if s == 2 and rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales, flat(model), sync.skipped


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "powersgd:rank=1"])
def test_grad_scaler_skips_the_same_step_on_all_ranks(pool, method):
    first, second = pool.run(2, _scaled, method)
    assert first[0] == second[0] == [8.0, 8.0, 4.0, 4.0, 4.0]
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2] == 1


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body, self.head = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, torch.tanh(self.first(x)), use_reentrant=False))


def _checkpointed(rank):
    model = _Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense", bucket_bytes=100, timeout_s=10):
        model(shards(0, 2)[0][rank]).sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_activation_checkpointing_works_without_reentrance(pool):
    first, second = pool.run(2, _checkpointed)
    assert torch.equal(first, second)


def _interrupted(rank):
    """Alone, an error inside backward harms nobody else: the next pass just works."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk:ratio=0.1", bucket_bytes=SMALL_BUCKETS) as sync:

        def fail(_):
            raise RuntimeError("stop")

        handle = model[2].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            model(torch.ones(2, 10)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        model(torch.ones(2, 10)).sum().backward()
        return sync.step


def test_alone_an_interrupted_pass_is_forgotten(pool):
    assert pool.run(1, _interrupted) == [1]
