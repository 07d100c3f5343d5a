"""The suite catches compressors that break one rule each."""

from dataclasses import dataclass, replace

import pytest
import torch

from stenograd.compression.contract import Compressor, Exchange, Facts, Feedback, average_of
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.randomk import RandomK
from stenograd.compressors.topk import TopK
from stenograd.errors import ConfigError
from stenograd.testing.conformance import check
from stenograd.wire.finite import Finite, finite_of
from stenograd.wire.requests import commit, gather, mean

STATELESS = ("hides NaN", "sums wrong", "is not cut anywhere")


@dataclass(frozen=True, kw_only=True)
class Broken(Compressor):
    """Dense averaging with one fault."""

    fault: str = ""

    def init(self, like, site):
        if self.fault == "state depends on the rank":
            return {f"memory/{site.rank}": torch.zeros(2)}
        return {} if self.fault in STATELESS else {"total": torch.zeros(like.numel())}

    @property
    def feedback(self):
        if self.fault == "not lossless":
            return Feedback.EXACT
        return Feedback.OFF if self.fault in ("shrinks", "shrinks at random") else Feedback.ON

    def facts(self, site):
        f = self.fault
        return Facts(
            linear=f in STATELESS,
            rounds=2 if f == "declares more rounds" else 1,
            finite=f in REPORTING,
            frees_residual=f in COMMITTING,
        )

    def exchange(self, x, residual, state, site):
        """One all-reduce with the fault."""
        f, n = self.fault, x.numel()
        kept = x.clone()
        if residual is not None:
            kept += residual
        if f in ("shrinks", "not lossless"):
            kept = 0.9 * x
        if f == "overshoots":
            kept = -0.1 * x
        if f == "hides NaN":
            kept = x.nan_to_num(0, 0, 0)
        if f == "is not cut anywhere":
            kept = (x * (1 + torch.linspace(0, 1, n))).to(x.dtype)
        if f == "shrinks at random":
            noise = torch.randn(n, generator=site.generator(0, shared=True)).to(x.dtype)
            kept = x * (0.9 + 0.1 * noise)
        if f == "global RNG":
            torch.rand(1)
        if f == "sums wrong":  # nobody can add up where nothing is reduced
            average = average_of(x for (x,) in (yield from gather(kept)))
        else:
            average = yield from mean(kept.clone())
        if f == "asks once more":
            yield from mean(kept.clone())
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
        finite = self._told(f, average, kept)
        if site.frees_residual and f != "never commits":
            average = yield from self._committed(f, average, residual, finite)
        lost = (x if residual is None else x + residual) - kept if site.error else None
        state = {**state, "total": total} if "total" in state else state
        return Exchange(average, state, lost, finite)

    def _told(self, f, average, kept):
        if f not in REPORTING or f == "reports nothing":
            return None
        if f == "reports NaN as finite":
            return torch.tensor(Finite.BOUNDED, dtype=torch.uint8)
        if f == "reports large as bad":
            return finite_of([average.abs().clamp(min=1) * 1e10])
        if f == "reports large as bounded":
            bad = not average.isnan().all() and not average.isfinite().all()
            return torch.tensor(Finite.BOUNDED if bad else Finite.NO, dtype=torch.uint8)
        return finite_of([average])

    def _committed(self, f, average, residual, finite):
        if f == "writes before the commit" and residual is not None:
            residual.add_(1)
        if not (yield from commit(finite)) or residual is None:
            return average
        if f == "commits to other numbers":
            average = average * 1.5
        return average if f == "writes elsewhere" else residual.copy_(average)


REPORTING = (
    "reports nothing",
    "reports NaN as finite",
    "reports large as bad",
    "reports large as bounded",
    "never commits",
    "writes before the commit",
    "writes elsewhere",
    "commits to other numbers",
)
COMMITTING = REPORTING[4:]


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("ranks differ", "all ranks get the same bits"),
        ("lies about the error", "average = mean"),
        ("not lossless", "lossless"),
        ("wrong type", "of x's length and type"),
        ("noise from nothing", "zeros stay zeros"),
        ("overshoots", "biased: "),
        ("shrinks", "not random"),
        ("shrinks at random", "unbiased"),
        ("state depends on the rank", "keys, shapes and types"),
        ("state grows", "keys, shapes and types"),
        ("modifies the state", "given state is not modified"),
        ("hides NaN", "linear: a non-finite x"),
        ("sums wrong", "linear: x may come divided"),
        ("is not cut anywhere", "linear: x may"),
        ("declares more rounds", "rounds declared"),
        ("asks once more", "rounds declared"),
        ("reports nothing", "every rank hears"),
        ("reports NaN as finite", "every rank hears"),
        ("reports large as bad", "not reported as NaN"),
        ("reports large as bounded", "bounded has a finite average|every rank hears|not reported as NaN"),
        ("never commits", "frees_residual: asks"),
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
        feedback = Feedback.OFF

    with pytest.raises(AssertionError, match="unbiased"):
        check(Liar(ratio=0.5))


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("writes before the commit", "leaves the given state|old state is whole"),
        ("writes elsewhere", "takes the residual's memory"),
        ("commits to other numbers", "a commit changes no number|sum of"),
    ],
)
def test_the_suite_catches_what_only_a_residual_shows(fault, rule):
    """Row 4 and 8 of what a review found: state that a bad step harms, and memory that is not freed."""
    with pytest.raises(AssertionError, match=rule):
        check(ErrorFeedback(inner=Broken(fault=fault)))


def test_freeing_the_residual_blindly_cannot_be_said():
    with pytest.raises(ConfigError, match="without telling whether every x was finite"):
        Facts(frees_residual=True)
    with pytest.raises(ConfigError, match="linear codes show NaN"):
        Facts(linear=True, finite=True)
    with pytest.raises(ConfigError, match="rounds must be at least 0"):
        Facts(rounds=-1)


def test_feedback_that_reads_the_residual_after_the_commit_is_caught():
    """Row 5: what was lost is the error less the residual, whose memory the average has taken by then."""

    @dataclass(frozen=True, kw_only=True)
    class Careless(ErrorFeedback):
        def exchange(self, x, residual, state, site):
            mine = state["residual"]
            done = yield from self.inner.exchange(x.to(mine.dtype), mine, state, replace(site, error=True))
            lost = (done.error - mine).to(x.dtype) if site.error else None
            state = {**done.state, "residual": done.error.to(mine.dtype)}
            return done._replace(average=done.average.to(x.dtype), state=state, error=lost)

    with pytest.raises(AssertionError, match=r"sum of \(x - error\) \+ residual"):
        check(Careless(inner=TopK(ratio=0.1)))
