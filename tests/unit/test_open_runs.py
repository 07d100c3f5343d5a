"""Who takes part in an open round: a property of arrivals; and what such a run refuses."""

import json
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stenograd
from stenograd.errors import ConfigError, LaunchError, MethodError, MismatchError, PeerLost
from stenograd.launch.detect import World
from stenograd.launch.membership import Membership, host_store
from stenograd.launch.network import Door, Knocks, Sockets, silent
from stenograd.launch.plans import Arrival, Member, Plan, in_reach


def alone():
    return World(0, 1, 0, 1, "alone")


def entered(path, count):
    """Return members of one run, in threads of this process."""
    found = [Membership(str(path), alone(), 5.0) for _ in range(count)]
    for one in found:
        one.enter({"method": "local"})
    return found


def meet(members, arrivals, quorum=0.5, grace_s=0.2):
    """Let members come to a round at once, and return what each gets."""
    plans = [None] * len(members)

    def come(i):
        plans[i] = members[i].meet(arrivals[i], quorum, grace_s)

    threads = [
        threading.Thread(target=come, args=(i,)) for i in range(len(members)) if arrivals[i] is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return plans


@pytest.fixture
def three(tmp_path):
    members = entered(tmp_path / "store", 3)
    for member in members:
        member.now = 0
    yield members
    for member in members:
        member.close()


def test_ranks_are_numbered_as_they_come(three):
    assert [member.rank for member in three] == [0, 1, 2]


def test_all_get_one_plan_and_one_attempt_counts(three):
    plans = meet(three, [Arrival(1, 0, float(i)) for i in range(3)])
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].ranks == (0, 1, 2)
    assert plans[0].weights == (0.0, 1.0, 2.0)
    assert plans[0].behind == []
    assert all(member.commit(plan) for member, plan in zip(three, plans, strict=True))
    assert [member.now for member in three] == [1, 1, 1]


def test_who_comes_after_the_grace_trains_on(three):
    start = time.monotonic()
    plans = meet(three, [Arrival(1, 0), Arrival(1, 0), None])
    assert time.monotonic() - start >= 0.2  # two of three are a quorum, but the grace is for the third
    assert plans[0].ranks == (0, 1)
    assert three[2].meet(Arrival(1, 0), 0.5, 0.2) is None  # at once, though the round is not over
    three[0].commit(plans[0])
    assert three[2].meet(Arrival(1, 0), 0.5, 0.2) is None
    assert three[2].now == 1


def test_below_the_quorum_nobody_meets(three):
    three[0].timeout_s = three[1].timeout_s = 1.0
    with pytest.raises(PeerLost, match="round 1 was not held within 1 s, missing: 1, 2"):
        three[0].meet(Arrival(1, 0), 1.0, 0.0)


def test_a_broken_attempt_is_tried_again_and_an_old_one_does_not_count(three):
    (plan, *_) = meet(three, [Arrival(1, 0)] * 3)
    assert three[1].fail(plan, "a link broke")
    three[2].close()
    again = meet(three[:2], [Arrival(1, 0)] * 2)
    assert again[0].attempt == 1
    assert again[0].ranks == (0, 1)
    assert three[0].commit(again[0])
    assert not three[1].commit(plan)  # as one that was frozen when it had everything
    assert not three[1].fail(again[1], "too late")  # so this one takes it, too
    assert three[1].commit(again[1])


def test_an_attempt_that_fails_again_and_again_leaves_out_one_after_the_other(three):
    left_out = []
    for _ in range(5):
        plans = meet(three, [Arrival(1, 0)] * 3)
        plan = next(plan for plan in plans if plan is not None)
        left_out.append({0, 1, 2} - {*plan.ranks})
        three[plan.ranks[0]].fail(plan, "two cannot reach each other")
    assert left_out == [set(), set(), {2}, {1}, {0}]


@pytest.mark.parametrize(
    ("apart", "newest", "left"),
    [
        ({}, {0, 1, 2}, [{0, 1, 2}, {0, 1, 2}]),
        ({0: {1}}, {0, 1, 2}, [{1, 2}, {0, 2}]),  # they take turns
        ({0: {1}, 1: {0}}, {0}, [{0, 2}, {0, 2}]),  # but somebody has what the others need
        ({1: {0, 2}}, {0, 1, 2}, [{0, 2}, {0, 2}]),  # the most that reach each other
    ],
)
def test_members_that_do_not_reach_each_other_are_not_in_one_plan(apart, newest, left):
    members = [Member(rank, f"life{rank}") for rank in range(3)]
    come = {
        member: Arrival(
            6, 5 if member.rank in newest else 4, apart=[f"life{rank}" for rank in apart.get(member.rank, ())]
        )
        for member in members
    }
    assert [{m.rank for m in in_reach([*members], come, k)} for k in (6, 7)] == left


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_doors_have_addresses_of_either_protocol(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"{address} is no address here")
    door = Door(address)
    knocks, deadline = Knocks({"a door": door.address}), time.monotonic() + 10
    while knocks.unanswered() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (knocks.answered, door.clear()) == ({"a door"}, True)
    door.close()


def test_a_door_is_where_gloo_connects(monkeypatch, tmp_path):
    monkeypatch.setattr("stenograd.launch.membership.interfaces", lambda: {"eth7": "127.0.0.7"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    (one,) = entered(tmp_path / "store", 1)
    assert one._door.address[0] == "127.0.0.7"
    one.close()


@pytest.fixture
def shut():
    """A port at which nobody answers, because its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        fill = [Knocks({"door": server.getsockname()}) for _ in range(4)]
        yield server.getsockname()
        for knocks in fill:
            knocks.close()


def test_who_is_out_of_reach_is_found_after_a_failure_and_comes_back_when_it_answers(three, shut):
    deadline = time.monotonic() + 20
    lives = [member.own.life for member in three]
    while not all(three[0]._ask(lambda life=life: three[0]._store.check([f"rung/{life}"])) for life in lives):
        assert time.monotonic() < deadline  # each has been reached by somebody
        time.sleep(0.05)
    right, three[0]._doors[lives[2]] = three[0]._doors[lives[2]], shut
    seen = []
    for k in (1, 2, 3):
        plan = next(plan for plan in meet(three, [Arrival(k, 0)] * 3, 1.0, 0.0) if plan is not None)
        if k == 1:
            assert plan.ranks == (0, 1, 2)
            three[0].fail(plan, "rank 2 did not answer")
            plan = next(plan for plan in meet(three, [Arrival(k, 0)] * 3, 1.0, 0.0) if plan is not None)
        seen.append(plan.ranks)
    assert seen == [(0, 1), (1, 2), (0, 1)]
    three[0]._doors[lives[2]] = right
    while three[0]._apart:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert next(filter(None, meet(three, [Arrival(4, 0)] * 3, 1.0, 0.0))).ranks == (0, 1, 2)


def test_a_peer_that_only_says_nothing_is_not_silent():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        one.sendall(b"x" * 1000)
        found: Sockets = frozenset({(one.fileno(), os.fstat(one.fileno()).st_ino)})
        time.sleep(0.05)
        assert not silent(found, 0.001)


def test_who_was_frozen_for_rounds_finds_its_attempt_judged(three):
    """The verdicts of old rounds are forgotten, but not that they were held."""
    (plan,) = {plan.text() for plan in meet(three, [Arrival(1, 0)] * 3)}
    stale = Plan.read(plan.encode())
    three[1].fail(stale, "rank 2 lost")
    for k in (1, 2, 3, 4, 5):
        plans = meet(three[:2], [Arrival(k, k - 1)] * 2)
        for member, plan in zip(three, plans, strict=False):
            assert member.commit(plan)
    assert not three[2].commit(stale)
    assert not three[2].fail(Plan.read(plans[0].text().encode()), "too late")


def test_one_that_was_killed_as_it_came_hides_nobody(tmp_path):
    first = entered(tmp_path / "store", 1)
    first[0]._ask(lambda: first[0]._store.add("entries", 1))  # and is killed
    second = entered(tmp_path / "store", 1)
    first[0]._ask(first[0]._see)
    assert [member.rank for member in first[0].alive()] == [0, 1]
    for one in (*first, *second):
        one.close()


def test_launched_workers_after_others_are_refused(tmp_path):
    Membership(str(tmp_path / "store"), alone(), 5.0)
    with pytest.raises(LaunchError, match=r"WORLD_SIZE must be that of the run .*, 1, got 2"):
        Membership(str(tmp_path / "store"), World(0, 2, 0, 2, "torchrun"), 5.0)


def test_who_has_left_says_so(three):
    three[0].close()
    with pytest.raises(LaunchError, match="rank 0 is not in the run"):
        three[0].move(3)


def test_one_that_was_frozen_does_not_take_the_others_for_lost(three):
    one = three[0]

    def wake_up():
        one._looked -= 10
        one._beats = {life: (beat, at - 10) for life, (beat, at) in one._beats.items()}
        before = one.alive()
        one._see()
        return before, one.alive()

    one._ask(one._see)
    before, after = one._ask(wake_up)
    assert before == []
    assert [member.rank for member in after] == [0, 1, 2]


def test_who_begins_gives_nobody_anything_and_counts_for_no_quorum(three):
    arrivals = {m.own: Arrival(1, -1 if m.rank else 0) for m in three[:2]}
    three[0]._see()
    assert three[0]._planned(1, arrivals, 1.0, True) is None  # the third has parameters, and is awaited
    plan = three[0]._planned(1, arrivals, 0.5, True)
    assert (plan.donor, plan.behind) == (0, [1])


def test_a_run_whose_parameters_nobody_has_ends_by_a_named_error(three):
    for member in three[1:]:
        member.close()
    time.sleep(0.1)
    with pytest.raises(PeerLost, match="nobody is left that has the parameters of round 0"):
        three[0].meet(Arrival(1, -1), 0.5, 0.0)


def test_a_second_process_of_a_rank_takes_its_place(tmp_path):
    world = World(1, 2, 0, 1, "torchrun")
    one, two = (Membership(str(tmp_path / "store"), world, 5.0) for _ in range(2))
    one.enter({})
    two.enter({})
    one._see()
    assert [member.life for member in one.alive()] == [two.own.life]
    with pytest.raises(LaunchError, match="another process has come as rank 1"):
        one.meet(Arrival(0, -1), 0.5, 0.0)
    one.close()
    two.close()


def test_another_model_is_refused(tmp_path):
    one, two = (Membership(str(tmp_path / "store"), alone(), 5.0) for _ in range(2))
    one.enter({"method": "local", "model": "a"})
    with pytest.raises(MismatchError, match=r"rank 1 differs from the run at .*: model b here, a there"):
        two.enter({"method": "local", "model": "b"})
    one.close()


def _move_often(member):
    for _ in range(100):
        member.move(1)
        time.sleep(0.05)


def test_a_store_that_is_gone_is_named(tmp_path):
    store = host_store(0)
    (member,) = entered(f"127.0.0.1:{store.port}", 1)
    member.now = 0
    del store
    with pytest.raises(PeerLost, match=r"the store of the open run at 127.0.0.1:.* is gone"):
        _move_often(member)
    member.close()


def test_no_store_is_named(tmp_path):
    with pytest.raises(LaunchError, match=r"no store of an open run answers at 127.0.0.1:1 "):
        Membership("127.0.0.1:1", alone(), 0.3)
    with pytest.raises(
        LaunchError, match="STENOGRAD_OPEN must be HOST:PORT, or a path with a slash, got 'x'"
    ):
        Membership("x", alone(), 0.3)
    for path, why in ((tmp_path / "no" / "store", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(LaunchError, match=rf"STENOGRAD_OPEN must be a file .*{why}"):
            Membership(str(path), alone(), 0.3)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-1, 4)), min_size=1, max_size=6),
    st.floats(0.05, 1.0),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_a_plan_has_a_quorum_and_somebody_with_the_newest(who, quorum, over):
    """Over any arrivals: (whether it has come, which round it has), at round 5."""
    here = Membership.__new__(Membership)
    members = [Member(i, f"m{i}") for i in range(len(who))]
    here._latest = dict(enumerate(members))
    here._left, here._attempts = set(), {}
    here._beats = {m.life: (b"", time.monotonic()) for m in members}
    here.rank, here.address, here.size = 0, "x", 1
    come = {m: Arrival(5, state) for m, (comes, state) in zip(members, who, strict=True) if comes}
    trained = [m for m, arrival in come.items() if arrival.state >= 0]
    if len(come) == len(members) and not trained:
        with pytest.raises(PeerLost):
            here._planned(5, come, quorum, over)
        return
    plan = here._planned(5, come, quorum, over)
    all_here = len(come) == len(members)
    awaited = len(members) - len(come) + len(trained)
    enough = len(trained) >= max(1, quorum * awaited - 1e-9)
    newest = max((arrival.state for arrival in come.values()), default=-1) == 4
    assert (plan is not None) == (all_here or (over and enough and newest))
    if plan is not None:
        assert plan.members == tuple(sorted(come))
        assert plan.states[plan.donor] == max(plan.states)
        assert plan.donor not in plan.behind
        assert Plan.read(plan.text().encode()) == plan
        json.loads(plan.text())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("local:quorum=2", "quorum must be a share of the ranks, 0 to 1, got 2.0: use 0.75"),
        ("local:quorum=0.5,grace=-1", "grace must be seconds, 0 or more"),
        ("local:grace=5s", "grace has no effect without quorum, got 5.0: give quorum=0.75, or leave it out"),
        ("diloco:quorum=0.5,delay=1", "quorum must be 0 with delay"),
        ("local:quorum=0.5,after=3", "quorum must be 0 with after"),
        ("local:quorum=0.5,states=average", "quorum must be 0 with states"),
        ("diloco:quorum=0.5,inside=dense", "quorum must be 0 with inside"),
        ("diloco:quorum=0.5,eager=true", "quorum must be 0 with eager rounds or pairs"),
        ("diloco:quorum=0.5,topology=pairs", "quorum must be 0 with eager rounds or pairs"),
        ("local:quorum=0.5,qsr=0.1", "qsr must be 0 with seconds or quorum"),
        ("local:quorum=0.5/topk", "what a lost rank has sent of its differences cannot be taken back"),
    ],
)
def test_what_does_not_fit_an_open_run_is_refused(text, what):
    with pytest.raises(MethodError, match=what):
        stenograd.method(text)


def test_texts_and_objects_of_open_rounds_mean_the_same():
    schedule = stenograd.schedules.DiLoCo(every=30, quorum=0.75, grace=5.0)
    assert stenograd.method("diloco:every=30,quorum=0.75,grace=5s").schedule == schedule


def _tiny():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_quorum_without_a_store_and_a_store_without_a_quorum_are_refused(monkeypatch):
    monkeypatch.delenv("STENOGRAD_OPEN", raising=False)
    with pytest.raises(ConfigError, match="quorum needs a store that outlives workers, got none"):
        stenograd.distribute(*_tiny(), "local:quorum=0.5")
    monkeypatch.setenv("STENOGRAD_OPEN", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"STENOGRAD_OPEN is set, .* got dense"):
        stenograd.distribute(*_tiny())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="was initialised by other means"):
            stenograd.distribute(*_tiny(), "local:quorum=0.5")
    finally:
        dist.destroy_process_group()


def test_a_state_is_of_the_round_that_saving_it_has_held(monkeypatch, tmp_path):
    monkeypatch.setenv("STENOGRAD_OPEN", str(tmp_path / "store"))
    model, optimizer = _tiny()
    try:
        with stenograd.distribute(model, optimizer, "diloco:every=2,quorum=0.5", timeout_s=10) as sync:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()  # no step, which would hold the round
            state = sync.state_dict()
    finally:
        stenograd.shutdown()
    assert (state["round"], state["state"], state["tokens"], state["since"]) == (1, 1, [[0, 2.0]], {"0": 0})


def test_one_worker_at_a_time_has_a_turn_and_one_that_has_gone_gives_it_up(three):
    """As to save: who saves deletes what it finds in the folder."""
    within, at_once = [], []

    def work(member):
        for _ in range(5):
            with member.turn("save"):
                within.append(member)
                time.sleep(0.01)
                at_once.append(len(within))
                within.remove(member)

    threads = [threading.Thread(target=work, args=(member,)) for member in three]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert at_once == [1] * 15
    with three[0].turn("save"):
        three[0].close()
        with three[1].turn("save"), three[0].turn("save"):  # nobody asks one that has left
            pass
    assert [member.claim("result") for member in three[1:]] == [True, False]
    assert three[2].claimed("result")


def test_workers_of_another_version_and_traces_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("STENOGRAD_OPEN", str(tmp_path / "store"))
    try:
        with stenograd.distribute(*_tiny(), "local:every=2,quorum=0.5", timeout_s=10) as sync:
            with pytest.raises(ConfigError, match="a trace needs the same workers in all rounds"):
                sync.trace(str(tmp_path / "trace.json"))
            monkeypatch.setattr("stenograd.sync.open_rounds.__version__", "0.0.1")
            other = Membership(str(tmp_path / "store"), alone(), 5.0)
            with pytest.raises(MismatchError, match=r"stenograd version 0\.0\.1 here"):
                other.enter(sync._about())
    finally:
        stenograd.shutdown()


def test_an_older_checkpoint_takes_nobody_else_back(three):
    """Who comes then would wait for a round that nobody holds any more."""
    three[0].move(60)
    while three[1].now < 60:
        time.sleep(0.05)
    three[1].move(40)
    assert Membership(three[0].address, alone(), 5.0).now == 60


def test_what_needs_all_ranks_is_refused_where_each_is_alone(monkeypatch, tmp_path):
    """Else every worker would train by itself, and nobody would say so."""
    monkeypatch.setenv("STENOGRAD_OPEN", str(tmp_path / "store"))
    refused = pytest.raises(ConfigError, match=r"STENOGRAD_OPEN is set, .* only rounds with a quorum")
    for begin in (
        stenograd.singa.DistOpt,
        lambda: stenograd.singa.DistOpt(nccl_id=stenograd.singa.NcclIdHolder(), local_rank=0, world_size=1),
        lambda: stenograd.mlbench.DecentralizedAggregation(rank=0, neighbors=[]),
        lambda: stenograd.heat.DASO(_tiny()[1], total_epochs=3),
    ):
        with refused:
            begin()
        assert not dist.is_initialized()
    try:
        stenograd.init()
        with refused:
            stenograd.ddp.register(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "topk")
    finally:
        stenograd.shutdown()


def test_a_store_that_fails_when_a_worker_comes_is_named(tmp_path):
    class Full:
        def compare_set(self, *_):
            raise RuntimeError("No space left on device")

    member = Membership(str(tmp_path / "store"), alone(), 5.0)
    member._store = Full()
    with pytest.raises(PeerLost, match=r"the store of the open run at .*store is gone: No space left on dev"):
        member.enter({})


def test_a_turn_is_not_waited_for_where_the_store_is_silent_and_is_given_back_later(three, monkeypatch):
    """A save may be urgent; what the store does once it answers keeps no other worker waiting."""
    monkeypatch.setattr("stenograd.launch.membership.CONNECT_S", 0.2)
    take, silent = three[0]._take_turn, [True]

    def late(key):
        if silent:
            time.sleep(0.6)
        return take(key)

    monkeypatch.setattr(three[0], "_take_turn", late)
    start = time.monotonic()
    with three[0].turn("save"):
        assert time.monotonic() - start < 0.5
    silent.clear()
    time.sleep(0.7)
    start = time.monotonic()
    with three[1].turn("save"):
        assert time.monotonic() - start < 2.0
