"""Devices: which of them a group's backends reach, side streams, who waits for whom, and all else about CUDA.

gloo moves bytes in the CPU's memory, and the host waits for them. NCCL and its like queue collectives on the
device, and a stream waits. Which of the two a tensor meets depends on where it lies and on the group's
backends, of which a group may have several ("cpu:gloo,cuda:nccl").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import StenogradError

__all__ = [
    "Carriers",
    "Streams",
    "bring",
    "count",
    "cuda_devices",
    "future_on",
    "is_current",
    "local_device",
    "name_all",
    "put",
    "random_state",
    "record",
    "refuse_capture",
    "restore_random_state",
    "synchronize",
    "use",
]

_IN_MEMORY = ("gloo", "mpi")  # they take the CPU's tensors; of gloo, messages between two ranks take no other
_NOTHING = nullcontext()


class Carriers:
    """Where a tensor must lie to travel in a group.

    A tensor travels from where it lies if the group has a backend for that device which queues collectives on
    it, and otherwise from a copy: in the CPU's memory, or, where the group has nothing for that (a group of
    "nccl" alone), on this process's device. So a model on a device without a backend of its own is trained
    through gloo, and messages of control need no place of their own.

    Args:
        backends: "device:backend" with commas between, as `torch.distributed.get_backend_config` tells; None
            where there is no group, so that nothing travels.
        bound: the device that the program has bound its groups to; None for the current one.

    Example:
        >>> cuda = torch.device("cuda", 0)
        >>> gloo, both = Carriers("cpu:gloo,cuda:gloo"), Carriers("cpu:gloo,cuda:nccl")
        >>> gloo.place(cuda), both.place(cuda), both.place(torch.device("cpu"))
        (device(type='cpu'), device(type='cuda', index=0), device(type='cpu'))
        >>> Carriers("cuda:nccl", bound=cuda).place(torch.device("cpu"))
        device(type='cuda', index=0)
    """

    def __init__(self, backends: str | None, bound: torch.device | None = None) -> None:
        pairs = [pair.split(":") for pair in backends.split(",")] if backends else []
        self._kinds = {kind for kind, backend in pairs if kind == "cpu" or backend not in _IN_MEMORY}
        self._anywhere = not pairs
        self._other = torch.device("cpu")
        if self._kinds and "cpu" not in self._kinds:
            kind = next(kind for kind, _ in pairs if kind in self._kinds)
            # With its number, since a thread that starts later has device 0 as its current one.
            self._other = bound or torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def reach_memory(self) -> bool:
        """Whether tensors can travel from the CPU's memory."""
        return self._anywhere or self._other.type == "cpu"

    def place(self, device: torch.device) -> torch.device:
        """Return where a tensor of this device lies while it travels."""
        return device if self._anywhere or device.type in self._kinds else self._other

    def aboard(self, t: Tensor) -> Tensor:
        """Return a tensor as it travels: itself, or a copy elsewhere."""
        return t if self._anywhere or t.device.type in self._kinds else t.to(self._other)

    def in_memory(self) -> Carriers:
        """Return the same for a group whose messages shall all travel from the CPU's memory."""
        return Carriers("cpu:gloo") if not self._anywhere else self


class Streams:
    """A side stream for each CUDA device, so that an exchange runs beside what the caller computes.

    Work goes there in `working`, after what the caller's stream has done by then. `join` lets the caller's
    stream wait for it. On other devices nothing happens.
    """

    def __init__(self) -> None:
        self._of: dict[torch.device, Any] = {}

    def add(self, device: torch.device) -> None:
        """Have a side stream on a device."""
        if device.type == "cuda" and device not in self._of:
            self._of[device] = torch.cuda.Stream(device)

    def working(self, device: torch.device, ready: Any = None) -> AbstractContextManager[Any]:
        """Return a context whose work goes to the side streams, on `device` after the event `ready`.

        Without autocast, in which the caller may be: what is sent must not depend on that.
        """
        return self._entered(device, ready) if self._of else _as_written(device)

    def join(self, handed: Iterable[Tensor] = ()) -> None:
        """Make the caller's streams wait for all side streams, whose tensors `handed` it may use then."""
        for device, stream in self._of.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for t in handed if self._of else ():
            if t.device in self._of:
                # Else the side stream may overwrite the memory of one that is dropped, before it was read.
                t.record_stream(torch.cuda.current_stream(t.device))

    @contextmanager
    def _entered(self, device: torch.device, ready: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_as_written(device))
            # All of them: what other buckets go on with meanwhile may lie on other devices.
            for other, stream in self._of.items():
                if other != device:
                    stack.enter_context(torch.cuda.stream(stream))
            if (own := self._of.get(device)) is not None:  # last, so that its device is the current one
                stack.enter_context(torch.cuda.stream(own))
                if ready is not None:
                    own.wait_event(ready)
            yield


def _as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device computes in the types that the code says, without autocast."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def record(device: torch.device) -> Any:
    """Return an event that tells how far the caller's CUDA stream is by now; None on other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def put(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of a few numbers, without waiting for the device that it goes to.

    Example:
        >>> put([1.0, 0.0], torch.float32, torch.device("cpu"))
        tensor([1., 0.])
    """
    return bring(torch.tensor(values, dtype=dtype, device="cpu"), device)


def bring(t: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor from the CPU's memory to a device, without waiting for the device.

    Example:
        >>> bring(torch.ones(1), torch.device("cpu"))
        tensor([1.])
    """
    if device.type == "cuda":
        # From memory that is not pinned, the host would wait until the copy, and all before it, is done.
        # The pinned copy may go out of scope: torch's allocator keeps it until the transfer is done.
        t = t.pin_memory()
    return t.to(device, non_blocking=True)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait until the caller's streams have written tensors, so that other threads' streams may read them."""
    for device in {t.device for t in tensors if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return a future for a tensor, whose waiters' streams wait for those on which it is set."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def refuse_capture() -> None:
    """Refuse to exchange while the caller's stream is being captured as a CUDA graph.

    Raises:
        StenogradError: it is: a replayed graph would exchange nothing, and wait for nobody.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise StenogradError(
            "a backward pass that exchanges gradients cannot be captured as a CUDA graph: what is sent is "
            "decided on the host in each step. Capture the forward pass and the loss only "
            "(torch.cuda.make_graphed_callables on parts of the model, before distribute), or use "
            "torch.compile without mode='reduce-overhead'"
        )


def count() -> int:
    """Return how many CUDA devices this process sees."""
    return torch.cuda.device_count()


def name_all() -> list[str]:
    """Return the names of the CUDA devices that this process sees."""
    return [torch.cuda.get_device_name(i) for i in range(count())]


def local_device(local_rank: int) -> torch.device:
    """Return the CUDA device of a rank, by its number on its host; they take turns where there are fewer.

    Example:
        >>> local_device(0)
        device(type='cuda', index=0)
    """
    return torch.device("cuda", local_rank % max(1, count()))


def use(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread."""
    torch.cuda.set_device(device)


def is_current(device: torch.device) -> bool:
    """Return whether a device is the CPU or this thread's current CUDA device.

    Example:
        >>> is_current(torch.device("cpu")), is_current(torch.device("meta"))
        (True, False)
    """
    return device.type == "cpu" or (
        device.type == "cuda" and device.index in (None, torch.cuda.current_device())
    )


def cuda_devices(tensors: Iterable[Tensor]) -> list[int]:
    """Return the numbers of the CUDA devices on which tensors lie, ascending.

    Example:
        >>> cuda_devices([torch.ones(1)])
        []
    """
    return sorted({t.device.index or 0 for t in tensors if t.is_cuda})


def random_state() -> dict[str, Any]:
    """Return the states of PyTorch's random generators: the CPU's, and all of CUDA if it is in use."""
    # Asking would start CUDA in a process that does not use it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Take what `random_state` returned; what is of CUDA only where there are as many devices."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
