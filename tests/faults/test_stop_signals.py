"""Signals that ask a training to stop: to one rank, to all, to every process, at any moment."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import clean_env
from rank_processes import train
from support.processes import runs

from stenograd.checkpoint.files import read_manifest, read_rank, saved_steps
from stenograd.checkpoint.reshard import alike
from stenograd.launch.local_workers import run_local
from stenograd.stopping import stop_on

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STATUS = 75
ROUNDS = [
    "local:every=3",
    "local:every=2/topk:ratio=0.1",
    "diloco:every=3",
    "diloco:every=4,delay=1",
    "gossip",
]
METHODS = ["dense", "topk:ratio=0.05", "powersgd:rank=2", "sign", *ROUNDS]
MOMENTS = ("forward", "backward", "collective", "step", "evaluation", "save", "round")
# How often a moment comes before a training of the drills is about half over.
OFTEN = {"forward": 30, "backward": 30, "collective": 8, "step": 8, "evaluation": 1, "save": 6, "round": 2}


def _good(arguments, workers):
    codes, output = train(arguments, workers)
    assert not any(codes), output[-2000:]


def _rows(folder, method):
    # What is under way while training goes on is counted when it is sent, in this epoch or the next.
    left_out = ["seconds", *(["payload_bytes", "moved_bytes", "compression"] if "delay" in method else [])]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{**row, **dict.fromkeys(left_out)} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Trainings that nobody stopped, by their options."""
    made = {}

    def find(common, workers):
        key = hashlib.sha256(json.dumps([common, workers]).encode()).hexdigest()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("straight")
            _good([*common, "--out", made[key]], workers)
        return made[key]

    return find


def _drill(straight, folder, number):
    """One rank, or in one drill of eight each, gets SIGTERM at a moment; go on, and compare what is saved."""
    draw = random.Random(number)
    method = METHODS[number % len(METHODS)]
    moment = MOMENTS[number // len(METHODS) % (7 if method in ROUNDS else 6)]
    workers = 2 + number % 2
    common = ["--method", method, "--batch-size", 240 // workers, "--epochs", 3, "--save-steps", 4]
    common += ["--timeout-s", 60]
    whole = straight(common, workers)
    asked = range(workers) if number % 8 == 7 else [draw.randrange(workers)]
    faults = {
        rank: {"at": moment, "nth": draw.randint(1, OFTEN[moment]), "do": "term"}
        | ({"after_s": draw.uniform(0, 0.02)} if number % 3 == 2 else {})
        for rank in asked
    }
    codes, output = train([*common, "--out", folder], workers, faults)
    assert codes == [STATUS] * workers, (method, moment, faults, codes, output[-2000:])
    assert output.count("stopped after step") == 1
    at = int(output.split("stopped after step ")[1].split(" ")[0])
    assert saved_steps(folder)[-1] == at
    _good([*common, "--out", folder, "--resume"], workers)
    steps = saved_steps(whole)[-1]
    assert saved_steps(folder)[-1] == steps > at
    manifests = [(one, read_manifest(one, steps)) for one in (whole, folder)]
    for rank in range(workers):
        one, other = (read_rank(path, manifest, rank) for path, manifest in manifests)
        for key in ("model", "optimizer", "sync"):
            assert alike(one[key], other[key]), f"{key} of rank {rank} differs, {method} in {moment}"
    assert _rows(whole, method) == _rows(folder, method)


# One in forward, and one in a round.
@pytest.mark.parametrize("number", [1, 58])
def test_a_rank_that_is_asked_stops_all_at_one_step(straight, tmp_path, number):
    _drill(straight, tmp_path / "run", number)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(200))
def test_any_rank_at_any_moment(straight, tmp_path, number):
    _drill(straight, tmp_path / "run", number)


SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import stenograd

FOLDER, START = sys.argv[1:]


class Batches(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, step):
        open(f"{FOLDER}/process-{os.getpid()}", "w").close()
        time.sleep(0.02)
        return step  # no tensor: a spawned worker that ends while it sends one may abort, for any program


def main():
    stop = stenograd.stop_on()
    world = stenograd.init(timeout_s=60)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.1")
    data = DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context=START)
    for step in data:
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()
        if step == 3:
            open(f"{FOLDER}/trains-{world.rank}", "w").close()
        if sync.stopping:
            stenograd.save_checkpoint(FOLDER, step=step + 1, model=model, optimizer=optimizer, sync=sync)
            if world.rank == 0:
                print("stopped", step + 1, flush=True)
            sys.exit(stop.status)


if __name__ == "__main__":
    main()
"""
PARENT = (
    "import sys; from stenograd.launch.local_workers import run_local; "
    "sys.exit(run_local([sys.executable, *sys.argv[2:]], int(sys.argv[1]), stop_s=60))"
)


class Job:
    """Ranks below `run_local`, two where their workers are forked, in a process group of their own."""

    def __init__(self, folder, start):
        folder.mkdir()
        self.folder, self.ranks = folder, 2 if start == "fork" else 1
        script = folder / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-c", PARENT, str(self.ranks), str(script), str(folder), start]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = clean_env(OMP_NUM_THREADS="1")
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams)

    def await_training(self):
        deadline = time.monotonic() + 100
        while len(list(self.folder.glob("trains-*"))) < self.ranks:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_outlive_a_signal_to_all_processes(tmp_path, start):
    """And then none is left."""
    job = Job(tmp_path / "run", start)
    job.await_training()
    os.killpg(job.process.pid, signal.SIGTERM)
    out, _ = job.process.communicate(timeout=100)
    assert job.process.returncode == STATUS, out
    (at,) = saved_steps(job.folder)
    assert out == f"stopped {at}\n"
    assert not any(runs(int(file.name.split("-")[1])) for file in job.folder.glob("process-*"))


def test_a_second_signal_ends_a_program_that_hangs():
    code = (
        "import signal, time, stenograd, stenograd.stopping as own\n"
        "own.SAME_S = 0.2\n"
        "stenograd.stop_on()\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=clean_env(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


LOADER = """
import multiprocessing, os, signal, sys, time
import torch
from torch.utils.data import DataLoader
import stenograd

if __name__ == "__main__":
    stop = stenograd.stop_on()
    loading = iter(DataLoader(range(1000), num_workers=1, multiprocessing_context=sys.argv[1]))
    next(loading)
    (worker,) = loading._workers
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert worker.is_alive()
    print(worker.pid, flush=True)
    if sys.argv[2] == "leave":  # with the loader still there
        globals()["kept"] = loading
    elif sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        worker.terminate()
        worker.join(20)
        assert not worker.is_alive()
    if sys.argv[2] == "others":  # who is no worker of a loader, or no more, heeds signals as ever
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        stop.close()
        again = iter(DataLoader(range(1000), num_workers=1))
        next(again)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in (child, again._workers[0]):
            os.kill(process.pid, signal.SIGTERM)
            process.join(20)
            assert not process.is_alive()
"""


@pytest.mark.parametrize(
    ("start", "ending"), [("fork", "others"), ("fork", "leave"), ("fork", "kill"), ("spawn", "terminate")]
)
def test_a_worker_ends_with_its_parent_and_by_it(tmp_path, start, ending):
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, str(script), start, ending],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == (-signal.SIGKILL if ending == "kill" else 0), done.stderr
    assert not done.stderr or ending == "kill"
    pid = int(done.stdout)
    deadline = time.monotonic() + 20  # torch's workers look for their parent every 5 s
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs(pid)


def test_a_parent_that_was_asked_while_it_loaded_data_starts_no_workers(capfd):
    """The signal was noted by a handler that the parent then replaced, and forgotten."""
    with stop_on():
        signal.raise_signal(signal.SIGTERM)
        status = run_local([sys.executable, "-c", "print('it trains')"], 2)
    said = capfd.readouterr()
    assert (status, said.out, "asked to stop before any worker" in said.err) == (STATUS, "", True)


LATE = """
import os, time
if os.environ.get("RANK") == "1":
    time.sleep(600)
"""


def test_a_signal_before_all_ranks_have_met_ends_them_at_once(tmp_path):
    """The rank that had come noted it, and waited until the timeout for the one that it had ended."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    command = [sys.executable, "-m", "stenograd", "train", "--workers", "2", "--timeout-s", "90"]
    env = clean_env(TMPDIR=str(tmp_path))
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    with subprocess.Popen(command, env=env) as process:
        while not any(file.stat().st_size for file in tmp_path.glob("stenograd-*/store")):
            assert process.poll() is None
            time.sleep(0.05)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 45


def test_the_parent_of_workers_passes_on_and_returns_the_status(tmp_path):
    """SIGUSR1 to `stenograd train --workers 2`, which then goes on by --resume."""
    command = [
        sys.executable,
        "-m",
        "stenograd",
        "train",
        "--task",
        "digits",
        "--workers",
        "2",
        "--method",
        "local:every=4",
    ]
    command += ["--epochs", "200", "--save-steps", "50", "--out", str(tmp_path / "run")]
    with subprocess.Popen(
        command,
        env=clean_env(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while not saved_steps(tmp_path / "run") and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        out = process.communicate(timeout=100)[0]
    assert process.returncode == STATUS, out
    assert "(status 75)" in out.splitlines()[-1]
    assert f"after step {saved_steps(Path(tmp_path / 'run'))[-1]} " in out
