"""Launchers, rendezvous and failures with real processes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launched import JOIN, SOURCE, clean_env
from support.processes import free_port, runs

from stenograd.errors import ConfigError, LaunchError
from stenograd.launch import local_workers as workers
from stenograd.launch import process_group as groups
from stenograd.launch.failure_detector import FailureDetector
from stenograd.launch.process_group import Absent, init, roll_call, run_local, shutdown

PYTHON = sys.executable
LIMIT_S = 60
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the mpiexec packages exist for Linux")

# The rank in argv dies; survivors report who did not answer.
LOSE = """
import os, signal, sys, torch, torch.distributed as dist
from stenograd.launch.process_group import init, roll_call
rank = init(timeout_s=40).rank
if rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    print("lost", roll_call(1.0).lost, flush=True)
    sys.exit(5)
"""

# Rank 1 dies, and a process that it has forked lives on, as a DataLoader's workers do.
FORKS = """
import os, pathlib, signal, sys, time, torch, torch.distributed as dist
from stenograd.launch.process_group import init, roll_call
folder, rank = pathlib.Path(sys.argv[1]), init(timeout_s=20).rank
dist.all_reduce(torch.ones(1))
if rank == 1:
    if not (child := os.fork()):
        os.closerange(0, 3)
        time.sleep(60)
        os._exit(0)
    (folder / "child").write_text(str(child))
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    (folder / str(rank)).write_text(f"{time.monotonic() - start:.1f} {roll_call(1.0).lost}")
"""

# The rank in argv is stopped before the second exchange; survivors fail after two seconds and a roll call.
STOP = """
import atexit, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[2])
atexit.register(lambda: (folder / os.environ["RANK"]).write_text(str(time.time())))
import torch
from stenograd.wire.driver import Driver
from stenograd.launch.process_group import init
from stenograd.wire.requests import mean
rank = init(timeout_s=40).rank
(driver,) = Driver(timeout_s=2).split([[0, 1, 2]])
driver.run(mean(torch.ones(1)))
if rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
driver.run(mean(torch.ones(1)))
"""


def run(command, **env):
    return subprocess.run(command, env=clean_env(**env), capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def outside(unlaunched):
    """This process, as if no launcher had started it and it had met nobody yet."""
    unlaunched.setattr(groups, "_place", None)
    unlaunched.setattr(groups.atexit, "register", lambda call: call)
    yield unlaunched
    shutdown()


def test_run_local_succeeds(capfd):
    assert run_local([PYTHON, "-c", JOIN], 2, env=clean_env()) == 0
    assert capfd.readouterr() == ("stenograd 2 2 3.0\n", "")


def test_survivors_name_the_killed_worker(capfd):
    """Worker 1 of 3 dies; both survivors answer the roll call, so only rank 1 is missing."""
    assert run_local([PYTHON, "-c", LOSE, "1"], 3, env=clean_env()) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert out == "lost [1]\n"
    assert err == "stenograd: worker 1 was killed by SIGKILL\n"


@linux_only
def test_a_fork_of_the_killed_worker_does_not_hold_up_the_survivors(tmp_path, patient):
    """It holds no connection of the worker's; otherwise the collective waited for the timeout of 20 s."""
    assert run_local([PYTHON, "-W", "ignore", "-c", FORKS, str(tmp_path)], 3, env=clean_env()) == 137
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    for rank in ("0", "2"):
        seconds, lost = (tmp_path / rank).read_text().split(maxsplit=1)
        assert float(seconds) < 15
        assert lost == "[1]"


def test_survivor_names_rank_0_though_the_store_died_with_it():
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    first = subprocess.Popen([PYTHON, "-c", LOSE, "0"], env=clean_env(RANK="0", **env))
    second = run([PYTHON, "-c", LOSE, "0"], RANK="1", **env)
    assert first.wait(LIMIT_S) == -signal.SIGKILL
    assert (second.stdout, second.stderr, second.returncode) == ("lost [0]\n", "", 5)


def test_run_local_reports_a_status_and_stops_the_rest(capfd, monkeypatch):
    monkeypatch.setattr(workers, "_GRACE_S", 0.3)
    code = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no data\\nin shard 1')\ntime.sleep(60)"
    )
    start = time.monotonic()
    assert run_local([PYTHON, "-c", code], 3) == 1
    assert time.monotonic() - start < 40
    first, *tail = capfd.readouterr().err.splitlines()
    assert first == "stenograd: worker 1 exited with status 1: in shard 1"
    assert tail == ["  no data", "  in shard 1"]


@pytest.fixture
def patient(monkeypatch):
    """Waiting for a worker that will not end takes longer than a loaded machine needs for the rest."""
    monkeypatch.setattr(workers, "_GRACE_S", 30.0)
    monkeypatch.setattr(workers, "_TERM_S", 30.0)


@linux_only
@pytest.mark.parametrize("victim", [0, 1])
def test_run_local_does_not_wait_for_a_stopped_worker(victim, capfd, patient):
    """Not the time for a report, nor that between SIGTERM and SIGKILL."""
    code = (
        "import os, signal, sys, time\n"
        f"if os.environ['RANK'] == '{victim}': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(0.2)\n"
        "sys.exit('nobody answered')"
    )
    start = time.monotonic()
    assert run_local([PYTHON, "-I", "-S", "-c", code], 3) == 1
    assert time.monotonic() - start < 20
    err = capfd.readouterr().err
    assert "exited with status 1" in err
    assert "nobody answered" in err


@linux_only
def test_run_local_ends_with_the_survivors_of_a_stopped_rank_0(capfd, tmp_path, patient):
    assert run_local([PYTHON, "-c", STOP, "0", str(tmp_path)], 3, env=clean_env()) == 1
    end = time.time()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1", "2"]
    assert end - max(float(file.read_text()) for file in tmp_path.iterdir()) < 20
    assert "rank(s) 0 did not answer" in capfd.readouterr().err


@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_worker_does_not_hold_up_the_end_of_a_run(number, tmp_path):
    pid = tmp_path / "pid"
    worker = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), 19)"
    parent = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it\n"
        "from stenograd.launch import local_workers as workers\n"
        "workers._TERM_S = 30.0\n"
        f"sys.exit(workers.run_local([sys.executable, '-c', {worker!r}], 1))"
    )
    with subprocess.Popen([PYTHON, "-c", parent], env=clean_env()) as process:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number
        assert time.monotonic() - start < 20  # not the time between SIGTERM and SIGKILL
    assert not runs(int(pid.read_text()))


def test_run_local_sets_the_variables(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS STENOGRAD_TIMEOUT_S"
    code = f"import os; print(*(os.environ[name] for name in {names.split()}))"
    assert run_local([PYTHON, "-c", code], 1, timeout_s=7) == 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert capfd.readouterr().out.split() == ["0", "1", "0", "1", str(cores), "7"]


@pytest.mark.parametrize("arguments", [([PYTHON], 0), ([], 1), ([PYTHON], -2)])
def test_run_local_refuses_bad_arguments(arguments):
    with pytest.raises(ConfigError):
        run_local(*arguments)
    with pytest.raises(ConfigError):
        run_local([PYTHON], 1, timeout_s=0)
    with pytest.raises(LaunchError, match="no command"):
        run_local(["no-such-command-anywhere"], 1)


@linux_only
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 128 + signal.SIGINT)],
)
def test_no_orphans(number, status, monkeypatch, tmp_path):
    """Each worker leaves a file named after its process number, then sleeps."""
    worker = f"import os, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    parent = (
        "import signal, sys, types\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it\n"
        f"package = types.ModuleType('stenograd'); package.__path__ = [{SOURCE + '/stenograd'!r}]\n"
        "sys.modules['stenograd'] = package  # without the torch that stenograd imports\n"
        "from stenograd.launch import local_workers as workers\n"
        "workers._TERM_S = 0.2\n"
        f"sys.exit(workers.run_local([sys.executable, '-c', {worker!r}], 2))"
    )
    with subprocess.Popen([PYTHON, "-c", parent], env=clean_env(TMPDIR=str(tmp_path / ".."))) as process:
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == status
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(runs(pid) for pid in pids)


def test_alone_needs_no_network(outside):
    world = init()
    assert (world.rank, world.world_size, world.launcher) == (0, 1, "alone")
    assert init() is world
    assert roll_call(0.0) == Absent()
    shutdown()
    shutdown()
    assert not dist.is_initialized()
    assert roll_call(0.0) == Absent()


def test_a_group_of_the_user_is_left_alone(outside):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert init().launcher == "alone"
        shutdown()
        assert dist.is_initialized()
        assert roll_call(0.0) == Absent()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("again", [False, True])
def test_a_group_that_the_program_ended_by_itself_leaves_nothing_behind(outside, again):
    """Whatever group comes next, the detector of the first ends, and one of the program's own stays."""
    init()
    detector = groups._session.detector = FailureDetector(0, "127.0.0.1")
    dist.destroy_process_group()
    if again:
        init()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        shutdown()
        assert dist.is_initialized()
        dist.destroy_process_group()
    assert not detector._server._thread.is_alive()


def test_the_users_interface_is_kept(outside):
    outside.setenv("GLOO_SOCKET_IFNAME", "lo")
    init()
    shutdown()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_peers_that_never_come(outside, tmp_path):
    outside.setenv("RANK", "1")
    outside.setenv("WORLD_SIZE", "4")
    outside.setenv("STENOGRAD_STORE", str(tmp_path / "store"))
    outside.setenv("STENOGRAD_TIMEOUT_S", "0.5")
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"1 of 4 ranks came within 0.5 s, missing: 0, 2, 3; look"):
        init()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("rank", "reason"), [("0", "is in use by another program"), ("1", "does not answer as rank 0's store")]
)
def test_port_in_use(outside, rank, reason):
    """The other program accepts connections and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        for key, value in zip(
            ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), (rank, "2", *place.split(":")), strict=True
        ):
            outside.setenv(key, value)
        with pytest.raises(LaunchError, match=f"{place}, which {reason}"):
            init(timeout_s=1.5)


def test_nobody_at_the_address(outside):
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        outside.setenv(key, value)
    outside.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LaunchError, match=r"rank 1 of 2 cannot meet the others at localhost:.*refused"):
        init(timeout_s=0.5)


@pytest.mark.parametrize("value", ["-1", "soon", "inf", "nan"])
def test_bad_timeouts(outside, value):
    outside.setenv("STENOGRAD_TIMEOUT_S", value)
    with pytest.raises(LaunchError, match="STENOGRAD_TIMEOUT_S must be seconds"):
        init()
    with pytest.raises(ConfigError, match="timeout_s"):
        init(timeout_s=0.0)


def _slowly_in_two_steps(rank, folder, what):
    """Connecting takes rank 0 two of three seconds, and rank 1 fails after it: what is left is one second."""
    if what == "init":
        shutdown()
        groups._place = None
        os.environ["STENOGRAD_STORE"] = str(folder / "store")
        where, name = groups, "_make_group"
    else:
        where, name = dist.distributed_c10d, "_new_process_group_helper"
    real = getattr(where, name)

    def connect(*args, **kwargs):
        found = real(*args, **kwargs)
        time.sleep(2 if rank == 0 else 6)
        if rank == 1:
            raise OSError("it fails")
        return found

    setattr(where, name, connect)
    start = time.monotonic()
    try:
        if what == "init":
            init(timeout_s=3)
        else:
            groups.make_group(None, [0, 1], "part", 3.0)
    except (OSError, RuntimeError, LaunchError) as error:
        # Otherwise the next init would take the half-made group for a whole one.
        assert what == "part" or not dist.is_initialized()
        return type(error).__name__, time.monotonic() - start
    finally:
        setattr(where, name, real)
        groups._place = None
    return None


@pytest.mark.parametrize("what", ["init", "part"])
def test_connecting_has_one_limit_for_all_its_waits(pool, tmp_path, what):
    (kind, seconds), (other, _) = pool.run(2, _slowly_in_two_steps, tmp_path, what)
    assert kind in ("LaunchError", "DistStoreError", "RuntimeError")
    assert other == "OSError"
    assert 2 < seconds < 4


@linux_only
def test_no_thread_of_the_group_outlives_shutdown():
    """One that does may abort the process while Python ends; scripts make optimizers after init."""
    code = (
        "import os, time, torch\n"
        "from stenograd.launch.process_group import init, shutdown\n"
        "init(timeout_s=30)\n"
        "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "shutdown()\n"
        "time.sleep(0.3)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    done = run([PYTHON, "-c", code])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 1
