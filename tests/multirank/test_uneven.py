"""Uneven inputs through `Join`, and sparse gradients, against one process that computes the same means."""

import re
import warnings

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards
from support.faces import attached
from support.training import descend
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.errors import StenogradError, WireError
from stenograd.exchange.sparse_rows import Rows, average_rows


def _uneven(rank, world_size, method, how, epochs, check_every):
    """Rank r has 5 - 2 r batches in each epoch."""
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = stenograd.distribute(
        model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30, check_every=check_every
    )
    for epoch in range(epochs):
        with Join([sync]) if how == "Join" else sync.join():
            for s in range(5 - 2 * rank):
                xs, ys = shards(10 * epoch + s, world_size)
                optimizer.zero_grad()
                if s == 1:
                    with sync.no_sync():  # accumulation does not disturb those that count passes
                        nn.functional.mse_loss(model(xs[rank]), ys[rank]).backward()
                nn.functional.mse_loss(model(xs[rank]), ys[rank]).backward()
                optimizer.step()
    momenta = torch.cat([optimizer.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()])
    owed = sync.state_dict()["parameters"]
    counts = sync.step, sync.skipped
    sync.close()
    return flat(model), momenta, counts, owed


def _one_process(world_size, epochs):
    """The same steps in one process: a rank that has run out adds zeros to the mean over all ranks."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for s in range(5):
            xs, ys = shards(10 * epoch + s, world_size)
            optimizer.zero_grad()
            for rank in range(world_size):
                if s < 5 - 2 * rank:
                    times = 2 if s == 1 else 1
                    (nn.functional.mse_loss(model(xs[rank]), ys[rank]) * times / world_size).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("how", ["Join", "join()"])
@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "sign", "powersgd:rank=1"])
def test_ranks_with_fewer_batches_shadow_the_others(pool, method, how):
    ranks = pool.run(2, _uneven, 2, method, how, 2, 1)
    for parameters, momenta, counts, _ in ranks:
        assert torch.equal(parameters, ranks[0][0])
        assert torch.equal(momenta, ranks[0][1])
        assert counts == (10, 0)
    if method == "dense":
        torch.testing.assert_close(ranks[0][0], _one_process(2, 2), rtol=1e-5, atol=1e-6)


def test_three_ranks_run_out_one_after_another(pool):
    ranks = pool.run(3, _uneven, 3, "dense", "Join", 2, 0)
    for parameters, momenta, *_ in ranks:
        torch.testing.assert_close(parameters, _one_process(3, 2), rtol=1e-5, atol=1e-6)
        assert torch.equal(momenta, ranks[0][1])


class _Wide(torch.optim.Optimizer):
    """SGD on copies beside its state, as master weights are."""

    def __init__(self, parameters):
        self.wide = []
        super().__init__(parameters, {})

    def add_param_group(self, group):
        super().add_param_group(group)
        self.wide += [p.detach().double() for p in self.param_groups[-1]["params"]]

    @torch.no_grad()
    def step(self):
        for p, wide in zip((p for g in self.param_groups for p in g["params"]), self.wide, strict=True):
            p.copy_(wide.sub_(p.grad, alpha=0.05))


def _wide(rank):
    """Ranks with 3 batches and 1, and then one batch more for a model that has grown."""
    model = mlp(0)
    optimizer = _Wide(model.parameters())
    with stenograd.distribute(model, optimizer, "dense", timeout_s=30) as sync:

        def train(shift):
            descend(optimizer, (model(torch.ones(1, 10)) + shift - rank).square().sum())

        with sync.join():
            for _ in range(3 - 2 * rank):
                train(0.0)
        model.shift = nn.Parameter(torch.full((3,), 1.0 + rank))
        optimizer.add_param_group({"params": [model.shift]})
        train(model.shift)
    return flat(model)


def test_copies_that_an_optimizer_keeps_follow_what_ranks_take_over(pool):
    first, second = pool.run(2, _wide)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def _early(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, "topk", timeout_s=5)

    def epoch():
        with sync.join(throw_on_early_termination=True):
            for _ in range(3 - rank):
                model(torch.ones(1, 10)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        epoch()


def test_uneven_inputs_can_be_an_error(pool):
    pool.run(2, _early)


def _searching(rank, face):
    model = mlp(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    net, sync = attached(face, model, optimizer, "dense")

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 10)).square().sum()
        loss.backward()
        return loss

    with sync, pytest.raises(StenogradError, match=r"LBFGS.*without join\(\)"), sync.join():
        optimizer.step(closure)


@pytest.mark.parametrize("face", ["distribute", "ddp"])
def test_losses_that_are_averaged_need_all_ranks(pool, face):
    """A rank that has run out would come to the exchange only, and the others would wait for its loss."""
    pool.run(2, _searching, face)


def _uneven_ddp(rank, method, how):
    model = DistributedDataParallel(mlp(0), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    hook = stenograd.ddp.register(model, method, timeout_s=30) if method else None
    with {"model": model.join, "hook": getattr(hook, "join", None), "Join": lambda: Join([hook])}[how]():
        for s in range(6 - 3 * rank):
            xs, ys = shards(s, 2)
            descend(optimizer, nn.functional.mse_loss(model(xs[rank]), ys[rank]))
    if hook is not None:
        hook.close()
    return flat(model)


@pytest.mark.parametrize("how", ["model", "hook", "Join"])
def test_the_ddp_hook_takes_uneven_inputs_as_ddp_does(pool, how):
    (plain, _) = pool.run(2, _uneven_ddp, None, "model")
    for method in ("dense", "topk:ratio=0.1", "powersgd:rank=1"):
        first, second = pool.run(2, _uneven_ddp, method, how)
        assert torch.equal(first, second)
        if method == "dense":
            assert torch.equal(first, plain)


class _Words(nn.Module):
    """An embedding with sparse gradients, one that shares its weight with a dense layer, and a dense head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 6, sparse=True)
        self.tied = nn.Embedding(6, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, sparse=True)
        self.head = nn.Linear(6, 400)

    def forward(self, index, use_bag):
        x = self.words(index).mean(0) + self.tied(index % 6).mean(0) @ self.tied.weight.t()
        if use_bag:
            x = x + self.bag(index[None] % 20)[0]
        return self.head(x)


def _batch(rank, s):
    g = torch.Generator().manual_seed(10 * s + rank)
    return torch.randint(0, 50, (int(torch.randint(0, 9, (1,), generator=g)) + 1,), generator=g)


def _optimizers(model):
    sparse = [*model.words.parameters(), *model.bag.parameters()]
    dense = [*model.tied.parameters(), *model.head.parameters()]
    return torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.AdamW(dense, lr=0.01)


def _sparse(rank, world_size, method):
    model = _Words()
    optimizers = _optimizers(model)
    sync = stenograd.distribute(model, optimizers, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    layouts = set()
    for s in range(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # The bag is used by rank 0 alone in some steps, by nobody in others.
        loss = model(_batch(rank, s), s % 3 == 0 and rank == 0).square().mean()
        (loss * (float("nan") if s == 7 and rank == world_size - 1 else 1.0)).backward()
        layouts.add((model.words.weight.grad.layout, model.tied.weight.grad.layout))
        if s % 3:
            assert model.bag.weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
    skipped, moved = sync.skipped, sync.traffic.moved_bytes
    sync.close()
    return flat(model), skipped, layouts, moved


def test_a_bad_sparse_gradient_that_waits_for_its_step_is_not_applied():
    """The second pass does not send it, and is bad all the same, as with dense gradients."""
    model = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "head": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values()]
    with stenograd.distribute(model, optimizers) as sync:
        (model["words"](torch.tensor([1])).sum() * float("nan")).backward()
        model["head"](torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is skipped
                optimizer.step()
        assert sync.skipped == 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(("key", "largest"), [("clip_value", 0.5), ("clip_norm", 0.5 / 2**0.5)])
def test_sparse_gradients_are_clipped_as_dense_ones_are(key, largest):
    model = nn.Embedding(4, 2, sparse=True)
    with stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), f"topk:{key}=0.5"):
        (3 * model(torch.tensor([1]))).sum().backward()
        assert model.weight.grad.to_dense()[1].tolist() == pytest.approx([largest] * 2)


def test_a_dense_gradient_of_the_programs_own_stays_where_a_sparse_one_is_added_to_it():
    """As that of an embedding that a layer shares, in a buffer of all gradients."""
    model, own = nn.Embedding(4, 4, sparse=True), torch.zeros(16)
    with stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        model.weight.grad = own.view(4, 4)
        (model(torch.tensor([1])) @ model.weight.t()).sum().backward()
        assert model.weight.grad.data_ptr() == own.data_ptr()
        assert torch.equal(model.weight.grad.view(-1), own)


def _sparse_alone(world_size):
    model = _Words()
    for p in model.parameters():
        p.grad = None
    optimizers = _optimizers(model)
    for s in range(12):
        if s == 7:
            continue
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(world_size):
            (model(_batch(rank, s), s % 3 == 0 and rank == 0).square().mean() / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
    return flat(model)


@pytest.mark.filterwarnings("ignore:a gradient was not finite")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "sign", "powersgd:rank=1"])
def test_sparse_gradients_are_averaged_exactly(pool, method, world_size):
    """With the dense method all equals one process; lossy ones leave the embeddings' averages exact."""
    ranks = pool.run(world_size, _sparse, world_size, method)
    for parameters, skipped, layouts, _ in ranks:
        assert torch.equal(parameters, ranks[0][0])
        assert skipped == 1
        assert layouts == {(torch.sparse_coo, torch.strided)}
    if method == "dense":
        torch.testing.assert_close(ranks[0][0], _sparse_alone(world_size), rtol=1e-4, atol=1e-5)


def _only_sparse(rank):
    model = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with stenograd.distribute(model, optimizer, "topk", timeout_s=30) as sync:
        before = sync.traffic.moved_bytes
        model(torch.tensor([3, 3, 5 + rank])).sum().backward()
        sent = sync.traffic.moved_bytes - before
        return (
            model.weight.grad.to_dense().sum(1).nonzero().ravel().tolist(),
            model.weight.grad.values(),
            sent,
        )


def test_a_model_of_one_sparse_embedding_sends_its_rows_alone(pool):
    """Rows 3 (twice), 5 and 6: 2 + 0.5 + 0.5 in each column; at most three rows of 24 bytes travel."""
    for rows, values, sent in pool.run(2, _only_sparse):
        assert rows == [3, 5, 6]
        assert values[:, 0].tolist() == [2.0, 0.5, 0.5]
        assert sent < 200


def _answered(rounds, count, row):
    (own,) = next(rounds).tensors
    sent = rounds.send([(own,), (torch.tensor([count]),)]).tensors
    rounds.send([sent, (torch.tensor([row]), torch.ones(1, 4))])


@pytest.mark.parametrize(
    ("count", "row", "rule"),
    [(1 << 40, 0, "0 to [3] rows"), (-1, 0, "0 to [3] rows"), (1, 3, "[0, 3)"), (1, -1, "[0, 3)")],
)
def test_rows_that_a_table_has_not_are_refused(count, row, rule):
    """Before memory for them is asked for, and before anything is written outside of a dense gradient."""
    with pytest.raises(WireError, match=re.escape(rule)):
        _answered(average_rows([Rows(torch.tensor([2]), torch.ones(1, 4), 3)], 2), count, row)
