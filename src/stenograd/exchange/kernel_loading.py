"""Loads a method's kernels before its first step: tiny exchanges among simulated ranks call every one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.catalog.registry import compressors
from stenograd.compression.contract import Compressor
from stenograd.compression.feedback import Wrapper
from stenograd.exchange.simulate import exchange
from stenograd.kernels.backend import wanted
from stenograd.kernels.hash import hash_tensor
from stenograd.kernels.host_cache import compiling

__all__ = ["load_kernels"]

# Enough elements for top-k to guess its bound from a sample (32,768 in a region of five), and a few: a code
# that short is gathered whatever the number of ranks is. Low-rank factors have up to 200 columns.
_SHAPES = ((torch.Size((420, 420)), torch.Size((7,))), (torch.Size((5,)),))
# Ranks from which on exchanges take no other path: two phases begin at 4, adding up regions at 5.
_MOST_RANKS = 5
_LATE = 2**40 + 1  # a step when ramps have long ended, and the second of two turns

_loaded: set[tuple[str, int, tuple[torch.dtype, ...], bool]] = set()  # by this process


@torch.no_grad()
def load_kernels(how: Method, world_size: int, tensors: Iterable[Tensor], *, checks: bool = False) -> None:
    """Load what a method will run on the CPU, so that its first step takes as long as the second.

    Kernels that are not on disk are compiled, by one process of a host while the others wait (see
    `kernels.host_cache`); that takes 2 to 10 seconds, loading about half a second, most of it numba's import.
    A method without kernels imports nothing. A compressor that is not one of Stenograd's is not run before
    its first exchange: nobody knows what it does besides; its kernels are loaded there.

    Args:
        how: the method; it is not changed, and neither is any global random generator.
        world_size: number of ranks, which decides the paths that exchanges take.
        tensors: what will travel; only their dtypes and devices matter.
        checks: whether replicas will be compared too (`ReplicaGuard`).

    Example:
        >>> from stenograd.catalog.method import method
        >>> load_kernels(method("topk:ratio=0.01"), 4, torch.nn.Linear(4, 2).parameters())
    """
    if wanted() == "reference":
        return
    dtypes = tuple(sorted({t.dtype for t in tensors if t.device.type == "cpu"}, key=str))
    what = (how.text, world_size, dtypes, checks)
    if what in _loaded:
        return
    with compiling(how.text.partition(":")[0]):
        for dtype in dtypes:
            for shapes in _SHAPES:
                _call_all(how.compressor, shapes, dtype, world_size)
        if checks and dtypes:
            hash_tensor(torch.zeros(1, dtype=torch.float32, device="cpu"))
    _loaded.add(what)


def _call_all(whole: Compressor, shapes: Sequence[torch.Size], dtype: torch.dtype, world_size: int) -> None:
    """Call all kernels of a compressor, whatever paths it takes with other numbers of elements.

    Zeros matter to top-k, whose guess of a bound fails on them.
    """
    codec = whole.inner if isinstance(whole, Wrapper) else whole
    if type(codec) not in compressors():
        return
    numel, generator = sum(shape.numel() for shape in shapes), torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    inside = dtype if codec is whole else torch.promote_types(dtype, torch.float32)  # what wrappers hand on
    for ranks in sorted({1, min(world_size, _MOST_RANKS)}):
        for x, step in ((noise, 0), (noise, _LATE), (torch.zeros_like(noise), _LATE)):
            # Without a residual here, and with one below where feedback is on: encoding takes other kernels.
            exchange(codec, [x.to(inside)] * ranks, shapes=shapes, step=step, want_error=True)
            exchange(whole, [x.to(dtype)] * ranks, shapes=shapes, step=step, commits=True)
