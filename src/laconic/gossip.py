"""Averaging with neighbours: a rank's tensors become a weighted mean of its own and its neighbours'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.drive import Driver, Pipeline
from laconic.errors import CheckpointError, TensorTypeError
from laconic.topology import Topology, check
from laconic.wire import Rounds, exchange

__all__ = ["Gossip", "mixing"]


def mixing(tensors: Sequence[Tensor], weights: Mapping[int, float], rank: int) -> Rounds[None]:
    """Mix tensors in place: `x_i <- sum_j W_ij x_j`, summed in rank order, in float32 or wider.

    Equal inputs give equal bits, whatever the order in which messages arrive. All tensors go in one message a
    neighbour.

    Args:
        tensors: real floating-point tensors, of the same shapes and dtypes on all ranks.
        weights: this rank's row W_i of the mixing matrix, its own weight included.
        rank: this rank.

    Example:
        >>> from laconic.simulate import run
        >>> xs = [torch.tensor([0.0]), torch.tensor([4.0])]
        >>> W = [{0: 0.75, 1: 0.25}, {0: 0.5, 1: 0.5}]
        >>> _ = run([mixing([x], W[rank], rank) for rank, x in enumerate(xs)])
        >>> [x.tolist() for x in xs]
        [[1.0], [2.0]]
    """
    groups = _by_dtype(tensors)
    mine = [torch.cat([t.detach().reshape(-1) for t in group]) for group in groups]
    theirs = yield from exchange([flat.clone() for flat in mine], [r for r in weights if r != rank])
    with torch.no_grad():
        for i, (group, flat) in enumerate(zip(groups, mine, strict=True)):
            rows = ((weights[r], flat if r == rank else theirs[r][i]) for r in sorted(weights))
            mixed = _weighted_sum(rows, flat).split([t.numel() for t in group])
            for t, piece in zip(group, mixed, strict=True):
                t.copy_(piece.view(t.shape))


class Gossip:
    """Mixes this rank's tensors with its neighbours', step after step.

    Args:
        driver: the way to the other ranks; its `traffic` counts what is sent.
        topology: who mixes with whom, the same on all ranks.

    Raises:
        ConfigError: the topology does not fit the number of ranks, is not symmetric, or a row of weights does
            not sum to 1.

    Example:
        >>> from laconic.groups import init, shutdown
        >>> from laconic.topology import Ring
        >>> _ = init()
        >>> x = torch.ones(2)
        >>> Gossip(Driver(), Ring()).mix([x])  # alone, so nothing changes
        >>> x.tolist()
        [1.0, 1.0]
        >>> shutdown()
    """

    def __init__(self, driver: Driver, topology: Topology) -> None:
        check(topology, driver.world_size)
        self.driver = driver
        self.topology = topology
        self.step = 0

    def mix(self, tensors: Sequence[Tensor], *, separately: bool = False) -> None:
        """Mix tensors in place with the weights of this step.

        Args:
            tensors: as for `mixing`, in the same order on all ranks.
            separately: one message a tensor and neighbour instead of one for all: less memory, more latency.

        Raises:
            TensorTypeError: a tensor is integer, boolean or complex.
            PeerLost: a neighbour did not answer in time; the tensors of that message are kept.
        """
        for t in tensors:
            if not t.is_floating_point():
                advice = "leave it out, or mix its real and imaginary parts"
                raise TensorTypeError(
                    f"only real floating-point tensors can be mixed, got {t.dtype}: {advice}"
                )
        driver = self.driver
        weights = self.topology.weights(driver.rank, driver.world_size, self.step)
        pipeline: Pipeline[None] = Pipeline(driver)
        for part in ([t] for t in tensors) if separately else [tensors]:
            pipeline.add(mixing(part, weights, driver.rank))
        pipeline.finish()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the next mixing: the number of those before it."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state_dict()`.

        Raises:
            CheckpointError: it is no such state.
        """
        if not isinstance(state.get("step"), int):
            raise CheckpointError(f"a gossip state holds the number of its step, got {state!r}")
        self.step = state["step"]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())


def _weighted_sum(rows: Iterable[tuple[float, Tensor]], like: Tensor) -> Tensor:
    total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    for weight, row in rows:
        total.add_(row, alpha=weight)
    return total
