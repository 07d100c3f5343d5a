"""Broken trainings, with real processes: every survivor says so in time and leaves nothing behind.

Each run starts 3 or 4 ranks of `stenograd train` on the digits, breaks something, and checks: the error and
the ranks that each survivor names, the time from the fault to the last survivor's end, exit statuses,
processes that are left, and that every file under its final name is whole. Method, moment, victim and
rendezvous follow from the seed. `pytest -m soak` runs every kind ten times.
"""

import os
import random
import sys
from functools import partial

import pytest
from broken_training import BrokenTraining

from stenograd.emulate.hosts import why_not

TIMEOUT_S = 8  # the ranks must also meet within it, beside other tests
GRACE_S = 25  # 5 s on an idle machine; here six ranks share the cores with other tests
SOAK_TIMEOUT_S, SOAK_GRACE_S = 3.0, float(os.environ.get("GRACE_S", 5.0))
LOST = "PeerLost"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it mounts and looks into /proc"),
    pytest.mark.timeout(450),
]


def _at_once(do, run, first=False):
    """A rank is killed, stopped, raises, quits or sleeps at a moment of its own."""
    victim = 0 if first else run.draw.randrange(1, run.size)
    fault = run.break_at(victim, do)
    run.await_end(run.but(victim))
    if do == "raise" and fault["at"] == "save":  # all ranks agree on how a save went
        run.await_end([victim])
        run.expect(run.everyone, "StenogradError", None, f"rank {victim}: ZeroDivisionError")
        return
    run.expect(run.but(victim), LOST, [victim])
    if do == "stop":  # whoever continues it must not keep it for ever
        run.resume(victim)
    if do == "nap":
        run.ranks[victim].kill()
        run.begin_fault()
    run.await_end([victim])
    if do == "raise":
        run.expect([victim], "ZeroDivisionError", [])
    if do == "stop":
        run.expect([victim], LOST, None)


def _link(run):
    """A host's link goes down, on its own side or the switch's; all ranks survive, apart from each other."""
    victim, inside = run.draw.randrange(run.size), run.draw.random() < 0.5
    run.break_at(victim, "mark")
    run.cut(victim, inside)
    _apart(run, victim)


def _slow(run):
    """A host's link becomes so slow that no step ends, or loses all packets longer than its burst."""
    victim, burst = run.draw.randrange(run.size), run.draw.choice([1540, 32])
    run.break_at(victim, "mark")
    run.slow(victim, f"tbf rate 1kbit burst {burst} latency 60s")
    _apart(run, victim)


def _apart(run, victim):
    run.await_end(run.everyone)
    run.expect(run.but(victim), LOST, [victim])
    run.expect([victim], LOST, None)


def _disk(action, text, run):
    """The output folder's disk becomes full, or read-only, at a moment; every rank says so."""
    run.mount()
    run.break_at(0, "mark")
    getattr(run, action)()
    run.await_end(run.everyone)
    run.expect(run.everyone, "StenogradError|CheckpointError|OSError", None, text)


def _port(run):
    """A second job is started with the first one's port: it says so, and the first goes on."""
    run.break_at(0, "mark")
    first, run.ranks = run.ranks, []
    run.begin_fault()
    run.start()
    run.await_end(run.everyone)
    run.expect(run.everyone, "LaunchError", None)
    assert run.goes_on(first), "the first job did not go on"
    run.ranks += first
    for rank in first:
        rank.kill()
        rank.ended.wait(10)


def _absent(run):
    """A rank never comes: the others name it within the timeout."""
    victim = run.draw.randrange(run.size)
    run.begin_fault()
    run.start(without=victim)
    rest = range(run.size - 1)
    run.await_end(rest)
    run.expect(rest, "LaunchError", None, "" if victim == 0 else f"missing: {victim}")


def _mismatch(run):
    """One rank was started with another method."""
    run.begin_fault()
    run.start(other_method=run.draw.randrange(run.size))
    run.await_end(run.everyone)
    run.expect(run.everyone, "MismatchError", None, "method")


KINDS = {
    "kill": partial(_at_once, "kill"),
    "kill-rank0": partial(_at_once, "kill", first=True),
    "stop": partial(_at_once, "stop"),
    "stop-rank0": partial(_at_once, "stop", first=True),
    "link-down": _link,
    "slow-link": _slow,
    "exception": partial(_at_once, "raise"),
    "disk-full": partial(_disk, "fill", "No space left"),
    "read-only": partial(_disk, "freeze", "Read-only file system"),
    "one-port": _port,
    "quits": partial(_at_once, "quit"),
    "sleeps": partial(_at_once, "nap"),
    "absent": _absent,
    "mismatch": _mismatch,
}
DISKS, LINKS = ("disk-full", "read-only"), ("link-down", "slow-link")


def _check(kind, seed, folder, timeout_s, grace_s, size=None):
    if kind in LINKS and (reason := why_not()):
        pytest.skip(reason)
    if kind in DISKS and os.geteuid() != 0:
        pytest.skip("mounting a disk needs root")
    draw = random.Random(f"{kind}/{seed}")
    tcp = "rank0" in kind or kind in ("one-port", *LINKS)
    meet = "tcp" if tcp else draw.choice(["tcp", "file"])
    options = {"timeout_s": timeout_s, "grace_s": grace_s, "meet": meet, "on_hosts": kind in LINKS}
    with BrokenTraining(draw, folder, size=size, **options) as run:
        try:
            KINDS[kind](run)
            run.finish()
        except (AssertionError, TimeoutError) as error:
            run.wrong.append(str(error))
        print(f"{kind} {seed}: {run.seconds:.1f} s")
        assert not run.wrong, run.told()


@pytest.mark.parametrize("kind", ["kill", "stop-rank0", "one-port", "disk-full", "link-down"])
def test_survivors_say_so_in_time_and_leave_nothing(tmp_path, kind):
    """The named error on every survivor in time, and no process or half file left."""
    _check(kind, 0, tmp_path, TIMEOUT_S, GRACE_S, size=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_they_do_within_seconds_whatever_breaks_and_when(tmp_path, kind, seed):
    """On a machine that does nothing else; GRACE_S in the environment allows for more."""
    _check(kind, seed, tmp_path, SOAK_TIMEOUT_S, SOAK_GRACE_S)
