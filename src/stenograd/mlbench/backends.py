"""Start and end a distributed run as MLBench does; the graph of all ranks; a number's average over them."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stenograd import devices
from stenograd.arguments import choice
from stenograd.errors import bad_value
from stenograd.launch.local_workers import environment
from stenograd.launch.process_group import World, init, join, shutdown
from stenograd.wire.agreement import agree, sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.groups import joined

__all__ = ["FCGraph", "global_average", "initialize_backends"]


_PORT = "29500"  # MLBench's


@dataclass(frozen=True)
class FCGraph:
    """The complete graph of all ranks, and this rank's device.

    Args:
        rank: this rank.
        world_size: number of ranks.
        use_cuda: whether this rank computes on a CUDA device.
        local_rank: this rank among those of its host; it decides which device.

    Example:
        >>> graph = FCGraph(0, 3)
        >>> graph.neighbors, str(graph)
        ([1, 2], 'cpu')
    """

    rank: int
    world_size: int
    use_cuda: bool = False
    local_rank: int = 0

    @property
    def neighbors(self) -> list[int]:
        """All other ranks, ascending."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    @property
    def current_device(self) -> torch.device:
        """Where this rank computes."""
        if not self.use_cuda:
            return torch.device("cpu")
        return devices.local_device(self.local_rank)

    @property
    def current_device_name(self) -> str:
        """The device's name, such as "cpu" or "cuda:0"."""
        return str(self.current_device)

    def __str__(self) -> str:
        return self.current_device_name


@contextmanager
def initialize_backends(
    comm_backend: str = "mpi",
    hosts: Sequence[str] | str | None = None,
    rank: int = -1,
    logging_level: int | str = "INFO",
    logging_file: str | Path | None = None,
    use_cuda: bool = False,
    seed: int | None = None,
    cudnn_deterministic: bool = False,
    ckpt_run_dir: str | Path | None = None,
    delete_existing_ckpts: bool = False,
) -> Iterator[tuple[int, int, FCGraph]]:
    """Join the ranks, and leave them at the end of the block.

    Args:
        comm_backend: "gloo", "nccl", or "mpi", which is gloo, and NCCL for CUDA tensors.
        hosts: host of each rank, a list or separated by commas; the ranks meet on rank 0's, at MASTER_PORT or
            29500. None asks the launcher.
        rank: this rank, where hosts is given.
        logging_level: of the logger "mlbench".
        logging_file: where it writes too; None for nowhere.
        use_cuda: whether this rank computes on CUDA; refused where there is none.
        seed: of the global random states of torch, numpy and random; None leaves them.
        cudnn_deterministic: whether cuDNN uses deterministic algorithms only.
        ckpt_run_dir: folder for checkpoints, made by rank 0; None for none.
        delete_existing_ckpts: whether rank 0 first deletes that folder with all that is in it.

    Yields:
        Rank, number of ranks, and the graph of all ranks. A group that was there before stays afterwards.

    Raises:
        ConfigError: an argument breaks its rule.
        LaunchError: the ranks could not meet.
        StenogradError: on all ranks: on one the folder or the log file cannot be made, or the seed is none.

    Example:
        >>> with initialize_backends("gloo") as (rank, world_size, graph):
        ...     print(rank, world_size, graph.neighbors)
        0 1 []
    """
    choice("comm_backend", comm_backend, ("mpi", "gloo", "nccl"), "use 'gloo' on CPUs")
    if use_cuda and not devices.count():
        raise bad_value("use_cuda", "needs a CUDA device", use_cuda, "leave it out to compute on the CPU")
    # Asked before `init`, which joins: a group that was there stays after the block.
    own = not joined()
    with environment(_place(hosts, rank)):
        world = init(backend=None if comm_backend == "mpi" else comm_backend)
        try:
            with ExitStack() as stack:

                def prepare() -> None:
                    _seed(seed, cudnn_deterministic)
                    _make_folder(world, ckpt_run_dir, delete_existing_ckpts)
                    stack.enter_context(_logging(world, logging_level, logging_file))

                # An error of one rank is raised on all, or the others would wait for it in a collective.
                agree(Driver(), prepare)
                graph = FCGraph(world.rank, world.world_size, use_cuda, world.local_rank)
                yield world.rank, world.world_size, graph
        finally:
            if own:
                shutdown()


def global_average(sum: float | Tensor, count: float | Tensor) -> Tensor:
    """Return `sum over ranks of sum / sum over ranks of count`, equal on all ranks, a float64 tensor.

    sum and count are those of this rank's values. On all ranks a ConfigError, where no rank has values. It
    joins the ranks of the launch, if nothing did before.

    Example:
        >>> global_average(3.0, 4).item()
        0.75
    """
    join()
    total, number = sum_over_ranks(Driver(), [float(sum), float(count)])
    if number == 0:
        raise bad_value("count", "must be above 0 on some rank", number, "average after the first value")
    return torch.tensor(total / number, dtype=torch.float64, device="cpu")


def _seed(seed: int | None, cudnn_deterministic: bool) -> None:
    if seed is not None:
        for start in (random.seed, np.random.seed, torch.manual_seed):
            start(seed)
    if cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def _make_folder(world: World, folder: str | Path | None, delete: bool) -> None:
    if folder is None or world.rank != 0:
        return
    if delete and Path(folder).exists():
        shutil.rmtree(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)


def _place(hosts: Sequence[str] | str | None, rank: int) -> dict[str, str]:
    """Return the variables that a launcher would set for these hosts."""
    if hosts is None:
        return {}
    names = [name.strip() for name in (hosts.split(",") if isinstance(hosts, str) else hosts)]
    if not 0 <= rank < len(names):
        raise bad_value(
            "rank", f"must be in 0..{len(names) - 1} for {len(names)} hosts", rank, "give each its own"
        )
    on_host = [r for r, name in enumerate(names) if name == names[rank]]
    return {
        "MASTER_ADDR": names[0],
        "MASTER_PORT": os.environ.get("MASTER_PORT", _PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(names)),
        "LOCAL_RANK": str(on_host.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(on_host)),
    }


@contextmanager
def _logging(world: World, level: int | str, file: str | Path | None) -> Iterator[None]:
    logger = logging.getLogger("mlbench")
    before = logger.level
    handler = logging.FileHandler(file) if file is not None else logging.NullHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(message)s"))
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
