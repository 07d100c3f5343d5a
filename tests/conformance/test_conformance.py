"""Every compressor passes the suite, a new one without any edit."""

import sys
from collections.abc import Iterator

import pytest

import stenograd.compressors
from stenograd.catalog.registry import compressors, entries
from stenograd.compression.codec import Codec
from stenograd.compression.contract import Feedback
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.identity import Identity
from stenograd.errors import MethodError
from stenograd.testing.conformance import cases, check

CASES = dict(cases())

NEW = '''
from dataclasses import dataclass
from stenograd.compression import Additive, Facts, Feedback

@dataclass(frozen=True, kw_only=True)
class EveryOther(Additive):
    """Send the elements with even places."""

    names = {"everyother": {}}
    summary = "every other element"

    feedback = Feedback.ON

    def facts(self, site):
        return Facts()

    def encode(self, x, site):
        return (x[::2].clone(),)

    def decode(self, payload, like, site):
        out = like.new_zeros(like.shape)
        out[::2] = payload[0]
        return out
'''


@pytest.mark.parametrize("name", CASES, ids=list(CASES))  # pytest numbers long names unless it is told
def test_every_compressor_conforms(name):
    check(CASES[name])


def test_lossy_cases_come_with_feedback_and_lossless_ones_cannot_have_it():
    plain = [c for c in CASES.values() if not isinstance(c, ErrorFeedback)]
    lossy = [c for c in plain if c.feedback not in (Feedback.NEVER, Feedback.OWN, Feedback.EXACT)]
    fed = [c.inner for c in CASES.values() if isinstance(c, ErrorFeedback)]
    assert fed == lossy
    with pytest.raises(MethodError, match="loses nothing"):
        ErrorFeedback(inner=Identity())


def test_every_compressor_has_a_case_a_name_and_a_summary():
    walked = {type(c) for c in CASES.values()}
    for cls in compressors():
        assert cls in walked
        assert cls.names
        assert cls.summary


def test_a_new_compressor_is_one_file(tmp_path, monkeypatch):
    """A directory on the package's path with one file in it: found, named, tested, and passed."""
    (tmp_path / "everyother.py").write_text(NEW)
    monkeypatch.setattr(stenograd.compressors, "__path__", [*stenograd.compressors.__path__, str(tmp_path)])
    try:
        assert entries()["everyother"].compressor.__name__ == "EveryOther"
        mine = [(name, c) for name, c in cases() if "EveryOther" in name]
        assert [name for name, _ in mine] == ["EveryOther()", "ErrorFeedback(inner=EveryOther(), decay=1.0)"]
        for _, compressor in mine:
            check(compressor)
    finally:
        sys.modules.pop("stenograd.compressors.everyother", None)


def test_cases_are_lazy_and_codecs_are_abstract():
    assert isinstance(cases(), Iterator)
    with pytest.raises(TypeError, match="abstract"):
        Codec()
