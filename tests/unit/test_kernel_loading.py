"""After `load_kernels` nothing is left to load: a step makes no kernel that was not there before it."""

import subprocess
import sys

import pytest
import torch

from stenograd.catalog.method import method, methods
from stenograd.compressors.topk import TopK
from stenograd.exchange import kernel_loading as warming
from stenograd.exchange.kernel_loading import load_kernels
from stenograd.kernels import backend
from stenograd.simulate import exchange

TEXTS = [
    *methods(),
    "topk:ratio=0.001,values=int8,dense_below=500",
    "topk:ratio=0.3,compact=false,feedback=false,warmup_steps=1",
    "topk:reduce=regions,clip_norm=1",
    "topk:chunk=64,values=int2,feedback_decay=0.9",
    "topk:feedback=ef21",
    "topk:ratio=0.001,ramp_steps=1",
    "powersgd:alternate=true",
    "lowbit:format=int4,feedback=loco",
    "terngrad:clip=2.5,feedback=true",
    "sign:majority=true,dense_below=1",
    "qsgd:bits=2,feedback=true,dense_below=300",
    "powersgd:rank=190,feedback=false",
]
BUCKETS = ([(700, 350), (3,)], [(2,), (1,)], [(13,), (64, 64), (2000,)])


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Kernels as in a new process: none is loaded, though some are on disk."""

    def forget():
        for name in [name for name in sys.modules if name.startswith("stenograd.kernels.cpu.")]:
            monkeypatch.delitem(sys.modules, name)
        backend._load.cache_clear()
        monkeypatch.setattr(warming, "_loaded", set())

    yield forget
    monkeypatch.undo()
    backend._load.cache_clear()


def loaded():
    """Every kernel with the kinds of arguments that it was compiled for."""
    modules = [module for name, module in sys.modules.items() if name.startswith("stenograd.kernels.cpu.")]
    kernels = [k for module in modules for k in vars(module).values() if hasattr(k, "signatures")]
    return {(kernel.py_func.__qualname__, str(kind)) for kernel in kernels for kind in kernel.signatures}


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
@pytest.mark.parametrize("text", TEXTS)
def test_a_step_loads_no_kernel(fresh_kernels, text, world_size):
    """Two phases begin at 4 ranks, the sparse all-reduce at 5; buckets are large, tiny and mixed."""
    fresh_kernels()
    how, generator = method(text), torch.Generator().manual_seed(1)
    load_kernels(how, world_size, [torch.zeros(1)])
    before = loaded()
    with_kernels = ("topk", "sign", "qsgd", "lowbit", "powersgd", "dgc", "dion", "terngrad", "threshold")
    assert bool(before) == any(text.startswith(m) for m in with_kernels)
    for shapes in BUCKETS:
        states, numel = None, sum(torch.Size(shape).numel() for shape in shapes)
        for step, density in enumerate((1, 0.001)):
            kept = torch.rand(world_size, numel, generator=generator) < density
            xs = list(torch.randn(world_size, numel, generator=generator) * kept)
            exchanges = exchange(how.compressor, xs, states, shapes=shapes, step=step)
            states = [e.state for e in exchanges]
    assert loaded() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", ["topk:feedback=false", "sign", "qsgd", "powersgd"])
def test_neither_does_one_of_another_dtype(fresh_kernels, text, dtype):
    fresh_kernels()
    load_kernels(method(text), 6, [torch.zeros(1, dtype=dtype)])
    before = loaded()
    xs = [torch.randn(350, 700, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(6)]
    exchange(method(text).compressor, xs)
    assert loaded() == before


def test_hashing_loads_no_kernel_either(fresh_kernels):
    fresh_kernels()
    load_kernels(method("dense"), 2, [torch.zeros(1)], checks=True)
    assert {name for name, _ in loaded()} == {"_sum"}


def test_random_state_stays_and_unknown_compressors_are_left_alone():
    class Own(TopK):
        def exchange(self, *args, **options):
            raise AssertionError("nobody but the engine runs it")

    before = torch.random.get_rng_state()
    load_kernels(method("qsgd:feedback=true"), 4, [torch.zeros(1)])
    load_kernels(method(Own()), 4, [torch.zeros(1)])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_method_without_kernels_imports_no_numba():
    code = """
import sys, torch
from stenograd.catalog.method import method
from stenograd.exchange.kernel_loading import load_kernels
for text in ("dense", "fp16", "bf16", "randomk", "randomblock"):
    load_kernels(method(text), 4, [torch.zeros(1)])
load_kernels(method("topk"), 4, [])
load_kernels(method("topk"), 4, [torch.zeros(1, device="meta")])
sys.exit("numba" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
