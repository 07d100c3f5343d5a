"""What `distribute` and the DDP hook promise alike, and states kept in a folder that a framework owns."""

import json
import warnings
from contextlib import nullcontext

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import stenograd

FACES = ["distribute", "ddp"]


def _attach(face, method, seed=0, **options):
    model = mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if face == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        return model, optimizer, stenograd.ddp.register(model, method, timeout_s=30, **options)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30, **options)
    return model, optimizer, sync


def _steps(model, optimizer, rank, world_size, first, count, bad=None):
    for s in range(first, first + count):
        xs, ys = shards(s, world_size)
        optimizer.zero_grad()
        loss = (model(xs[rank]) - ys[rank]).square().mean()
        (loss * (float("nan") if (s, rank) == bad else 1.0)).backward()
        optimizer.step()


def _promises(rank, world_size, face, folder):
    model, optimizer, sync = _attach(face, "topk:ratio=0.1")
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 1)
        with sync.trace(f"{folder}/trace.json"):
            _steps(model, optimizer, rank, world_size, 1, 2)
        _steps(model, optimizer, rank, world_size, 3, 3, bad=(4, 1))
        before = sync.traffic.payload_bytes
        with sync.no_sync():
            model(shards(6, world_size)[0][rank]).sum().backward()
        quiet = sync.traffic.payload_bytes == before
        metrics = sync.traffic.as_metrics("t")
        place = (sync.rank, sync.world_size)
        counts = (sync.step, sync.skipped, sync.repaired)
        same = metrics["t/moved_bytes"] == sync.traffic.moved_bytes > 0
    sync.close()  # twice does no harm
    return place, counts, quiet, same, flat(model)


@pytest.mark.parametrize("face", FACES)
def test_both_faces_keep_the_same_promises(pool, face, tmp_path):
    ranks = pool.run(2, _promises, 2, face, str(tmp_path))
    for rank, (place, counts, quiet, same, parameters) in enumerate(ranks):
        assert place == (rank, 2)
        assert counts == (5, 1, 0)  # the step with a NaN on rank 1 is skipped on both
        assert quiet
        assert same
        assert torch.equal(parameters, ranks[0][4])
        assert torch.isfinite(parameters).all()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == rank]
        assert names.count("step") == 2
        assert {"forward", "backward", "encode", "decode", "collective"} <= set(names)


def _with_closures(rank, world_size, face, method):
    """5 steps given closures, the third with a NaN on rank 1; and without that step."""
    wholes, counts, evaluations = [], [], []
    for broken in (True, False):
        model, optimizer, sync = _attach(face, method)
        with sync, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a step is skipped
            for s in range(5):
                if s == 2 and not broken:
                    continue
                xs, ys = shards(s, world_size)

                def closure(s=s, model=model, optimizer=optimizer, xs=xs, ys=ys):
                    optimizer.zero_grad()
                    loss = (model(xs[rank]) - ys[rank]).square().mean()
                    (loss * (float("nan") if (s, rank) == (2, 1) else 1.0)).backward()
                    evaluations.append(s)
                    return loss

                assert optimizer.step(closure).ndim == 0
            wholes.append(flat(model))
            counts.append((sync.step, sync.skipped))
    return wholes, counts, evaluations


@pytest.mark.parametrize("face", FACES)
def test_a_step_with_a_closure_is_skipped_too(pool, face):
    """torch evaluates closures after a step's pre-hooks, which would see the gradients of the last one."""
    for (broken, whole), counts, evaluations in pool.run(2, _with_closures, 2, face, "topk:ratio=0.1"):
        assert counts == [(4, 1), (4, 0)]
        assert torch.equal(broken, whole)
        assert evaluations == [0, 1, 2, 3, 4, 0, 1, 3, 4]


def test_a_closure_s_bad_gradient_costs_one_local_step(pool):
    ranks = pool.run(2, _with_closures, 2, "distribute", "local:every=9")
    assert [counts[0][1] for _, counts, _ in ranks] == [0, 1]
    (broken, whole), _, _ = ranks[1]
    assert torch.equal(broken, whole)


class _Unusual(torch.optim.SGD):
    """Its step takes a closure and something more, by position, or no closure but a number."""

    def step(self, first=None, second=None):
        self.got = (first() if callable(first) else first, second)
        super().step()


def test_other_arguments_of_a_step_arrive_as_they_were_given():
    model = mlp(0)
    optimizer = _Unusual(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "topk"):
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step(lambda: 1.5, "tracker")
        assert optimizer.got == (1.5, "tracker")
        optimizer.step(0.25, second=3)
        assert optimizer.got == (0.25, 3)
    stenograd.shutdown()


def _group_added_late(rank, world_size):
    """An optimizer steps without the model's parameters, gets them, and meets a NaN."""
    model = DistributedDataParallel(mlp(0))
    other = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([other], lr=0.1)
    with stenograd.ddp.register(model, "dense", timeout_s=30), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a step is skipped
        optimizer.step()
        optimizer.add_param_group({"params": list(model.parameters())})
        before = flat(model)
        _steps(model, optimizer, rank, world_size, 0, 1, bad=(0, 1))
        return torch.equal(flat(model), before)


def test_parameters_that_an_optimizer_gets_later_are_kept_from_bad_steps_too(pool):
    assert pool.run(2, _group_added_late, 2) == [True, True]


def _uneven(rank, world_size):
    """Rank 0 runs out of inputs first; checks rest while others go on."""
    model, optimizer, sync = _attach("ddp", "topk:ratio=0.1", check_every=1)
    with sync, sync.join():
        _steps(model, optimizer, rank, world_size, 0, 3 + 2 * rank)
    return sync.step, flat(model)


def test_checks_rest_while_a_rank_has_run_out_of_inputs(pool):
    ranks = pool.run(2, _uneven, 2)
    assert [step for step, _ in ranks] == [5, 5]
    assert torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.parametrize("face", FACES)
def test_checks_without_interval_are_refused(face):
    model = mlp(0) if face == "distribute" else _LooksLikeDDP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach = {
        "distribute": lambda: stenograd.distribute(model, optimizer, "dense", repair=True),
        "ddp": lambda: stenograd.ddp.register(model, "dense", repair=True),
    }[face]
    with pytest.raises(stenograd.errors.ConfigError, match="check_every"):
        attach()


class _LooksLikeDDP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = mlp(0)

    def register_comm_hook(self, state, hook):
        raise AssertionError("refused before")


def _saved(rank, world_size, face, method, folder, schedule):
    """Train 6 steps in one go; and 4, save, load into fresh objects, 2 more."""
    whole, optimizer, sync = _attach(face, method)
    with sync:
        _steps(whole, optimizer, rank, world_size, 0, 6)
    model, optimizer, sync = _attach(face, method)
    own = {"model": model, "optimizer": optimizer} if schedule else {}
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 4)
        stenograd.save_state(folder, sync, **own)
        theirs = (model.state_dict(), optimizer.state_dict())  # what a framework keeps
        stenograd.save_state(folder, sync, **own)  # replaces the first
    model, optimizer, sync = _attach(face, method, seed=3)
    own = {"model": model, "optimizer": optimizer} if schedule else {}
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 1)  # DDP makes other buckets after the first step
        model.load_state_dict(theirs[0])
        optimizer.load_state_dict(theirs[1])
        stenograd.load_state(folder, sync, **own)
        _steps(model, optimizer, rank, world_size, 4, 2)
    return flat(whole), flat(model)


@pytest.mark.parametrize(
    ("face", "method", "schedule"),
    [
        ("distribute", "topk:ratio=0.1", False),
        ("ddp", "powersgd:rank=2", False),
        ("distribute", "local:every=4", True),
        ("distribute", "diloco:every=3/topk:ratio=0.2", True),
    ],
)
def test_a_state_beside_a_framework_s_checkpoint_continues_bit_for_bit(
    pool, tmp_path, face, method, schedule
):
    for whole, resumed in pool.run(2, _saved, 2, face, method, str(tmp_path), schedule):
        assert torch.equal(whole, resumed)
    names = sorted(p.name for p in (tmp_path / "stenograd").iterdir())
    assert len([n for n in names if n.endswith(".json")]) == 1
    assert len(names) == 3  # one manifest and two ranks' files, whatever was saved before


def _residual(rank, world_size, folder, save):
    model, optimizer, sync = _attach("ddp", "topk:ratio=0.05")
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 3)
        if save:
            stenograd.save_state(folder, sync)
        else:
            stenograd.load_state(folder, sync)
        states = sync.state_dict()["parameters"]
        return {name: s["residual"] for name, s in states.items() if "residual" in s}


def test_a_state_is_shared_out_to_another_number_of_ranks(pool, tmp_path):
    """What all ranks together still owe stays the same."""
    two = pool.run(2, _residual, 2, str(tmp_path), True)
    three = pool.run(3, _residual, 3, str(tmp_path), False)
    assert two[0]
    for name in two[0]:
        torch.testing.assert_close(sum(r[name] for r in three), sum(r[name] for r in two))


def _refused(rank, world_size, folder):
    said = []
    _, _, sync = _attach("distribute", "topk")
    with sync:
        try:
            stenograd.load_state(folder, sync)
        except stenograd.errors.CheckpointError as error:
            said.append(str(error))
        stenograd.save_state(folder, sync)
        torch.distributed.barrier()  # the other rank may still be clearing up
        if rank == 0:
            next(p for p in _files(folder) if "rank1" in p.name).unlink()
        torch.distributed.barrier()
        try:
            stenograd.load_state(folder, sync)
        except stenograd.errors.CheckpointError as error:
            said.append(str(error))
    _, _, sync = _attach("distribute", "local:every=4")
    with sync:
        try:
            stenograd.save_state(folder, sync)
        except stenograd.errors.ConfigError as error:
            said.append(str(error))
    return said


def _files(folder):
    from pathlib import Path

    return list((Path(folder) / "stenograd").iterdir())


def test_what_was_not_saved_or_is_not_whole_is_refused_on_every_rank(pool, tmp_path):
    for missing, damaged, incomplete in pool.run(2, _refused, 2, str(tmp_path)):
        assert "holds no state" in missing
        assert "rank1" in damaged
        assert "pass model=model, optimizer=optimizer" in incomplete


def _compiled_names(rank, world_size, face):
    model = mlp(0)
    model[0] = torch.compile(model[0], backend="eager")
    whole = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if face == "ddp":
        whole = DistributedDataParallel(whole)
        sync = stenograd.ddp.register(whole, "topk:ratio=0.1", timeout_s=30)
    else:
        sync = stenograd.distribute(whole, optimizer, "topk:ratio=0.1", timeout_s=30)
    with sync:
        _steps(whole, optimizer, rank, world_size, 0, 2)
        return list(sync.state_dict()["parameters"])


@pytest.mark.parametrize("face", FACES)
def test_names_do_not_depend_on_what_layers_are_wrapped_in(pool, face):
    plain = [name for name, _ in mlp(0).named_parameters()]
    for names in pool.run(2, _compiled_names, 2, face):
        assert sorted(names) == sorted(plain)


def _profiled(rank, world_size):
    model, optimizer, sync = _attach("distribute", "topk:ratio=0.1")
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 1)
        with profile() as profiled:
            _steps(model, optimizer, rank, world_size, 1, 2)
        return {e.key: e.count for e in profiled.key_averages() if e.key.startswith("stenograd::")}


def test_spans_show_in_torch_s_profiler(pool):
    for spans in pool.run(2, _profiled, 2):
        assert set(spans) == {"stenograd::encode", "stenograd::wait", "stenograd::decode"}
        assert spans["stenograd::encode"] == spans["stenograd::wait"] >= 2 * 3  # steps times buckets


def _unexchanged(rank, world_size):
    model, optimizer, sync = _attach("ddp", "topk:ratio=0.1")
    said = []
    with sync:
        _steps(model, optimizer, rank, world_size, 0, 2)
        for context in (sync.no_sync, nullcontext):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with context():
                    _steps(model, optimizer, rank, world_size, 2, 1)
            said.append([str(one.message) for one in caught])
    return said


def test_a_step_on_gradients_that_ddp_never_handed_over_is_a_warning(pool):
    for inside, outside in pool.run(2, _unexchanged, 2):
        assert [text.startswith("optimizer.step() applies gradients") for text in inside] == [True]
        assert outside == []
