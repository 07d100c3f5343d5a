"""Open runs: workers are killed, frozen, slowed, cut off; others come; and all that are there stay equal."""

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

from stenograd.emulate.hosts import Hosts, command, ip, why_not

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
    """Workers of an open run on this host, whose store is a file; or one on each of emulated hosts."""

    def __init__(self, folder, size, method, step_s=0.02, store=None, hosts=None):
        folder.mkdir(exist_ok=True)
        self.hosts = hosts
        self.folder, self.size = folder, size
        self.command = [sys.executable, WORKER, str(folder), method, str(step_s)]
        self.env = {"STENOGRAD_OPEN": store or str(folder / "store"), "OMP_NUM_THREADS": "1"}
        self.processes = {}
        self.ended = []

    def last(self, k):
        """Let all end after round k."""
        (self.folder / "end.tmp").write_text(str(k))
        (self.folder / "end.tmp").rename(self.folder / "end")

    def ends(self):
        """Return what each rank has noted at its end, after all have ended."""
        for process in self.processes.values():
            assert process.wait(100) == 0, self.output()
        return {rank: rows[-1]["end"] for (rank, _), rows in self.logs().items()}

    def start(self, rank, falter=None, **more):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1"}
        ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
        ranks = ranks if rank < self.size else {}  # one that nobody has numbered
        own = {"FALTER": json.dumps(falter)} if falter else {}
        env = clean_env(**(self.env | ranks | own | more))
        if rank in self.processes:
            self.ended.append(self.processes[rank])
        there = ["ip", "netns", "exec", self.hosts._host(rank)] if self.hosts else []
        with (self.folder / f"out-{rank}-{len(self.ended)}").open("wb") as out:
            self.processes[rank] = subprocess.Popen([*there, *self.command], env=env, stdout=out, stderr=out)

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

    def await_round(self, k, limit_s=100):
        deadline = time.monotonic() + limit_s
        while self.round() < k:
            assert time.monotonic() < deadline, self.output()
            assert any(process.poll() is None for process in self.processes.values()), self.output()
            time.sleep(0.02)

    def finish(self, ranks, rounds=4, limit_s=100):
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
        self.last(self.round() + rounds)
        for rank in ranks:
            self.processes[rank].wait(max(deadline - time.monotonic(), 0.1))

    def stop(self):
        for process in [*self.processes.values(), *self.ended]:
            process.kill()
            process.wait()

    def output(self):
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-6000:]}"
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
                assert end["tokens"][str(rank)] >= brought > 0
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


# A frozen one that comes back, one that is killed and started again, and a donor that is lost while it gives.
@pytest.mark.parametrize("number", [10, 15, 35])
def test_those_that_are_there_stay_equal(tmp_path, number):
    _drill(tmp_path / "run", number)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", range(200))
def test_any_fault_at_any_moment(tmp_path, number):
    _drill(tmp_path / "run", number)


def _slow_down(hosts, index, kbit):
    shape = ["tbf", "rate", f"{kbit}kbit", "burst", "4000", "latency", "400ms"]
    for where, interface in ((hosts._host(index), "eth0"), (f"{hosts._prefix}switch", f"port{index}")):
        command("tc", "-n", where, "qdisc", "replace", "dev", interface, "root", *shape)


def _part(hosts, pair, action):
    """Let two hosts reach all but each other ("add"), or each other, too ("del")."""
    for one, other in (pair, pair[::-1]):
        ip("-n", hosts._host(one), "route", action, "blackhole", f"10.77.0.{other + 1}/32")


def _network_drill(folder, number):
    """A worker is cut off from all or from one other, for a while or for good, or its link gets slow."""
    draw = random.Random(1000 + number)
    kind, size = ["cut", "pair", "slow"][number % 3], draw.choice([3, 4])
    victim, other = draw.sample(range(size), 2)
    seconds = draw.choice([draw.uniform(0.5, 12.0), None])
    with Hosts(size + 1, "100mbit") as hosts:
        store = f"10.77.0.{size + 1}:29400"
        run = Run(folder, size, METHODS[number // 3 % len(METHODS)], store=store, hosts=hosts)
        run.env["GLOO_SOCKET_IFNAME"] = "eth0"
        served = [sys.executable, "-m", "stenograd", "rendezvous", "--port", "29400"]
        keeper = hosts.start(size, served, clean_env())
        try:
            for rank in range(size):
                run.start(rank)
            run.await_round(draw.randint(1, 4))
            time.sleep(draw.uniform(0, 0.3))
            if kind == "cut":
                hosts.cut(victim)
            elif kind == "pair":
                _part(hosts, (victim, other), "add")
            else:
                _slow_down(hosts, victim, draw.choice([100, 400, 2000]))
            if kind != "slow" and seconds is not None:
                time.sleep(seconds)
                hosts.cut(victim, mend=True) if kind == "cut" else _part(hosts, (victim, other), "del")
            lost = {victim} if kind == "cut" and seconds is None else set()
            survivors = {*range(size)} - lost
            # For good: rounds must go on with one of the two at least, whichever it is.
            run.finish(survivors - {victim, other} if kind == "pair" and seconds is None else survivors)
            run.check({rank for rank in survivors if run.processes[rank].wait(60) == 0})
            assert all(run.processes[rank].returncode == 0 for rank in survivors), run.output()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{kind} {victim} {other} {seconds} hangs:\n{run.output()}") from None
        finally:
            run.stop()
            keeper.kill()
            keeper.wait()


_SENDER = """
import os, socket, sys, time
from stenograd.launch.network import silent
deadline = time.monotonic() + 20
while True:
    try:
        peer = socket.create_connection(("10.77.0.2", 29400), 5)
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.1)
own = frozenset({(peer.fileno(), os.fstat(peer.fileno()).st_ino)})
peer.sendall(b"x")
time.sleep(1.5)
print(silent(own, 1.0), flush=True)
sys.stdin.readline()
peer.sendall(b"x")
while not silent(own, 1.0) and time.monotonic() < deadline:
    time.sleep(0.05)
print(silent(own, 1.0), flush=True)
"""
_RECEIVER = """
import socket, time
server = socket.create_server(("10.77.0.2", 29400))
peer, _ = server.accept()
time.sleep(60)
"""


@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
def test_a_peer_behind_a_cut_link_is_silent_and_one_that_says_nothing_is_not():
    with Hosts(2) as hosts:
        started = []
        for host, code in enumerate((_SENDER, _RECEIVER)):
            command = ["ip", "netns", "exec", hosts._host(host), sys.executable, "-c", code]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=clean_env(), **pipes))
        sender, receiver = started
        try:
            assert sender.stdout.readline() == "False\n"
            hosts.cut(1)
            assert sender.communicate("go\n", timeout=40)[0] == "True\n"
        finally:
            for process in (sender, receiver):
                process.kill()
                process.communicate()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=f"no emulated hosts: {why_not()}")
@pytest.mark.parametrize("number", range(60))
def test_any_fault_of_the_network(tmp_path, number):
    _network_drill(tmp_path / "run", number)


@pytest.fixture
def run(tmp_path):
    """Make runs, and end what is left of them."""
    made = []

    def make(*args, **kwargs):
        made.append(Run(tmp_path / f"run{len(made)}", *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    ("method", "size", "weigh"),
    [
        ("local:every=3", 2, {}),
        ("diloco:every=4,fragments=2/topk:ratio=0.1", 2, {}),
        ("diloco:every=3/sign", 3, {"WEIGH": "1"}),
    ],
)
def test_with_all_in_time_it_is_a_fixed_world_bit_for_bit(run, method, size, weigh):
    schedule, slash, codec = method.partition("/")
    text = f"{schedule},quorum=0.5,grace=60{slash}{codec}"
    opened, fixed = (run(size, how, 0.0) for how in (text, method))
    opened.last(8)
    for rank in range(size):
        opened.start(rank, **weigh)
    ends = opened.ends()
    fixed.last(ends[0]["steps"] // 4 if "fragments" in method else 8)  # of its rounds, each of all fragments
    del fixed.env["STENOGRAD_OPEN"]
    for rank in range(size):
        here = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        fixed.start(rank, STENOGRAD_STORE=str(fixed.folder / "store"), **here, **weigh)
    assert {end["final"] for end in ends.values()} == {end["final"] for end in fixed.ends().values()}
    assert len({end["final"] for end in ends.values()}) == 1


def test_a_slow_rank_is_not_waited_for_and_counts_for_what_it_has_trained(run):
    one = run(3, "local:every=10,quorum=0.6,grace=0.15")
    for rank in range(3):
        one.start(rank, SLOWER="6" if rank == 1 else "1")
    one.await_round(1)
    start = time.monotonic()
    one.await_round(11)
    assert time.monotonic() - start < 10 * 10 * 6 * 0.02  # what ten rounds take at its pace
    one.last(14)
    ends = one.ends()
    one.check({0, 1, 2})
    slow, fast = ends[1]["tokens"]["1"], ends[0]["tokens"]["0"]
    assert 0 < slow < fast / 2
    assert ends[1]["brought"]["0"] == slow


def test_after_a_void_round_all_count_for_what_they_have_kept(run):
    one = run(2, "diloco:every=5,quorum=0.5,grace=60", 0.0)
    one.last(5)
    one.start(0)
    one.start(1, SPOIL="8")
    tokens = one.ends()[0]["tokens"]
    assert tokens["0"] == tokens["1"] + 5  # in the second round


def test_a_copy_that_did_not_arrive_whole_is_sent_again(run):
    one = run(2, "diloco:every=5,quorum=0.5,grace=0.5")
    for rank in range(2):
        one.start(rank)
    one.await_round(2)
    one.start(2, {"do": "lie", "nth": 1})
    one.finish({0, 1, 2})
    one.check({0, 1, 2})


def test_workers_name_the_store_when_it_is_lost(run):
    code = "import time; from stenograd.launch.membership import host_store; s = host_store(0); "
    code += "print(s.port, flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=clean_env(), stdout=subprocess.PIPE, text=True) as store:
        one = run(2, "local:every=3,quorum=0.5", store=f"127.0.0.1:{int(store.stdout.readline())}")
        for rank in range(2):
            one.start(rank)
        one.await_round(2)
        store.kill()
        for process in one.processes.values():
            assert process.wait(60) == 1
    assert one.output().count("the store of the open run at 127.0.0.1") >= 2


def test_train_starts_workers_again_stops_and_goes_on(tmp_path):
    """A worker is killed and comes back, then all are asked to stop, then --resume ends the run."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "stenograd", "train", "--task", "digits", "--workers", "2", "--keep"]
    command += ["--method", "diloco:every=5,quorum=0.5,grace=0.5", "--epochs", "5000", "--out", str(out)]
    env = clean_env(OMP_NUM_THREADS="1")
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(command, env=env, stdout=errors, stderr=errors, start_new_session=True) as process,
    ):
        deadline = time.monotonic() + 200

        def wait_for(what):
            while not what():
                assert process.poll() is None, (tmp_path / "errors").read_text()
                assert time.monotonic() < deadline, (tmp_path / "errors").read_text()
                time.sleep(0.05)

        wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text())
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[1]), signal.SIGKILL)
        wait_for(lambda: "rank 1 is back" in (tmp_path / "errors").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, (tmp_path / "errors").read_text()
    said = (tmp_path / "errors").read_text()
    assert "worker 1 was killed by SIGKILL; it is started again" in said
    assert "saved, to be continued by --resume (status 75)" in said
    epochs = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    done = subprocess.run(
        [*command[:4], "--out", str(out), "--resume", "--workers", "2", "--epochs", str(epochs[-1] + 5)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    after = [json.loads(line)["epoch"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert after[: len(epochs)] == epochs
    assert after[-1] == epochs[-1] + 5
    assert json.loads((out / "result.json").read_text())["steps_by_rank"].keys() == {"0", "1"}
    options = json.loads((out / "run.json").read_text())["options"]  # for the next --resume
    assert (options["epochs"], options["keep"]) == (epochs[-1] + 5, True)
