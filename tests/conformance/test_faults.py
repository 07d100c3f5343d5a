"""The suite catches compressors that break one rule each."""

from dataclasses import dataclass

import pytest
import torch

from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, Transport
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compressors.randomk import RandomK
from stenograd.compressors.topk import TopK
from stenograd.data.finite import Finite, finite_of
from stenograd.data.requests import commit, mean
from stenograd.errors import ConfigError
from stenograd.testing.conformance import check

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
    def delta(self):
        return 1.0 if self.fault in ("contraction", "not lossless") else 0.0

    @property
    def feedback(self):
        if self.fault == "not lossless":
            return Feedback.NEVER
        return Feedback.OFF if self.fault in ("shrinks", "shrinks at random") else Feedback.ON

    def transport(self, site):
        f = self.fault
        keeps = f in ("hides NaN", "sums wrong", "is not cut anywhere")
        return Faulty(
            linear=keeps,
            rounds=2 if f == "declares more rounds" else 1,
            reports_finite=f in REPORTING,
            frees_residual=f in COMMITTING,
        )


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


@dataclass(frozen=True, kw_only=True)
class Faulty(Transport):
    """One all-reduce with the fault of its compressor."""

    def summing(self):
        return self

    def run(self, codec, x, residual, state, site, want_error):
        f, n = codec.fault, x.numel()
        kept = x.clone()
        if residual is not None:
            kept += residual
        if f in ("shrinks", "contraction", "not lossless"):
            kept = 0.9 * x
        if f == "hides NaN":
            kept = x.nan_to_num(0, 0, 0)
        if f == "is not cut anywhere":
            kept = (x * (1 + torch.linspace(0, 1, n))).to(x.dtype)
        if f == "shrinks at random":
            noise = torch.randn(n, generator=site.generator(0, shared=True)).to(x.dtype)
            kept = x * (0.9 + 0.1 * noise)
        if f == "global RNG":
            torch.rand(1)
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
        if self.frees_residual and f != "never commits":
            average = yield from self._committed(f, average, residual, finite)
        lost = (x if residual is None else x + residual) - kept if want_error else None
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
        @property
        def feedback(self) -> Feedback:
            return Feedback.OFF

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
        Faulty(frees_residual=True)
    with pytest.raises(ConfigError, match="Faulty is linear"):
        Faulty(linear=True, reports_finite=True)
    with pytest.raises(ConfigError, match="rounds must be at least 0"):
        Faulty(rounds=-1)


def test_feedback_that_reads_the_residual_after_the_commit_is_caught():
    """Row 5: what was lost is the error less the residual, whose memory the average has taken by then."""

    @dataclass(frozen=True, kw_only=True)
    class Late(Transport):
        inner: Transport

        def run(self, codec, x, residual, state, site, want_error):
            mine = state["residual"]
            inner = self.inner if self.frees_residual else self.inner.keeping()
            done = yield from inner.run(codec.inner, x.to(mine.dtype), mine, state, site, True)
            lost = (done.error - mine).to(x.dtype) if want_error else None
            state = {**done.state, "residual": done.error.to(mine.dtype)}
            return done._replace(average=done.average.to(x.dtype), state=state, error=lost)

    @dataclass(frozen=True, kw_only=True)
    class Careless(ErrorFeedback):
        def transport(self, site: Site) -> Transport:
            inner = self.inner.transport(site)
            flags = {name: getattr(inner, name) for name in ("rounds", "reports_finite", "frees_residual")}
            return Late(inner=inner, **flags)

    with pytest.raises(AssertionError, match=r"sum of \(x - error\) \+ residual"):
        check(Careless(inner=TopK(ratio=0.1)))
