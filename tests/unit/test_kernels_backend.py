"""Which version runs: lazily, as asked, and with one warning when numba is missing."""

import subprocess
import sys
import warnings

import numba.core.caching
import pytest
import torch

from stenograd.errors import ConfigError
from stenograd.kernels import backend, quantize, scatter, sign
from stenograd.kernels.backend import pick
from stenograd.kernels.cpu import jit as cpu_jit
from stenograd.kernels.quantize import qsgd_decode_mean
from stenograd.kernels.scatter import scatter_mean
from stenograd.kernels.select import select
from stenograd.kernels.sign import sign_decode_mean
from stenograd.kernels.values import pack_values

UNCOMPILED = """
import torch
from stenograd.compressors import TopK
from stenograd.kernels.backend import wanted
from stenograd.simulate import exchange
exchange(TopK(ratio=0.5), [torch.ones(4)])
print(wanted())
"""


@pytest.fixture
def _fresh():
    backend._numba_runs.cache_clear()
    yield
    backend._numba_runs.cache_clear()


def chosen(*tensors):
    fast = pick(pack_values, *tensors)
    return "plain" if fast is None else fast.__module__.removeprefix("stenograd.kernels.")


def test_float32_in_the_cpus_memory_goes_to_numba(monkeypatch):
    monkeypatch.delenv("STENOGRAD_KERNELS", raising=False)
    assert chosen(torch.zeros(3)) == "cpu.values"
    for other in (torch.zeros(3).double(), torch.zeros(6)[::2], torch.zeros(3, device="meta")):
        assert chosen(other) == "plain"
        assert chosen(torch.zeros(3), other) == "plain"


def test_the_environment_decides(monkeypatch):
    for asked, module in (("reference", "plain"), ("numba", "cpu.values"), ("", "cpu.values")):
        monkeypatch.setenv("STENOGRAD_KERNELS", asked)
        assert chosen(torch.zeros(3)) == module
    monkeypatch.setenv("STENOGRAD_KERNELS", "fast")
    with pytest.raises(ConfigError, match=r"STENOGRAD_KERNELS must be one of .* got 'fast'"):
        chosen(torch.zeros(3))


@pytest.mark.usefixtures("_fresh")
def test_without_numba_the_reference_runs_and_says_so_once(monkeypatch):
    monkeypatch.delenv("STENOGRAD_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it fails
    with pytest.warns(RuntimeWarning, match="numba is not installed: compression runs several times slower"):
        assert chosen(torch.zeros(3)) == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(torch.tensor([1.0, 2.0]), 1)[0].tolist() == [1]
    monkeypatch.setenv("STENOGRAD_KERNELS", "numba")
    with pytest.raises(ConfigError, match="STENOGRAD_KERNELS is 'numba', which cannot be used"):
        chosen(torch.zeros(3))


def test_where_numba_compiles_nothing_the_reference_runs(monkeypatch):
    """A program may want that for kernels of its own, to debug them; ours are not plain Python."""
    monkeypatch.delenv("STENOGRAD_KERNELS", raising=False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run([sys.executable, "-c", UNCOMPILED], check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("reference\n", "")


def test_kernels_run_where_no_cache_can_be_kept(monkeypatch):
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    @cpu_jit.kernel
    def double(a):
        return a + a

    assert double(21) == 42


def test_importing_stenograd_imports_no_numba():
    code = "import sys, stenograd, stenograd.kernels.sign; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("numel", [1 << 31, (1 << 31) + 1])
@pytest.mark.parametrize(
    "decode",
    [
        lambda payload, n: scatter_mean([payload], n),
        lambda payload, n: sign_decode_mean([payload], 1024, [n]),
        lambda payload, n: qsgd_decode_mean([payload], 4, 512, [n]),
    ],
)
def test_numba_makes_no_mean_whose_places_an_int32_cannot_hold(monkeypatch, decode, numel):
    """Without `out`, nothing of that length exists when the version is chosen; int32 places would wrap."""
    chosen = []

    def instead(*args, **options):
        chosen.append(pick(*args, **options))
        return lambda *_: torch.zeros(0)  # allocates nothing of that length

    for family in (quantize, scatter, sign):
        monkeypatch.setattr(family, "pick", instead)
    decode((torch.zeros(1, dtype=torch.int32), torch.zeros(1)), numel)
    assert (chosen[0] is None) == (numel > 1 << 31)
