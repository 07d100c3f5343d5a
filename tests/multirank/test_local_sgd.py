"""`local:every=H`: against plain copies in one process, in rounds, with codecs, saved, and hurt by NaN."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import stenograd
from stenograd.compression.contract import Site
from stenograd.errors import ConfigError, MethodError, NonFiniteError, StenogradError
from stenograd.simulate import ranks
from stenograd.sync.gradients import GradientSync

OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}
BUCKET = 2048  # bytes: the first weight is larger, the others share some


class Net(nn.Module):
    """A matrix larger than a bucket, small tensors, a running mean, and a layer that only rank 0 uses."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.norm = nn.Linear(20, 40, bias=False), nn.BatchNorm1d(40)
        self.last, self.extra = nn.Linear(40, 3), nn.Linear(3, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x, rank):
        y = self.last(torch.tanh(self.norm(self.first(x))))
        return self.extra(y) if rank == 0 else y


def loss_of(model, rank, step, nan=()):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x, rank), y)
    return loss * math.nan if (rank, step) in nan else loss


def train(group, rank, text, kind, steps, nan=(), cut=None, accumulate=1):
    """Train one rank; with `cut`, save there and go on with everything new."""
    model, saved, taken = Net(), None, []
    for begin, end in [(0, steps)] if cut is None else [(0, cut), (cut, steps)]:
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = stenograd.distribute(
            model, optimizer, text, group=group, bucket_bytes=BUCKET, timeout_s=30, check_every=0
        )
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.load_state_dict(saved[2])
        for step in range(begin, end):
            optimizer.zero_grad()
            for part in range(accumulate - 1):
                with sync.no_sync():
                    loss_of(model, rank, 100 * part + step, nan).backward()
            loss_of(model, rank, step, nan).backward()
            optimizer.step()
            taken.append(sync.skipped)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        done = sync.round, sync.skipped, sync.pending, sync.traffic.collectives
        sync.close()
    return {"state": model.state_dict(), "done": done, "optimizer": optimizer.state_dict()}


def on_rank(rank, *args, **kwargs):
    return train(None, rank, *args, **kwargs)


def simulated(world, *args, **kwargs):
    return ranks(world, lambda driver: train(driver, driver.rank, *args, **kwargs))


def mean_in_order(values):
    total = values[0] * (1.0 / len(values))
    for value in values[1:]:
        total = total + value * (1.0 / len(values))
    return total


def top_tenth(xs, *_):
    """Each rank's tenth of largest magnitude."""
    return [np.where(np.abs(x) >= np.sort(np.abs(x))[-math.ceil(x.size / 10)], x, 0) for x in xs]


def signs(xs, *_):
    """Signs times the mean magnitude of each 16 elements."""
    blocks = [np.split(x, range(16, x.size, 16)) for x in xs]
    return [np.concatenate([np.where(b >= 0, 1, -1) * np.abs(b).mean() for b in mine]) for mine in blocks]


def rank_two(xs, shape, memory):
    """Each rank's projection on two directions; a step of subspace iteration goes on from the last one."""
    n, m = (*shape, 1)[:2]
    if 2 * (n + m) >= n * m:
        return xs
    matrices = [x.reshape(n, m) for x in xs]
    if "q" not in memory:  # the random start, which any other would do as well as
        site = Site(shapes=(torch.Size(shape),), world_size=len(xs), key=memory["key"])
        start = stenograd.method("powersgd:rank=2,values=float32").compressors(False)[-1].inner
        (memory["q"],) = (
            q.reshape(m, 2).double().numpy() for q in start.init(torch.zeros(n * m), site).values()
        )
    p, _ = np.linalg.qr(np.mean([matrix @ memory["q"] for matrix in matrices], axis=0))
    memory["q"] = np.mean([matrix.T @ p for matrix in matrices], axis=0)
    return [(p @ (p.T @ matrix)).reshape(-1) for matrix in matrices]


def halves(xs, *_):
    return [torch.from_numpy(x).bfloat16().double().numpy() for x in xs]


CODECS = {
    "bf16": halves,
    "topk:ratio=0.1,values=float32": top_tenth,
    "sign:block=16,dense_below=0": signs,
    "powersgd:rank=2,values=float32": rank_two,
}


class Differences:
    """What each rank has sent of one parameter, h, and its mean over the ranks, H, in float64.

    A message is `q = C(p - h)`; then h becomes h + q, H becomes H + mean(q), and p becomes p + H - h. As p
    has moved by H - h, so has h, which is then H on all ranks.
    """

    def __init__(self, codec, parameter, key):
        self.codec, self.shape, self.memory = codec, tuple(parameter.shape), {"key": key}
        self.mean = parameter.detach().double().numpy().reshape(-1)

    def meet(self, same):
        sent = [p.detach().double().numpy().reshape(-1) for p in same]
        messages = self.codec([x - self.mean for x in sent], self.shape, self.memory)
        mean = self.mean + np.mean(messages, axis=0)
        for p, x, q in zip(same, sent, messages, strict=True):
            p.copy_(torch.from_numpy(x + mean - (self.mean + q)).view(self.shape))
        self.mean = mean


def plain(world, every, kind, steps, nan=(), codec=None):
    """The same in one process: copies of the model, and a loop. With a codec, differences are sent."""
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
    lanes = [Differences(CODECS[codec], p, i) for i, p in enumerate(models[0].parameters()) if codec]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step, nan).backward()
            if all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for i, same in enumerate(zip(*(m.parameters() for m in models), strict=True)):
                if codec is not None:
                    lanes[i].meet(same)
                    continue
                value = mean_in_order([p.detach() for p in same])
                for p in same:
                    p.copy_(value)
            for same in zip(*(m.buffers() for m in models), strict=True):
                if same[0].is_floating_point():
                    value = mean_in_order(list(same))
                    for b in same:
                        b.copy_(value)
    return [m.state_dict() for m in models]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_copies_in_one_process_bit_for_bit(world, kind):
    """10 steps with H = 4: rounds after 4 and 8, then 2 local steps, which leave the ranks apart."""
    wanted = plain(world, 4, kind, 10)
    done = simulated(world, "local:every=4", kind, 10)
    for rank, (mine, theirs) in enumerate(zip(done, wanted, strict=True)):
        assert mine["done"][:3] == (2, 0, False)
        for name, value in theirs.items():
            assert torch.equal(mine["state"][name], value), (rank, name)
    assert not torch.equal(done[0]["state"]["first.weight"], done[1]["state"]["first.weight"])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_ranks_do_the_same(world, pool):
    wanted = plain(world, 3, "momentum", 6)
    for mine, theirs in zip(pool.run(world, on_rank, "local:every=3", "momentum", 6), wanted, strict=True):
        for name, value in theirs.items():
            close = torch.allclose(mine["state"][name], value, atol=1e-6)
            same = name.startswith(("norm.running", "norm.num")) or torch.equal(mine["state"][name], value)
            assert close, name
            assert same, name


@pytest.mark.parametrize(
    ("world", "kind", "codec"),
    # From four ranks on signs are averaged in two phases; see test_two_phase.py.
    [(2, "momentum", c) for c in CODECS]
    + [(3, "adamw", c) for c in CODECS]
    + [(4, "momentum", c) for c in CODECS if not c.startswith("sign")],
)
def test_codecs_send_differences(world, kind, codec):
    """H and h as in `Differences`, tensor by tensor; buckets of one tensor make both the same."""
    size = (
        256 if codec == "bf16" else 4
    )  # bytes; it rounds each element by itself, and would be cut that small

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = stenograd.distribute(
            model, optimizer, f"local:every=2/{codec}", group=driver, bucket_bytes=size, timeout_s=30
        )
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, driver.rank, step).backward()
            optimizer.step()
        sync.close()
        return model.state_dict()

    wanted = plain(world, 2, kind, 6, codec=codec)
    close = {"rtol": 1e-3, "atol": 2e-4} if codec == "bf16" else {"rtol": 0, "atol": 2e-6}
    for mine, theirs in zip(ranks(world, rank_of), wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, **close, msg=name)


@pytest.mark.parametrize("codec", ["", "/topk:ratio=0.1", "/sign", "/powersgd:rank=2"])
def test_resumed_in_mid_round_bit_for_bit(codec):
    """Rounds after 3, 6 and 9 steps; saved after 4 (in the second) and 6 (between two)."""
    text = f"local:every=3{codec}"
    whole = simulated(3, text, "adamw", 10)
    for cut in (4, 6):
        for a, b in zip(whole, simulated(3, text, "adamw", 10, cut=cut), strict=True):
            assert a["done"][:2] == b["done"][:2] == (3, 0)
            assert all(torch.equal(a["state"][n], b["state"][n]) for n in a["state"])


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_nan_costs_one_local_step_on_one_rank(kind, step):
    """Also in the pass that makes a round due: the round is held all the same."""
    nan = ((1, step),)
    wanted = plain(2, 4, kind, 9, nan=nan)
    with pytest.warns(RuntimeWarning, match="a gradient of rank 1 was not finite"):
        done = simulated(2, "local:every=4", kind, 9, nan=nan)
    for rank, (mine, theirs) in enumerate(zip(done, wanted, strict=True)):
        assert mine["done"][:3] == (2, rank, False)
        for name, value in theirs.items():
            assert torch.equal(mine["state"][name], value), name


def test_two_optimizers_skip_together_and_count_once():
    """The bad pass makes a round due on both ranks; it is held when the second optimizer has stepped."""

    def rank_of(driver):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        with stenograd.distribute(model, optimizers, "local:every=2", group=driver, timeout_s=30) as sync:
            for step in range(4):
                model.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                (loss * (math.nan if driver.rank == 1 and step == 1 else 1.0)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            weight = model[0].weight.detach().clone()
            return sync.skipped, sync.round, weight

    with pytest.warns(RuntimeWarning, match="a gradient of rank 1 was not finite"):
        (first, rounds, a), (second, more, b) = ranks(2, rank_of)
    assert (first, second, rounds, more) == (0, 1, 2, 2)
    assert torch.equal(a, b)


def test_a_skipped_step_leaves_the_round_to_the_next_forward_pass():
    """Rank 1 skips the step that is due, as GradScaler does: rank 0 waits for it, and nothing hangs."""

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        sync = stenograd.distribute(model, optimizer, "local:every=2", group=driver, timeout_s=30)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, driver.rank, step).backward()
            if not (driver.rank == 1 and step in (1, 3)):
                optimizer.step()
            seen.append((sync.round, sync.pending))
        with sync.consensus():
            kept = {n: v.clone() for n, v in model.state_dict().items()}
        sync.flush()
        sync.close()
        return seen, kept

    (first, a), (second, b) = ranks(2, rank_of)
    assert first == [(0, False), (1, False), (1, False), (2, False)]
    assert second == [(0, False), (0, True), (1, False), (1, True)]
    assert all(torch.equal(a[n], b[n]) for n in a if "num_batches" not in n)


@pytest.mark.parametrize("functional", [False, True], ids=["modules called", "weights used"])
@pytest.mark.parametrize("codec", ["", "/topk:ratio=0.3"])
def test_optimizers_that_step_in_turn_lose_no_round(codec, functional):
    """After a pass only one of two optimizers steps, and the model, a mere container, is never called.

    10 passes with H = 2: the round that is due is held before the next forward pass, or, where no module is
    called at all, when the other optimizer has stepped, too. The tenth is left to `consensus()`.
    """

    def rank_of(driver):
        model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
        optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]
        sync = stenograd.distribute(model, optimizers, f"local:every=2{codec}", group=driver, timeout_s=30)
        rounds = []
        for step in range(10):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + driver.rank))
            layer, optimizer = model["ab"[step % 2]], optimizers[step % 2]
            model.zero_grad()
            out = nn.functional.linear(x, layer.weight, layer.bias) if functional else layer(x)
            out.square().sum().backward()
            optimizer.step()
            rounds.append(sync.round)
        with sync.consensus():
            kept = [p.detach().clone() for p in model.parameters()]
        sync.close()
        return rounds, sync.round, kept

    (rounds, held, a), (same, _, b) = ranks(2, rank_of)
    assert rounds == same == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert held == 5
    assert all(map(torch.equal, a, b))


def test_every_one_with_plain_sgd_equals_averaged_gradients():
    """theta - lr g_r, averaged, is theta - lr mean(g), up to rounding; with AdamW it is not."""

    def rank_of(driver, text, kind):
        model = nn.Linear(4, 2)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        make = {"sgd": lambda ps: torch.optim.SGD(ps, lr=0.1), "adamw": OPTIMIZERS["adamw"]}[kind]
        optimizer = make(model.parameters())
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30):
            for step in range(5):
                optimizer.zero_grad()
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + driver.rank))
                model(x).square().sum().backward()
                optimizer.step()
        return model.weight.detach().clone()

    for kind, equal in (("sgd", True), ("adamw", False)):
        local, every = (ranks(2, rank_of, text, kind)[0] for text in ("local:every=1", "dense"))
        assert torch.allclose(local, every, atol=1e-6) == equal, kind


def test_accumulation_counts_as_one_step():
    done = simulated(2, "local:every=2", "momentum", 4, accumulate=3)
    assert done[0]["done"][0] == 2
    assert torch.equal(done[0]["state"]["first.weight"], done[1]["state"]["first.weight"])


def test_consensus_is_the_mean_and_is_taken_back():
    def rank_of(driver):
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with stenograd.distribute(model, optimizer, "local:every=10", group=driver, timeout_s=30) as sync:
            with torch.no_grad():
                model.weight.zero_()
            model(torch.full((1, 2), float(driver.rank + 1))).sum().backward()
            optimizer.step()
            with sync.consensus():
                inside = model.weight.tolist()
            return inside, model.weight.tolist()

    assert ranks(2, rank_of) == [([[-1.5, -1.5]], [[-1.0, -1.0]]), ([[-1.5, -1.5]], [[-2.0, -2.0]])]


def test_bytes_are_a_round_every_h_steps(pool):
    """8 steps with H = 4 and without buffers: two rounds, each of the model once in and once out."""
    (first, _) = pool.run(2, _bytes, "local:every=4")
    model_bytes, moved = first
    assert moved == 2 * (model_bytes + 8)  # 2 (N-1)/N = 1 of the model a round, and the pass's number


def test_bytes_of_gradients_before_the_rounds_count(pool):
    """Three steps with gradients, then H = 4 local ones and a round, and one more: four times the model.

    Gradients travel with a few words that tell whether they are finite.
    """
    (first, _) = pool.run(2, _bytes, "local:every=4,after=3")
    model_bytes, moved = first
    assert 4 * model_bytes <= moved < 4.01 * model_bytes


def _bytes(rank, text):
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=30)
    before = sync.traffic.moved_bytes
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
    moved = sync.traffic.moved_bytes - before
    sync.close()
    return sum(p.numel() * p.element_size() for p in model.parameters()), moved


def test_what_does_not_fit_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"check_every must be 0 with local:every=2/topk"):
        stenograd.distribute(model, optimizer, "local:every=2/topk", check_every=3)
    with pytest.raises(MethodError, match="GradientSync takes a method without a schedule"):
        GradientSync(model, optimizer, "local")
    with (
        stenograd.distribute(model, optimizer, "local:every=2") as sync,
        pytest.raises(StenogradError, match="needs as many batches on every rank"),
    ):
        sync.join()


def test_parameters_that_are_finite_on_no_rank_are_an_error_on_every_rank():
    def rank_of(driver):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, "local:every=1", group=driver, timeout_s=30)
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.weight[0, 0] = math.inf
        with pytest.raises(NonFiniteError, match=r"round 0 of local:every=1 found .* on all"):
            optimizer.step()
        sync.close()
        return True

    assert ranks(2, rank_of) == [True, True]
