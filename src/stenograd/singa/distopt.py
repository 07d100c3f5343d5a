"""SINGA's `DistOpt`: an optimizer that trains on the gradients of all ranks, and its collectives."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.arguments import number, whole
from stenograd.catalog.method import Method, method
from stenograd.compression.contract import require_floating
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.cast import Cast
from stenograd.compressors.identity import Identity
from stenograd.devices import is_current
from stenograd.errors import CheckpointError, ConfigError, bad_value
from stenograd.exchange.buckets import Bucket
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.singa.gradients import DEFAULT_THRESHOLD, Gradients
from stenograd.singa.launch import join
from stenograd.singa.optimizers import SGD, Optimizer, Saved, Setting
from stenograd.singa.slots import named_members
from stenograd.sync.averaging import average_buffers, not_finite
from stenograd.sync.copies import Copies
from stenograd.sync.handshake import broadcast_model, broadcast_tensors, compare, describe_optimizers
from stenograd.wire.driver import Driver
from stenograd.wire.finite import are_finite
from stenograd.wire.traffic import Traffic

__all__ = ["DistOpt", "TorchOptimizer"]

_FORMAT = 1  # of get_states(); a reader refuses others
_MOST_EXCHANGES = 64  # each holds memory for its tensors; a model is summed in fewer groups


class TorchOptimizer:
    """A PyTorch optimizer with SINGA's methods: `update` sets a gradient, `step` updates all parameters.

    Args:
        optimizer: updates the parameters that it holds; others stay as they are.

    Example:
        >>> w = torch.ones(1, requires_grad=True)
        >>> optimizer = TorchOptimizer(torch.optim.SGD([w], lr=0.5))
        >>> optimizer.update(w, torch.ones(1))
        >>> optimizer.step()
        >>> w.tolist()
        [0.5]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def lr_value(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Set a parameter's gradient."""
        param.grad = grad

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        self.optimizer.step()

    def get_states(self) -> dict[str, Any]:
        """Return a copy of the optimizer's `state_dict()`."""
        return copy.deepcopy(self.optimizer.state_dict())  # torch's state_dict shares its tensors

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Load a `state_dict()`.

        Raises:
            ConfigError: it is of another kind of optimizer, or of one with other groups.
        """
        try:
            self.optimizer.load_state_dict(copy.deepcopy(dict(states)))
        except (KeyError, ValueError) as cause:
            raise ConfigError(f"the states do not fit ({cause}): use the same kind of optimizer") from cause


class DistOpt(Saved):
    """Wraps an optimizer for data-parallel training: each `backward_and_...` call is one step.

    Gradients travel in groups, while backward goes on: a tensor of more than `threshold` elements travels
    alone, the others together as soon as they hold more than `threshold`. Then each parameter is updated with
    its averaged gradient, in backward order. If gradients are not finite on some rank, the step changes no
    parameter on any rank, and `skipped` counts it.

    `all_reduce` and the other collectives replace tensors in place by their sum over the ranks, which is
    complete when the call returns. Tensors must be contiguous, real, on the CPU or this rank's CUDA device,
    and equally large on all ranks. In full precision they are added up as they are, so sums of whole numbers
    are whole. Other sums are the world size times an average, which is divided first and cannot overflow.

    Args:
        opt: an optimizer of `stenograd.singa` or of `torch.optim`; None makes a new `SGD()`.
        nccl_id: the `NcclIdHolder` that the parent process made; None under mpiexec, torchrun, srun or alone.
        local_rank: with nccl_id, this process's number among the parent's children, in [0, world_size).
        world_size: with nccl_id, the number of children, at least 1.
        buffSize: accepted for compatibility and ignored: buffers are as large as what is sent.
        timeout_s: seconds after which a silent peer is an error, above 0.
        gpu_num: older name of local_rank.
        gpu_per_node: with nccl_id, older name of world_size; without, the number of ranks on this host.
        num_gpus: older name of world_size.

    Attributes:
        world_size, local_rank, global_rank: number of ranks, and this process's rank on its host and in all
            (older: `rank_in_local`, `rank_in_global`).
        traffic: bytes, collectives and seconds waited of this rank.
        partial: number of the partition that `backward_and_partial_update` averaged last; 0 after a cycle.
        skipped: number of steps that changed nothing because gradients were not finite.

    Raises:
        ConfigError: a rank, a size or buffSize is out of range, or contradicts the launcher.
        LaunchError: the ranks did not find each other.
        TypeError: opt is not an optimizer, or nccl_id is not an `NcclIdHolder`.

    Example:
        >>> from stenograd.singa import SGD
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> optimizer = DistOpt(SGD(lr=0.5))  # alone: a world of one
        >>> optimizer((w * w).sum() / 2)
        >>> w.tolist()
        [0.5, 1.0]
    """

    def __init__(
        self,
        opt: Any = None,
        nccl_id: Any = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        buffSize: int = 4194304,
        *,
        timeout_s: float = 300.0,
        gpu_num: int | None = None,
        gpu_per_node: int | None = None,
        num_gpus: int | None = None,
    ) -> None:
        # None makes a new SGD(); SINGA's default argument is one SGD() for all instances.
        self._inner = _inner(SGD() if opt is None else opt)
        self.opt = self._inner if opt is None else opt
        self.buffSize = whole("buffSize", buffSize, "leave it out")
        rank = _one("local_rank", local_rank, gpu_num)
        children = None if nccl_id is None else gpu_per_node  # a token means one node
        size = _one("world_size", world_size, num_gpus, children)
        self.local_rank = join(nccl_id, rank, size, timeout_s, per_node=gpu_per_node).local_rank
        self._driver = Driver.own(timeout_s=timeout_s)
        self.global_rank, self.world_size = self._driver.rank, self._driver.world_size
        self._gradients = Gradients(self._driver)
        self._buffered: list[Tensor] = []
        self._exchanges: dict[tuple[str, Bucket], TensorExchange] = {}
        self.partial = self.skipped = 0

    @property
    def lr(self) -> float:
        """The learning rate of the next step; with a PyTorch optimizer, that of its first parameter group."""
        return self._inner.lr_value

    @property
    def sparsInit(self) -> bool:
        """Whether any step has accumulated what it did not send."""
        return self._gradients.corrected

    @property
    def gradAccumulation(self) -> list[Tensor]:
        """Copies of the accumulations, flat, one per group in the order of the last corrected step."""
        return self._gradients.accumulations()

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

    @property
    def communicator(self) -> DistOpt:
        """This object, which does what SINGA's does; its programs ask `hasattr(sgd, "communicator")`."""
        return self

    def __call__(self, loss: Tensor) -> None:
        """Train one step: `backward_and_update(loss)`."""
        self.backward_and_update(loss)

    def backward_and_update(self, loss: Tensor, threshold: int = DEFAULT_THRESHOLD) -> None:
        """Train one step on gradients averaged in full precision.

        Args:
            loss: one element, with a graph.
            threshold: in elements, at least 0: larger gradients travel alone, the others in groups of more
                than this; with 0 each travels alone. Smaller groups start earlier, larger ones cost fewer
                latencies.

        Raises:
            ConfigError: threshold is negative, or loss has no graph or several elements.
            MismatchError: at the first step, the ranks' parameters, modes, thresholds or optimizers differ.
            PeerLost: a rank did not answer within the timeout.
        """
        self._train(loss, threshold, _plain())

    def backward_and_update_half(
        self,
        loss: Tensor,
        threshold: int = DEFAULT_THRESHOLD,
        clipping: bool = False,
        clip_Value: float = 100,
        *,
        clip_value: float | None = None,
    ) -> None:
        """Train one step on gradients that travel in float16: half the bytes, 11 significant bits.

        Gradients are divided by the world size before they are summed, so that a sum cannot overflow; those
        below 6e-8 times the world size become 0.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`.
            clipping: whether to clamp this rank's gradients to [-clip_Value, clip_Value] first.
            clip_Value: above 0.
            clip_value: another spelling of clip_Value, from SINGA's documents.

        Raises:
            ConfigError: as in `backward_and_update`, or clip_Value is not positive and finite.
        """
        limit = clip_Value if clip_value is None else clip_value
        self._train(loss, threshold, _rounded(limit if clipping else None))

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int = DEFAULT_THRESHOLD,
        spars: float = 0.05,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """Train one step on the most significant elements of each group's gradient.

        With v the group's gradient plus its accumulation, S is `{i : |v_i| >= spars}`, or the `ceil(spars n)`
        largest of n with topK; the ranks average v on S, and the rest of v is the next accumulation. Start
        with topK: a good absolute threshold differs between models and epochs.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`.
            spars: with topK the share of the elements to send, in (0, 1]; otherwise the smallest magnitude
                to send, > 0. SINGA's default means 5 % with topK; as a magnitude it is far above MNIST's
                gradients, which are about 1e-3.
            topK: True selects a share of the elements, False selects by magnitude.
            corr: whether to accumulate what is not sent; otherwise it is lost, and training suffers. It may
                change from step to step: accumulations are kept with their parameters.

        Raises:
            ConfigError: as in `backward_and_update`, or spars is outside its range.
        """
        self._train(loss, threshold, _sparse(spars, topK, corr))

    backward_and_spars_update = backward_and_sparse_update  # the older name

    def backward_and_partial_update(self, loss: Tensor, threshold: int = DEFAULT_THRESHOLD) -> None:
        """Train one step on this rank's gradients alone, then average one partition of the parameters.

        Partitions are the fusion rule's groups; each call averages the next one, and after the last `partial`
        is 0 again. Momentum is not averaged. Call `finalize()` after training.

        Args:
            loss: one element, with a graph.
            threshold: as in `backward_and_update`; the smaller, the more partitions.

        Raises:
            ConfigError: as in `backward_and_update`.
            NonFiniteError: as in `finalize`; parameters stay as this rank's update has left them.
        """
        walked, partitions = self._gradients.local(loss, threshold)
        # Other ranks do not learn of a bad gradient here, so only this rank's update is left out.
        finite = are_finite(p.grad for p in walked if p.grad is not None)
        self._update_all(walked, finite)
        # With another threshold there may be fewer partitions than the last call averaged.
        due = self.partial if self.partial < len(partitions) else 0
        self._average([self._gradients.parameters[name] for name in partitions[due]])
        self.partial = (due + 1) % len(partitions)

    def finalize(self, model: nn.Module | None = None) -> None:
        """Average all parameters seen so far and a model's float buffers, so that all ranks end equal.

        Raises:
            NonFiniteError: on every rank, if some rank's parameters are not finite; all are kept then.
        """
        self._average(self._gradients.parameters.values())
        if model is not None:
            average_buffers(model, self._driver)
        self.partial = 0

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Divide a gradient, a sum over the ranks, by the world size in place, and update with it."""
        with torch.no_grad():  # a user's own optimizer may change parameters in place without saying so
            self._inner.update(param, grad.div_(self.world_size))

    def step(self) -> None:
        """Count a step, as `opt.step()` does; the `backward_and_...` methods count themselves."""
        self._inner.step()

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks.

        Raises:
            ConfigError: the tensor is not contiguous, or on a device that the ranks do not share.
            TensorTypeError: it does not hold real floating-point numbers.
        """
        self._sum([tensor], _plain())

    synch = all_reduce  # as SINGA's communicator calls it

    def all_reduce_half(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, sent in float16; the sum itself may exceed 65,504."""
        self._sum([tensor], _rounded())

    def fused_all_reduce(self, tensor: Iterable[Tensor], send: bool = True) -> None:
        """Sum several tensors in one collective.

        Args:
            tensor: the tensors, of one type, on one device.
            send: False only copies them to the buffer. True sums the buffer and writes the result to these
                tensors, in order; if the buffer is empty, the tensors themselves are summed.

        Raises:
            ConfigError: as in `all_reduce`; or the buffer holds another number of elements than the tensors.
        """
        self._fused(tensor, send, _plain())

    def fused_all_reduce_half(self, tensor: Iterable[Tensor], send: bool = True) -> None:
        """Sum several tensors in one collective, sent and added in float16; see `fused_all_reduce`."""
        self._fused(tensor, send, _rounded())

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
        self._sum([tensor], _sparse(spars, topK, corr=False), accumulation)

    def fused_sparsification(
        self, tensor: Iterable[Tensor], accumulation: Tensor | None, spars: float, topK: bool
    ) -> None:
        """Apply `sparsification` to several tensors as if they were one, in one exchange."""
        self._sum([*tensor], _sparse(spars, topK, corr=False), accumulation)

    def wait(self) -> None:
        """Do nothing: every collective is complete when its call returns."""

    def synchronize(self, tensors: nn.Module | Tensor | Iterable[Tensor]) -> None:
        """Overwrite tensors, or all parameters and buffers of a model, with rank 0's.

        Raises:
            MismatchError: the ranks' models differ, or hold their parameters or buffers in another order.

        Example:
            >>> from stenograd.singa import DistOpt
            >>> DistOpt().synchronize(nn.Linear(4, 2))
        """
        if isinstance(tensors, nn.Module):
            compare(self._driver, {}, dict(tensors.named_parameters()), model=tensors)
            with self._followed(tensors.parameters()):
                broadcast_model(self._driver, tensors)
            return
        several = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        with self._followed(several):
            broadcast_tensors(self._driver, [tensor.detach() for tensor in several])

    def register(
        self, param_group: Tensor | Iterable[Tensor | tuple[str, Tensor]], config: Mapping[str, Setting]
    ) -> None:
        """Give parameters names (`register(model.named_parameters(), {})`) and settings of their own.

        Args:
            param_group: as in `Optimizer.register`.
            config: settings that differ; must be empty for a PyTorch optimizer, which has groups for that.
        """
        members = [param_group] if isinstance(param_group, Tensor) else list(param_group)
        if isinstance(self.opt, Optimizer):
            self.opt.register(members, config)
        elif config:
            raise bad_value(
                "config", "must be empty with a PyTorch optimizer", dict(config), "use its groups"
            )
        self._gradients.register(named_members(members))

    def get_states(self) -> dict[str, Any]:
        """Return copies of all that decides this rank's next steps; save them on every rank."""
        counters = {"partial": self.partial, "skipped": self.skipped}
        states = {"optimizer": self._inner.get_states(), **self._gradients.state()}
        return {**self._identity(), **counters, **states}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from what `get_states` returned, also in a new process, before or after its first step.

        Raises:
            CheckpointError: the states are of another format, rank, world size or model.
            ConfigError: they come from another kind of optimizer.
        """
        for key, wanted in self._identity().items():
            if states.get(key) != wanted:
                raise CheckpointError(
                    f"the state's {key} must be {wanted!r}, got {states.get(key)!r}: "
                    "load it where it was saved"
                )
        self._gradients.check(states)  # before anything changes
        self._inner.set_states(states["optimizer"])
        self._gradients.load(states)
        self.partial, self.skipped = int(states["partial"]), int(states["skipped"])

    def close(self) -> None:
        """Stop the thread that communicates; a second call does nothing."""
        self._gradients.close()

    def _identity(self) -> dict[str, Any]:
        return {"format": _FORMAT, "rank": self.global_rank, "world_size": self.world_size}

    def _settings(self) -> dict[str, Any]:
        """Return what must be equal on all ranks for equal gradients to make equal steps."""
        inner = self._inner
        if isinstance(inner, TorchOptimizer):
            return describe_optimizers(nn.Module(), [inner.optimizer], alike=True)
        kind = type(inner).__name__
        own = sorted((f"settings of parameter {s.key!r}", s.values) for s in inner._slots if s.values)
        return {"optimizer": kind, "step_counter": inner.step_counter, **inner._values, **dict(own)}

    def _train(self, loss: Tensor, threshold: int, how: Method) -> None:
        walked, finite = self._gradients.averaged(loss, threshold, how, self._settings)
        self._update_all(walked, finite)

    def _update_all(self, parameters: Iterable[Tensor], finite: bool) -> None:
        """Update parameters with their gradients if these are finite, and count the step either way."""
        self.skipped += not finite
        with torch.no_grad():
            for parameter in parameters:
                if not finite:
                    parameter.grad = None
                elif parameter.grad is not None:
                    self._inner.update(parameter, parameter.grad)
        # A skipped step counts, too: in partial mode other ranks have made it, and schedules must stay equal.
        self._inner.step()

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over the ranks, with one collective per type and device.

        Raises:
            NonFiniteError: on every rank, if a mean is not finite; all tensors are kept then.
        """
        named = {str(i): tensor for i, tensor in enumerate(tensors)}
        if not named:
            return
        exchange = TensorExchange(_plain(), self._driver, waits=True, bucket_bytes=sys.maxsize)
        means = exchange.average(named)
        exchange.close()
        # All means before any is written: one that is bad must leave every tensor as it was.
        if not exchange.finite:
            raise not_finite("parameters")
        with self._followed(named.values()), torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(means[name])

    def _followed(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Let the copies that an optimizer keeps of tensors, such as master weights, move as these do."""
        return Copies(self.opt if isinstance(self.opt, torch.optim.Optimizer) else ()).follow(tensors)

    def _fused(self, given: Iterable[Tensor], send: bool, how: Method) -> None:
        tensors = [*given]  # `model.parameters()` can be gone through once
        # With what is held, or a buffer of two types could never be sent.
        _check([*self._buffered, *tensors])
        if not send:
            # copies: the caller may reuse its tensors before they are sent
            self._buffered += [tensor.detach().reshape(-1).clone() for tensor in tensors]
            return
        wanted, found = sum(t.numel() for t in tensors), sum(t.numel() for t in self._buffered)
        if self._buffered and wanted != found:
            advice = "push each tensor with send=False first, then all of them with send=True"
            raise bad_value("tensors", f"must hold the {found} elements of the buffer", wanted, advice)
        if tensors:
            self._reduce(tensors, how, source=self._buffered)
        self._buffered = []  # only now: a call that is refused loses nothing

    def _sum(self, targets: Sequence[Tensor], how: Method, accumulation: Tensor | None = None) -> None:
        _check([*targets, *([] if accumulation is None else [accumulation])])
        if targets:
            self._reduce(targets, how, accumulation)

    @torch.no_grad()
    def _reduce(
        self,
        targets: Sequence[Tensor],
        how: Method,
        accumulation: Tensor | None = None,
        *,
        source: Sequence[Tensor] = (),
    ) -> None:
        """Write the sum over the ranks of the source, or of the targets, to the targets."""
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
        # It relies on `waits=True` in `_exchange`: only then does a dense exchange add up (`Lane.sums`).
        adds = how == _plain()  # unless divided first, the average is the sum
        exchange.lend(0, flat if adds else flat.mul_(exchange.scale(0)))
        exchange.submit(0)
        (total,) = exchange.finish().result().averages
        if not adds:
            total.mul_(self.world_size)  # exchanges give averages
        for target, piece in zip(targets, total.split(bucket.numels), strict=True):
            target.copy_(piece.view(target.shape))
        if accumulation is not None:
            accumulation.copy_(exchange.state_of(0)["residual"].view(accumulation.shape))

    def _exchange(self, how: Method, bucket: Bucket) -> TensorExchange:
        """Return the exchange of such tensors by a method; the newest are kept."""
        self._driver.check_groupless()
        key = how.text, bucket
        exchange = self._exchanges.pop(key, None)
        if exchange is None:
            exchange = TensorExchange(how, self._driver, waits=True)
            exchange.arrange([bucket])
        self._exchanges[key] = exchange  # to the end: the first is then the one unused for longest
        if len(self._exchanges) > _MOST_EXCHANGES:
            self._exchanges.pop(next(iter(self._exchanges))).close()
        return exchange


def _inner(optimizer: Any) -> Optimizer | TorchOptimizer:
    """Return an optimizer with the methods that `DistOpt` calls.

    Raises:
        TypeError: optimizer is neither SINGA's nor PyTorch's.
        ConfigError: it is an LBFGS, which computes gradients several times per step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("opt must use gradients once per step, got LBFGS: use SGD, Adam, ...")
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise TypeError(
        f"opt must be an optimizer of stenograd.singa or torch.optim, got {optimizer!r}: use SGD(lr=0.1)"
    )


def _plain() -> Method:
    """Return the method of `backward_and_update`: every element in its own precision."""
    return Method(compressor=Identity())


def _rounded(clip: float | None = None) -> Method:
    """Return the method of `backward_and_update_half`: every element in float16.

    Values are clamped to [-clip, clip], unless clip is None, and divided by the world size before they are
    summed; SINGA sums first, which overflows beyond 65,504.

    Raises:
        ConfigError: clip is not positive and finite.
    """
    if clip is not None:
        clip = float(number("clip_Value", clip, "use 100, or clipping=False", above=0))
    return Method(compressor=Cast(dtype="float16"), clip_value=clip)


def _sparse(spars: float, topK: bool, corr: bool) -> Method:
    """Return the method of `backward_and_sparse_update`: few elements, with error feedback if corr.

    With topK it sends the share `spars` of the largest elements, otherwise those of at least `spars`.

    Raises:
        ConfigError: spars is outside (0, 1] for top-k, or not positive and finite for a threshold.

    Example:
        >>> _sparse(0.05, topK=False, corr=False).compressor
        Threshold(value=0.05)
    """
    if topK and not 0 < spars <= 1:
        raise bad_value("spars", "must be in (0, 1] with topK=True", spars, "use 0.01 to send 1 %")
    number("spars", spars, "give a typical gradient magnitude, such as 0.001", above=0)
    # float32 is exact: 40.6 bits per element at 1 %, index included, where SINGA sends 64. And one all-gather
    # sends each rank's own top elements on any number of ranks, as SINGA does.
    how = "topk:values=float32,reduce=gather,ratio" if topK else "threshold:value"
    return method(f"{how}={float(spars)},feedback={corr}")


def _check(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that cannot be summed in place."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a tensor, got {type(tensor).__name__}: pass tensors")
        require_floating(tensor)
        if not tensor.is_contiguous():
            advice = "call contiguous() and use the result"
            raise bad_value("tensor", "must be contiguous", f"strides {tensor.stride()}", advice)
        if not is_current(tensor.device):
            advice = "move it with .to(device)"
            raise bad_value("tensor", "must be on the group's device", str(tensor.device), advice)
    if len({(t.dtype, t.device) for t in tensors}) > 1:
        kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        raise bad_value("tensors", "must have one type and device", kinds, "sum them in separate calls")


def _one(name: str, *given: int | None) -> int | None:
    """Return the value given under any of an argument's names; values given under several must be equal."""
    values = [value for value in given if value is not None]
    if any(value != values[0] for value in values):
        raise ConfigError(f"{name} and its older name must be equal, got {values}: give one of them")
    return values[0] if values else None
