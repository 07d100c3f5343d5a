"""Kernels in Triton against plain torch, bit for bit: on the GPU, or on the CPU in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="Triton is not installed")

from stenograd.kernels import triton as fast
from stenograd.testing.checks import Plain

quantize = Plain("quantize")
sign = Plain("sign")

# The interpreter computes by numpy, which warns where NaN and infinity are made.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One element, a last block that is shorter than the others, several tensors, an empty one among them.
LENGTHS = ([1], [150], [5, 64, 0, 7])


def values(numels, seed, bad):
    """Return normally distributed numbers, with zeros among them, or NaN and infinity."""
    x = torch.randn(sum(numels), generator=torch.Generator().manual_seed(seed))
    x[::3] = 0.0
    if bad:
        x[-1], x[0] = float("nan"), float("-inf")
    return x.to(DEVICE)


def compare(family, key, numels, *, x=None, residual=None, seed=()):
    """Encode, decode three such messages, and compare all that comes out with plain torch."""
    plain = {"sign": sign, "qsgd": quantize}[family]
    found = []
    for module in (fast, plain):
        left = None if residual is None else residual.clone()
        payload = getattr(module, f"{family}_encode_feedback")(x, left, *key, numels, *seed)
        mean = getattr(module, f"{family}_decode_mean")([payload] * 3, *key, numels)
        found.append([*payload, mean, *([] if left is None else [left])])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("numels", LENGTHS, ids=str)
@pytest.mark.parametrize("block", [64, 7])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
@pytest.mark.parametrize("given", ["x", "residual", "both"])
def test_signs_and_scales_are_plain_torchs(numels, block, bad, given):
    x = None if given == "residual" else values(numels, 1, bad)
    residual = None if given == "x" else values(numels, 2, bad)
    compare("sign", (block,), numels, x=x, residual=residual)


@pytest.mark.parametrize("numels", LENGTHS, ids=str)
@pytest.mark.parametrize(("bits", "block"), [(4, 64), (3, 7), (2, 2**31 - 1)])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
@pytest.mark.parametrize("given", ["x", "residual", "both"])
def test_rounded_codes_and_scales_are_plain_torchs(numels, bits, block, bad, given):
    x = None if given == "residual" else values(numels, 1, bad)
    residual = None if given == "x" else values(numels, 2, bad)
    compare("qsgd", (bits, block), numels, x=x, residual=residual, seed=(7,))


def test_a_block_longer_than_a_program_holds_is_left_to_plain_torch():
    x = values([9000], 3, bad=False)
    assert fast.sign_encode_feedback(x, None, 9000, [9000]) is None
    assert fast.qsgd_encode_feedback(x, None, 4, 9000, [9000], 3) is None
