"""Ranks from `multiprocessing` children that hold a token."""

import multiprocessing
import os
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from singa_helpers import leaf, moved, push

from stenograd.errors import ConfigError, LaunchError
from stenograd.launch.process_group import World
from stenograd.singa import SGD, DistOpt, NcclIdHolder


def _child(nccl_id, local_rank, world_size, answers):
    torch.set_num_threads(1)
    opt = DistOpt(SGD(lr=1.0), nccl_id=nccl_id, local_rank=local_rank, world_size=world_size, timeout_s=60)
    w = leaf(0.0)
    opt.backward_and_update(push([w], [local_rank + 1.0]))
    places = opt.global_rank, opt.local_rank, opt.world_size, opt.rank_in_global, opt.rank_in_local
    again = DistOpt(nccl_id=nccl_id, gpu_num=local_rank, gpu_per_node=world_size)  # the older names
    answers.put((places, moved(w)[0], again.global_rank, "RANK" in os.environ))


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.usefixtures("unlaunched")
def test_children_meet_through_the_token(method):
    """The guide's mnist_multiprocess.py: ranks 0 and 1, and the mean of 1 and 2."""
    if method == "fork" and torch.distributed.is_initialized():
        from stenograd import shutdown

        shutdown()  # or the children would inherit the group of this process
    context = multiprocessing.get_context(method)
    answers, token = context.Queue(), NcclIdHolder()
    children = [context.Process(target=_child, args=(token, rank, 2, answers)) for rank in range(2)]
    for child in children:
        child.start()
    found = sorted(answers.get(timeout=100) for _ in children)
    for child in children:
        child.join()
    assert found == [((r, r, 2, r, r), 1.5, r, False) for r in range(2)]
    assert [child.exitcode for child in children] == [0, 0]


def _two_nodes(rank):
    world = World(rank, 4, rank % 2, 2, "torchrun")
    with mock.patch("stenograd.singa.launch.join_ranks", return_value=world):
        opt = DistOpt(gpu_num=rank % 2, gpu_per_node=2, timeout_s=30)
        with pytest.raises(ConfigError, match="gpu_per_node must be 2"):
            DistOpt(gpu_per_node=4)
    return opt.local_rank, opt.world_size


def test_without_a_token_gpu_per_node_is_what_it_says(pool):
    assert pool.run(4, _two_nodes) == [(0, 4), (1, 4), (0, 4), (1, 4)]


def test_a_token_is_private_and_gives_each_rank_once():
    token = NcclIdHolder()
    folder = Path(token.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    copy = pickle.loads(pickle.dumps(token))
    copy.claim(0)
    copy.claim(0)  # a second optimizer of the same process
    Path(f"{token.path}-rank-1").symlink_to("1")
    with pytest.raises(LaunchError, match="rank 1 of this token is taken by process 1: give each process"):
        token.claim(1)
    with mock.patch("os.getpid", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        copy.claim(2)
    token.claim(2)  # no mark without a number was left
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(LaunchError, match="is gone: keep the parent alive"):
        token.claim(0)
