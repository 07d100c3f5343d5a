"""Partitions lose no sample, whatever the sizes; starting a run outside a launcher."""

import copy
import logging
import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from stenograd.errors import ConfigError, DataError
from stenograd.mlbench.backends import FCGraph, global_average, initialize_backends
from stenograd.mlbench.partition import DataPartitioner, Partition, partition_dataset_by_rank
from stenograd.wire.groups import joined


@given(count=st.integers(1, 2000), size=st.integers(1, 40), shuffle=st.booleans())
def test_each_sample_is_on_one_rank(count, size, shuffle):
    if count < size:
        return
    parts = [partition_dataset_by_rank(range(count), r, size, shuffle=shuffle) for r in range(size)]
    assert sorted(i for part in parts for i in part.indices) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("count", "size"), [(60000, 6), (100, 7)])
def test_sums_of_rounded_shares_lose_nothing(count, size):
    """Adding 1/6 six times gives less than 1, which once cost the last sample."""
    assert sum(len(partition_dataset_by_rank(range(count), r, size)) for r in range(size)) == count


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(0, 500))
def test_parts_of_any_sizes_cover_the_data(weights, count):
    sizes = [w / sum(weights) for w in weights]
    partitioner = DataPartitioner(range(count), 0, shuffle=True, sizes=sizes)
    parts = [partitioner.use(i) for i in range(len(sizes))]
    assert sorted(x for part in parts for x in part) == list(range(count))
    assert all(abs(len(part) - share * count) <= 1 for part, share in zip(parts, sizes, strict=True))


def test_orders_depend_on_the_seed_alone():
    before = torch.random.get_rng_state()
    first, again, other = (partition_dataset_by_rank(range(50), 0, 2, seed=seed) for seed in (1, 1, 2))
    assert first.indices == again.indices != other.indices
    assert partition_dataset_by_rank(range(4), 1, 2, shuffle=False).indices == [2, 3]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_partition_is_a_data_set_that_can_be_copied():
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    part = pickle.loads(pickle.dumps(copy.deepcopy(Partition(data, [5, 3, 1]))))
    assert len(part.tensors) == 2  # an attribute of the whole
    assert [y.tolist() for _, y in DataLoader(part, batch_size=2)] == [[5, 3], [1]]
    with pytest.raises(AttributeError, match="nothing"):
        part.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: partition_dataset_by_rank(range(9), 0, 2, "zipf"), ConfigError, "must be 'uniform'"),
        (lambda: partition_dataset_by_rank(range(9), 2, 2), ConfigError, r"rank must be in 0..1, got 2"),
        (lambda: partition_dataset_by_rank(range(2), 0, 3), DataError, "at least one sample per rank"),
        (lambda: DataPartitioner(range(9), 0, True, [0.5, 0.4]), ConfigError, "sum to 1"),
        (lambda: DataPartitioner(range(9), 0, True, [1.5, -0.5]), ConfigError, "must be above 0"),
        (lambda: DataPartitioner(range(9), 0, True, seed=-1), ConfigError, "seed must be at least 0"),
    ],
)
def test_bad_arguments(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_run_of_one_with_hosts_seeds_logs_and_a_folder(tmp_path):
    folder, log = tmp_path / "checkpoints", tmp_path / "run.log"
    folder.mkdir()
    (folder / "old").write_text("x")
    options = {"hosts": ["localhost"], "rank": 0, "seed": 1, "logging_file": log}
    with initialize_backends("gloo", **options, ckpt_run_dir=folder) as (rank, world_size, graph):
        assert (rank, world_size, graph.neighbors, str(graph)) == (0, 1, [], "cpu")
        assert global_average(6, 4) == 1.5
        first = torch.rand(1)
        logging.getLogger("mlbench").info("halfway")
        assert os.environ["MASTER_ADDR"] == "localhost"
        assert (folder / "old").exists()
    assert "halfway" in log.read_text()
    assert "MASTER_ADDR" not in os.environ
    assert not joined()
    with initialize_backends("mpi", **options, ckpt_run_dir=folder, delete_existing_ckpts=True):
        assert torch.equal(torch.rand(1), first)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"comm_backend": "horovod"}, "must be 'mpi', 'gloo' or 'nccl'"),
        ({"hosts": "a,b", "rank": 2}, r"rank must be in 0..1 for 2 hosts, got 2"),
    ],
)
def test_bad_backends(options, says):
    with pytest.raises(ConfigError, match=says), initialize_backends(**options):
        pass


def test_the_graph_is_complete():
    assert FCGraph(1, 4).neighbors == [0, 2, 3]
    assert FCGraph(1, 4).current_device == torch.device("cpu")
