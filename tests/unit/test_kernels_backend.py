"""Which version runs: lazily, as asked, and with one warning when numba is missing."""

import subprocess
import sys
import warnings

import numba.core.caching
import pytest
import torch

from laconic.errors import ConfigError
from laconic.kernels import backend, cpu_jit, dispatch, dispatch_dense, dispatch_sparse
from laconic.kernels.backend import pick


@pytest.fixture
def _fresh():
    backend._numba_runs.cache_clear()
    yield
    backend._numba_runs.cache_clear()


def chosen(*tensors):
    return pick("values", "not_finite", *tensors).__module__.rpartition(".")[2]


def test_float32_in_the_cpus_memory_goes_to_numba(monkeypatch):
    monkeypatch.delenv("LACONIC_KERNELS", raising=False)
    assert chosen(torch.zeros(3)) == "cpu_values"
    for other in (torch.zeros(3).double(), torch.zeros(6)[::2], torch.zeros(3, device="meta")):
        assert chosen(other) == "reference_values"
        assert chosen(torch.zeros(3), other) == "reference_values"


def test_the_environment_decides(monkeypatch):
    for asked, module in (("reference", "reference_values"), ("numba", "cpu_values"), ("", "cpu_values")):
        monkeypatch.setenv("LACONIC_KERNELS", asked)
        assert chosen(torch.zeros(3)) == module
    monkeypatch.setenv("LACONIC_KERNELS", "fast")
    with pytest.raises(ConfigError, match=r"LACONIC_KERNELS must be one of .* got 'fast'"):
        chosen(torch.zeros(3))


@pytest.mark.usefixtures("_fresh")
def test_without_numba_the_reference_runs_and_says_so_once(monkeypatch):
    monkeypatch.delenv("LACONIC_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it fails
    with pytest.warns(RuntimeWarning, match="numba is not installed: compression runs several times slower"):
        assert chosen(torch.zeros(3)) == "reference_values"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.select(torch.tensor([1.0, 2.0]), 1)[0].tolist() == [1]
    monkeypatch.setenv("LACONIC_KERNELS", "numba")
    with pytest.raises(ConfigError, match="LACONIC_KERNELS is 'numba', which cannot be used"):
        chosen(torch.zeros(3))


def test_kernels_run_where_no_cache_can_be_kept(monkeypatch):
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    @cpu_jit.kernel
    def double(a):
        return a + a

    assert double(21) == 42


def test_importing_laconic_imports_no_numba():
    code = "import sys, laconic, laconic.kernels.dispatch; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("numel", [1 << 31, (1 << 31) + 1])
@pytest.mark.parametrize(
    ("module", "decode"),
    [
        (dispatch_sparse, lambda payload, n: dispatch.scatter_mean([payload], n)),
        (dispatch_dense, lambda payload, n: dispatch.sign_decode_mean([payload], 1024, [n])),
        (dispatch_dense, lambda payload, n: dispatch.qsgd_decode_mean([payload], 4, 512, [n])),
    ],
)
def test_numba_makes_no_mean_whose_places_an_int32_cannot_hold(monkeypatch, module, decode, numel):
    """Without `out`, nothing of that length exists when the version is chosen; int32 places would wrap."""
    chosen = []

    def instead(*args, **options):
        chosen.append(pick(*args, **options).__module__)
        return lambda *_: torch.zeros(0)  # allocates nothing of that length

    monkeypatch.setattr(module, "pick", instead)
    decode((torch.zeros(1, dtype=torch.int32), torch.zeros(1)), numel)
    assert ("reference" in chosen[0]) == (numel > 1 << 31)
