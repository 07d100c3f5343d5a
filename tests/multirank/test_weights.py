"""Ranks and passes that count differently, by tokens: as one process over all tokens would train."""

import copy
import math
import warnings

import pytest
import torch
from models import ALL_METHODS, SMALL_BUCKETS, flat, mlp
from support.faces import attached
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional

import stenograd
from stenograd.errors import ConfigError, StenogradError
from stenograd.schedules import DiLoCo, EveryStep, Local
from stenograd.simulate import ranks
from stenograd.sync.outer import Part
from stenograd.testing.methods import by_name

WORLD, STEPS = 3, 6
EVERY = [m for m in ALL_METHODS if isinstance(stenograd.method(m).schedule, EveryStep)]
# Shares of 1/2, 1/2 and 2: factors by which a gradient may be multiplied at any time, with the same bits.
COUNTS = ((4, 4, 16), (1, 1, 4), (16, 4, 4), (2, 8, 2))


def _batch(step, rank, n, dtype=torch.float32):
    g = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(n, k, generator=g).to(dtype) for k in (10, 3))
    return x, y


def _scaled(rank, face, method, weighted):
    """Train with weights, or with losses multiplied by the shares that the weights mean."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    net, sync = attached(face, model, optimizer, method, SMALL_BUCKETS, timeout_s=60)
    for step in range(STEPS):
        counts = COUNTS[step % len(COUNTS)]
        share = WORLD * counts[rank] / sum(counts)
        optimizer.zero_grad()
        loss = functional.mse_loss(net(_batch(step, rank, 5)[0]), _batch(step, rank, 5)[1])
        if weighted:
            sync.weight(counts[rank])
        (loss if weighted else loss * share).backward()
        optimizer.step()
    assert sync.skipped == 0
    sync.close()
    return flat(model)


@pytest.mark.parametrize(
    ("face", "method"), [*(("distribute", m) for m in EVERY), *(("ddp", m) for m in by_name() if m in EVERY)]
)
def test_every_method_sends_what_it_would_of_scaled_gradients(pool, face, method):
    """Bit for bit, feedback included, since shares are powers of two."""
    found = pool.run(WORLD, _scaled, face, method, True)
    assert all(torch.equal(other, found[0]) for other in found)
    assert torch.equal(found[0], pool.run(WORLD, _scaled, face, method, False)[0])


def _sizes(step, accumulated, part, rank):
    """How many samples a rank has in a pass; none now and then."""
    return (3 * step + 5 * part + 4 * rank + accumulated) % 9


def _uneven(rank, face, method, accumulated, reduce, dtype):
    model = mlp(1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    net, sync = attached(face, model, optimizer, method, SMALL_BUCKETS, timeout_s=60)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulated):
            n = _sizes(step, accumulated, part, rank)
            x, y = _batch(step * accumulated + part, rank, n, dtype)
            sync.enabled = part == accumulated - 1
            sync.weight(n + 1)  # a batch that is not used
            sync.weight(n * 3, reduce=reduce, divided=accumulated)
            (functional.mse_loss(net(x), y, reduction=reduce) / accumulated).backward()
        optimizer.step()
    sync.close()
    return flat(model)


def _by_one_process(accumulated, dtype):
    model = mlp(1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [
            _batch(step * accumulated + part, rank, _sizes(step, accumulated, part, rank), dtype)
            for part in range(accumulated)
            for rank in range(WORLD)
        ]
        x, y = (torch.cat(kind) for kind in zip(*batches, strict=True))
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("face", "method"), [("distribute", "dense"), ("ddp", "dense"), ("distribute", "topk:ratio=1")]
)
def test_training_equals_one_process_over_all_samples(pool, face, method, accumulated, reduce):
    """Empty batches, whose mean is NaN, count for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pool.run(WORLD, _uneven, face, method, accumulated, reduce, torch.float64)
    wanted = _by_one_process(accumulated, torch.float64)
    for other in found:
        assert torch.allclose(other, wanted, rtol=0, atol=1e-6 if "topk" in method else 1e-12)


ROUNDS = [
    "local:every=3",
    "local:every=3,after=3",
    "local:every=2/topk:ratio=0.5",
    "diloco:every=3",
    "diloco:every=4,fragments=2",
    "diloco:every=4,delay=1",
    "diloco:every=2/topk:ratio=0.5",
    "sparseloco:every=2",
]


def _linear(rank, method, weighted):
    """Losses whose gradients do not depend on the weights, so that scaling them scales what a rank moves."""
    model = mlp(2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
    counts = COUNTS[0]
    share = WORLD * counts[rank] / sum(counts)
    for step in range(12):  # whole rounds: between them, ranks have their plain mean in common
        optimizer.zero_grad()
        g = torch.Generator().manual_seed(100 * step + rank)
        pulls = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in model.parameters()]
        loss = sum((p * pull).sum() for p, pull in zip(model.parameters(), pulls, strict=True))
        if weighted:
            sync.weight(counts[rank] * (step + 1))
        (loss if weighted else loss * share).backward()
        optimizer.step()
    with sync.consensus():
        found = flat(model)
    sync.close()
    return found


@pytest.mark.parametrize("method", ROUNDS)
def test_rounds_count_what_each_rank_has_trained(pool, method):
    """A rank that counts twice brings twice as much, as if it had moved twice as far."""
    if method.startswith("local") and "topk" in method:
        pytest.skip("what a rank keeps for itself is in its own units: see the next test")
    found = pool.run(WORLD, _linear, method, True)
    wanted = pool.run(WORLD, _linear, method, False)
    for other, one in zip(found, wanted, strict=True):
        assert torch.allclose(other, one, rtol=0, atol=1e-9)


def _void(driver, method, weighted, saves):
    """Return for what each part of a rank counts in the second round, after one that ranks 0 and 1 spoilt."""
    state = None
    for start, stop in ((0, 2), (2, 4)) if saves else ((0, 4),):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, method, group=driver, timeout_s=60)
        if state is not None:
            for part, kept in zip((model, optimizer, sync), state, strict=True):
                part.load_state_dict(kept)
        for step in range(start, stop):
            sync._ends_at = 0.0 if step % 2 else math.inf  # by time, two passes are a round as well
            if weighted:
                sync.weight(10**step * (driver.rank + 1))
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            if step == 1 and driver.rank < 2:
                torch.nn.init.constant_(model.weight, torch.nan)
            optimizer.step()
        state = [part.state_dict() for part in (model, optimizer, sync)]
        state[0] = {name: value.clone() for name, value in state[0].items()}
        weight = sync._parts[0].weight
        sync.close()
    return weight


ALL, SECOND = 1111, 1100  # what a rank counts by weights, with the first round and without


@pytest.mark.parametrize("saves", [False, True], ids=["", "saved"])
@pytest.mark.parametrize(
    ("method", "weighted", "counts"),
    [
        ("local:every=2", True, [SECOND, 2 * SECOND, 3 * ALL, 4 * ALL]),
        ("diloco:every=2", True, [SECOND, 2 * SECOND, 3 * ALL, 4 * ALL]),
        # What was trained while the void round was under way is lost, too.
        ("diloco:every=2,delay=1,mix=0.5", True, [1000, 2000, 3 * ALL, 4 * ALL]),
        # Ranks 1 and 3 speak for the bias, of which the first round was sound.
        ("diloco:every=2,inside=dense,node_size=2", True, [3 * SECOND, 3 * SECOND, 7 * ALL, 7 * SECOND]),
        ("diloco:every=1000s", True, [SECOND, 2 * SECOND, 3 * ALL, 4 * ALL]),
        ("diloco:every=1000s", False, [2, 2, 4, 4]),
    ],
)
def test_what_a_void_round_has_left_counts_in_the_next(method, weighted, counts, saves):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks(4, _void, method, weighted, saves) == counts


@pytest.mark.parametrize("method", ["local:every=9", "diloco:every=9", "local:every=1000s"])
def test_refresh_ends_a_round_as_rounds_end(method):
    """Rank 1 counts four times as much, by its weights or by time by the passes that it has made."""
    timed = method.endswith("s")
    text = method + ",outer_lr=1,momentum=0,nesterov=false" * method.startswith("diloco")

    def train(rank):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=rank, timeout_s=30) as sync:
            for _ in range(4 if timed and rank.rank else 1):
                optimizer.zero_grad()
                if not timed:
                    sync.weight(1 + 3 * rank.rank)
                (model(torch.ones(1, 3)) - rank.rank).square().sum().backward()
                optimizer.step()
            own = flat(model)
            sync.refresh()
            return own, flat(model)

    (first, mean), (second, other) = ranks(2, train)
    assert torch.equal(mean, other)
    assert torch.allclose(mean, (first + 4 * second) / 5)


def _idle(rank, method):
    """Ranks of which only the first has anything to train on."""
    model = mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
    for step in range(4):
        optimizer.zero_grad()
        x, y = _batch(step, rank, 4)
        sync.weight(4 if rank == 0 else 0)
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with sync.consensus():
        found = flat(model)
    sync.close()
    return found


@pytest.mark.parametrize(
    "method", ["dense", "sign", "local:every=2", "diloco:every=2,outer_lr=1,momentum=0,nesterov=false"]
)
def test_ranks_that_count_nothing_change_nothing(pool, method):
    found = pool.run(2, _idle, method)
    alone = pool.run(1, _idle, "dense" if method != "sign" else "sign")
    assert all(torch.allclose(other, alone[0], rtol=0, atol=1e-6) for other in found)


def _resumed(rank, method, cut):
    """Train, or stop in the middle of a round and go on from what was saved."""
    state = None
    for start, stop in ((0, cut), (cut, 8)):
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
        if state is not None:
            for part, kept in zip((model, optimizer, sync), state, strict=True):
                part.load_state_dict(kept)
            sync.after_load()
        for step in range(start, stop):
            optimizer.zero_grad()
            x, y = _batch(step, rank, 4)
            sync.weight((7 * rank + 5 * step) % 11 + 1)
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
        state = [part.state_dict() for part in (model, optimizer, sync)]
        state[0] = {name: value.clone() for name, value in state[0].items()}
        sync.close()
    return flat(model)


@pytest.mark.parametrize("method", ["topk:ratio=0.1", "local:every=3", "diloco:every=4,fragments=2"])
def test_a_resumed_training_counts_on(pool, method):
    assert torch.equal(pool.run(2, _resumed, method, 5)[1], pool.run(2, _resumed, method, 0)[1])


def _joined(rank, face):
    """Ranks with as many batches as their number."""
    model = mlp(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net, sync = attached(face, model, optimizer, "dense", SMALL_BUCKETS, timeout_s=60)
    with Join([net]) if face == "ddp" else sync.join():
        for step in range(rank):
            optimizer.zero_grad()
            x, y = _batch(step, rank, rank + 1)
            sync.weight(rank + 1)
            functional.mse_loss(net(x), y).backward()
            optimizer.step()
    sync.close()
    return flat(model)


@pytest.mark.parametrize("face", ["distribute", "ddp"])
def test_a_rank_without_batches_counts_nothing(pool, face):
    found = pool.run(WORLD, _joined, face)
    model = mlp(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(WORLD - 1):
        optimizer.zero_grad()
        batches = [_batch(step, rank, rank + 1) for rank in range(step + 1, WORLD)]
        x, y = (torch.cat(kind) for kind in zip(*batches, strict=True))
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert torch.allclose(found[-1], flat(model), rtol=0, atol=1e-6)


def _embedded(rank):
    """Sparse gradients of an embedding, beside dense ones."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "dense", timeout_s=60)
    for step in range(4):
        optimizer.zero_grad()
        n = 2 + 3 * rank + step
        sync.weight(n)
        model(_words(step, rank, n)).square().mean().backward()
        optimizer.step()
    sync.close()
    return flat(model)


def _words(step, rank, n):
    return torch.randint(0, 20, (n, 2), generator=torch.Generator().manual_seed(10 * step + rank))


def test_sparse_gradients_count_alike(pool):
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        words = torch.cat([_words(step, rank, 2 + 3 * rank + step) for rank in range(2)])
        model(words).square().mean().backward()
        optimizer.step()
    for other in pool.run(2, _embedded):
        assert torch.allclose(other, flat(model), rtol=0, atol=1e-6)


def _simulated(driver, first, weighted, idle):
    """Two steps, in the second of which the last rank has no backward pass."""
    rank, model = driver.rank, copy.deepcopy(first)  # ranks are threads, and share the random generator
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.1", group=driver, bucket_bytes=SMALL_BUCKETS)
    for step, counts in enumerate((COUNTS[0], (4, 4, 0))):
        optimizer.zero_grad()
        x, y = _batch(step, rank, 5)
        share = WORLD * counts[rank] / sum(counts)
        loss = functional.mse_loss(model(x), y)
        if idle and not counts[rank]:
            sync.take_part()
        else:
            if weighted:
                sync.weight(counts[rank])
            (loss if weighted else loss * share).backward()
        optimizer.step()
    sync.close()
    return flat(model)


def test_simulated_ranks_count_alike():
    """With a rank that takes part without a pass, and where nobody counts."""
    first = mlp(7)
    scaled = ranks(WORLD, _simulated, first, False, False)[0]
    assert torch.allclose(ranks(WORLD, _simulated, first, True, True)[0], scaled, rtol=0, atol=1e-6)
    assert torch.equal(ranks(WORLD, _simulated, first, False, True)[0], scaled)


def _rounds_of(driver, how):
    """Two rounds, as open ones send them: by unequal weights, and without any where all weigh alike."""
    w = torch.zeros(1)
    part, found = Part({"w": w}, driver, stenograd.method(how), Local(every=1), 100), []
    for weight in (3.0 - 2 * driver.rank, None):
        w += 4.0 * driver.rank
        part.weight = weight
        part.send()
        assert part.merge()
        found.append(w.item())
    return found


@pytest.mark.parametrize("how", ["dense", "fp16"])
def test_a_round_of_equal_weights_counts_alike_after_one_of_unequal_ones(how):
    """0 and 4 by 3 and 1 is 1; then 1 and 5 is 3."""
    assert ranks(2, _rounds_of, how) == [[1.0, 3.0]] * 2


@pytest.mark.parametrize("again", [4, 8, None], ids=["other", "equal", "none"])
@pytest.mark.parametrize("kept", [False, True], ids=["set_to_none", "zeros"])
def test_a_number_without_a_pass_changes_nothing(again, kept):
    """A batch is skipped after its weight was given, and the step is made all the same."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with stenograd.distribute(layer, optimizer, "local:every=2") as sync:
        sync.weight(8)
        layer(torch.ones(1, 1)).sum().backward()
        sync.weight(24)
        optimizer.step()
        assert layer.weight.grad.item() == 1.0
        assert sync._weighing.trained == 8
        optimizer.zero_grad(set_to_none=not kept)
        if again is not None:
            sync.weight(again)
        layer(torch.ones(1, 1)).sum().backward()
        assert layer.weight.grad.item() == 1.0
        assert sync._weighing.trained == 8 + (24 if again is None else again)


@pytest.mark.parametrize("kept", [False, True], ids=["set_to_none", "zeros"])
@pytest.mark.parametrize("early", [False, True], ids=["after clearing", "before clearing"])
def test_a_pass_whose_step_was_left_out_takes_nothing_from_the_next(early, kept):
    """As where a GradScaler leaves out a step; what is cleared then counts with no later pass."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with stenograd.distribute(layer, optimizer, "local:every=9") as sync:
        for _ in range(3):
            if early:
                sync.weight(8)
            optimizer.zero_grad(set_to_none=not kept)
            if not early:
                sync.weight(8)
            layer(torch.ones(1, 1)).sum().backward()
            assert layer.weight.grad.item() == 1.0
        assert sync._weighing.trained == 24


@pytest.mark.parametrize("method", ["dense", "local:every=2"])
def test_what_torch_returns_is_not_weighed(method):
    """As an adaptive weight of two losses needs it: only what is added to `.grad` counts by its number."""
    layer = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with stenograd.distribute(layer, optimizer, method) as sync:
        for n in (1, 3, 0):
            sync.weight(n)
            loss = layer(torch.ones(1, 1)).sum()
            (returned,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
            assert returned.item() == 1.0
            sync.weight(n)  # its pass has not begun
            with sync.no_sync():
                loss.backward()
            assert layer.weight.grad.item() == 1.0


@pytest.mark.parametrize("method", ["dense", "local:every=2"])
def test_layers_that_are_frozen_for_a_while_are_weighed_when_they_learn(method):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with stenograd.distribute(model, optimizer, method) as sync:
        for learns in (False, True):
            model[0].requires_grad_(learns)
            optimizer.zero_grad()
            sync.weight(2, reduce="sum")
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
            assert model[1].weight.grad.item() == pytest.approx(model[0].weight.item())
        assert model[0].weight.grad.item() == pytest.approx(model[1].weight.item())


def _one_forgets(rank, method):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, method, timeout_s=3)
    if rank == 0:
        sync.weight(3)
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    except StenogradError as error:
        return str(error)
    finally:
        sync.close()
    return ""


@pytest.mark.parametrize("method", ["dense", "local:every=1"])
def test_a_rank_that_gives_no_weight_is_named(pool, method):
    told = pool.run(2, _one_forgets, method)
    assert "rank(s) 1 gave no weight within 3 s" in told[0]
    assert told[1]  # whatever is found out there


def test_what_cannot_be_weighed_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer) as sync:
        for bad in (-1, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="n must be a finite number"):
                sync.weight(bad)
        with pytest.raises(ConfigError, match="reduce must be mean or sum"):
            sync.weight(1, reduce="median")
        with pytest.raises(ConfigError, match="divided must be a finite number > 0"):
            sync.weight(1, divided=0)
        sync.weight(1)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(StenogradError, match="a backward pass came without a weight"):
            model(torch.ones(1, 4)).sum().backward()
    for method in ("gossip", "noloco:every=2", "diloco:every=2,eager=true"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with (
                stenograd.distribute(model, optimizer, method) as sync,
                pytest.raises(ConfigError, match="weights"),
            ):
                sync.weight(1)


def test_every_way_of_training_in_rounds_is_tried():
    """All presets and schedules that can be weighed."""
    kinds = {type(stenograd.method(m).schedule) for m in ROUNDS}
    assert kinds == {Local, DiLoCo}
