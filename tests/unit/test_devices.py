"""Devices: where tensors travel from, who waits for whom, and what is asked of CUDA; without a CUDA device.

"meta" stands for a device that only NCCL reaches: what lies there was handed to it, and cannot be read.
"""

import ast
import contextlib
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import stenograd
from stenograd import devices
from stenograd.catalog.method import method
from stenograd.compression.contract import Site
from stenograd.compression.feedback import EF21
from stenograd.compressors.sign import Sign
from stenograd.devices import Carriers, Streams
from stenograd.errors import ConfigError, PeerLost, StenogradError
from stenograd.sync import mixing
from stenograd.sync.handshake import broadcast_tensors
from stenograd.sync.mixing import Estimates, codec_of
from stenograd.sync.replica_guard import ReplicaGuard
from stenograd.tracing import Tracer, clock_offsets
from stenograd.wire.agreement import agree, everyone, sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.finite import are_finite
from stenograd.wire.requests import Op, Request, exchange, gather, mean, scatter

PACKAGE = Path(stenograd.__file__).parent
META = torch.device("meta")
CUDA = torch.device("cuda", 1)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backends", "device", "travels_from"),
    [
        ("cpu:gloo,cuda:nccl", CPU, CPU),
        ("cpu:gloo,cuda:nccl", CUDA, CUDA),
        ("cpu:gloo,cuda:nccl", torch.device("mps"), CPU),
        ("cpu:gloo,cuda:gloo,xpu:gloo", CUDA, CPU),  # what "gloo" alone is
        ("cpu:mpi,cuda:mpi", CUDA, CPU),
        ("cuda:nccl", CPU, CUDA),
        ("cuda:nccl", torch.device("cuda", 0), torch.device("cuda", 0)),
        (None, CUDA, CUDA),
    ],
)
def test_a_tensor_travels_from_where_the_group_has_a_backend(backends, device, travels_from):
    assert Carriers(backends, bound=CUDA).place(device) == travels_from


def test_the_device_of_a_group_of_nccl_alone_has_its_number(monkeypatch):
    """A thread that starts later has device 0 as its current one, whatever the program has set."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Carriers("cuda:nccl").place(CPU) == torch.device("cuda", 3)


@pytest.fixture
def group(monkeypatch):
    """Return what makes a driver of rank 0 of 3, whose backends are as told; nobody else is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)

    def make(backends):
        monkeypatch.setattr(dist, "get_backend_config", lambda _: backends)
        monkeypatch.setattr(Carriers, "__init__", _bound_to_meta)
        return Driver()

    yield make
    dist.destroy_process_group()


_init = Carriers.__init__


def _bound_to_meta(self, backends, bound=None):
    _init(self, backends, META)


class Work:
    """A collective that has ended, and notes how it was waited for."""

    def __init__(self):
        self.waits = []

    def wait(self, *timeout):
        self.waits.append((threading.get_ident(), *timeout))


def _handed(driver, monkeypatch):
    """Let a driver's collectives end at once; return where it puts what it hands to the backend."""
    handed = []

    def note(kind):
        def begin(*args):
            work = Work()
            handed.append((kind, next(a for a in args if isinstance(a, torch.Tensor)).device, work))
            return work

        return begin

    for name in ("_transmit", "_transmit_to", "_transmit_from"):
        monkeypatch.setattr(driver, name, note(name))
    return handed


ASKED = {
    "agree": lambda driver: agree(driver, lambda: None),
    "everyone": lambda driver: everyone(driver, "text"),
    "sum": lambda driver: sum_over_ranks(driver, [1.0]),
    "clocks": clock_offsets,
    "broadcast": lambda driver: broadcast_tensors(driver, [torch.ones(2, dtype=torch.int16)]),
    "broadcast of complex numbers": lambda driver: driver.broadcast(torch.ones(2, dtype=torch.complex64)),
    "gather": lambda driver: driver.run(gather(torch.ones(1))),
    "scatter": lambda driver: driver.run(scatter(torch.ones(3, 1))),
    "mean": lambda driver: driver.run(mean(torch.ones(2))),
    "exchange": lambda driver: driver.run(exchange([torch.ones(2)], [1, 2])),
    "guard": lambda driver: ReplicaGuard(nn.Linear(1, 1), driver).check(),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("backends", ["meta:nccl", "cpu:gloo,meta:nccl"])
def test_messages_from_the_cpu_go_by_what_the_group_has(asked, backends, group, monkeypatch):
    """NCCL takes no CPU tensor. Zeros are all that comes, and reading them fails in some way of its own."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # memory may hold a length of gigabytes
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    driver = group(backends)
    handed = _handed(driver, monkeypatch)
    with contextlib.suppress(Exception):
        ASKED[asked](driver)
    assert handed
    assert {device for _, device, _ in handed} == {META if backends == "meta:nccl" else CPU}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(("device", "waits_within"), [(META, False), (CPU, True)])
def test_a_stream_waits_for_nccl_and_the_host_for_gloo(device, waits_within, traced, group, monkeypatch):
    """NCCL's work makes the stream wait of the thread that asks, if no timeout is given: in a trace, too."""
    driver = group("cpu:gloo,meta:nccl")
    driver.tracer = Tracer() if traced else None
    handed = _handed(driver, monkeypatch)
    driver.start(Request(Op.SUM, (torch.ones(2, device=device),))).wait()
    ((_, _, work),) = handed
    ((thread, *timeout),) = work.waits
    if waits_within and traced:  # a thread of the trace follows it, and is waited for
        assert thread != threading.get_ident()
    else:
        assert thread == threading.get_ident()
        assert timeout == ([timedelta(seconds=300)] if waits_within else [])


def test_ranks_meet_on_their_devices_before_any_two_of_them(group, monkeypatch):
    """In an odd world one rank has no partner, and NCCL wants all ranks in a group's first call."""
    driver = group("cpu:gloo,meta:nccl")
    handed = _handed(driver, monkeypatch)
    for device in (CPU, META, META):
        driver.start(Request(Op.EXCHANGE, (torch.ones(2, device=device),))).wait()
    assert [kind for kind, *_ in handed] == ["_transmit"]
    driver.start(Request(Op.EXCHANGE, (torch.ones(2, device=META),), peers=(1,))).wait()
    assert [kind for kind, *_ in handed] == ["_transmit", "_transmit_to"]
    assert driver.traffic.moved_bytes == 8  # the meeting is no part of training


def test_lost_ranks_are_dropped_only_where_a_loss_is_an_error(group):
    both = group("cpu:gloo,meta:nccl")
    both.stay_in_memory()
    assert both._carriers.place(META) == CPU
    with pytest.raises(ConfigError, match="without a backend for CPU tensors"):
        group("meta:nccl").stay_in_memory()


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        (dist.DistBackendError, "NCCL error: remote process exited or there was a network error", True),
        (dist.DistBackendError, "NCCL error: invalid usage. Duplicate GPU detected : rank 1 and 0", False),
        (torch.OutOfMemoryError, "CUDA out of memory while it connects to its peer", False),
        (RuntimeError, "Expected all tensors to be on the same device", False),
    ],
)
def test_only_a_lost_peer_is_called_so(kind, text, lost, group, monkeypatch):
    driver = group("cpu:gloo,meta:nccl")
    driver.timeout_s = 0.1

    def fail(*_):
        raise kind(text)

    monkeypatch.setattr(driver, "_transmit", fail)
    with pytest.raises(PeerLost if lost else kind, match=text[:20]):
        driver.run(mean(torch.ones(2, device=META)))


class Cuda:
    """Stands for `torch.cuda`: streams note what waits for what, and each device has a current one."""

    def __init__(self):
        self.current = {}
        self.log = []

    def patch(self, monkeypatch):
        for name in ("Stream", "current_stream", "stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def Stream(self, device):
        return _Stream(self, f"side {device}", device)

    def current_stream(self, device):
        return self.current.get(device) or _Stream(self, f"caller {device}", device)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current.get(stream.device)
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before

    def Event(self):
        return _Event()


class _Stream:
    def __init__(self, cuda, name, device):
        self.cuda, self.name, self.device = cuda, name, device

    def wait_stream(self, other):
        self.cuda.log.append((self.name, other.name))

    def wait_event(self, event):
        self.cuda.log.append((self.name, event.of))


class _Event:
    def record(self, stream):
        self.of = f"event of {stream.name}"


class _Average:
    device = torch.device("cuda", 0)

    def __init__(self):
        self.used_on = []

    def record_stream(self, stream):
        self.used_on.append(stream.name)


def test_work_goes_to_side_streams_and_the_caller_waits_for_all_of_them(monkeypatch):
    """A bucket on device 0 may go on with another on device 1: there, too, not on the thread's own stream."""
    cuda, streams = Cuda().patch(monkeypatch), Streams()
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    for device in (one, other, CPU, one):
        streams.add(device)
    with streams.working(one, devices.record(one)):
        assert [cuda.current_stream(d).name for d in (one, other)] == ["side cuda:0", "side cuda:1"]
    assert [cuda.current_stream(d).name for d in (one, other)] == ["caller cuda:0", "caller cuda:1"]
    assert cuda.log == [("side cuda:0", "event of caller cuda:0")]
    average = _Average()
    streams.join([average, torch.ones(1)])
    assert cuda.log[1:] == [("caller cuda:0", "side cuda:0"), ("caller cuda:1", "side cuda:1")]
    assert average.used_on == ["caller cuda:0"]


def test_on_the_cpu_there_is_nothing_to_wait_for():
    streams = Streams()
    streams.add(CPU)
    with streams.working(CPU, devices.record(CPU)):
        pass
    streams.join([torch.ones(1)])


def test_a_captured_backward_pass_is_refused_by_name(monkeypatch):
    model = nn.Linear(2, 1)
    with stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(StenogradError, match="cannot be captured as a CUDA graph"):
            model(torch.ones(1, 2)).sum().backward()
        monkeypatch.undo()


def test_estimates_that_were_loaded_follow_the_parameters_to_their_device(monkeypatch):
    """Computing with tensors of the CPU and of "meta" together is an error, and so it is with a GPU's."""
    monkeypatch.setattr(mixing, "is_finite", lambda _: True)
    saved = Estimates(codec_of(method("bf16")), 1.0)
    saved.anchor("0.0", [torch.empty(8, device="cpu")], [0, 1])
    loaded = Estimates(codec_of(method("bf16")), 1.0)
    loaded.load_state_dict(saved.state_dict())
    x = torch.empty(8, device=META)
    site = Site(shapes=(), rank=0, world_size=2, device=META)
    request = next(loaded.mix("0.0", [x], {0: 0.5, 1: 0.5}, site))
    assert {t.device for t in request.tensors} == {META}


def test_what_ef21_has_begun_is_known_without_asking_the_device():
    """On "meta" nothing can be read."""
    x = torch.empty(6, device=META)
    site = Site(shapes=(x.shape,), device=META)
    how = EF21(inner=Sign())
    state = how.init(x, site)
    for begun in (0.0, 1.0):
        state["ef21_begun/0"].fill_(begun)
        request = next(how.exchange(x, None, state, site))
        assert {t.device for t in request.tensors} == {META}


class _Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the CPU."""

    is_cpu = False


class _Reads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.Tensor, _Elsewhere])
@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_many_tensors_are_looked_at_together(kind, bad):
    """3e38 + 3e38 is beyond float32, and a tensor of float16 or float64 is looked at in its own type."""
    tensors = [torch.full((3,), 3e38), torch.empty(0), torch.full((2,), 6e4, dtype=torch.float16)]
    tensors += [torch.full((2,), 1e300, dtype=torch.float64), torch.ones(4)]
    if bad is not None:
        tensors[-1][2] = bad
    with _Reads() as reads:
        assert are_finite([t.as_subclass(kind) for t in tensors]) == (bad is None)
    assert kind is torch.Tensor or reads.count == 1


def test_a_guard_reads_all_hashes_at_once():
    """As often for 40 parameters as for 4."""
    counts = []
    for layers in (2, 20):
        guard = ReplicaGuard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
        guard.check()
        with _Reads() as reads:
            guard.check()
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_one_file_knows_of_cuda():
    """Kernels apart, which are written for one kind of device each."""
    asking = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            cuda = isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.xpu")
            named = isinstance(node, ast.Call) and ast.unparse(node).startswith("torch.device('cuda'")
            if cuda or named:
                asking.add(str(path.relative_to(PACKAGE)))
    assert {name for name in asking if not name.startswith("kernels/")} == {"devices.py"}
