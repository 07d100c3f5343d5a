"""A rank that lives answers the roll call, whatever strangers do at its port."""

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
import warnings

import pytest

from stenograd.errors import LaunchError
from stenograd.launch import failure_detector as launched
from stenograd.launch import network
from stenograd.launch.failure_detector import Absent, FailureDetector, LineServer
from stenograd.wire.driver import Driver

GRACE_S = 10.0  # drivers give each other 2 s or more, which busy machines take for less


@pytest.fixture
def two():
    """Ranks 0 and 1, which know each other."""
    ranks = FailureDetector(0, "127.0.0.1"), FailureDetector(1, "127.0.0.1")
    cards = {rank: one.card for rank, one in enumerate(ranks)}
    for one in ranks:
        one.meet(cards)
    yield ranks
    for one in ranks:
        one.close()


def place(rank):
    """The address and token on a rank's card."""
    host, port, token, *_ = json.loads(rank.card)
    return (host, port), token


def asked(rank, secret="", **question):
    """What a rank answers to a question of somebody who has its token, and may have the secret."""
    address, token = place(rank)
    said = json.dumps(question)
    key = hashlib.sha256(f"{secret} {token}".encode()).digest()
    mac = hmac.new(key, said.encode(), "sha256").hexdigest()
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(json.dumps([said, mac]).encode() + b"\n")
        return json.loads(connection.makefile("rb").readline() or b"null")


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
    """Each has 5 s: 400 of them, 66 at a time, would take 30 s if the oldest did not make room."""
    address, _ = place(two[1])
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(socket.create_connection(address))
        start = time.monotonic()
        assert two[0].absent("world", GRACE_S) == Absent()
        assert time.monotonic() - start < 10


def crowd(rank, size):
    """Let a rank know as many others, which exist on cards only."""
    at = ["127.0.0.1", 1, "token"]
    rank.meet({other: json.dumps([*at, rank._proof(other, at)]) for other in range(1, size + 1)})


def test_200_ranks_that_ask_at_once_are_all_answered():
    """All connect before the first of them gets a word through, as on a slow link; 64 were kept."""
    one = FailureDetector(0, "127.0.0.1")
    crowd(one, 200)
    said = json.dumps({"from": 1, "group": "world"})
    with contextlib.ExitStack() as stack:
        askers = [stack.enter_context(socket.create_connection(place(one)[0], 10)) for _ in range(200)]
        time.sleep(0.3)
        for asker in askers:
            asker.sendall(json.dumps([said, one._mac(place(one)[1], said)]).encode() + b"\n")
        assert all(asker.recv(1000) for asker in askers)
    one.close()


def test_a_rank_without_room_is_asked_again(two, monkeypatch):
    """It drops what it has accepted, by an end and by a reset, and answers the third time."""
    read, drops = LineServer._read, [struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)]

    def dropping(server, peer):
        if server is two[1]._server and drops:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, drops.pop())
            server._drop(peer)
        else:
            read(server, peer)

    monkeypatch.setattr(LineServer, "_read", dropping)
    assert two[0].absent("world", GRACE_S) == Absent()
    assert not drops


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS])
def test_a_rank_that_lacks_descriptors_itself_counts_nobody_as_lost(two, monkeypatch, number):
    """Neither where it cannot connect, nor where it cannot even begin to ask."""

    async def failing(*_):
        raise OSError(number, "made by the test")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "open_connection", failing)
        assert two[0].absent("world", 0.5) == Absent()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "run", lambda asks: asks.close() or failing().send(None))
        assert two[0].absent("world", 0.5) == Absent()
    two[1].close()
    assert two[0].absent("world", GRACE_S) == Absent(lost=[1])


def test_a_late_answer_counts_within_half_the_timeout(two):
    """As over a full link; two seconds were the limit, however long a collective may take."""
    answer, waits_s = two[1]._server._answer, [2.3]
    two[1]._server._answer = lambda line: (waits_s and time.sleep(waits_s.pop())) or answer(line)
    assert two[0].absent("world", Driver(timeout_s=20.0)._roll_call_s) == Absent()
    assert not waits_s


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
        assert time.monotonic() - start < 15  # closed after 5 s, whatever it still sends


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
    [b"\n", b"\0\xff\n", b"[" * 60_000 + b"\n", b"x" * 70_000, b"{}\n{}\n", b'["{}", "0123456789abcdef"]\n'],
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
    assert two[0].absent("world", GRACE_S) == Absent()  # a report removes no rank that answers
    two[1].close()
    assert two[0].absent("world", GRACE_S) == Absent(lost=[1])


def test_without_the_secret_nobody_is_answered_or_believed(monkeypatch):
    """A stranger reads cards, with their tokens, where ranks meet at a port; the secret lies nowhere."""
    monkeypatch.setenv("STENOGRAD_SECRET", "of this launch")
    ranks = [FailureDetector(rank, "127.0.0.1") for rank in range(3)]
    cards = {rank: one.card for rank, one in enumerate(ranks)}
    for one in ranks:
        one.meet(cards)
    assert asked(ranks[0], **{"from": 1}, lost=[2]) is None
    assert ranks[0]._reported_lost == {}
    assert asked(ranks[0], "of this launch", **{"from": 1}, lost=[2]) is not None
    assert ranks[0].absent("world", GRACE_S) == Absent()
    ranks[2].close()
    assert ranks[0].absent("world", GRACE_S) == Absent(lost=[2])
    monkeypatch.setenv("STENOGRAD_SECRET", "of another")
    stranger = FailureDetector(1, "127.0.0.1")
    for one, card in ((ranks[0], stranger.card), (ranks[0], cards[1].replace("127.0.0.1", "127.0.0.2"))):
        with pytest.raises(LaunchError, match="different values of STENOGRAD_SECRET"):
            one.meet({1: card})
    for one in (*ranks, stranger):
        one.close()


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


def test_a_closed_detector_is_lost_and_frees_its_port(two):
    address, _ = place(two[1])
    two[1].close()
    two[1].close()
    assert two[0].absent("world", GRACE_S) == Absent(lost=[1])
    with socket.create_server(address):
        pass
    assert launched.attend(0, lambda: "256.0.0.1") is None


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="nothing forks there")
def test_a_forked_child_holds_no_connection_of_its_parent_but_the_programs_own():
    """As a worker of a DataLoader outlives its rank: what was opened in `unshared` ends with the parent."""
    with socket.create_server(("127.0.0.1", 0)) as programs, contextlib.ExitStack() as stack:
        with network.unshared():
            listener = socket.create_server(("127.0.0.1", 0))
            calls = socket.create_connection(listener.getsockname())
        called = stack.enter_context(listener.accept()[0])  # the other end, after the block
        own = socket.create_connection(programs.getsockname())
        theirs = stack.enter_context(programs.accept()[0])
        stranger = stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted = listener.accept()[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
            child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        try:
            address = listener.getsockname()
            for one in (listener, calls, own, accepted):
                one.close()
            for end in (called, stranger, theirs):
                end.settimeout(0.5)
            assert called.recv(1) == stranger.recv(1) == b""
            with pytest.raises(TimeoutError):
                theirs.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=1)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
