"""Aggregations that send less and remember what they did not send."""

from __future__ import annotations

from torch import nn

from stenograd.compression.contract import Compressor
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.randomblock import RandomBlock
from stenograd.compressors.randomk import RandomK
from stenograd.errors import bad_value
from stenograd.mlbench.aggregation import AVG_WORLD, Denominator
from stenograd.mlbench.memory import RememberingAggregation

__all__ = ["PowerAggregation", "SparsifiedAggregation", "sparsifier"]


class PowerAggregation(RememberingAggregation):
    """Low-rank factors of each gradient matrix, with error feedback; see `stenograd.mlbench.PowerSGD`.

    Args:
        model: its trainable parameters get memories.
        use_cuda: as in `Aggregation`.
        reuse_query: whether the power iteration starts from the last step's Q.
        world_size: number of ranks; in a world of one nothing is compressed.
        rank: largest rank of an approximation, at least 1.

    Raises:
        ConfigError: world_size is not the group's, or rank is below 1.
        CheckpointError: a loaded state is of another rank, world size, method or model.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.grad = torch.tensor([[4.0, 8.0]])
        >>> PowerAggregation(layer).agg_grad()(layer, "avg_world")
        True
    """

    def __init__(
        self,
        model: nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
    ) -> None:
        self.compressor = ErrorFeedback(inner=PowerSGD(rank=rank, warm_start=reuse_query))
        super().__init__(model, use_cuda, world_size)

    def _compressor(self, numel: int) -> Compressor:
        return self.compressor

    def _method(self) -> str:
        return repr(self.compressor)

    def _agg_gradients(
        self, model: nn.Module, op: str, denom: Denominator = None, *, by_layer: bool = False
    ) -> bool:
        if self.world_size == 1 and op == AVG_WORLD and denom is None:
            return True
        return super()._agg_gradients(model, op, denom, by_layer=by_layer)


class SparsifiedAggregation(RememberingAggregation):
    """The same few random coordinates of each gradient on all ranks, with error feedback.

    In MLBench this class is empty. The learning rate does not enter its memory; in
    `CentralizedSparsifiedSGD` it does.

    Args:
        model: its trainable parameters get memories.
        use_cuda: as in `Aggregation`.
        world_size: number of ranks; None is the group's.
        sparse_grad_size: coordinates a tensor to send, at least 1.
        random_sparse: scattered coordinates instead of a block of neighbours.

    Raises:
        ConfigError: an argument is out of range.
        CheckpointError: a loaded state is of another rank, world size, method or model.

    Example:
        >>> import torch
        >>> layer = nn.Linear(3, 1, bias=False)
        >>> layer.weight.grad = torch.ones(1, 3)
        >>> SparsifiedAggregation(layer, sparse_grad_size=2).agg_grad()(layer, "avg_world")
        True
        >>> layer.weight.grad.sum()
        tensor(2.)
    """

    def __init__(
        self,
        model: nn.Module,
        use_cuda: bool = False,
        world_size: int | None = None,
        sparse_grad_size: int = 10,
        random_sparse: bool = False,
    ) -> None:
        self.sparse_grad_size, self.random_sparse = sparse_grad_size, random_sparse
        super().__init__(model, use_cuda, world_size)

    def _compressor(self, numel: int) -> Compressor:
        return sparsifier(self.sparse_grad_size, numel, self.random_sparse)

    def _method(self) -> str:
        return f"sparsified: {self.sparse_grad_size}, random {self.random_sparse}"


def sparsifier(count: int, numel: int, random: bool) -> ErrorFeedback:
    """Return what sends exactly `min(count, numel)` of `numel` elements and remembers the others.

    Raises:
        ConfigError: count is not a whole number of at least 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        rule = "must be a whole number of at least 1"
        raise bad_value("sparse_grad_size", rule, count, "10 is the default")
    # ceil(ratio * numel) is the count, half an element away from any rounding
    ratio = (count - 0.5) / numel if count < numel else 1.0
    return ErrorFeedback(inner=(RandomK if random else RandomBlock)(ratio=ratio))
