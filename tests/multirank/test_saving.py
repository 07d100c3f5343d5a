"""`save_checkpoint` and `load_checkpoint` on real ranks: whole, damaged, mixed up, on more or fewer ranks."""

import gc
import json
import os
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

import stenograd
from stenograd.checkpoint.files import Manifest, write_manifest, write_rank
from stenograd.errors import StenogradError


class Counter:
    """A sampler of the simplest kind: samples seen by all ranks together."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Run:
    """A rank's training, with noise from PyTorch's own generator and from two of its own."""

    def __init__(self, rank, method):
        torch.manual_seed(rank)
        net = [nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3)]
        self.model = nn.Sequential(*net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.sync = stenograd.distribute(self.model, self.optimizer, method, bucket_bytes=400, timeout_s=60)
        own, common = torch.Generator().manual_seed(100 + rank), torch.Generator().manual_seed(7)
        self.generators, self.sampler = {"own": own, "common": common}, Counter()

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            x = torch.randn(4, 8, generator=self.generators["own"])
            x = x + torch.randn(1, generator=self.generators["common"])
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.sampler.seen += 4 * self.sync.world_size
        return self

    @property
    def parts(self):
        names = ("model", "optimizer", "sync", "scheduler", "sampler", "generators")
        return {name: getattr(self, name) for name in names}

    def save(self, folder, step, **more):
        return stenograd.save_checkpoint(folder, step=step, **self.parts, **more)

    def load(self, folder, **more):
        return stenograd.load_checkpoint(folder, **self.parts, **more)

    def flat(self):
        residuals = [t["residual"] for t in self.sync.state_dict()["parameters"].values() if "residual" in t]
        tensors = [*self.model.state_dict().values(), *residuals]
        return torch.cat([t.reshape(-1).double() for t in tensors]).tolist()

    def residual(self):
        parameters = self.sync.state_dict()["parameters"].values()
        return torch.cat([tensors["residual"].view(-1) for tensors in parameters]).tolist()


def _told(action):
    try:
        return action()
    except StenogradError as error:
        return type(error).__name__, str(error)


def _continued(rank, folder, method):
    """5 + 4 steps in one go, and from a checkpoint into a fresh run."""
    run = Run(rank, method).steps(5)
    run.save(folder, 5, extra={"note": rank})
    straight = (run.steps(4).flat(), run.sampler.seen)
    run.sync.close()
    other = Run(rank, method)
    torch.manual_seed(99)
    loaded = other.load(folder)
    resumed = (other.steps(4).flat(), other.sampler.seen)
    other.sync.close()
    about = (loaded.step, loaded.extra, loaded.world_size, loaded.resharded, loaded.refused)
    return straight == resumed and about == (5, {"note": rank}, 3, False, ())


@pytest.mark.parametrize("method", ["topk:ratio=0.2", "powersgd:rank=1"])
def test_continued_equals_uninterrupted(pool, tmp_path, method):
    assert pool.run(3, _continued, tmp_path / "new" / "folder", method) == [True] * 3


def _saved_twice(rank, folder):
    run = Run(rank, "topk:ratio=0.2")
    for step in (1, 2, 3):
        run.steps(1).save(folder, step)
    run.sync.close()
    return run.residual(), run.generators["own"].get_state(), torch.get_rng_state()


def _loaded(rank, folder, step=None):
    run = Run(rank, "topk:ratio=0.2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = _told(lambda: run.load(folder, step=step))
    run.sync.close()
    text = " ".join(str(warning.message) for warning in caught)
    if isinstance(loaded, stenograd.checkpoint.api.Loaded):
        states = (
            run.generators["own"].get_state(),
            run.generators["common"].get_state(),
            torch.get_rng_state(),
        )
        return loaded.step, run.residual(), states, run.sampler.seen, text
    return loaded


def _files(folder, step):
    return sorted(folder.glob(f"checkpoint-step{step}-*.pt"))


def test_more_and_fewer_ranks_and_damage(pool, tmp_path):
    """Two checkpoints are kept. On 4 and 2 ranks the residuals' sum is kept; what is damaged is refused."""
    saved = pool.run(3, _saved_twice, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if name.endswith(".json")] == [
        "checkpoint-step2.json",
        "checkpoint-step3.json",
    ]
    assert len(names) == 2 + 2 * 3
    total = torch.tensor([residual for residual, *_ in saved], dtype=torch.float64).sum(0)
    assert total.abs().sum() > 0
    for world_size in (4, 2):
        ranks = pool.run(world_size, _loaded, tmp_path)
        kept = torch.tensor([residual for _, residual, *_ in ranks], dtype=torch.float64).sum(0)
        torch.testing.assert_close(kept, total, rtol=1e-6, atol=0)
        assert {(step, seen, text) for step, *_, seen, text in ranks} == {(3, 36, "")}
        own, common, random = zip(*(states for _, _, states, *_ in ranks), strict=True)
        assert all(torch.equal(own[rank], saved[rank][1]) for rank in range(min(3, world_size)))
        assert all(torch.equal(common[0], state) for state in common)
        for states in (own, random):
            assert not any(torch.equal(a, b) for i, a in enumerate(states) for b in states[:i])
    _damage(pool, tmp_path)


SAVED_BEFORE = Path(__file__).with_name("saved_before")  # by two ranks, with earlier code


def _loaded_before(rank):
    run = Run(rank, "topk:ratio=0.2")
    loaded = run.load(SAVED_BEFORE)
    run.sync.close()
    numbers = [state.tolist() for state in run.model.state_dict().values()]
    return loaded.step, loaded.extra, numbers, run.residual(), run.sampler.seen


@pytest.mark.parametrize("world_size", [2, 1])
def test_a_checkpoint_of_an_earlier_version_is_loaded(pool, world_size):
    """What torch itself reads from its files; one rank alone has rank 0's model, and the residuals' sum."""
    files = [torch.load(file, weights_only=True)["content"] for file in _files(SAVED_BEFORE, 3)]
    states = [content["sync"]["parameters"].values() for content in files]
    owed = [torch.cat([state["residual"].view(-1) for state in parameters]) for parameters in states]
    owed = owed if world_size == 2 else [sum(owed)]
    for rank, (step, extra, numbers, residual, seen) in enumerate(pool.run(world_size, _loaded_before)):
        assert (step, extra, seen) == (3, {"note": rank}, 24)
        assert numbers == [value.tolist() for value in files[rank]["model"].values()]
        assert torch.equal(torch.tensor(residual), owed[rank])


def _damage(pool, folder):
    newest, older = _files(folder, 3)[1], _files(folder, 2)[1]
    whole = newest.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for harm, says in [
        (whole[:1000], f"it has 1000 bytes and the manifest says {len(whole)}"),
        (bytes(flipped), "its SHA-256 is not the manifest's"),
        (older.read_bytes().ljust(len(whole), b"\0")[: len(whole)], "is not the manifest's"),
        (None, "No such file"),
    ]:
        newest.unlink() if harm is None else newest.write_bytes(harm)
        first, second, _ = pool.run(3, _loaded, folder)
        assert (first[0], second[0]) == (2, 2)
        assert "continuing from step 2, because" in first[-1]
        assert newest.name in first[-1]
        assert says in first[-1]
        assert second[-1] == ""
    exact = pool.run(2, _loaded, folder, 3)
    assert exact[0] == exact[1]
    assert exact[0][0] == "CheckpointError"
    assert newest.name in exact[0][1]
    newest.write_bytes(whole)
    _forged(pool, folder, newest, older)


def _forged(pool, folder, newest, older):
    """A manifest that names another save's file, or has its digest, is found out."""
    path = folder / "checkpoint-step3.json"
    manifest, other = json.loads(path.read_text()), json.loads((folder / "checkpoint-step2.json").read_text())
    name, manifest["files"][1] = manifest["files"][1]["name"], other["files"][1]
    path.write_text(json.dumps(manifest))
    assert "rank 1's file has another form" in pool.run(2, _loaded, folder)[0][-1]
    newest.write_bytes(older.read_bytes())
    manifest["files"][1] = {**other["files"][1], "name": name}
    path.write_text(json.dumps(manifest))
    assert "files of two checkpoints are mixed up" in pool.run(2, _loaded, folder)[0][-1]
    for file in folder.glob("*.json"):
        file.write_text("{")
    told = pool.run(2, _loaded, folder)
    assert told[0] == told[1]
    assert told[0][1].startswith("no whole checkpoint: ")
    assert "no checkpoint of step 7; it holds those of steps: 2, 3" in pool.run(2, _loaded, folder, 7)[0][1]


def _saved_over_a_gap(rank, folder):
    """Rank 1's file of the second checkpoint is lost before the third is saved."""
    run, real = Run(rank, "topk:ratio=0.2"), os.listdir
    for step in (1, 2, 3):
        if (rank, step) == (1, 3):
            _files(folder, 2)[1].unlink()
            os.listdir = lambda path: (time.sleep(0.5), real(path))[1]  # so rank 0 would delete first
        run.steps(1).save(folder, step)
    os.listdir = real
    run.sync.close()


def test_a_checkpoint_that_lacks_a_file_pushes_out_no_whole_one(pool, tmp_path):
    """Only its rank can tell: other ranks' files may lie on other disks."""
    pool.run(2, _saved_over_a_gap, tmp_path)
    assert sorted(int(path.stem.partition("step")[2]) for path in tmp_path.glob("*.json")) == [1, 3]
    _files(tmp_path, 3)[0].write_bytes(b"damaged")
    assert [found[0] for found in pool.run(2, _loaded, tmp_path)] == [1, 1]


def _cannot_write(rank, folder):
    """Rank 1's disk is full in the second save; the first stays, and nothing of the second."""
    run = Run(rank, "topk:ratio=0.2").steps(1)
    run.save(folder, 1)
    real = os.fsync
    if rank == 1:
        os.fsync = lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    told = _told(lambda: run.steps(1).save(folder, 2))
    os.fsync = real
    again = _told(lambda: run.save(folder / "file", 3))
    run.sync.close()
    return told, again


def test_a_full_disk(pool, tmp_path):
    (tmp_path / "file").touch()
    told = pool.run(2, _cannot_write, tmp_path)
    assert told[0] == told[1]
    (name, text), again = told[0]
    assert name == "CheckpointError"
    assert text.startswith("rank 1: ")
    assert "cannot be written (No space left on device)" in text
    assert again[1].endswith("cannot be created (File exists): give a folder that can be written")
    assert sorted(path.name.partition("-")[2][:5] for path in tmp_path.glob("*step*")) == ["step1"] * 3
    assert [first for first, *_ in pool.run(2, _loaded, tmp_path)] == [1, 1]


def _alone(rank, folder):
    """Rank 1 alone cannot look through the folder after a save, gives other values, or hears no warning."""
    run = Run(rank, "topk:ratio=0.2").steps(1)
    run.save(folder, 1)
    real = os.listdir
    if rank == 1:
        os.listdir = lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    told = [_told(lambda: run.steps(1).save(folder, 2, timeout_s=10))]
    os.listdir = real
    kept = run.load(folder).step
    for change in ({"step": 2 + rank}, {"step": -rank}, {"step": 3, "keep": 1 - rank}):
        told.append(_told(partial(run.save, folder, timeout_s=10, **change)))
    told.append(_told(lambda: run.load(folder, step=1 + rank, timeout_s=10)))
    (folder / "checkpoint-step3.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 0 else "ignore")
        told.append(_told(lambda: run.load(folder, timeout_s=10)))
    run.sync.close()
    run = Run(rank, "gossip")
    parts = {"model": run.model, "optimizer": run.optimizer} if rank == 0 else {}
    told.append(_told(lambda: stenograd.save_state(folder, run.sync, timeout_s=10, **parts)))
    run.sync.close()
    return kept, told


def test_what_fails_on_one_rank_alone_is_raised_on_all(pool, tmp_path):
    """A save that could only not look for older checkpoints is whole. None of the rest changes a file."""
    (kept, told), other = pool.run(2, _alone, tmp_path, timeout_s=100)
    assert (kept, told) == other
    assert kept == 2
    wanted = [
        ("CheckpointError", "rank 1: "),
        ("MismatchError", "ranks differ in step: rank 0 has 2, rank 1 has 3"),
        ("ConfigError", "rank 1: step must be"),
        ("ConfigError", "rank 1: keep must be at least 1"),
        ("MismatchError", "ranks differ in step: rank 0 has 1, rank 1 has 2"),
        ("StenogradError", "rank 0: UserWarning: continuing from step 2"),
        ("ConfigError", "rank 1: save_state needs the model"),
    ]
    assert [kind for kind, _ in told] == [kind for kind, _ in wanted]
    assert [text for (_, message), (_, text) in zip(told, wanted, strict=True) if text not in message] == []
    assert "Input/output error" in told[0][1]
    names = sorted(path.name.partition("-")[2][:5] for path in tmp_path.glob("*step*"))
    assert names == ["step1"] * 3 + ["step2"] * 3 + ["step3"]


def _cannot_be_read(rank, folder):
    """Rank 1's scheduler keeps a NumPy number, as one does that was given NumPy's losses."""
    run = Run(rank, "topk:ratio=0.2").steps(1)
    run.save(folder, 1, extra={"best": 0.5})
    if rank == 1:
        run.scheduler.best = np.float64(0.5)
    told = _told(lambda: run.steps(1).save(folder, 2))
    if rank == 1:
        del run.scheduler.best, run.sampler.seen
    broken = _told(lambda: run.save(folder, 3))
    run.sync.close()
    return told, broken


def test_what_could_not_be_read_is_refused_on_every_rank(pool, tmp_path):
    told = pool.run(2, _cannot_be_read, tmp_path)
    assert told[0] == told[1]
    (name, text), broken = told[0]
    assert broken == ("StenogradError", "rank 1: AttributeError: 'Counter' object has no attribute 'seen'")
    assert name == "CheckpointError"
    assert text.startswith("rank 1: cannot be saved: scheduler.best is a numpy.float64, ")
    assert "give float(x)" in text
    assert sorted(path.name.partition("-")[2][:5] for path in tmp_path.iterdir()) == ["step1"] * 3
    assert [first for first, *_ in pool.run(2, _loaded, tmp_path)] == [1, 1]


def _peak_mb(action):
    """Megabytes that an action needs at its peak, beyond what is resident before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over from the present
    before = _resident_mb("VmRSS:")
    action()
    return _resident_mb("VmHWM:") - before


def _resident_mb(what):
    return int(Path("/proc/self/status").read_text().partition(what)[2].split()[0]) / 1024


def _joined_by_one(rank, folder):
    """Eight ranks' files of 16 MB each: 4 of weights, 8 of Adam's state, 4 of residuals."""
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.2", timeout_s=60)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    writing = _peak_mb(lambda: stenograd.save_checkpoint(folder / "warm", step=1, **parts))
    stenograd.load_checkpoint(folder / "warm", **parts)
    mine, states, files = sync.state_dict(), [], []
    content = {"model": model.state_dict(), "optimizer": [optimizer.state_dict()], "extra": None}
    content |= {"random": {"cpu": torch.get_rng_state(), "cuda": []}, "generators": {}}
    for number in range(8):
        residuals = {name: {"residual": torch.randn_like(p)} for name, p in model.named_parameters()}
        states.append({**mine, "rank": number, "world_size": 8, "parameters": residuals})
        files.append(write_rank(folder, 1, "ab", number, {**content, "sync": states[-1]}))
    write_manifest(folder, Manifest(step=1, set_id="ab", world_size=8, files=tuple(files)))
    (want,), states = stenograd.reshard(states, 1), None
    reading = _peak_mb(lambda: stenograd.load_checkpoint(folder, **parts))
    got = sync.state_dict()["parameters"]
    sync.close()
    same = all(torch.equal(want["parameters"][n]["residual"], got[n]["residual"]) for n in got)
    return writing, reading, same


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_memory_of_saving_and_of_resharding(pool, tmp_path):
    """Saving 16 MB held their bytes once more. Eight ranks' files were read whole: 8 x 16 MB and more.

    Now one file is, and of the others the residuals one after another: 16 + 4 + 8 MB for their sum in
    float64, and 4 for the share.
    """
    ((writing, reading, same),) = pool.run(1, _joined_by_one, tmp_path)
    assert same
    assert writing < 12
    assert reading < 64


def _misfits(rank, folder):
    run = Run(rank, "topk:ratio=0.2").steps(1)
    nothing = run.load(folder)
    run.save(folder, 1)
    parts = run.parts
    told = [_told(partial(stenograd.load_checkpoint, folder, **{**parts, **change})) for change in _CHANGES]
    told += [_told(lambda: run.save(folder, -1)), _told(lambda: run.save(folder, 1, keep=0))]
    run.sync.close()
    return nothing, told


_CHANGES = [{"sync": None}, {"optimizer": None}, {"generators": {}}, {"model": nn.Linear(2, 2)}]


def test_what_does_not_fit(pool, tmp_path):
    (nothing, told), other = pool.run(2, _misfits, tmp_path)
    assert nothing is None
    assert told == other[1]
    wanted = ["sync was saved but is not given", "1 optimizers", "generators ['common', 'own']"]
    wanted += ["does not fit: Error(s) in loading", "step must be", "keep must be at least 1"]
    assert [text for (_, message), text in zip(told, wanted, strict=True) if text not in message] == []


@pytest.mark.parametrize("how", ["one after the other", "other parameters"])
def test_no_parameter_gets_the_momentum_of_another(tmp_path, how):
    """What torch's optimizers keep is numbered, and two layers of one shape take each other's."""

    def parts(turned):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        order = list(model)[::-1] if turned else list(model)
        if how == "other parameters":
            optimizer = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in order]
        else:
            held = [p for part in order for p in part.parameters()]
            optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "sync": None}

    stenograd.save_checkpoint(tmp_path, step=1, **parts(False))
    stenograd.load_checkpoint(tmp_path, **parts(False))
    with pytest.raises(stenograd.errors.CheckpointError, match=r"1\.weight in the place of 0\.weight"):
        stenograd.load_checkpoint(tmp_path, **parts(True))


def _zero(rank, folder):
    """Two steps and two more by optimizers of which each has a part, and these again from a checkpoint."""
    found = []
    for again in (False, True):
        torch.manual_seed(again)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with pytest.raises(StenogradError, match="got ZeroRedundancyOptimizer, which takes part of each"):
            stenograd.distribute(model, optimizer, "local:every=4", timeout_s=60)
        with stenograd.distribute(model, optimizer, "topk:ratio=0.2", timeout_s=60) as sync:
            parts = {"model": model, "optimizer": optimizer.optim, "sync": sync}
            if again:
                stenograd.load_checkpoint(folder, **parts)
            for step in range(2 if again else 0, 4):
                if step == 2 and not again:
                    stenograd.save_checkpoint(folder, step=2, **parts)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        found.append([p.tolist() for p in model.parameters()])
    return found


def test_a_zero_redundancy_optimizer_is_saved_in_its_parts(pool, tmp_path):
    (whole, resumed), other = pool.run(2, _zero, tmp_path)
    assert whole == resumed
    assert [whole, resumed] == other


def _through_dcp(rank, folder, load):
    run = Run(rank, "topk:ratio=0.2")
    if not load:
        run.steps(3)
    saved_by = 3 if load else None
    state = {
        "model": run.model.state_dict(),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        "sync": stenograd.PerRank(run.sync, saved_by),
    }
    if load:
        dcp.load(state, checkpoint_id=folder)
        run.model.load_state_dict(state["model"])
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    else:
        dcp.save(state, checkpoint_id=folder)
    run.sync.close()
    momentum = [s["momentum_buffer"].tolist() for s in run.optimizer.state_dict()["state"].values()]
    return run.residual(), run.sync.step, [p.tolist() for p in run.model.parameters()], momentum


def test_through_torch_distributed_checkpoint(pool, tmp_path):
    """Each rank has its own residual back; two ranks get halves of the sum of three."""
    folder = str(Path(tmp_path) / "dcp")
    saved = pool.run(3, _through_dcp, folder, False)
    assert saved[0][0] != saved[1][0]
    assert pool.run(3, _through_dcp, folder, True) == saved
    total = torch.tensor([residual for residual, *_ in saved], dtype=torch.float64).sum(0)
    fewer = pool.run(2, _through_dcp, folder, True)
    for residual, *rest in fewer:
        torch.testing.assert_close(torch.tensor(residual).double(), total / 2, rtol=1e-6, atol=1e-12)
        assert rest == list(saved[0][1:])


def _save_in_mid_round(rank, folder, method):
    run = Run(rank, method).steps(6)
    run.save(folder, 6)
    run.sync.close()


def _load_where_one_rank_fails(rank, folder, method):
    run, start = Run(rank, method), time.monotonic()

    def failing(state):
        raise ValueError("no such state")

    if rank == 1:
        run.optimizer.load_state_dict = failing
    with pytest.raises(StenogradError) as failed:
        run.load(folder, timeout_s=20)
    run.sync.close()
    return type(failed.value).__name__, str(failed.value), time.monotonic() - start


@pytest.mark.parametrize("method", ["diloco:every=4,eager=true", "diloco:every=4,topology=pairs", "topk"])
def test_a_rank_that_alone_cannot_load_is_named_everywhere_at_once(pool, tmp_path, method):
    """New ranks end the round under way by a mean over all of them: not before all have loaded."""
    pool.run(3, _save_in_mid_round, tmp_path, method)
    for kind, text, seconds in pool.run(2, _load_where_one_rank_fails, tmp_path, method):
        assert kind == "CheckpointError"
        assert "rank 1: " in text
        assert "no such state" in text
        assert seconds < 15
