"""A rank that lives answers the roll call, whatever strangers do at its port."""

import contextlib
import errno
import json
import socket
import threading
import time

import pytest

from stenograd.launch import failure_detector as presence
from stenograd.launch.failure_detector import Absent, Presence

GRACE_S = 10.0  # drivers give each other 2 s, which busy machines take for less


@pytest.fixture
def two():
    """Ranks 0 and 1, which know each other."""
    ranks = Presence(0, "127.0.0.1"), Presence(1, "127.0.0.1")
    cards = {rank: one.card for rank, one in enumerate(ranks)}
    for one in ranks:
        one.meet(cards)
    yield ranks
    for one in ranks:
        one.close()


def place(rank):
    """The address and token on a rank's card."""
    host, port, token = json.loads(rank.card)
    return (host, port), token


def asked(rank, **question):
    """What a rank answers to a question that has its token."""
    address, token = place(rank)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(json.dumps({"to": token, **question}).encode() + b"\n")
        return json.loads(connection.makefile("rb").readline())


@contextlib.contextmanager
def dripping(address, clients, text=b"x"):
    """Clients that send one byte of a text every 0.5 s, and never the end of the line."""
    stop = threading.Event()
    connections = [socket.create_connection(address) for _ in range(clients)]

    def drip():
        while not stop.wait(0.5):
            for connection in connections:
                with contextlib.suppress(OSError):  # the listener may have closed it
                    connection.sendall(text)

    thread = threading.Thread(target=drip)
    thread.start()
    yield
    stop.set()
    thread.join()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("connections", [30, 400])
def test_idle_connections_do_not_make_a_rank_lost(two, connections):
    """Each has 2 s: 400 of them, 64 at a time, would take 12 s if the oldest did not make room."""
    address, _ = place(two[1])
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(socket.create_connection(address))
        start = time.monotonic()
        assert two[0].absent("world", GRACE_S) == Absent()
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("clients", [1, 40, 100])
def test_clients_that_drip_bytes_do_not_make_a_rank_lost(two, clients):
    """A second later none of them is done with its line: a byte every 0.5 s, under any timeout per read."""
    with dripping(place(two[1])[0], clients):
        time.sleep(1.2)
        assert two[0].absent("world", GRACE_S) == Absent()


def test_a_long_line_has_no_longer_than_a_short_one(two):
    """32 KiB every 0.5 s, so that the second part reaches the 64 KiB at which a line is given up."""
    with dripping(place(two[1])[0], 3, b"x" * (1 << 15)):
        time.sleep(1.2)
        assert two[0].absent("world", GRACE_S) == Absent()
    address, _ = place(two[1])
    with socket.create_connection(address, timeout=20) as connection:
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 20:
                connection.sendall(b"x")  # never 65,536 of them
                time.sleep(0.1)
        assert time.monotonic() - start < 15  # closed after 2 s, whatever it still sends


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED, errno.EPERM])
def test_a_failed_accept_does_not_end_the_listener(two, monkeypatch, number):
    accept, failures = socket.socket.accept, [OSError(number, "made by the test")]

    def failing(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    assert two[0].absent("world", GRACE_S) == Absent()
    assert not failures
    assert two[0].absent("world", GRACE_S) == Absent()


def test_a_missing_descriptor_costs_the_oldest_idle_connection(two, monkeypatch):
    """As with a full table of descriptors: accept fails until somebody's connection is closed."""
    address, _ = place(two[1])
    accept, idle, accepted = socket.socket.accept, socket.socket(), threading.Event()

    def failing(listener):
        if accepted.is_set():
            with contextlib.suppress(BlockingIOError):
                idle.recv(1, socket.MSG_DONTWAIT)  # closed
                return accept(listener)
            raise OSError(errno.EMFILE, "made by the test")
        accepted.set()
        return accept(listener)

    with idle:
        monkeypatch.setattr(socket.socket, "accept", failing)
        idle.connect(address)
        assert accepted.wait(10)
        assert two[0].absent("world", GRACE_S) == Absent()
        idle.settimeout(10)
        assert idle.recv(1) == b""


@pytest.mark.parametrize(
    "line",
    [b"\n", b"\0\xff\n", b"[" * 60_000 + b"\n", b"x" * 70_000, b"{}\n{}\n", b'{"to": "0123456789abcdef"}\n'],
)
def test_garbage_is_not_answered_and_harms_nobody(two, line):
    address, _ = place(two[1])
    with socket.create_connection(address, timeout=10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(line)  # which may be refused before its end
        assert connection.recv(100) == b""
    assert two[0].absent("world", GRACE_S) == Absent()


def test_only_the_others_are_believed_and_only_about_ranks(two):
    """Whoever has the token could otherwise fill the memory, and have ranks named that do not exist."""
    groups = dict(two[0].came)
    for asker in (True, 7, -1, 1.0, None, [1]):
        asked(two[0], **{"from": asker}, lost=[0, 1], group=f"group of {asker}")
    assert two[0].absent("world", GRACE_S) == Absent()
    asked(two[0], **{"from": 1}, lost=[True, 7, "1", [1], 1.0, None])
    assert two[0].absent("world", GRACE_S) == Absent()
    assert dict(two[0].came) == groups
    asked(two[0], **{"from": 1}, lost=[1])
    assert two[0].absent("world", GRACE_S) == Absent(lost=[1])


@pytest.mark.parametrize("word", [b"[]", b"null", b'{"rank": 1}', b'{"rank": 1, "came": "often"}'])
def test_a_stranger_at_a_lost_ranks_port_does_not_pass_for_it(two, word):
    address, _ = place(two[1])
    two[1].close()
    with socket.create_server(address) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(word + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert two[0].absent("world", GRACE_S) == Absent(lost=[1])
        thread.join()


def test_late_ranks_and_leavers_are_told_apart(two):
    """Rank 1 came to one collective of two; once it has given up itself, it is no longer late."""
    two[0].came.update(world=2)
    two[1].came.update(world=1)
    assert two[0].absent("world", GRACE_S) == Absent(late=[1])
    assert two[1].absent("world", GRACE_S) == Absent()
    assert two[0].absent("world", GRACE_S) == Absent()


def test_a_closed_presence_is_lost_and_frees_its_port(two):
    address, _ = place(two[1])
    two[1].close()
    two[1].close()
    assert two[0].absent("world", GRACE_S) == Absent(lost=[1])
    with socket.create_server(address):
        pass
    assert presence.attend(0, lambda: "256.0.0.1") is None
