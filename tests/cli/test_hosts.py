"""Emulated hosts of the benchmarks: ranks meet, bytes are counted, nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import clean_env
from support.processes import runs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

from stenograd.emulate.hosts import Hosts, HostsError, ip, names, remove, why_not

REASON = why_not()
NO_DELAY = REASON or why_not("1ms")
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"hosts cannot be emulated: {REASON}"),
    pytest.mark.usefixtures("unlaunched"),
]
with_delay = pytest.mark.skipif(NO_DELAY is not None, reason=f"no delay: {NO_DELAY}")

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((250_000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
dist.barrier()
sent = int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
print("sum", x[0].item(), "host", os.environ["GROUP_RANK"], "sent", sent > 1_000_000)
dist.destroy_process_group()
"""


def of_this_process():
    return names(f"stenograd-{os.getpid()}-")


def test_all_reduce():
    """Rank r holds r + 1, so the sum is 3; of two ranks each sends its whole megabyte."""
    with Hosts(2, "1gbit") as hosts:
        assert len(of_this_process()) == 3
        outputs = hosts.run([sys.executable, "-W", "ignore", "-c", ALL_REDUCE], timeout_s=100)
        sent = hosts.sent_bytes()
    assert [text.splitlines()[-1] for text in outputs] == [f"sum 3.0 host {h} sent True" for h in (0, 1)]
    assert all(1_000_000 < count < 1_200_000 for count in sent)
    assert of_this_process() == []


def test_variables_of_ranks():
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GLOO_SOCKET_IFNAME $MINE"'
    with Hosts(2) as hosts:
        outputs = hosts.run(["sh", "-c", show], 2, env={"MINE": "x"})
    expected = ["0 4 0 2 0", "1 4 1 2 0", "2 4 0 2 1", "3 4 1 2 1"]
    assert outputs == [f"{line} eth0 x\n" for line in expected]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two hosts need two cores")
def test_hosts_have_cores_of_their_own():
    """Each has as many as it was given, no two have the same, and this process keeps all of its own."""
    mine = os.sched_getaffinity(0)
    show = "import os; print(*os.sched_getaffinity(0))"
    with Hosts(2, cores_per_host=1) as hosts:
        first, second = (set(text.split()) for text in hosts.run([sys.executable, "-c", show]))
    assert len(first) == len(second) == 1
    assert first != second
    assert os.sched_getaffinity(0) == mine


def test_the_link_has_the_rate():
    """200 kB at 1 Mbit/s last 1.6 s, less what the bucket lets through at once."""
    serve = "nc = __import__('socket').create_server(('', 7)); c = nc.accept()[0]\nwhile c.recv(65536): pass"
    send = (
        "import socket, time\nfor _ in range(100):\n"
        "  try: s = socket.create_connection(('10.77.0.2', 7)); break\n"
        "  except OSError: time.sleep(0.1)\n"
        "start = time.time(); s.sendall(bytes(200_000)); s.shutdown(1); s.recv(1); print(time.time() - start)"
    )
    code = f"import os\nexec({serve!r} if os.environ['RANK'] == '1' else {send!r})"
    with Hosts(2, "1mbit") as hosts:
        seconds = float(hosts.run([sys.executable, "-c", code], timeout_s=60)[0])
    assert 1.2 < seconds < 12


PINGS = """
import os, statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x, took = torch.zeros(1), []
for _ in range(20):
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)
    took.append(time.perf_counter() - start)
big = torch.full((250_000,), dist.get_rank() + 1.0)
start = time.perf_counter()
dist.all_reduce(big)
seconds = time.perf_counter() - start
dist.barrier()
print(1e3 * min(took[5:]), seconds, big[0].item())
dist.destroy_process_group()
"""


@with_delay
def test_a_delay_is_added_to_the_rate():
    """A ping takes two delays of 10 ms; a megabyte at 20 Mbit/s 0.4 s, less what buckets let through."""
    with Hosts(2, "20mbit", delay="10ms") as hosts:
        outputs = hosts.run([sys.executable, "-W", "ignore", "-c", PINGS], timeout_s=100)
        sent = hosts.sent_bytes()
    ping_ms, seconds, total = map(float, outputs[0].splitlines()[-1].split())
    assert 20 <= ping_ms < 30
    assert 0.38 < seconds < 3
    assert total == 3.0
    assert all(1_000_000 < count < 1_200_000 for count in sent)
    assert of_this_process() == []


@with_delay
def test_link_finds_the_rate_and_the_delay(tmp_path):
    """One flow at a time, and both at once.

    Other tests may keep the cores busy, so bounds are wide, and hops are measured again if they had to wait.
    """
    file = tmp_path / "link.json"
    measure = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "stenograd",
        "link",
        "--seconds",
        "4",
        "--out",
        str(file),
    ]
    for _ in range(3):
        with Hosts(2, "50mbit", delay="5ms") as hosts:
            hosts.run(measure, timeout_s=100)
        found = json.loads(file.read_text())
        if found["hop_s"] < 0.1:
            break
    assert found["hosts"] == [0, 1]
    assert [*found["alone_bps"], *found["together_bps"]] == pytest.approx([50e6] * 4, rel=0.4)
    assert 0.005 <= found["latency_s"] < 0.02
    assert 0.01 <= found["hop_s"] < 0.1  # there and back
    assert found["seconds"] < 30


@with_delay
def test_the_relay_ends_with_the_process_that_started_it():
    code = (
        "import time\nfrom stenograd.emulate.hosts import Hosts\n"
        "with Hosts(1, delay='1ms') as hosts:\n  print(hosts._relay.pid, flush=True)\n  time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        relay = process.stdout.readline().strip()
        assert runs(relay)
        process.kill()
    deadline = time.monotonic() + 20
    while runs(relay):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    remove(f"stenograd-{process.pid}-")


@with_delay
def test_ranks_do_not_wait_for_a_relay_that_has_ended():
    code = "import os, signal, time\nos.kill(int(os.environ['RELAY']), signal.SIGKILL)\ntime.sleep(60)"
    with (
        Hosts(1, delay="1ms") as hosts,
        pytest.raises(HostsError, match="the process that holds packets back ended with status -9"),
    ):
        hosts.run([sys.executable, "-c", code], env={"RELAY": str(hosts._relay.pid)})
    assert of_this_process() == []


def test_one_failure_ends_all():
    start = time.monotonic()
    with (
        Hosts(2) as hosts,
        pytest.raises(HostsError, match="rank 1 ended with status 3; its last lines:\noops"),
    ):
        hosts.run(["sh", "-c", '[ "$RANK" = 0 ] && sleep 60; echo oops; exit 3'])
    assert time.monotonic() - start < 30
    assert of_this_process() == []


def test_timeout():
    with Hosts(1) as hosts, pytest.raises(HostsError, match=r"rank 0 did not end within 0\.5 s"):
        hosts.run(["sleep", "60"], timeout_s=0.5)


def test_an_error_in_the_block_removes_the_hosts():
    with pytest.raises(KeyError), Hosts(1):
        raise KeyError
    assert of_this_process() == []


@pytest.fixture
def script():
    """Run `stenograd emulate` as a process of its own, whose rank sleeps."""
    command = [sys.executable, "-m", "stenograd", "emulate", "--hosts", "1", "--rate", "none"]
    command += ["--", "sh", "-c", "echo up; sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_env()) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_sigterm_removes_the_hosts(script):
    script.send_signal(signal.SIGTERM)
    assert script.wait(20) == 128 + signal.SIGTERM
    assert names(f"stenograd-{script.pid}-") == []


def test_the_next_run_removes_what_a_killed_one_left(script):
    script.kill()
    script.wait(20)
    assert len(names(f"stenograd-{script.pid}-")) == 2
    ip("netns", "add", "stenograd-own-0")  # somebody's, who has made it by hand
    try:
        with Hosts(1):
            assert names(f"stenograd-{script.pid}-") == []
        assert names("stenograd-own-") == ["stenograd-own-0"]
    finally:
        remove("stenograd-own-")


def test_two_networks_at_once():
    with Hosts(1) as one, Hosts(1) as other:
        assert one.run(["echo", "a"]) == ["a\n"]
        assert other.run(["echo", "b"]) == ["b\n"]
    assert of_this_process() == []


def _emulated(*words):
    command = [sys.executable, "-m", "stenograd", "emulate", *words]
    return subprocess.run(command, capture_output=True, text=True, env=clean_env(), check=False, timeout=60)


def test_the_command_shows_rank_0_and_what_each_host_sent():
    show = ["sh", "-c", "echo rank $RANK of $WORLD_SIZE"]
    done = _emulated("--hosts", "2", "--rate", "100mbit/20mbit", "--", *show)
    assert done.returncode == 0
    assert done.stdout == "rank 0 of 2\n"
    assert [line.split(" sent")[0] for line in done.stderr.splitlines()] == ["host 0", "host 1"]


def test_a_letter_that_comes_in_two_pieces_is_shown_whole():
    pieces = r"printf '\342\224'; sleep 0.5; printf '\202\n'"
    done = _emulated("--hosts", "1", "--rate", "none", "--", "sh", "-c", pieces)
    assert (done.returncode, done.stdout) == (0, "│\n")


def test_the_command_says_what_was_wrong():
    wrong_rate = _emulated("--rate", "1gbps", "--", "true")
    assert wrong_rate.returncode == 2
    assert "rate must be none or like 100mbit or 1gbit, got '1gbps': write 1gbit" in wrong_rate.stderr
    wrong_delay = _emulated("--delay", "20", "--", "true")
    assert wrong_delay.returncode == 2
    assert "delay must be none or like 20ms or 500us, got '20'" in wrong_delay.stderr
    failing = _emulated("--rate", "none", "--", "sh", "-c", "echo what went wrong; exit 3")
    assert failing.returncode == 1
    assert "rank 0 ended with status 3, see above" in failing.stderr
    assert (failing.stdout + failing.stderr).count("what went wrong") == 1
