"""`stenograd doctor` under a launcher: interfaces between emulated hosts, good ones and traps."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from stenograd.emulate.hosts import Hosts, names, why_not
from stenograd.errors import LaunchError
from stenograd.launch.interfaces import Reach, best, interfaces, time_interfaces

REASON = why_not()


class _Store(dict):
    """The part of a store that is needed, for threads."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


class _World:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


def _together(count, prepare=lambda rank: None):
    """What each of several ranks finds, in threads of this process."""
    store, found = _Store(), {}

    def run(rank):
        prepare(rank)
        found[rank] = time_interfaces(store, _World(rank, count))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(count)]


@pytest.mark.skipif("lo" not in interfaces(), reason="needs Linux")
def test_ranks_of_one_host_are_timed_over_loopback():
    one, two, three = _together(3)
    assert one == two == three
    assert [(r.name, r.failed, r.pairs, r.reason) for r in one] == [("lo", 0, 2, "")]
    assert 0 < one[0].rtt_ms < 1000
    assert one[0].mbit_s > 10


def test_hosts_of_every_number_take_turns(monkeypatch):
    """Three hosts in a ring have three pairs; one that nobody answers costs its pairs only."""
    here = threading.local()
    monkeypatch.setattr("stenograd.launch.interfaces._host", lambda: f"host{threading.get_ident()}")
    monkeypatch.setattr(
        "stenograd.launch.interfaces.interfaces",
        lambda: {"eth0": here.at.replace("10", "20", 1), "ib0": here.at},
    )
    real = socket.create_connection

    def connect(address, timeout, source):
        if address[0] == "10.0.0.2":
            raise OSError("no route")
        return real(("127.0.0.1", address[1]), timeout)

    serve, listened = socket.create_server, set()

    def listen(address):
        listened.add(address[0])
        return serve(("127.0.0.1", 0))

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "create_server", listen)
    one, two, three = _together(3, lambda rank: setattr(here, "at", f"10.0.0.{rank}"))
    assert one == two == three
    eth0, ib0 = one
    assert (eth0.name, eth0.failed, eth0.pairs) == ("eth0", 0, 3)
    assert (ib0.name, ib0.failed, ib0.pairs, ib0.reason) == ("ib0", 1, 3, "10.0.0.1 to 10.0.0.2: no route")
    assert best(one) is eth0
    assert listened == {f"{net}.0.0.{rank}" for net in (10, 20) for rank in range(3)}


@pytest.mark.skipif("lo" not in interfaces(), reason="needs Linux")
def test_an_interface_has_one_limit_for_all_its_answers(monkeypatch):
    """Each of 20 answers comes after 0.2 s, within the limit of 0.5 s; all of them would take 4 s."""
    monkeypatch.setattr("stenograd.launch.interfaces._LIMIT_S", 0.5)
    serve = socket.create_server

    class Slow(socket.socket):
        def sendall(self, data):
            time.sleep(0.2)
            super().sendall(data)

    class Server(socket.socket):
        def accept(self):
            link, address = super().accept()
            return Slow(fileno=link.detach()), address

    monkeypatch.setattr(socket, "create_server", lambda address: Server(fileno=serve(address).detach()))
    start = time.monotonic()
    one, two = _together(2)
    assert time.monotonic() - start < 3
    assert one == two
    assert (one[0].failed, one[0].pairs) == (2, 2)
    assert "timed out" in one[0].reason


def test_ranks_that_do_not_answer_are_named():
    with pytest.raises(LaunchError, match=r"1 of 2 ranks told 'interfaces/card' within 0\.2 s, missing: 1"):
        time_interfaces(_Store(), _World(0, 2), limit_s=0.2)


def test_no_interface_is_best_where_each_fails_somewhere():
    assert best([Reach("eth0", "10.0.0.1", 1, 3, "no route", 0.1, 900.0)]) is None


def _traps(host, number):
    """A bridge with the same address on every host, as of containers, and a link that leads nowhere."""
    for command in (
        "link add br9 type bridge",
        "addr add 172.31.0.1/16 dev br9",
        "link set br9 up",
        "link add void0 type veth peer name void1",
        f"addr add 10.99.0.{number + 1}/16 dev void0",
        "link set void0 up",
        "link set void1 up",
    ):
        subprocess.run(["ip", "-n", host, *command.split()], check=True, capture_output=True)


def _diagnosed(hosts):
    """What `doctor` prints on both hosts, with the rows of its table by interface."""
    without = ["env", "-u", "GLOO_SOCKET_IFNAME", sys.executable, "-m", "stenograd", "doctor"]
    shown, other = hosts.run(without, timeout_s=120)
    lines = [line.split("│") for line in shown.splitlines() if line[:1] == "│"]
    return shown, other, {line[1].strip(): line[2:] for line in lines}


@pytest.mark.skipif(REASON is not None, reason=f"hosts cannot be emulated: {REASON}")
def test_the_interface_to_export_is_named(unlaunched):
    unlaunched.setenv("COLUMNS", "200")  # a line for each row
    with Hosts(2, "100mbit") as hosts:
        for number, name in enumerate(name for name in names(hosts._prefix) if "host" in name):
            _traps(name, number)
        for _ in range(3):  # a busy machine fills the link less
            shown, other, rows = _diagnosed(hosts)
            if float(rows["eth0"][3]) > 70:
                break
    assert "2 of 2" in rows["eth0"][1]
    assert 70 < float(rows["eth0"][3]) < 101
    assert "both hosts have the address 172.31.0.1" in rows["br9"][4]
    assert "0 of 2" in rows["void0"][1]
    assert "On every host: export GLOO_SOCKET_IFNAME=eth0" in shown
    assert "all-reduce of 2 ranks over eth0: works" in shown
    assert "│" not in other
