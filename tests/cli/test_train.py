"""`stenograd train` with real workers."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from cli_process import QUICK, execute, on_a_rank, stenograd_command
from launched import JOIN, binary, clean_env

from stenograd.checkpoint.files import read_manifest, read_rank, saved_steps
from stenograd.checkpoint.reshard import alike
from stenograd.cli import loop

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the mpiexec packages")


def rows(folder):
    """The lines of metrics.jsonl without the times."""
    parsed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in parsed]


def result(folder):
    return json.loads((folder / "result.json").read_text())


def slurm_runs():
    """Whether `srun` is here and its controller answers."""
    if shutil.which("srun") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, check=False, timeout=30).returncode == 0


def test_two_workers(trained):
    """71,754 parameters of 4 bytes; two workers send a dense model, or 5 % of 2.8 bytes, 28.7 times less."""
    folder, out = trained
    lines = out.splitlines()
    assert (len(lines), lines[1][:9], lines[-2][:15]) == (5, "epoch 1/2", "after 2 epochs:")
    first, second = rows(folder)
    assert (first["epoch"], second["epoch"], second["steps"]) == (1, 2, 12)
    assert second["dense_bytes"] == 12 * 4 * 71_754
    assert 28.6 < second["compression"] < 28.8
    assert second["train_loss"] < first["train_loss"]
    assert second["eval_loss"] == result(folder)["eval_loss"]
    assert result(folder)["fingerprint"] in lines[-2]
    assert lines[-1].startswith(f"wrote {folder} (")
    names = sorted(re.sub("-[0-9a-f]{8}", "", path.name) for path in folder.iterdir())
    sets = [["-rank0.pt", "-rank1.pt", ".json"], ["-rank0.pt", "-rank1.pt", ".json"]]
    checkpoints = [
        f"checkpoint-step{step}{e}" for step, ends in zip((12, 24), sets, strict=True) for e in ends
    ]
    assert names == [*checkpoints, "metrics.jsonl", "result.json", "run.json", "steps.json"]


def test_steps_json_splits_the_steps_of_every_rank(trained):
    """24 steps of two ranks; the phases' medians are within the step's, and the ledger is the run's."""
    folder, _ = trained
    ranks = json.loads((folder / "steps.json").read_text())["ranks"]
    assert [rank["steps"] for rank in ranks] == [24, 24]
    for rank in ranks:
        at = {part: quantiles["0.5"] for part, quantiles in rank["quantiles_s"].items()}
        assert all(at[part] > 0 for part in ("forward", "backward", "optimizer"))
        assert at["forward"] + at["backward"] < at["step"]
        assert rank["means_s"].keys() == at.keys()
        sent = sum(e["moved_bytes"] for e in rank["ledger"] if e["kind"] in ("training", "control"))
        assert sent == result(folder)["moved_bytes"]
        assert rank["machine"]["threads"] == 1


def newest(folder):
    """The ranks' training states of the newest checkpoint."""
    manifest = read_manifest(folder, saved_steps(folder)[-1])
    return [read_rank(folder, manifest, rank) for rank in range(manifest.world_size)]


def test_resumed_equals_uninterrupted(on_two_ranks, trained, tmp_path):
    """The first part died in epoch 3: the checkpoint of its 5th step is the newest that is whole."""
    resumed = shutil.copytree(trained[0], tmp_path / "resumed")
    (resumed / "checkpoint-step29-0badcafe-rank0.pt").write_bytes(
        b"of no use without rank 1's and a manifest"
    )
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3}\n')
    train = ("train", *QUICK, "--workers", 2, "--epochs", 3, "--out")
    assert "resumed after epoch 2 (step 24)" in on_two_ranks(
        "train", "--resume", "--epochs", 3, "--out", resumed
    )
    straight = tmp_path / "straight"
    on_two_ranks(*train, straight, "--save-steps", 31, "--save-every", 9)
    assert saved_steps(straight) == [31, 36]
    assert rows(resumed) == rows(straight)
    assert result(resumed)["fingerprint"] == result(straight)["fingerprint"]
    for a, b in zip(newest(resumed), newest(straight), strict=True):
        assert alike(a["model"], b["model"])
        assert alike(a["sync"], b["sync"])
    _cut(straight, 36)
    said = on_two_ranks("train", "--out", straight, "--resume")
    assert "resumed after epoch 2 and 7 steps (step 31)" in said
    options = json.loads((straight / "run.json").read_text())["options"]
    assert (options["save_steps"], options["workers"]) == (31, 2)
    assert rows(resumed) == rows(straight)
    steps = (straight / "steps.json").read_text()
    on_two_ranks("train", "--out", straight, "--resume")
    assert (straight / "steps.json").read_text() == steps
    assert result(resumed)["fingerprint"] == result(straight)["fingerprint"]


def test_a_run_is_resumed_with_its_own_options_and_nothing_else(here, tmp_path):
    """A folder without a run is an error, and nothing is made there."""
    folder, nowhere = tmp_path / "run", tmp_path / "nowhere"
    status, _, err = here("train", "--resume", "--out", nowhere)
    assert (status, f"--resume needs a run in --out, and {nowhere} holds none" in err) == (2, True)
    assert not nowhere.exists()
    status, out, err = here("train", "--batch-size", 64, "--lr", 0.01, "--epochs", 1, "--out", folder)
    assert (status, err) == (0, "")
    status, out, err = here("train", "--resume", "--epochs", 2, "--out", folder)
    assert (status, err) == (0, "")
    assert "resumed after epoch 1" in out
    told = json.loads((folder / "run.json").read_text())
    assert (told["identity"]["recipe"]["lr"], told["identity"]["recipe"]["batch_size"]) == (0.01, 64)
    assert (told["options"]["lr"], told["options"]["epochs"]) == (0.01, 2)


def _cut(folder, step):
    """Leave a checkpoint as a crash before its manifest would, and the result out."""
    (folder / f"checkpoint-step{step}.json").unlink()
    (folder / "result.json").unlink()


def test_resumed_by_one_worker(here, trained, tmp_path, monkeypatch):
    """Under torchrun's restarts it resumes unasked, with the workers there are: here this process alone."""
    folder = shutil.copytree(trained[0], tmp_path / "run")
    before = [state["sync"]["parameters"] for state in newest(folder)]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    status, out, err = here("train", *QUICK, "--epochs", 2, "--out", folder)
    assert (status, err) == (0, "")
    assert "resumed at step 24 of 2 workers with 1 worker, after epoch 2: residuals re-sharded" in out
    assert result(folder)["fingerprint"] == result(trained[0])["fingerprint"]
    status, out, err = here("train", *QUICK, "--epochs", 3, "--out", folder)
    assert (status, len(rows(folder)), rows(folder)[2]["steps"]) == (0, 3, 23)
    assert rows(folder)[2]["train_loss"] < rows(folder)[1]["train_loss"]
    assert before[0].keys() == newest(folder)[0]["sync"]["parameters"].keys()


def test_a_long_run_keeps_the_times_of_its_newest_steps(here, monkeypatch):
    """23 steps of which 5 are to be kept; the list of all grew for as long as the run took."""
    kept, real = [], loop.Trainer.run_epoch

    def run_epoch(trainer, *arguments):
        row = real(trainer, *arguments)
        kept.append((row.steps, len(trainer.times.kept["step"])))
        return row

    monkeypatch.setattr(loop.Trainer, "run_epoch", run_epoch)
    monkeypatch.setattr(loop, "_STEPS_KEPT", 5)
    assert here("train", *QUICK, "--epochs", 1)[0] == 0
    assert kept == [(23, 5)]


@linux_only
@pytest.mark.parametrize(
    "launcher",
    [
        *("torchrun", "openmpi", "mpich"),
        pytest.param("slurm", marks=pytest.mark.skipif(not slurm_runs(), reason="no Slurm runs here")),
    ],
)
def test_ranks_of_every_launcher_meet_and_train_alike(launcher, trained, tmp_path):
    """They meet twice, and train as those of `--workers` do; nothing is left of their meeting place.

    `prterun` with this personality is what Open MPI's `mpiexec` executes. Under MPICH a shell stands between
    launcher and rank, so the parent process alone does not name the launch.
    """
    (tmp_path / "hosts").write_text("localhost slots=2\n" if launcher == "openmpi" else "localhost:2\n")
    (tmp_path / "join.py").write_text(f"{JOIN}\nimport sys\nfrom stenograd.cli import main\nsys.exit(main())")
    (tmp_path / "tmp").mkdir()
    hosts, python = str(tmp_path / "hosts"), sys.executable
    arguments = [str(tmp_path / "join.py"), "train", *QUICK, "--epochs", "2"]
    command = {
        "torchrun": lambda: [
            *(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments)
        ],
        "openmpi": lambda: [
            *(binary("openmpi", "prterun"), "--personality", "ompi", "--allow-run-as-root"),
            *("--oversubscribe", "--hostfile", hosts, "-n", "2", python, *arguments),
        ],
        "mpich": lambda: [
            *(binary("mpich", "mpiexec.hydra"), "-f", hosts, "-n", "2"),
            *("sh", "-c", f"{shlex.join([python, *arguments])}; exit $?"),
        ],
        "slurm": lambda: ["srun", "--overlap", "-n", "2", python, *arguments],
    }[launcher]()
    done = execute(command, TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert launcher != "mpich" or done.stderr == ""
    assert done.stdout.splitlines()[0] == f"{launcher} 2 2 3.0"
    assert done.stdout.count("epoch 2/2") == 1
    assert done.stdout.split()[-1] == result(trained[0])["fingerprint"]
    assert not list((tmp_path / "tmp").glob("stenograd-*/*"))


def test_alone_then_damaged(here, tmp_path):
    """A truncated checkpoint is named, and nothing in the folder changes."""
    folder = tmp_path / "run"
    status, out, _ = here("train", "--epochs", 1, "--lr", 0.01, "--out", folder)
    assert (status, "1 worker," in out) == (0, True)
    assert (result(folder)["moved_bytes"], result(folder)["payload_bytes"] >= 45 * 4 * 71_754) == (0, True)
    (checkpoint,) = folder.glob("checkpoint-step*-rank0.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:100_000])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, _, err = here("train", "--epochs", 2, "--lr", 0.01, "--out", folder, "--resume")
    assert (status, err.count("\n")) == (2, 1), err
    assert f"{checkpoint}: cannot be read" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_damaged_newest_checkpoint_is_told_once(here, tmp_path):
    """The command prints what `load_checkpoint` warns of otherwise."""
    folder = tmp_path / "run"
    assert here("train", "--epochs", 2, "--lr", 0.01, "--out", folder)[0] == 0
    damaged = next(folder.glob(f"checkpoint-step{saved_steps(folder)[-1]}-*.pt"))
    damaged.write_bytes(damaged.read_bytes()[:100_000])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, out, err = here("train", "--epochs", 2, "--lr", 0.01, "--out", folder, "--resume")
    assert (status, err) == (0, ""), err
    assert out.count(f"a newer checkpoint is damaged and was left: {damaged}") == 1
    assert rows(folder)[-1]["epoch"] == 2


def test_evaluation_only(here):
    status, out, err = here("train", "--epochs", 0)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert (len(lines), lines[1].startswith("after 0 epochs: eval accuracy")) == (2, True)


def test_steps_that_are_not_finite_are_skipped(here, tmp_path):
    """At this rate the weights overflow at once; later gradients are NaN, and those steps are void."""
    status, out, err = here("train", "--epochs", 2, "--lr", 1e30, "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    assert rows(tmp_path / "run")[-1]["skipped"] == 45
    assert "45 steps skipped" in out


@linux_only
def test_killed_worker_ends_the_run():
    """The survivor names the lost rank, and all end long before the timeout of 60 s."""
    arguments = stenograd_command("train", *QUICK, "--workers", 2, "--epochs", 10_000, "--timeout-s", 60)
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, env=clean_env(), stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        while not parent.stdout.readline().startswith("epoch     1/"):
            assert parent.poll() is None
        workers = children(parent.pid)
        os.kill(next(pid for pid in workers if environment(pid)["RANK"] == "1"), signal.SIGKILL)
        start = time.monotonic()
        _, err = parent.communicate(timeout=50)
    assert time.monotonic() - start < 30
    assert parent.returncode == 128 + signal.SIGKILL
    assert "rank(s) 1 did not answer" in err
    assert "worker 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid):
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _limps(rank, words):
    """Train as a rank, of which rank 1 is slow."""
    real = loop.Trainer.take_step

    def step(trainer, indices):
        time.sleep(0.02 * rank)
        return real(trainer, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "take_step", step)
        return on_a_rank(rank, words)


@pytest.mark.parametrize("every", [50, 5])
def test_a_slow_rank_is_waited_for_in_rounds_by_time_before_an_epoch_ends_or_is_saved(pool, tmp_path, every):
    words = ["train", "--task", "digits", "--batch-size", 64, "--method", "local:every=0.05s", "--epochs", 2]
    words += ["--timeout-s", 30, "--save-steps", every, "--out", tmp_path / "run"]
    said = pool.run(2, _limps, words)
    assert [(status, err) for status, _, err in said] == [(0, ""), (0, "")]
    assert saved_steps(tmp_path / "run")[-1] == 24
    assert "after 2 epochs" in said[0][1]
