"""The suite catches compressors that break one rule each."""

from dataclasses import dataclass

import pytest
import torch

from stenograd.compression.contract import Compressor, Exchange
from stenograd.compressors.randomk import RandomK
from stenograd.data.requests import mean
from stenograd.testing.conformance import check


@dataclass(frozen=True, kw_only=True)
class Broken(Compressor):
    """Dense averaging with one fault."""

    fault: str = ""

    def init(self, like, site):
        if self.fault == "state depends on the rank":
            return {f"memory/{site.rank}": torch.zeros(2)}
        return {"total": torch.zeros(like.numel())}

    @property
    def delta(self):
        return 1.0 if self.fault == "contraction" else 0.0

    @property
    def biased(self):
        return self.fault not in ("shrinks", "shrinks at random")

    @property
    def lossless(self):
        return self.fault == "not lossless"

    @property
    def propagates(self):
        return self.fault == "hides NaN"

    def rounds(self, x, state, site, *, want_error=False):
        f, n = self.fault, x.numel()
        kept = x.clone()
        if f in ("shrinks", "contraction", "not lossless"):
            kept = 0.9 * x
        if f == "hides NaN":
            kept = x.nan_to_num(0, 0, 0)
        if f == "shrinks at random":
            noise = torch.randn(n, generator=site.generator(0, shared=True)).to(x.dtype)
            kept = x * (0.9 + 0.1 * noise)
        if f == "global RNG":
            torch.rand(1)
        average = yield from mean(kept.clone())
        if f == "ranks differ":
            average = average + 1e-6 * site.rank
        if f == "lies about the error":
            kept = kept * 1.01
        if f == "crashes on NaN" and not x.isfinite().all():
            raise ValueError("NaN")
        if f == "noise from nothing":
            average, kept = average + 1, kept + 1
        total = state.get("total", torch.zeros(n))
        if f == "modifies the state":
            total.add_(1)
        if f == "state grows":
            total = torch.cat([total, total])
        if f == "wrong type":
            average = average.double()
        lost = x - kept if want_error else None
        return Exchange(average, {**state, "total": total} if "total" in state else state, lost)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("ranks differ", "all ranks get the same bits"),
        ("lies about the error", "average = mean"),
        ("not lossless", "lossless"),
        ("wrong type", "of x's length and type"),
        ("noise from nothing", "zeros stay zeros"),
        ("contraction", r"\(1 - delta\)"),
        ("shrinks", "not random"),
        ("shrinks at random", "unbiased"),
        ("state depends on the rank", "keys, shapes and types"),
        ("state grows", "keys, shapes and types"),
        ("modifies the state", "given state is not modified"),
        ("hides NaN", "propagates"),
        ("global RNG", "global random state"),
    ],
)
def test_the_suite_catches(fault, rule):
    with pytest.raises(AssertionError, match=rule):
        check(Broken(fault=fault))


def test_the_suite_lets_crashes_through():
    with pytest.raises(ValueError, match="NaN"):
        check(Broken(fault="crashes on NaN"))


def test_the_suite_passes_the_faultless_one():
    check(Broken())


def test_a_biased_random_codec_that_claims_to_be_unbiased_is_caught():
    @dataclass(frozen=True, kw_only=True)
    class Liar(RandomK):
        @property
        def biased(self) -> bool:
            return False

    with pytest.raises(AssertionError, match="unbiased"):
        check(Liar(ratio=0.5))
