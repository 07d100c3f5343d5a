"""The gate of emulated links: a run on a link that is not as asked is refused."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind the tests' own folders

import links

from stenograd.emulate.hosts import Hosts, HostsError, command, names, why_not

REASON = why_not()
on_hosts = pytest.mark.skipif(REASON is not None, reason=f"hosts cannot be emulated: {REASON}")
GOOD = {"asked_bps": 2e7, "bps": 2e7, "asked_s": 0.01, "latency_s": 0.0101, "lost_of_a_core": 0.01}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"bps": 1.89e7}, "carries 18.9 Mbit/s, not 20"),
        ({"bps": 2.11e7}, "carries 21.1 Mbit/s, not 20"),
        ({"latency_s": 0.0108}, "takes 10.80 ms one way, not 10.00"),
        ({"latency_s": 0.0099}, "takes 9.90 ms one way, not 10.00"),
        ({"lost_of_a_core": 0.051}, "takes 5.1 % of a core"),
        ({"lost_of_a_core": None}, "could not be measured on so busy a machine"),
    ],
)
def test_each_bound_has_its_message(change, fault):
    """5 % of 20 Mbit/s is 1; 5 % of 10 ms and 0.2 ms for a process to wake up are 0.7 ms."""
    assert links.wrong(GOOD) == []
    (found,) = links.wrong(GOOD | change)
    assert fault in found


def test_a_link_without_a_limit_has_no_wrong_rate():
    assert links.wrong(GOOD | {"asked_bps": None, "bps": 3e9}) == []


def test_a_single_host_has_no_link():
    assert links.gate(Hosts(1, "20mbit")) == {}


@on_hosts
@pytest.mark.usefixtures("unlaunched")
def test_a_link_of_another_rate_than_asked_is_refused(monkeypatch):
    """Asked for 20 Mbit/s, set to 10 behind the back of whoever asked."""
    monkeypatch.setattr(links, "_TRIES", 1)
    with Hosts(2, "20mbit") as hosts:
        (host,) = (name for name in names(hosts._prefix) if name.endswith("host0"))
        shape = ["tbf", "rate", "10mbit", "burst", "16384", "latency", "100ms"]
        command("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", *shape)
        with pytest.raises(HostsError, match=r"not what was asked for.*carries \d+\.\d Mbit/s, not 20"):
            links.gate(hosts)


@on_hosts
@pytest.mark.usefixtures("unlaunched")
def test_what_was_measured_is_told(monkeypatch):
    """Whatever this machine does meanwhile: the bounds have tests of their own."""
    monkeypatch.setattr(links, "wrong", lambda found: [])
    with Hosts(2, "20mbit") as hosts:
        found = links.gate(hosts)
    assert (found["asked_bps"], found["asked_s"], found["refused_before"]) == (2e7, 0.0, [])
    assert 0 <= found["bps"] < 2.1e7
    assert 0 < found["latency_s"] < 1
    assert {"lost_of_a_core", "lost_by_core", "lost_to_packets"} <= set(found)
