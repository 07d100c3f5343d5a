"""MLBench's classes and functions join the ranks of a launch by themselves."""

import pytest
import torch
from support.processes import free_port
from torch import nn

from stenograd import shutdown
from stenograd.errors import StenogradError
from stenograd.launch.detect import STORE_VARIABLE
from stenograd.launch.local_workers import environment
from stenograd.mlbench import DecentralizedAggregation, DecentralizedSGD, global_average, initialize_backends
from stenograd.testing.pool import start_context


def _weights(rank, by_class):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, rank)
    if by_class:
        optimizer = DecentralizedSGD(rank, [1 - rank], model, lr=0.1, timeout_s=60)
        optimizer.step()
    else:
        DecentralizedAggregation(rank, [1 - rank], timeout_s=60).agg_model()(model)
    return model.weight.item()


CALLS = {
    "global_average": lambda rank: global_average(float(rank), 1).item(),
    "DecentralizedSGD": lambda rank: _weights(rank, True),
    "DecentralizedAggregation": lambda rank: _weights(rank, False),
}


def _joined(rank, call, store):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with environment({STORE_VARIABLE: store} | {key: str(value) for key, value in place.items()}):
        return CALLS[call](rank)


def _hosts(rank, port):
    with (
        environment({"MASTER_PORT": str(port)}),
        initialize_backends("gloo", hosts="localhost, localhost", rank=rank) as (_, world_size, graph),
    ):
        return world_size, graph.local_rank


def _answer(answers, function, rank, *arguments):
    torch.set_num_threads(1)
    answers.put(function(rank, *arguments))
    shutdown()


def _on_two(function, *arguments):
    context = start_context()
    answers = context.Queue()
    children = [
        context.Process(target=_answer, args=(answers, function, rank, *arguments)) for rank in range(2)
    ]
    for child in children:
        child.start()
    found = [answers.get(timeout=100) for _ in children]
    for child in children:
        child.join()
    return found


@pytest.mark.parametrize("call", CALLS)
def test_ranks_are_joined_by_whoever_is_first(call, tmp_path):
    """Ranks hold 0 and 1."""
    assert _on_two(_joined, call, str(tmp_path / "store")) == [0.5, 0.5]


def test_blanks_between_hosts_do_not_count():
    """Two ranks of one host."""
    assert sorted(_on_two(_hosts, free_port())) == [(2, 0), (2, 1)]


def _logs(rank, folder):
    log = folder / "logs" / "rank" if rank else folder / "rank"
    with (
        pytest.raises(StenogradError, match=r"^rank 1: .*No such file"),
        initialize_backends("gloo", logging_file=log),
    ):
        pass


def test_a_log_that_one_rank_cannot_write_is_an_error_on_all(pool, tmp_path):
    pool.run(2, _logs, tmp_path)
