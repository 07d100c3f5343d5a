"""Gossip that goes on without a lost neighbour."""

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.losses import survivors, tell

from stenograd.errors import ConfigError
from stenograd.launch.process_group import shutdown
from stenograd.sync.gossip import Gossip
from stenograd.topology import Ring
from stenograd.wire.driver import Driver

MIXINGS = 6
DIES_AT = 2


def _rank(rank, folder, own_group):
    if own_group:
        shutdown()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        meet = {"init_method": f"file://{folder / 'store'}", "rank": rank, "world_size": 4}
        dist.init_process_group("gloo", timeout=timedelta(seconds=30), **meet)
    try:
        _train(rank, folder)
    finally:
        if own_group:
            dist.destroy_process_group()
            del os.environ["GLOO_SOCKET_IFNAME"]


def _train(rank, folder):
    gossip = Gossip(Driver(timeout_s=6), Ring(), lost="drop")
    traffic = gossip.driver.traffic
    traffic.hosts = ["a", "b", "a", "b"]
    x = torch.tensor([float(rank)], dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(MIXINGS):
            if rank == 2 and step == DIES_AT:
                os._exit(9)
            if step == DIES_AT + 1:  # rank 0, no neighbour of 2, may have mixed once more than 1 and 3
                before = x.clone()
            links = traffic.inside_bytes, traffic.across_bytes
            gossip.mix([x])
    links = traffic.inside_bytes - links[0], traffic.across_bytes - links[1]
    told = [str(w.message) for w in caught if "were lost" in str(w.message)]
    step = gossip.step
    gossip.load_state_dict({"step": 0})  # from before the loss: every mixing comes again
    again = torch.tensor([float(rank)], dtype=torch.float64)
    gossip.mix([again])
    assert again.item() != rank
    tell(folder, rank, (before, x, step, gossip.events, told, links, traffic.rank))


@pytest.mark.parametrize("own_group", [False, True])
def test_survivors_go_on_and_keep_their_mean(pool, tmp_path, own_group):
    """On a ring of 4 rank 2 dies: 1 - 0 - 3 is left, with weights 1/3 and the rest for the rank itself.

    The ring's matrix is symmetric, so what is left of it keeps the mean of the survivors. Rank 0 is no
    neighbour of 2 and notices only after the timeout. It is alone on host a, so a mixing sends all 8 bytes
    per neighbour across.
    """
    told = survivors(pool, 4, _rank, tmp_path, own_group)
    assert {rank: words[-2:] for rank, words in told.items()} == {
        0: ((0, 16), 0),
        1: ((0, 8), 1),
        3: ((0, 8), 3),
    }
    for _, _, step, events, words, _, _ in told.values():
        assert step == MIXINGS
        assert len(words) == 1
        assert "rank(s) 2 were lost" in words[0]
        assert "3 of 4 ranks go on" in words[0]
        assert [event["lost"] for event in events] == [[2]]
        assert events[0]["seconds"] < 25
    before, after = ([float(t[i]) for t in told.values()] for i in (0, 1))
    assert sum(after) == pytest.approx(sum(before), rel=1e-12)
    assert max(after) - min(after) < 0.7 * (max(before) - min(before))


def _refused(rank):
    driver = Driver(timeout_s=20)
    with pytest.raises(ConfigError, match="lost must be one of raise, drop, got 'ignore'"):
        Gossip(driver, Ring(), lost="ignore")
    with pytest.raises(ConfigError, match="separately must be False"):
        Gossip(driver, Ring(), lost="drop").mix([torch.ones(1)], separately=True)


def test_what_cannot_be_had_is_refused(pool):
    pool.run(1, _refused)
