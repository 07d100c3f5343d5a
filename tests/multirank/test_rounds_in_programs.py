"""Rounds beside what else a program does: saving whole models, copies, traces, failures while sending."""

import copy
import io
import json
import math
import pickle

import pytest
import torch
from torch import nn

import stenograd
from stenograd.errors import CheckpointError, MethodError, PeerLost
from stenograd.simulate import ranks

SCHEDULES = ["local:every=2", "diloco:every=2", "diloco:every=4,delay=1,mix=0.5", "gossip"]


def step(model, optimizer, scale=1.0):
    optimizer.zero_grad()
    (model(torch.ones(1, 3)) * scale).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("text", SCHEDULES)
def test_whole_models_are_pickled_and_copied(text):
    """A copy has the weights, works alone, and holds no round of the original."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        step(model, optimizer)
        torch.save(model, io.BytesIO())
        for copied in (lambda: pickle.loads(pickle.dumps(model)), lambda: copy.deepcopy(model)):
            other = copied()
            assert all(map(torch.equal, other.parameters(), model.parameters()))
            model(torch.ones(1, 3)).sum().backward()  # with a step that is skipped, something is due
            due, held = list(sync._due), sync.round
            other.train()(torch.ones(1, 3))
            assert (sync._due, sync.round) == (due, held)
            step(model, optimizer)


def _traced(rank, path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "diloco:every=3,delay=1,mix=0.5", timeout_s=30) as sync:
        with sync.trace(path):
            for _ in range(4):
                step(model, optimizer)
        return sync.round


def test_a_trace_notes_what_is_under_way_while_training_goes_on(pool, tmp_path):
    """Delayed rounds have a group of their own, and their exchanges are in the trace like others."""
    assert pool.run(2, _traced, str(tmp_path / "t.json")) == [1, 1]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "collective"} == {0, 1}


def test_a_rank_that_is_lost_while_chunks_are_handed_over_is_named():
    """The second chunk finds that the first has failed; what is raised names the rank."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "diloco:every=1", bucket_bytes=64) as sync:
        exchange = sync._parts[0]._flat.exchange
        launch, calls = exchange._launch, []

        def failing(index, *rest):
            calls.append(index)
            exchange._failure = PeerLost("rank 1 did not answer", [1])
            raise exchange._failure

        exchange._launch = failing
        submit = exchange.submit

        def waiting(index):
            for job in exchange._jobs:
                job.exception()  # so that each chunk is handed over after the last one has failed
            submit(index)

        exchange.submit = waiting
        with pytest.raises(PeerLost, match="rank 1 did not answer"):
            step(model, optimizer)
        assert calls[0] == 0
        exchange._launch = launch


@pytest.mark.parametrize("text", ["diloco:every=4", "diloco:every=4/topk", "local:every=4/topk"])
def test_the_state_of_another_model_is_refused_before_anything_changes(text):
    def sync_of(width):
        model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = stenograd.distribute(model, optimizer, text)
        step(model, optimizer)
        return model, sync

    _, small = sync_of(4)
    model, large = sync_of(5)
    before, steps = copy.deepcopy(model.state_dict()), large.step
    with pytest.raises(CheckpointError, match=r"must have shape .*: load it into the same model"):
        large.load_state_dict({**small.state_dict(), "passes": 77})
    state = small.state_dict()
    del state["parameters"]["0.weight in rounds"]
    with pytest.raises(CheckpointError, match=r"differ in parameter '0\.weight'"):
        small.load_state_dict(state)
    assert large.step == steps
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    small.close()
    large.close()


def test_a_bad_rank_costs_eager_rounds_nothing_but_its_own_part():
    """Nobody hears of it before the next round, so the rank itself must not take it into its outer ones."""

    def rank_of(driver):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, "diloco:every=1,eager=true", group=driver) as sync:
            rounds = []
            for number in range(6):
                if number == 2 and driver.rank == 1:
                    with torch.no_grad():
                        model.weight[0, 0] = math.nan
                step(model, optimizer)
                rounds.append(sync.round)
            return rounds[-1] >= 4, bool(model.weight.isfinite().all())

    with pytest.warns(RuntimeWarning, match="not finite"):
        assert ranks(2, rank_of) == [(True, True)] * 2


def test_keys_of_a_preset_are_never_dropped():
    with pytest.raises(MethodError, match="diloco has no key 'ratio'"):
        stenograd.method("sparseloco:ratio=0.1/bf16")
    with pytest.raises(MethodError, match="key 'every' is given twice"):
        stenograd.method("slowmo:every=2,every=3")
    assert "ratio=0.1" in str(stenograd.method("sparseloco:ratio=0.1"))


def test_more_ranks_in_a_node_than_tensors():
    """Some rank then speaks for no parameter at all."""

    def rank_of(driver):
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        text = "diloco:every=2,inside=dense,node_size=2"
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for _ in range(4):
                step(model, optimizer, 1.0 + driver.rank)
            state = sync.state_dict()
            sync.load_state_dict(state)
            return sync.round, model.weight.detach().clone()

    found = ranks(4, rank_of)
    assert [rounds for rounds, _ in found] == [2] * 4
    assert all(torch.equal(found[0][1], weight) for _, weight in found)


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_layer_that_was_unfrozen_without_a_refresh_is_refused(text):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        step(model, optimizer)
        model[0].requires_grad_(True)
        with pytest.raises(stenograd.StenogradError, match=r"shape \(3, 3\) .* call sync\.refresh"):
            step(model, optimizer)
        sync.refresh()
        step(model, optimizer)
    stenograd.shutdown()


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_step_inside_a_backward_pass_is_refused(text):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text):
        model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
        with pytest.raises(stenograd.StenogradError, match="stepped during a backward pass"):
            model(torch.ones(1, 3)).sum().backward()
    stenograd.shutdown()


@pytest.mark.parametrize("text", ["topk", *SCHEDULES])
def test_a_model_that_holds_its_own_sync_is_averaged_over_time(text):
    """torch's AveragedModel copies the model deeply, whatever is among its attributes."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        model.sync = sync
        smooth = torch.optim.swa_utils.AveragedModel(model)
        step(model, optimizer)
        smooth.update_parameters(model)
        assert torch.equal(smooth.module.weight, model.weight)
        assert smooth.module.sync is sync
    stenograd.shutdown()


def _skipped_then_saved(rank, folder, text):
    """Rank 1 skips the fourth step, after which a round is due, and all save."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text, timeout_s=20) as sync:
        for s in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank + s))).square().sum().backward()
            if (rank, s) != (1, 3):
                optimizer.step()
        stenograd.save_checkpoint(folder, step=4, model=model, optimizer=optimizer, sync=sync)
        kept = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())
        stenograd.load_checkpoint(folder, model=model, optimizer=optimizer, sync=sync)
        assert all(map(torch.equal, model.parameters(), kept[0]))
        assert len(optimizer.state_dict()["state"]) == len(kept[1]["state"])
        return sync.round


@pytest.mark.parametrize("text", ["local:every=4", "diloco:every=4,states=reset", "gossip:every=4"])
def test_ranks_save_together_after_one_skipped_the_step_of_a_round(pool, tmp_path, text):
    assert pool.run(2, _skipped_then_saved, str(tmp_path), text) == [1, 1]


@pytest.mark.parametrize(
    "name", ["diloco:every=4", "noloco:every=4", "diloco:every=4,fragments=2", "local:every=4"]
)
def test_a_checkpoint_from_before_the_first_round_keeps_its_weights_on_another_number_of_ranks(name):
    def train(driver):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, f"{name},after=9", group=driver) as sync:
            for _ in range(5):
                step(model, optimizer)
            return model.state_dict(), sync.state_dict()

    saved = ranks(2, train)
    (new,) = stenograd.reshard([state for _, state in saved], 1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, f"{name},after=9") as sync:
        sync.load_state_dict(new)
        model.load_state_dict(saved[0][0])
        sync.after_load()
        assert all(torch.equal(value, model.state_dict()[n]) for n, value in saved[0][0].items())
        for _ in range(8):  # to the end of the first round
            step(model, optimizer)
        assert sync.round == 1
    stenograd.shutdown()


@pytest.mark.parametrize("text", ["topk", *SCHEDULES])
def test_a_sparse_gradient_that_is_not_finite_costs_one_step(text):
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        before = model.weight.detach().clone()
        (model(torch.tensor([1, 1, 3])).sum() * math.nan).backward()
        with pytest.warns(RuntimeWarning, match="not finite"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert sync.skipped == 1
    stenograd.shutdown()
