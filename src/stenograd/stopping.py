"""Requests to stop: signals that batch systems send before they end a job, noted until the ranks agree."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

from stenograd.errors import ConfigError, StenogradError, bad_value

__all__ = ["SAME_S", "STOPPED", "StopOn", "alone", "requested", "stop_on", "watches"]

# Exit status of a training that has saved and leaves. EX_TEMPFAIL of sysexits.h: a failure that another
# attempt mends. No shell, Python or signal ends a program by it, so batch systems can requeue on it.
STOPPED = 75

SAME_S = 5.0  # a launcher passes on what the whole process group gets: the second one is no second request
_BLOCKS = hasattr(signal, "pthread_sigmask")  # not on Windows

# Replaced, never changed: a handler may run in the middle of a loop over it.
_active: tuple[StopOn, ...] = ()
_undo: list[Callable[[], None]] = []  # gives DataLoader back as it was
_forks = False  # whether forked children forget


class StopOn:
    """Signals that ask this process to stop; made by `stop_on`. A context manager, which ends by `close()`.

    Attributes:
        status: 75, by which a program exits that has saved and leaves (EX_TEMPFAIL: try again).
        signals: that count as a request.
        requested_at: `time.monotonic()` of the first request; None while there is none.
    """

    status = STOPPED

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        global _active, _forks
        self.signals = tuple(dict.fromkeys(signals))
        self.requested_at: float | None = None
        self._seen: dict[int, float] = {}
        _check_thread()
        # Before `_active` has this one: loaders are changed for the first only.
        _spare_workers()
        if not _forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_forget)
            _forks = True
        self._earlier: dict[int, Any] = {}
        _active = (*_active, self)
        for number in self.signals:
            # Noted first: a signal may come as soon as ours is in place.
            self._earlier[number] = signal.getsignal(number)
            signal.signal(number, self._note)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop, by a signal or by `request()`."""
        return self.requested_at is not None

    def request(self) -> None:
        """Ask, as the first signal does; the other ranks hear of it as of a signal."""
        self.requested_at = time.monotonic() if self.requested_at is None else self.requested_at

    def close(self) -> None:
        """Give the signals back to the earlier handlers, and forget the request; safe to call twice.

        Raises:
            StenogradError: this is not the main thread.
        """
        global _active
        if self not in _active:
            return
        _check_thread()
        # Compared by `==`, because each access to `_note` makes another bound method.
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._note:  # else whoever came later keeps it
                signal.signal(number, _usable(number, earlier))
        _active = tuple(other for other in _active if other is not self)
        self.requested_at = None
        if not _active:
            while _undo:
                _undo.pop()()

    def __enter__(self) -> StopOn:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note a request, and let an earlier handler have it; the second one is for that alone."""
        now, earlier = time.monotonic(), _usable(number, self._earlier[number])
        again = now - self._seen.setdefault(number, now) > SAME_S
        # One that has ended may be called by a handler that was put over it.
        if again or self not in _active:
            signal.signal(number, earlier)
            # Raised again, because the default action is nothing that could be called.
            signal.raise_signal(number)
            return
        self.request()
        # Python's own for SIGINT would raise in the middle of a step.
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


def stop_on(*signals: int) -> StopOn:
    """Let signals ask all ranks to stop, at the same step: `sync.stopping` turns true there.

    The first signal is only noted, whatever the program does just then. With its next exchange this rank
    tells the others, so that on all ranks `sync.stopping` turns true after the same step, and all can save
    and leave: `sys.exit(stop.status)`, where `stop` is what this returns. An earlier Python handler of the
    signal is called, too. A second signal, more than 5 seconds after the first, does what it did before this
    call; by default it ends the process, even one that hangs.

    Workers of a `DataLoader` that are started afterwards outlive these signals, which a batch system may send
    to all processes of the job, until their loader ends them. Other processes that the program forks heed
    signals as without this call.

    Call it in the main thread of every rank, before `stenograd.distribute` or `stenograd.ddp.register`.

    Args:
        signals: numbers, such as `signal.SIGUSR1`; none for SIGTERM.

    Returns:
        What tells whether there was a request, makes one (`request()`), and undoes all of this (`close()`, or
        the end of a `with` block).

    Raises:
        ConfigError: a signal does not exist, or cannot be handled.
        StenogradError: this is not the main thread.

    Example:
        >>> import torch, stenograd
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with stenograd.stop_on() as stop, stenograd.distribute(model, optimizer) as sync:
        ...     for step in range(10):
        ...         model(torch.ones(8, 4)).sum().backward()
        ...         optimizer.step()
        ...         if step == 3:
        ...             signal.raise_signal(signal.SIGTERM)
        ...         if sync.stopping:
        ...             break
        >>> step
        4
    """
    return StopOn(map(_checked, signals or (signal.SIGTERM,)))


def requested() -> bool:
    """Return whether this process was asked to stop."""
    return any(one.requested_at is not None for one in _active)


def watches() -> bool:
    """Return whether this process may be asked to stop by a signal."""
    return bool(_active)


def alone() -> Callable[[], None]:
    """Let signals be requests and nothing else, where a framework has put handlers before ours.

    Returns:
        What gives the signals back to the handlers that they have now.
    """
    before = {number: signal.getsignal(number) for one in _active for number in one.signals}
    ours = {number: one._note for one in _active for number in one.signals}
    for number, note in ours.items():
        signal.signal(number, note)

    def undo() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) == ours[number]:
                signal.signal(number, _usable(number, handler))

    return undo


def _checked(number: int) -> signal.Signals:
    try:
        found = signal.Signals(number)
    except ValueError:
        raise bad_value(
            "signals", "must be numbers of signals", number, "use signal.SIGTERM", ConfigError
        ) from None
    if found.name in ("SIGKILL", "SIGSTOP"):
        raise bad_value("signals", "must be some that can be handled", found.name, "use SIGTERM", ConfigError)
    return found


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise StenogradError(
            "only the main thread may handle signals: call stop_on(), and close what it returns, there"
        )


def _usable(number: int, handler: Any) -> Any:
    """Return an earlier handler, or what it had found itself if it is of a `StopOn` that has ended."""
    one = getattr(handler, "__self__", None)
    if isinstance(one, StopOn) and one not in _active and handler == one._note:
        return _usable(number, one._earlier[number])
    return signal.SIG_DFL if handler is None else handler  # None: installed by C code


def _forget() -> None:
    """Let a forked child heed signals as its parent did before."""
    global _active
    # Newest first: of two that handle one signal, the older finds its own handler once the newer is gone.
    for one in reversed(_active):
        for number, earlier in one._earlier.items():
            if signal.getsignal(number) == one._note:
                signal.signal(number, _usable(number, earlier))
    _active = ()


def _spare_workers() -> None:
    """Let DataLoaders' workers outlive these signals; on Windows there are none that reach them."""
    if _active or not _BLOCKS:
        return
    from torch.utils.data import dataloader  # here: the parent of local ranks starts without torch

    kind: Any = dataloader._MultiProcessingDataLoaderIter
    plain = kind.__init__

    @functools.wraps(plain)
    def begun(self: Any, loader: Any) -> None:
        """Start workers with the signals blocked, which `_Spared` then ignores."""
        signals = tuple({number for one in _active for number in one.signals})
        own, method = loader.worker_init_fn, getattr(loader.multiprocessing_context, "_name", None)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            _start_helpers(method)
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # Python's helpers unblock SIGTERM
            loader.worker_init_fn = _Spared(own, signals)
            plain(self, loader)
            # `terminate` sends SIGTERM, which may be one of the signals that do nothing there.
            for worker in self._workers:
                worker._popen.terminate = partial(_end, weakref.ref(self), worker._popen)
        finally:
            loader.worker_init_fn = own
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    kind.__init__ = begun
    _undo.append(lambda: setattr(kind, "__init__", plain))


def _start_helpers(method: str | None) -> None:
    """Start what Python starts with the first process that is not forked."""
    import multiprocessing

    if (method or multiprocessing.get_start_method()) != "fork":
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()


class _Spared:
    """Begins a DataLoader's worker: signals to stop do nothing there.

    A function in their place, because programs that a worker starts would inherit that they are ignored, or
    blocked. torch's own handler heeds the parent only, and ends the process else.
    """

    def __init__(self, own: Callable[[int], None] | None, signals: tuple[int, ...]) -> None:
        self._own, self._signals = own, signals

    def __call__(self, worker: int) -> None:
        for number in self._signals:
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if self._own is not None:
            self._own(worker)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def _end(loading: weakref.ref[Any], process: Any) -> None:
    """End a worker for its parent, which SIGTERM cannot; torch would take that for an accident."""
    from torch._C import _remove_worker_pids

    running = loading()
    if running is not None and running._worker_pids_set:
        _remove_worker_pids(id(running))
        running._worker_pids_set = False
    process.kill()
