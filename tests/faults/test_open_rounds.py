"""Open runs: workers are killed, frozen, slowed, cut off; others come; and all that are there stay equal."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import clean_env

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="severs connections of frozen workers")
WORKER = str(Path(__file__).with_name("open_worker.py"))
METHODS = [
    "diloco:every=5,quorum=0.5,grace=0.5",
    "local:every=5,quorum=0.5,grace=0.5",
    "diloco:every=6,fragments=2,quorum=0.5,grace=0.5/topk:ratio=0.1",
    "diloco:every=4,quorum=0.75,grace=0.3/sign",
    "sparseloco:every=4,quorum=0.5,grace=0.5",
]


class Run:
    """Workers of an open run on this host, whose store is a file."""

    def __init__(self, folder, size, method, step_s=0.02, store=None):
        folder.mkdir(exist_ok=True)
        self.folder, self.size = folder, size
        self.command = [sys.executable, WORKER, str(folder), method, str(step_s)]
        self.env = {"STENOGRAD_OPEN": store or str(folder / "store"), "OMP_NUM_THREADS": "1"}
        self.processes = {}
        self.ended = []

    def start(self, rank, falter=None, **more):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1"}
        ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
        ranks = ranks if rank < self.size else {}  # one that nobody has numbered
        own = {"FALTER": json.dumps(falter)} if falter else {}
        env = clean_env(**self.env, **ranks, **own, **more)
        if rank in self.processes:
            self.ended.append(self.processes[rank])
        with (self.folder / f"out-{rank}-{len(self.ended)}").open("wb") as out:
            self.processes[rank] = subprocess.Popen(self.command, env=env, stdout=out, stderr=out)

    def logs(self):
        """Return what each process has noted, by rank and process."""
        found = {}
        for path in self.folder.glob("log-*"):
            rank, pid = map(int, path.name.split("-")[1:])
            lines = path.read_text().splitlines()
            found[rank, pid] = [json.loads(line) for line in lines if line.endswith("}")]
        return found

    def round(self):
        """Return the newest round that a process has noted."""
        states = [row["state"] for rows in self.logs().values() for row in rows if "state" in row]
        return max(states, default=-1)

    def await_round(self, k, limit_s=60):
        deadline = time.monotonic() + limit_s
        while self.round() < k:
            assert time.monotonic() < deadline, self.output()
            assert any(process.poll() is None for process in self.processes.values()), self.output()
            time.sleep(0.02)

    def finish(self, ranks, rounds=4, limit_s=60):
        """Let these take part in some rounds more, and wait until they have ended."""
        deadline = time.monotonic() + limit_s
        start = self.round()

        def here(rank):
            rows = self.logs().get((rank, self.processes[rank].pid), [])
            return [row for row in rows if row.get("state", -1) > start and rank in row["members"]]

        while not all(here(rank) for rank in ranks):
            codes = {rank: self.processes[rank].poll() for rank in ranks}
            assert set(codes.values()) == {None}, (codes, self.output())
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)
        (self.folder / "end.tmp").write_text(str(self.round() + rounds))
        (self.folder / "end.tmp").rename(self.folder / "end")
        for rank in ranks:
            self.processes[rank].wait(max(deadline - time.monotonic(), 0.1))

    def stop(self):
        for process in [*self.processes.values(), *self.ended]:
            process.kill()
            process.wait()

    def output(self):
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("out-*"))
        )

    def check(self, survivors):
        """All that noted a round had the same after it; survivors lost no step and reached the end."""
        digests = {}
        for who, rows in self.logs().items():
            for row in rows:
                if "state" in row:
                    digests.setdefault(row["state"], {})[who] = row["digest"]
        unequal = {k: held for k, held in digests.items() if len(set(held.values())) > 1}
        assert not unequal, (unequal, self.output())
        for rank in survivors:
            assert self.processes[rank].returncode == 0, self.output()
            rows = self.logs()[rank, self.processes[rank].pid]
            end = rows[-1]["end"]
            if len(end["brought"]) == 1:
                # What it has brought to rounds is all that it had trained when it last took part.
                (brought,) = end["brought"].values()
                before = sum(r != rank for r, _ in self.logs())
                assert end["tokens"][str(rank)] >= brought > 0, before
        return digests


def _fault(run, draw, kind, rank):
    process = run.processes[rank]
    if kind == "kill":
        process.kill()
    elif kind == "stop":
        process.send_signal(signal.SIGSTOP)
    elif kind == "pause":
        process.send_signal(signal.SIGSTOP)
        time.sleep(draw.uniform(0.2, 9.0))
        process.send_signal(signal.SIGCONT)


AT = ["_meet", "_open", "_catch_up", "_send", "hold", "_merge", "_tell_changes"]


def _drill(folder, number):
    draw = random.Random(number)
    size = draw.choice([2, 3, 4])
    method = METHODS[number % len(METHODS)]
    kind = ["kill", "stop", "pause", "rejoin", "join", "falter", "two", "donor"][number // len(METHODS) % 8]
    run = Run(folder, size, method)
    victim = draw.randrange(size)
    survivors = {*range(size)} - {victim}
    falter = None
    if kind == "falter":
        do = draw.choice(["SIGKILL", "SIGSTOP"])
        falter = {
            "at": draw.choice(AT),
            "nth": draw.randint(2, 5),
            "do": do,
            "when": draw.choice(["before", "after"]),
        }
    if kind == "donor":  # rank 0 gives what others lack, and is lost while it does
        victim, survivors = 0, {*range(1, size)}
        falter = {"at": "_catch_up", "nth": 2, "do": draw.choice(["SIGKILL", "SIGSTOP"])}
    try:
        for rank in range(size):
            run.start(rank, falter if rank == victim else None)
        run.await_round(draw.randint(1, 4))
        time.sleep(draw.uniform(0, 0.3))
        if kind in ("kill", "stop", "pause", "rejoin", "two"):
            _fault(run, draw, "kill" if kind in ("rejoin", "two") else kind, victim)
        if kind == "pause":
            survivors.add(victim)
        if kind in ("rejoin", "two"):
            run.start(victim)
            survivors.add(victim)
        if kind in ("join", "two", "donor"):
            run.start(size)
            survivors.add(size)
        run.finish(survivors)
        run.check(survivors)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{kind} {falter} hangs:\n{run.output()}") from None
    finally:
        run.stop()


@pytest.mark.parametrize("number", range(0, 40, 5))
def test_those_that_are_there_stay_equal(tmp_path, number):
    _drill(tmp_path / "run", number)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", range(200))
def test_any_fault_at_any_moment(tmp_path, number):
    _drill(tmp_path / "run", number)
