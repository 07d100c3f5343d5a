"""SINGA's collectives: each replaces tensors in place by their sum over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.comm.traffic import Traffic
from stenograd.compression.contract import require_floating
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.data.buckets import Bucket
from stenograd.errors import bad_value
from stenograd.launch.process_group import World
from stenograd.singa.methods import plain, rounded, sparse
from stenograd.sync.handshake import broadcast_model

__all__ = ["Primitives"]

_MOST_EXCHANGES = 64  # each holds memory for its tensors; a model is summed in fewer groups


class Primitives:
    """Sums tensors over the ranks; each sum is complete when the call returns.

    Tensors must be contiguous, real, on the CPU or on this rank's CUDA device, and equally large on all
    ranks. In full precision they are added up as they are, so sums of whole numbers are whole. Other sums
    are the world size times Stenograd's average, which divides first and so cannot overflow on the way.

    Args:
        driver: the way to the other ranks.
        world: this process's rank on its host.
    """

    def __init__(self, driver: Driver, world: World) -> None:
        self._driver = driver
        self._buffered: list[Tensor] = []
        self._exchanges: dict[tuple[str, Bucket], TensorExchange] = {}
        self.local_rank = world.local_rank
        self.global_rank = driver.rank
        self.world_size = driver.world_size

    @property
    def rank_in_local(self) -> int:
        """The older name of `local_rank`."""
        return self.local_rank

    @property
    def rank_in_global(self) -> int:
        """The older name of `global_rank`."""
        return self.global_rank

    @property
    def traffic(self) -> Traffic:
        """Bytes, collectives and seconds waited of this rank so far."""
        return self._driver.traffic

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks.

        Raises:
            ConfigError: the tensor is not contiguous, or on a device that the ranks do not share.
            TensorTypeError: it does not hold real floating-point numbers.
        """
        self._sum([tensor], plain())

    def all_reduce_half(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, sent in float16; the sum itself may exceed 65,504."""
        self._sum([tensor], rounded())

    def fused_all_reduce(self, tensors: Sequence[Tensor], send: bool = True) -> None:
        """Sum several tensors in one collective.

        Args:
            tensors: of one type, on one device.
            send: False only copies them to the buffer. True sums the buffer and writes the result to these
                tensors, in order; if the buffer is empty, the tensors themselves are summed.

        Raises:
            ConfigError: as in `all_reduce`; or the buffer holds another number of elements than the tensors.
        """
        self._fused(tensors, send, plain())

    def fused_all_reduce_half(self, tensors: Sequence[Tensor], send: bool = True) -> None:
        """Sum several tensors in one collective, sent and added in float16; see `fused_all_reduce`."""
        self._fused(tensors, send, rounded())

    def sparsification(self, tensor: Tensor, accumulation: Tensor | None, spars: float, topK: bool) -> None:
        """Replace a tensor by the sum of the ranks' most significant elements.

        Args:
            tensor: what to sum.
            accumulation: what earlier calls did not send, of the same size; it is added before the selection
                and replaced by what this call does not send. With None the rest is dropped.
            spars: with topK the share of the elements to send, in (0, 1]; otherwise the smallest magnitude
                to send, > 0.
            topK: True selects a share of the elements, False selects by magnitude.

        Raises:
            ConfigError: as in `all_reduce`; or spars is out of range, or the accumulation has another size.
        """
        self._sum([tensor], sparse(spars, topK, corr=False), accumulation)

    def fused_sparsification(
        self, tensors: Sequence[Tensor], accumulation: Tensor | None, spars: float, topK: bool
    ) -> None:
        """Apply `sparsification` to several tensors as if they were one, in one exchange."""
        self._sum(tensors, sparse(spars, topK, corr=False), accumulation)

    def wait(self) -> None:
        """Do nothing: every collective is complete when its call returns."""

    def synchronize(self, tensors: nn.Module | Tensor | Iterable[Tensor]) -> None:
        """Overwrite tensors, or all parameters and buffers of a model, with rank 0's.

        Example:
            >>> from stenograd.singa import DistOpt
            >>> DistOpt().synchronize(nn.Linear(4, 2))
        """
        if isinstance(tensors, nn.Module):
            broadcast_model(self._driver, tensors)
            return
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self._driver.broadcast(tensor.detach())

    def _fused(self, tensors: Sequence[Tensor], send: bool, how: Method) -> None:
        _check(tensors)
        if not send:
            self._buffered += [tensor.detach().reshape(-1).clone() for tensor in tensors]
            return
        held, self._buffered = self._buffered, []
        wanted, found = sum(t.numel() for t in tensors), sum(t.numel() for t in held)
        if held and wanted != found:
            advice = "push each tensor with send=False first, then all of them with send=True"
            raise bad_value("tensors", f"must hold the {found} elements of the buffer", wanted, advice)
        self._sum(tensors, how, source=held)

    def _sum(
        self,
        targets: Sequence[Tensor],
        how: Method,
        accumulation: Tensor | None = None,
        source: Sequence[Tensor] = (),
    ) -> None:
        _check([*targets, *source, *([] if accumulation is None else [accumulation])])
        if targets:
            self._reduce(targets, how, accumulation, source=source)

    @torch.no_grad()
    def _reduce(
        self,
        targets: Sequence[Tensor],
        how: Method,
        accumulation: Tensor | None = None,
        *,
        source: Sequence[Tensor] = (),
        mean: bool = False,
    ) -> None:
        """Write the sum (or mean) over the ranks of the source, or of the targets, to the targets."""
        flat = torch.cat([t.reshape(-1) for t in source or targets])
        if accumulation is not None:
            if accumulation.numel() != flat.numel():
                rule = f"must have the {flat.numel()} elements of what is summed"
                raise bad_value("accumulation", rule, accumulation.numel(), "make one for each group")
            how = replace(how, compressor=ErrorFeedback(inner=how.compressor), text="")
        names = tuple(map(str, range(len(targets))))
        bucket = Bucket(names, tuple(t.shape for t in targets), flat.dtype, flat.device)
        exchange = self._exchange(how, bucket)
        if accumulation is not None:
            exchange.set_state(0, {"residual": accumulation.reshape(-1)})
        adds = how == plain() and not mean  # unless divided first, the average is the sum
        exchange.lend(0, flat if adds else flat.mul_(exchange.scale(0)))
        exchange.submit(0)
        (total,) = exchange.finish().result().averages
        if not (adds or mean):
            total.mul_(self.world_size)
        for target, piece in zip(targets, total.split(bucket.numels), strict=True):
            target.copy_(piece.view(target.shape))
        if accumulation is not None:
            accumulation.copy_(exchange.state_of(0)["residual"].view(accumulation.shape))

    def _exchange(self, how: Method, bucket: Bucket) -> TensorExchange:
        """Return the exchange of such tensors by a method; the newest are kept."""
        key = how.text, bucket
        exchange = self._exchanges.pop(key, None)
        if exchange is None:
            exchange = TensorExchange(how, self._driver, waits=True)
            exchange.arrange([bucket])
        self._exchanges[key] = exchange
        if len(self._exchanges) > _MOST_EXCHANGES:
            self._exchanges.pop(next(iter(self._exchanges))).close()
        return exchange


def _check(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that cannot be summed in place."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a tensor, got {type(tensor).__name__}: pass tensors")
        require_floating(tensor)
        if not tensor.is_contiguous():
            advice = "call contiguous() and use the result"
            raise bad_value("tensor", "must be contiguous", f"strides {tensor.stride()}", advice)
        mine = torch.cuda.current_device() if tensor.is_cuda else None
        if tensor.device.type not in ("cpu", "cuda") or tensor.device.index not in (mine, None):
            advice = "move it with .to(device)"
            raise bad_value("tensor", "must be on the group's device", str(tensor.device), advice)
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        raise bad_value("tensors", "must have one type and device", kinds, "sum them in separate calls")
