"""States of gossip: saved and continued, on as many ranks and on others; and what is refused."""

import copy

import pytest
import torch
from gossip_training import OPTIMIZERS, PARAMETERS, Net, flat, loss_of, simulated
from torch import nn

import stenograd
from stenograd.errors import CheckpointError, ConfigError, MethodError, StenogradError
from stenograd.simulate import ranks


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize(
    "text",
    [
        "gossip",
        "gossip:pushsum=on,every=2",
        "gossip:graph=star,order=adapt-then-combine,buffers=average",
        "gossip:graph=star,consensus=0.3/topk:ratio=0.2",
        "gossip:graph=ring,consensus=0.3/sign:dense_below=64",
        "gossip:graph=exponential,consensus=1/qsgd",
    ],
)
def test_resumed_bit_for_bit(text, cut):
    whole = simulated(3, text, "adamw", 7)
    parts = simulated(3, text, "adamw", 7, cut=cut)
    for a, b in zip(whole, parts, strict=True):
        assert (a["round"], a["share"]) == (b["round"], b["share"])
        for what in ("state", "common"):
            assert all(torch.equal(a[what][n], b[what][n]) for n in a[what]), what


@pytest.mark.parametrize(
    "text", ["gossip", "gossip:pushsum=on", "gossip:graph=ring,consensus=0.3/topk:ratio=0.2"]
)
def test_resharding_starts_all_ranks_from_the_mean(text):
    """4 -> 2 -> 3 ranks, each time from the exact mean, and training goes on from there."""
    saved = simulated(4, text, "momentum", 3)
    for world, at in ((2, 3), (3, 6)):
        new = stenograd.reshard([s["sync"] for s in saved], world)
        mean = torch.stack([flat(s["state"]) for s in saved]).mean(0)
        first = saved[0]["state"]

        def rank_of(driver, new=new, first=first, at=at):
            model = Net()
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
            sync.load_state_dict(new[driver.rank])
            model.load_state_dict(first)
            sync.after_load()
            start = copy.deepcopy(model.state_dict())
            for step in range(at, at + 3):
                optimizer.zero_grad()
                loss_of(model, driver.rank, step).backward()
                optimizer.step()
            end = copy.deepcopy((model.state_dict(), sync.state_dict(), sync.round))
            sync.close()
            return start, *end

        found = ranks(world, rank_of)
        for start, _, _, done in found:
            torch.testing.assert_close(flat(start), mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(flat(start), flat(found[0][0]))
            assert done == at + 3
        saved = [{"state": state, "sync": sync} for _, state, sync, _ in found]


def test_a_resharded_state_divides_by_the_weights():
    """Ranks at 1 and 4 with weights 0.5 and 1.5 have the mean (0.5 + 6) / 2; a plain mean would be 2.5."""
    states = simulated(2, "gossip:pushsum=on", "still", 1)
    for state, value, weight in zip(states, (1.0, 4.0), (0.5, 1.5), strict=True):
        for name in PARAMETERS:
            state["sync"]["parameters"][name]["own"].fill_(value * weight)
        state["sync"]["parameters"]["push-sum in rounds"]["own weight"].fill_(weight)
    new = stenograd.reshard([s["sync"] for s in states], 3)

    def rank_of(driver):
        model = Net()
        with stenograd.distribute(
            model, OPTIMIZERS["still"](model.parameters()), "gossip:pushsum=on", group=driver, timeout_s=30
        ) as sync:
            sync.load_state_dict(new[driver.rank])
            loss_of(model, 0, 0)  # what is owed is done before the next training forward pass
            return sync.share, flat(model.state_dict())

    for share, values in ranks(3, rank_of):
        assert share == 1.0
        assert bool((values == 3.25).all())


def test_a_state_of_another_graph_is_refused():
    """Rank and world size are the same, and so is the model."""
    state = simulated(2, "gossip:graph=ring", "still", 1)[0]["sync"]

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["still"](model.parameters())
        with (
            stenograd.distribute(model, optimizer, "gossip", group=driver, timeout_s=30) as sync,
            pytest.raises(CheckpointError, match=r"method must be 'gossip', got 'gossip:graph=ring'"),
        ):
            sync.load_state_dict(state)

    ranks(2, rank_of)


def test_what_does_not_fit_is_refused():
    refused = {
        "gossip:graph=line": "graph must be one of onepeer, exponential, ring, torus, star, complete, got",
        "gossip:every=0": "every must be at least 1",
        "gossip:consensus=1.5": r"consensus must be in \(0, 1\], got 1.5",
        "gossip:consensus=nan": "consensus must be in",
        "gossip:order=both": "order must be one of combine-then-adapt, adapt-then-combine",
        "gossip:lost=ignore": "lost must be one of raise, drop",
        "gossip:pushsum=maybe": "pushsum must be one of auto, on, off",
        "gossip:consensus=0.5": "would only slow down mixing that loses nothing; leave consensus out",
        "gossip:consensus=0.5/topk": "those of graph=onepeer change; use graph=ring, torus or exponential",
        "gossip:graph=ring/topk": "write consensus=0.4 for sign, 0.04 for topk",
        "gossip:graph=ring,consensus=1/sign:majority=true": "use sign without majority",
        "gossip:graph=ring,consensus=1/randomk:unbiased=true": "leave out unbiased=true",
        "gossip:graph=ring,consensus=1/powersgd": "use topk, sign, qsgd, bf16 or fp16",
        "gossip:graph=ring,consensus=1/threshold": "use topk, sign, qsgd, bf16 or fp16",
        "gossip:graph=ring,consensus=1/topk:clip_norm=1": "clip gradients in your loop",
        "gossip:graph=ring,consensus=1/topk:warmup_steps=9": "leave warmup_steps out",
        "gossip:graph=ring,consensus=1,lost=drop/topk": "use lost=raise, or leave the codec out",
        "gossip:graph=ring,consensus=1,pushsum=on/topk": "leave pushsum out",
    }
    for text, message in refused.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"check_every must be 0 .*inside `with sync.consensus\(\):`"):
        stenograd.distribute(model, optimizer, "gossip", check_every=1)
    with pytest.raises(StenogradError, match="gossip needs as many batches on every rank"):
        stenograd.distribute(model, optimizer, "gossip").join()
    stenograd.shutdown()


class _Twice(torch.optim.Optimizer):
    """Evaluates its closure twice, and changes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.enable_grad()
    def step(self, closure):
        closure()
        return closure()


def test_a_second_evaluation_is_refused_where_mixing_comes_before_the_step():
    """SGD evaluates its closure once, which happens before mixing."""
    model = Net()
    optimizer = _Twice(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    with (
        stenograd.distribute(model, optimizer, "gossip"),
        pytest.raises(StenogradError, match="without a closure, or write order=adapt-then-combine"),
    ):
        optimizer.step(closure)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for method in ("gossip", "gossip:order=adapt-then-combine"):
        with stenograd.distribute(model, optimizer, method) as sync:
            optimizer.step(closure)
            assert sync.round == 1
    stenograd.shutdown()
