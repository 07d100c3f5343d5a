"""Rounds beside what else a program does: saving whole models, copies, traces, failures while sending."""

import copy
import io
import json
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.training import descend
from torch import nn

import stenograd
from stenograd.checkpoint.reshard import alike
from stenograd.errors import CheckpointError, MethodError, PeerLost, StenogradError
from stenograd.simulate import ranks

SCHEDULES = ["local:every=2", "diloco:every=2", "diloco:every=4,delay=1,mix=0.5", "gossip"]


def step(model, optimizer, scale=1.0):
    descend(optimizer, (model(torch.ones(1, 3)) * scale).sum())


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


@pytest.mark.parametrize("text", ["local:every=3", "diloco:every=3", "diloco:every=3/bf16"])
def test_a_state_is_taken_with_buckets_of_another_size(text):
    model = nn.Linear(3, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, text) as sync:
        step(model, optimizer)
        state, other = sync.state_dict(), copy.deepcopy(model)
        for _ in range(4):
            step(model, optimizer)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with stenograd.distribute(other, optimizer, text, bucket_bytes=64) as sync:
        sync.load_state_dict(state)
        for _ in range(4):
            step(other, optimizer)
        assert sync.round == 1
    assert torch.equal(model.weight, other.weight)


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


@pytest.mark.parametrize("text", ["dense", "topk", *SCHEDULES])
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


@pytest.mark.parametrize("text", ["local:every=4", "diloco:every=4", "gossip"])
def test_inside_consensus_nothing_is_saved_loaded_or_trained(text):
    """The parameters there are not this rank's own, which come back after the block."""

    def train(rank):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=rank, timeout_s=20) as sync:
            step(model, optimizer, rank.rank)
            state, own = sync.state_dict(), model.weight.detach().clone()

            def trains():
                model(torch.ones(1, 3)).sum().backward()

            for call in (sync.state_dict, lambda: sync.load_state_dict(state), sync.refresh, trains):
                with pytest.raises(StenogradError, match=r"inside consensus\(\)"), sync.consensus():
                    call()
            with sync.consensus(), sync.no_sync(), sync.consensus():
                trains()
            assert torch.equal(model.weight, own)
            step(model, optimizer, rank.rank)
            sync.load_state_dict(sync.state_dict())
            return sync.step

    assert ranks(2, train) == [2, 2]


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


@pytest.mark.parametrize("text", ["gossip", "gossip:order=adapt-then-combine", "local:every=2"])
def test_a_resumed_run_steps_by_closures_as_before(text):
    def train(rank):
        def started():
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, optimizer, stenograd.distribute(model, optimizer, text, group=rank)

        def steps(model, optimizer, first, last):
            for s in range(first, last):
                x = torch.full((1, 3), float(rank.rank + s + 1))

                def closure(x=x):
                    optimizer.zero_grad()
                    loss = model(x).square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            return model.weight.detach().clone()

        parts = started()
        steps(*parts[:2], 0, 3)
        states = copy.deepcopy([part.state_dict() for part in parts])
        whole = steps(*parts[:2], 3, 5)
        parts[2].close()
        again = started()
        for part, state in zip(again, states, strict=True):
            part.load_state_dict(state)
        return torch.equal(steps(*again[:2], 3, 5), whole)

    assert ranks(2, train) == [True, True]


def _saved_when_closed(rank, folder, text):
    """All leave out the fourth step, after which a round is due, and close; then they save, and go on."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=20)
    for s in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(rank + s))).square().sum().backward()
        if s < 3:
            optimizer.step()
    sync.close()
    stenograd.save_state(folder, sync, model=model, optimizer=optimizer)
    own, again = model.weight.detach().clone(), stenograd.distribute(model, optimizer, text, timeout_s=20)
    stenograd.load_state(folder, again, model=model, optimizer=optimizer)
    assert torch.equal(model.weight, own)
    again.close()
    return own


@pytest.mark.parametrize("text", ["local:every=4", "diloco:every=4", "gossip:every=4", "diloco:every=60s"])
def test_ranks_save_after_they_have_closed(pool, tmp_path, text):
    one, other = pool.run(2, _saved_when_closed, str(tmp_path), text)
    assert not torch.equal(one, other)


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


AFTER = [
    "local:every=3,after=6",
    "local:every=3,after=6/qsgd",
    "local:every=1,after=6,inside=dense,node_size=1",
    "local:every=1,after=6,inside=dense,node_size=2",
    *(f"{name}:every=4,after=6" for name in ("diloco", "noloco", "sparseloco")),
    "diloco:every=4,fragments=2,delay=1,mix=0.5,after=6",
    "diloco:every=4,eager=true,after=6",
    "diloco:every=4,after=6/lowbit",
]


def _goes_back(rank, text, folder):
    """Save in the first passes, whose gradients are averaged; come back to there from a round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def go(begin, end):
        for t in range(begin, end):
            generator = torch.Generator().manual_seed(100 * t + rank)
            x = torch.randn(8, 4, generator=generator)
            descend(optimizer, model(x).square().mean() * (math.nan if t == 2 else 1))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.skipped, sync.round))

    with stenograd.distribute(model, optimizer, text, timeout_s=20) as sync:
        kept = {"model": model, "optimizer": optimizer, "sync": sync}
        go(0, 4)
        stenograd.save_checkpoint(folder, step=4, **kept)
        first = go(4, 13)
        again = []
        for _ in range(2):
            stenograd.load_checkpoint(folder, **kept)
            again.append(go(4, 13))
        optimizer.add_param_group({"params": []})
    return [alike(first, one) for one in again]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", AFTER)
def test_going_back_to_before_the_first_round_repeats_the_run_bit_for_bit(pool, tmp_path, text):
    assert pool.run(2, _goes_back, text, str(tmp_path)) == [[True, True]] * 2


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


def _skips_a_batch(rank, text):
    """Rank 1's second backward pass breaks off; the program catches that and goes on with the next batch."""
    model = nn.Sequential(nn.Linear(3, 80), nn.Linear(80, 2))  # large enough for codecs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stenograd.distribute(model, optimizer, text, timeout_s=10)

    def fails(grad):
        if (batch, rank) == (1, 1):
            raise ValueError("a bad batch")

    model[0].weight.register_hook(fails)
    for batch in range(14):
        optimizer.zero_grad()
        try:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        except ValueError:
            continue
        except StenogradError as error:
            return batch, str(error)
    return None


BROKEN = [*SCHEDULES, "diloco:every=4,fragments=2/topk", "diloco:every=2,eager=true", "local:every=2/qsgd"]
BROKEN += ["diloco:every=2,lost=drop", "noloco:every=2", "gossip:graph=ring,consensus=0.4/sign"]
BROKEN += ["gossip:lost=drop"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_backward_pass_that_broke_off_is_named_in_the_next_round_on_all_ranks(pool, text):
    """Both have made as many whole passes when they meet, but of different batches."""
    for told in pool.run(2, _skips_a_batch, text, timeout_s=60):
        assert told is not None
        assert "at different backward passes" in told[1]


def _evaluates(rank, text, mode):
    """Evaluate and save in a mode of torch's after every fifth step; return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 80), nn.Linear(80, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    with stenograd.distribute(model, optimizer, text, timeout_s=30) as sync:
        for batch in range(1, 19):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if batch % 6 or rank:  # else this rank skips a step that may make a round due
                optimizer.step()
            if batch % 3 == 0:
                with mode(), sync.consensus():
                    model(x)
                with mode():
                    sync.load_state_dict(copy.deepcopy(sync.state_dict()))
                    sync.flush()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("text", ["dense", "topk", *BROKEN])
def test_evaluating_and_saving_in_inference_mode_changes_nothing(pool, text):
    plain, inference = (pool.run(2, _evaluates, text, mode) for mode in (torch.no_grad, torch.inference_mode))
    for a, b in zip(plain, inference, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("text", ["local:every=2", "gossip"])
def test_one_whole_graph_is_refused_with_the_reason(text):
    torch._dynamo.reset()  # it remembers, for a process, what a model compiled earlier made it run uncompiled
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        stenograd.distribute(model, optimizer, text),
        pytest.raises(Exception, match="where ranks meet in rounds"),
    ):
        torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 3))


class _InRounds:
    """A small training, and all that it is made of, for `dcp`; `saved_by` as in `PerRank`."""

    def __init__(self, rank, text):
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.sync = stenograd.distribute(self.model, self.optimizer, text, bucket_bytes=64)
        self.kept = {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            descend(self.optimizer, (self.model(torch.randn(8, 4, generator=generator)) - 1).square().mean())
        return self

    def flat(self):
        self.sync.flush()
        return self.values()

    def values(self):
        return torch.cat([t.reshape(-1).float() for t in self.model.state_dict().values()])

    def parts(self, saved_by=None):
        """Each rank's own; of other ranks' model and momenta, those of the first."""
        of = f"rank{self.rank if saved_by is None else 0} "
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return {
            "model": {of + key: t for key, t in self.model.state_dict().items()},
            "momenta": {f"{of}{i}": t for i, t in enumerate(momenta)},
            "sync": stenograd.PerRank(self.sync, saved_by),
        }

    def load(self, folder, saved_by=None):
        state = self.parts(saved_by)
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict({key.partition(" ")[2]: t for key, t in state["model"].items()})
        return self


def _state_in_rounds(rank, text, folder):
    """Train to step 22: at once, again from step 4, and twice from a checkpoint of DCP at step 10."""
    run = _InRounds(rank, text).train(0, 4)
    stenograd.save_checkpoint(folder / "early", step=4, **run.kept)
    run.train(4, 10)
    dcp.save(run.parts(), checkpoint_id=folder / "dcp")
    found = {"at once": run.train(10, 22).flat()}
    stenograd.load_checkpoint(folder / "early", **run.kept)
    found["going back"] = run.train(4, 22).flat()
    run.sync.close()
    run = _InRounds(rank, text).train(0, 1)  # so that there are momenta to load into
    found["from DCP"] = run.load(folder / "dcp").train(10, 22).flat()
    found["going back by DCP"] = run.load(folder / "dcp").train(10, 22).flat()
    run.sync.close()
    return found


IN_ROUNDS = [
    "local:every=4",
    "local:every=4/topk:ratio=0.3",
    "local:every=4/qsgd",
    "local:every=3,after=6",
    "diloco:every=4",
    "diloco:every=4/lowbit",
    "diloco:every=5,after=6",
    "diloco:every=4,fragments=2",
    "diloco:every=6,fragments=2,delay=1",
    "diloco:every=6,fragments=2,delay=2,mix=0.5",
    "diloco:every=4,eager=true",
    "noloco:every=4",
    "sparseloco:every=4",
    "gossip",
    "gossip:graph=ring,consensus=0.4/sign",
]


@pytest.mark.parametrize("text", IN_ROUNDS)
def test_going_back_and_loading_by_dcp_in_a_round_change_no_bit(pool, tmp_path, text):
    """Step 4 lies before `after=6` and within the first round, step 10 within a later one."""
    for found in pool.run(2, _state_in_rounds, text, tmp_path):
        for how, weights in found.items():
            assert torch.equal(weights, found["at once"]), how


def _onto_other_ranks(rank, text, folder, saved_by):
    """Save in mid-round in both ways; or go on in both from what `saved_by` ranks saved, to step 22."""
    run, found = _InRounds(rank, text), []
    if saved_by is None:
        run.train(0, 10)
        stenograd.save_checkpoint(folder / "own", step=10, **run.kept)
        dcp.save(run.parts(), checkpoint_id=folder / "dcp")
    for way, before in (("own", 1), ("dcp", 1), ("dcp", 7)) if saved_by else ():
        run.train(0, before)  # so that there are momenta to load into, and a round to leave
        if way == "own":
            stenograd.load_checkpoint(folder / "own", **run.kept)
        else:
            run.load(folder / "dcp", saved_by)
        weights = run.train(10, 22).flat()
        with run.sync.consensus():
            found.append((weights, run.values(), run.sync.round))
        run.sync.close()
        run = _InRounds(rank, text)
    run.sync.close()
    return found


@pytest.mark.parametrize("text", IN_ROUNDS)
def test_what_other_ranks_saved_goes_on_alike_by_dcp_and_by_load_checkpoint(pool, tmp_path, text):
    """3 ranks save in mid-round; 2 go on from it, in a new program or in one that leaves another round."""
    pool.run(3, _onto_other_ranks, text, tmp_path, None)
    for ways in pool.run(2, _onto_other_ranks, text, tmp_path, 3):
        assert len(ways) == 3
        for weights, common, rounds in ways:
            assert torch.equal(weights, ways[0][0])
            assert torch.equal(common, ways[0][1])
            assert rounds == ways[0][2]


class _Masters(torch.optim.Optimizer):
    """SGD on float64 copies, with a list of them and one of the parameters themselves."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.wide = [p.detach().double() for p in self.params]

    @torch.no_grad()
    def step(self, closure=None):
        for p, wide in zip(self.params, self.wide, strict=True):
            wide.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            p.copy_(wide)


class _Swaps(torch.optim.Optimizer):
    """SGD that keeps a copy after every other step, and lets the parameter lie in its memory in the next."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].get("kept", p)
            apart = kept.data_ptr() != p.data_ptr()
            if apart:
                p.data = kept
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            if not apart:
                self.state[p]["kept"] = p.detach().clone()


@pytest.mark.parametrize("own", [_Masters, _Swaps])
@pytest.mark.parametrize("text", ["local:every=2", "diloco:every=4,fragments=2", "gossip"])
def test_each_copy_moves_once_and_with_its_own_parameter(text, own):
    """Layers that are alike have weights as near to each other as to the copies."""

    def train(rank, kind):
        model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(3)))
        optimizer = kind(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=rank, timeout_s=20):
            for s in range(8):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * s + rank.rank))
                optimizer.zero_grad()
                (model(x) - x - rank.rank).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach() for p in model.parameters()])

    found, plain = ranks(2, train, own), ranks(2, train, torch.optim.SGD)
    assert all(torch.allclose(*both, atol=1e-5) for both in zip(found, plain, strict=True))


@pytest.mark.parametrize("steps", [1, 3, 4, 5])
@pytest.mark.parametrize(
    "text", ["local:every=4", "diloco:every=4", "diloco:every=4,fragments=2,delay=1,mix=0.5"]
)
def test_weights_that_the_program_loads_stay_after_refresh_in_any_phase_of_a_round(text, steps):
    """Where all ranks have loaded the same, nothing of what each has trained before is a part of it."""

    def train(rank):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stenograd.distribute(model, optimizer, text, group=rank, timeout_s=20) as sync:
            for s in range(steps):
                step(model, optimizer, rank.rank + s)
            model.load_state_dict({name: torch.full_like(p, 5.0) for name, p in model.state_dict().items()})
            sync.refresh()
            assert not sync.pending
            return {float(x) for p in model.parameters() for x in p.detach().flatten()}

    assert ranks(3, train) == [{5.0}] * 3
