"""Averages of named tensors among simulated ranks: clipping, warm-up, small tensors, bad numbers, state."""

import math
import threading
import time

import numpy as np
import pytest
import torch

import stenograd
from stenograd.errors import ConfigError, MethodError, PeerLost
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.simulate import ranks
from stenograd.wire.driver import Driver


def averages(how, mine, steps=1, **options):
    """Each rank's averages and its exchange after some steps; `mine(rank, step)` are its tensors."""

    def rank_of(driver):
        exchange = TensorExchange(how, driver, **options)
        found = []
        for step in range(steps):
            given = mine(driver.rank, step)
            kept = {name: t.clone() for name, t in given.items()}
            found.append({name: t.clone() for name, t in exchange.average(given).items()})
            assert all(torch.equal(t, kept[name]) for name, t in given.items() if t.isfinite().all())
        exchange.close()
        return found, exchange

    return lambda world: ranks(world, rank_of)


def one(how, *values, **options):
    """The average of one tensor, on every rank the same."""
    tensors = [torch.as_tensor(v, dtype=torch.float32) for v in values]
    done = averages(how, lambda rank, _: {"x": tensors[rank]}, **options)(len(values))
    for found, _ in done:
        assert torch.equal(found[0]["x"], done[0][0][0]["x"]) or found[0]["x"].isnan().any()
    return done[0][0][0]["x"].tolist()


def test_values_are_clipped_before_averaging():
    """1000 and 0 at 100: the mean of the clipped is 50, not the clipped mean of 100."""
    assert one("dense:clip_value=100", [1000.0], [0.0]) == [50]
    assert one("dense:clip_value=100", [1000.0], [0.0], waits=True) == [50]


def test_norms_are_clipped_tensor_by_tensor():
    """[3, 4] has norm 5 and becomes [.6, .8]; [.5] is short enough and an empty tensor stays empty."""
    mine = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5]), "c": torch.zeros(0)}
    ((found, _),) = averages("dense:clip_norm=1", lambda *_: mine)(1)
    got = {name: t.tolist() for name, t in found[0].items()}
    assert got["a"] == pytest.approx([0.6, 0.8])
    assert (got["b"], got["c"]) == ([0.5], [])


def test_fifteen_equal_gradients():
    """Norm of 15 twos is 2 sqrt(15), so each becomes 1 / sqrt(15)."""
    assert one("dense:clip_norm=1", [2.0] * 15) == pytest.approx([1 / math.sqrt(15)] * 15)


@pytest.mark.parametrize("key", ["clip_value", "clip_norm"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["dense", "topk:ratio=0.5", "sign", "fp16", "threshold:value=0.1"])
def test_clipping_hides_neither_nan_nor_infinity(name, key, bad):
    """A clamped infinity is finite, so it is looked for before; both ranks hear of it."""
    how = f"{name}{',' if ':' in name else ':'}{key}=1"
    done = averages(how, lambda rank, _: {"x": torch.tensor([bad if rank else 2.0, 1.0])})(2)
    for found, exchange in done:
        assert not found[0]["x"].isfinite().all()
        assert (exchange.finite, exchange.skipped, exchange.step) == (False, 1, 0)


@pytest.mark.parametrize("key", ["clip_value", "clip_norm"])
@pytest.mark.parametrize(
    "name", ["dense", "topk:ratio=0.5", "sign", "qsgd", "natural", "fp16", "randomk:ratio=0.5", "powersgd"]
)
def test_what_is_clipped_may_be_as_large_as_its_type_allows(name, key):
    """The sum of both ranks' numbers is beyond float32; that of the clipped ones is not."""
    how = f"{name}{',' if ':' in name else ':'}{key}=1"
    done = averages(how, lambda *_: {"x": torch.full((2, 2), 3e38)})(2)
    for found, exchange in done:
        assert found[0]["x"].isfinite().all()
        assert (exchange.finite, exchange.skipped, exchange.step) == (True, 0, 1)


@pytest.mark.parametrize(
    ("key", "bound"),
    [("clip_value", 0.0), ("clip_norm", -1.0), ("clip_value", math.inf), ("clip_norm", math.nan)],
)
def test_senseless_bounds_are_refused(key, bound):
    with pytest.raises(MethodError, match=f"{key} must be positive and finite"):
        stenograd.Method(compressor=stenograd.method("dense").compressor, **{key: bound})


@pytest.mark.parametrize("key", ["warmup_steps", "dense_below"])
def test_counts_below_one_are_refused(key):
    with pytest.raises(MethodError, match=f"{key} must be at least 1, got -1"):
        stenograd.Method(compressor=stenograd.method("topk").compressor, **{key: -1})


@pytest.mark.parametrize("waits", [False, True])
def test_warmup_is_dense_until_its_step(waits):
    """Steps 0 and 1 send all; then the largest of four, and after it what is owed of the next: 3 + 3."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    run = averages("topk:ratio=0.25,warmup_steps=2", lambda *_: {"x": x}, steps=4, waits=waits)
    ((found, exchange),) = run(1)
    assert [step["x"].tolist() for step in found] == [[1, 2, 3, 4]] * 2 + [[0, 0, 0, 4], [0, 0, 6, 0]]
    assert exchange.state_dict()["parameters"]["x"]["residual"].tolist() == [2, 4, 0, 4]


def test_a_skipped_step_does_not_count_as_warmup():
    def mine(rank, step):
        return {"x": torch.tensor([math.nan if step == 0 else 1.0, 3.0])}

    for found, exchange in averages("topk:ratio=0.5,warmup_steps=1", mine, steps=3)(2):
        assert [step["x"].tolist() for step in found[1:]] == [[1, 3], [0, 3]]
        assert (exchange.step, exchange.skipped) == (2, 1)


@pytest.mark.parametrize("waits", [False, True])
def test_small_tensors_travel_densely(waits):
    """4 and 2 elements, below 3 dense: 4.5 is the mean of 9 and 0; the small ones are exact means."""
    given = [
        {"w": torch.tensor([1.0, 2, 9, 4]), "b": torch.tensor([0.5, 0.25])},
        {"w": torch.tensor([1.0, 2, 3, 5]), "b": torch.tensor([0.5, 0.75])},
    ]
    for found, exchange in averages("topk:ratio=0.25,dense_below=3", lambda r, _: given[r], waits=waits)(2):
        assert found[0]["w"].tolist() == [0, 0, 4.5, 2.5]
        assert found[0]["b"].tolist() == [0.5, 0.5]
        kept = exchange.state_dict()["parameters"]
        assert kept["b"] == {}
        assert kept["w"]["residual"].tolist() == ([1, 2, 0, 4] if exchange.driver.rank == 0 else [1, 2, 3, 0])
        assert [b.dense for b in exchange.buckets] == [False, True]


@pytest.mark.parametrize("name", [n for n in stenograd.methods() if n != "threshold"])
@pytest.mark.parametrize("world", [2, 4])
def test_feedback_and_averages_add_up(name, world):
    """Over five steps: sum of averages + mean residual = sum of the ranks' means, against NumPy, in buckets.

    10,000 elements of `big` are more than a bucket of 8 kB; `odd` is empty in one dimension.
    """
    shapes = {"big": (100, 100), "w": (30, 20), "b": (7,), "odd": (0, 3)}
    generator = np.random.default_rng(0)
    data = {n: generator.normal(size=(5, world, *s)).astype(np.float32) for n, s in shapes.items()}
    done = averages(
        name,
        lambda rank, step: {n: torch.from_numpy(values[step, rank]) for n, values in data.items()},
        steps=5,
        bucket_bytes=8192,
    )(world)
    assert len(done[0][1].buckets) >= 2
    for n, values in data.items():
        wanted = values.astype(np.float64).sum(0).mean(0)
        applied = sum(step[n].double().numpy() for step in done[0][0])
        for found, _ in done[1:]:
            assert all(torch.equal(a[n], b[n]) for a, b in zip(found, done[0][0], strict=True))
        states = [exchange.state_dict()["parameters"][n] for _, exchange in done]
        if "residual" in states[0]:
            applied = applied + np.mean([s["residual"].double().numpy() for s in states], axis=0)
        if "residual" in states[0] or name == "dense":
            np.testing.assert_allclose(applied, wanted, atol=2e-4)


@pytest.mark.parametrize("how", ["dense", "fp16"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_weight_counts_for_one_exchange(how, waits, bad):
    """Weights 3 and 1 of 0 and 4 give 1; the mean is 2, also after a step that was skipped."""

    def rank_of(driver):
        exchange, found = TensorExchange(how, driver, waits=waits), []
        for weight in (3.0 - 2 * driver.rank, None, 3.0 - 2 * driver.rank):
            if weight is not None:
                exchange.weigh(weight)
            spoilt = math.nan if bad and weight is not None else 0.0
            found.append(exchange.average({"x": torch.tensor([4.0 * driver.rank + spoilt])})["x"].item())
            found.append(exchange.share)
        exchange.close()
        return found

    for share, found in zip((1.5, 0.5), ranks(2, rank_of), strict=True):
        weighed = math.nan if bad else 1.0
        assert found == pytest.approx([weighed, share, 2.0, 1.0, weighed, share], nan_ok=True)


@pytest.mark.parametrize("how", ["dense", "topk:ratio=1,values=float32"])
def test_a_step_begins_when_the_one_before_has_ended(how):
    """Rank 1 comes late, so rank 0 begins its second step, and weighs it, while the first is under way."""

    def rank_of(driver):
        exchange = TensorExchange(how, driver, bucket_bytes=1)
        for step in range(2):
            if step:
                exchange.weigh(3.0 - 2 * driver.rank)
            else:
                time.sleep(0.3 * driver.rank)
            mine = {name: torch.full((2, 2), 4.0 * driver.rank + step) for name in "abc"}
            averages = exchange.start(mine)
        found = [t.unique().tolist() for t in averages.result().values()]
        exchange.close()
        return found, exchange.step

    assert ranks(2, rank_of, timeout_s=10) == [([[2.0]] * 3, 2)] * 2  # 1 by 3 and 5 by 1


def test_saved_state_is_a_copy_wherever_it_is():
    """In a bucket, or waiting for one."""
    exchange = TensorExchange("topk:ratio=0.5,values=float32", Driver())
    exchange.average({"x": torch.tensor([3.0, 1.0])})
    for buckets in (1, 0):
        exchange.end_at(buckets)
        exchange.state_dict()["parameters"]["x"]["residual"].fill_(7)
        assert exchange.state_dict()["parameters"]["x"]["residual"].tolist() == [0.0, 1.0]
    exchange.close()


def test_another_shape_under_the_same_name_is_refused_and_owes_what_it_owed():
    """What top-1 has left out of [3, 1] is owed in the next exchange of that shape."""

    def rank_of(driver):
        exchange = TensorExchange("topk:ratio=0.5,values=float32", driver)
        found = [exchange.average({"x": torch.tensor([3.0, 1.0])})["x"].tolist()]
        with pytest.raises(ConfigError, match=r"residual of x must have shape \(3,\), got \(2,\)"):
            exchange.average({"x": torch.ones(3)})
        found.append(exchange.average({"x": torch.tensor([0.0, 1.0])})["x"].tolist())
        exchange.close()
        return found

    assert ranks(1, rank_of) == [[[3.0, 0.0], [0.0, 2.0]]]


def test_a_rank_that_stays_away_or_fails_is_named():
    def absent(driver):
        if driver.rank == 0:
            TensorExchange("dense", driver).average({"x": torch.ones(1)})

    with pytest.raises(PeerLost, match=r"simulated rank 0: rank\(s\) 1 did not come within 0.2 s"):
        ranks(2, absent, timeout_s=0.2)

    def failing(driver):
        if driver.rank == 1:
            raise ValueError("mine")
        TensorExchange("dense", driver).average({"x": torch.ones(1)})

    with pytest.raises(ValueError, match="mine"):
        ranks(2, failing, timeout_s=30)


class Stream:
    """Stands for a CUDA stream: each thread has its own current one, and notes what it waits for."""

    mine = threading.local()

    def __init__(self, device=None):
        self.waited = []

    @classmethod
    def current(cls, _):
        cls.mine.stream = getattr(cls.mine, "stream", None) or cls()
        return cls.mine.stream

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.mark.parametrize("waits", [False, True])
def test_the_callers_stream_waits_for_averages_that_another_thread_made(waits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", Stream.current)

    def rank_of(driver):
        exchange = TensorExchange("topk:ratio=0.5", driver, waits=waits)
        mine = Stream.current(None)
        averages = exchange.start({"x": torch.ones(4)})
        exchange._streams._of[torch.device("cuda:0")] = side = Stream()
        before = list(mine.waited)
        averages.result()
        exchange.close()
        return before, mine.waited == [side]

    assert ranks(2, rank_of) == [([], True)] * 2


def test_a_rank_without_batches_waits_before_it_fills_its_buckets_anew(monkeypatch):
    """With `join()` it has no averages to read, but the next zeros lie where some may still be written."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream.current)

    def rank_of(driver):
        model = torch.nn.Linear(2, 1)
        sync = stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk", group=driver)
        finish, side, mine = sync._exchange.finish, Stream(), Stream.current(None)

        def ended(*args, **keys):
            outcome = finish(*args, **keys)
            sync._exchange._streams._of[torch.device("cuda:0")] = side
            return outcome

        sync._exchange.finish = ended
        sync.shadow()
        sync._exchange._streams._of.clear()
        sync.close()
        return mine.waited

    assert [len(waited) for waited in ranks(2, rank_of)] == [1, 1]


@pytest.mark.parametrize("how", ["demo", "dion", "powersgd:rank=2"])
def test_autocast_around_an_exchange_changes_no_bit(how, monkeypatch):
    """Programs call `backward()` inside of it, and without numba torch multiplies matrices."""
    monkeypatch.setenv("STENOGRAD_KERNELS", "reference")

    def steps(driver, on):
        generator = torch.Generator().manual_seed(driver.rank)
        exchange = TensorExchange(how, driver, waits=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            rows = [torch.randn(40, 30, generator=generator) for _ in range(3)]
            found = [exchange.average({"x": x})["x"].clone() for x in rows]
        exchange.close()
        return torch.stack(found)

    for plain, inside in zip(ranks(2, steps, False), ranks(2, steps, True), strict=True):
        assert torch.equal(plain, inside)
