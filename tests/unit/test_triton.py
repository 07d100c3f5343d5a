"""Kernels in Triton against plain torch, bit for bit: on the GPU, or on the CPU in Triton's interpreter.

The interpreter takes more than the compiler does, so without a GPU they are compiled for one as well.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="Triton 3.6 is not installed")

from stenograd.errors import ConfigError
from stenograd.kernels import triton as fast
from stenograd.kernels.backend import pick
from stenograd.kernels.sign import sign_encode_feedback
from stenograd.testing.checks import Plain

quantize = Plain("quantize")
sign = Plain("sign")

# The interpreter computes by numpy, which warns where NaN and infinity are made.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One element, a last block that is shorter than the others, several tensors, an empty one among them.
# In the last two, all blocks of codes but those of 3 bits start at whole bytes.
LENGTHS = ([1], [150], [5, 64, 0, 7], [64, 8, 0, 71], [128])


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


def test_without_a_triton_that_suits_the_choice_is_refused(monkeypatch):
    monkeypatch.setattr(fast, "triton", None)
    monkeypatch.setenv("STENOGRAD_KERNELS", "triton")
    with pytest.raises(ConfigError, match=r"needs Triton 3\.6"):
        pick(sign_encode_feedback)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stenograd.kernels import triton as kernels

POINTERS = {
    "x": "*fp32", "left": "*fp32", "total": "*fp32", "starts": "*i64", "keys": "*i64", "codes": "*u8",
    "scales": "*fp32", "size": "i32", "levels": "fp32", "most": "fp32", "by": "fp32",
}
SIZES = {"_sign": [{"packs": 0}, {"packs": 1}], "_quantize": [{"packed": b} for b in (0, 1, 2, 4, 8)],
         "_decode": [{"bits": b, "factor": 1} for b in (1, 3, 4)]}
ALL = {"add": True, "keep": True, "count": 3, "multiplies": True, "width": 64}
for name, variants in SIZES.items():
    function = getattr(kernels, name)
    for variant in variants:
        const = {key: value for key, value in {**ALL, **variant}.items() if key in function.arg_names}
        kinds = {key: POINTERS.get(key, "constexpr") for key in function.arg_names}
        if "count" in const:
            kinds |= {"codes": ("*u8",) * 3, "scales": ("*fp32",) * 3}
        places = {(function.arg_names.index(key),): value for key, value in const.items()}
        made = triton.compile(
            ASTSource(function, kinds, constexprs=places),
            target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False},
        )
        print(name, variant, len(made.asm["cubin"]) > 0)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests above compile them")
def test_every_kernel_compiles_for_a_gpu():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["True"] * 10
