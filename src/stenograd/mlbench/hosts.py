"""Places of ranks: what a launcher would set for a list of hosts, and the graph of all ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stenograd.errors import bad_value
from stenograd.launch.local_workers import environment

__all__ = ["FCGraph", "environment", "place"]

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
        return torch.device("cuda", self.local_rank % max(1, torch.cuda.device_count()))

    @property
    def current_device_name(self) -> str:
        """The device's name, such as "cpu" or "cuda:0"."""
        return str(self.current_device)

    def __str__(self) -> str:
        return self.current_device_name


def place(hosts: Sequence[str] | str | None, rank: int) -> dict[str, str]:
    """Return the variables that a launcher would set for these hosts."""
    if hosts is None:
        return {}
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts)
    if not 0 <= rank < len(names):
        raise bad_value(
            "rank", f"must be in 0..{len(names) - 1} for {len(names)} hosts", rank, "give each its own"
        )
    on_host = [r for r, name in enumerate(names) if name == names[rank]]
    return {
        "MASTER_ADDR": names[0].strip(),
        "MASTER_PORT": os.environ.get("MASTER_PORT", _PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(names)),
        "LOCAL_RANK": str(on_host.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(on_host)),
    }
