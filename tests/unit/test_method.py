"""Methods as text."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import stenograd
from stenograd.catalog.method import METHOD_KEYS
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import compressors, entries, entry_of, schedules
from stenograd.errors import MethodError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dense", "dense"),
        (" topk : ratio = 0.05 ", "topk:ratio=0.05"),
        ("topk", "topk"),
        ("topk:feedback=true", "topk"),
        ("topk:dense_below=0", "topk"),
        ("sign:dense_below=1024", "sign"),
        ("sign:dense_below=0", "sign:dense_below=0"),
        ("topk:feedback=no", "topk:feedback=false"),
        ("topk:feedback_decay=0.5,ratio=0.1", "topk:ratio=0.1,feedback_decay=0.5"),
        ("topk:feedback_decay=1", "topk"),
        ("topk:feedback=ef21", "topk:feedback=ef21"),
        ("topk:feedback=ef21-sgdm,ratio=0.1", "topk:ratio=0.1,feedback=ef21-sgdm"),
        ("qsgd:feedback_decay=0.5,feedback=true", "qsgd:feedback=true,feedback_decay=0.5"),
        ("bf16", "bf16"),
        ("powersgd:warm_start=off,rank=2", "powersgd:rank=2,warm_start=false"),
        (
            "sign:clip_norm=1,warmup_steps=10,dense_below=64",
            "sign:dense_below=64,warmup_steps=10,clip_norm=1.0",
        ),
    ],
)
def test_text_is_canonical_and_makes_itself_again(text, canonical):
    made = stenograd.method(text)
    assert str(made) == canonical
    assert stenograd.method(canonical) == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown method ''"),
        ("tpk", "did you mean 'topk'"),
        ("topk:ration=0.1", "did you mean 'ratio'"),
        ("topk:ratio", "has no value"),
        ("topk:ratio=", "has no value"),
        ("topk:ratio=a", "must be a number, got 'a': write ratio=0.01"),
        ("topk:ratio=5%", "must be a number, got '5%': write ratio=0.05"),
        ("topk:chunk=2.5", "must be a whole number, got '2.5': write chunk=1"),
        ("topk=0.05", "got 'topk=0.05': write topk:ratio=0.05"),
        ("topk ratio=0.05", "got 'topk ratio=0.05': write topk:ratio=0.05"),
        ("local=8/topk", "got 'local=8': write local:every=8"),
        ("slowmo=8", "got 'slowmo=8': write slowmo"),
        ("topk:ratio=0", r"ratio must be in \(0, 1\], got 0.0"),
        ("topk:ratio=1.5", r"ratio must be in \(0, 1\], got 1.5"),
        ("topk:ratio=nan", r"ratio must be in \(0, 1\], got nan"),
        ("topk:ratio=0.1,ratio=0.2", "given twice"),
        ("topk:feedback=maybe", "must be true or false, or ef21 or ef21-sgdm or loco, got 'maybe'"),
        ("powersgd:warm_start=maybe", "must be true or false, got 'maybe'"),
        ("qsgd:feedback=ef21", "EF21 needs a biased compressor"),
        ("dense:feedback=ef21", "EF21 needs a biased compressor"),
        ("sign:majority=true,feedback=ef21", "EF21 needs a biased compressor whose average is a mean"),
        ("topk:feedback=ef21,feedback_decay=0.9", "feedback_decay needs error feedback"),
        ("randomk:ratio=-1", "ratio"),
        ("randomblock:ratio=2", "ratio"),
        ("threshold:value=0", "value"),
        ("threshold:value=inf", "value"),
        ("qsgd:bits=1", "bits"),
        ("qsgd:bits=9", "bits"),
        ("powersgd:rank=0", "rank"),
        ("fp16:dtype=float32", "no key 'dtype'"),
        ("dense:feedback=true", "loses nothing"),
        ("randomk:unbiased=true,feedback=true", "grow without bound"),
        ("topk:feedback_decay=0", r"feedback_decay must be in \(0, 1\], got 0.0: 1 forgets nothing"),
        ("topk:feedback_decay=1.1", r"feedback_decay must be in \(0, 1\]"),
        ("topk:feedback_decay=nan", r"feedback_decay must be in \(0, 1\]"),
        ("dense:feedback_decay=0.9", "feedback_decay needs error feedback, got 0.9: add feedback=true"),
        ("topk:feedback=false,feedback_decay=0.9", "feedback_decay needs error feedback"),
        ("topk:clip_value=-1", "clip_value must be positive"),
        ("topk:warmup_steps=0", "warmup_steps must be at least 1"),
        ("topk:dense_below=-1", "dense_below must be at least 1"),
        (17, "a method is text"),
    ],
)
def test_wrong_text_is_named(text, says):
    with pytest.raises(MethodError, match=says):
        stenograd.method(text)


def _integer_keys():
    """Every integer key of every method, from the registry: a new method's are in it by themselves."""
    for name, entry in entries().items():
        hints = get_type_hints(entry.compressor) | METHOD_KEYS
        own = {f.name for f in fields(entry.compressor)} - set(entry.preset)
        yield from (f"{name}:{key}" for key in sorted(own | set(METHOD_KEYS)) if hints[key] is int)


@pytest.mark.parametrize("key", list(_integer_keys()))
def test_every_integer_has_bounds(key):
    """Beyond 64 bits, the parser refuses all; from 2^31 on, every count is refused."""
    for huge in (10**22, -(10**22)):
        with pytest.raises(
            MethodError, match=r"must be from -2\^63 to 2\^63 - 1, got -?10+: take a smaller one"
        ):
            stenograd.method(f"{key}={huge}")
    if not key.endswith("seed"):
        with pytest.raises(
            MethodError, match=r"must be (at most 2147483647|at most 128|2 to 8), got 2147483648"
        ):
            stenograd.method(f"{key}={2**31}")


def test_feedback_is_on_for_the_biased_ones_and_can_be_turned_off():
    biased = {"lowbit", "topk", "threshold", "randomk", "randomblock", "sign", "powersgd"}
    for name in stenograd.methods():
        wrapped = isinstance(stenograd.method(name).compressor, stenograd.compression.ErrorFeedback)
        assert wrapped == (name in biased), name
        if name in biased:
            off = stenograd.method(f"{name}:feedback=false").compressor
            assert not isinstance(off, stenograd.compression.ErrorFeedback)


def test_pseudo_gradients_need_feedback_less_often():
    """4-bit values lose nothing that matters there; 2-bit values and what is left out do."""
    fed = {t: "ErrorFeedback" in repr(stenograd.method(t).compressor) for t in ("diloco/lowbit", "lowbit")}
    assert fed == {"diloco/lowbit": False, "lowbit": True}
    assert "ErrorFeedback" in repr(stenograd.method("sparseloco").compressor)


def _objects():
    """Every method's compressor and every example, as an object and as the text that makes it."""
    for name, entry in entries().items():
        yield entry.compressor(**entry.preset), name
    for cls in compressors():
        for example in cls.examples():
            entry = entry_of(example)
            own = [f.name for f in fields(example) if f.name not in entry.preset]
            yield example, f"{entry.name}:" + ",".join(f"{key}={getattr(example, key)}" for key in own)


@pytest.mark.parametrize(("codec", "text"), [pytest.param(*pair, id=pair[1]) for pair in _objects()])
def test_an_object_means_what_its_text_means(codec, text):
    """Also with what every method takes, after a schedule, and with feedback around it already."""
    wanted = stenograd.method(text)
    for made in (stenograd.method(codec), stenograd.Method(compressor=codec)):
        assert replace(made, text="-") == replace(wanted, text="-")
        assert stenograd.method(made.text) == made
    more = {"warmup_steps": 3, "clip_norm": 1, "clip_value": 2.0, "dense_below": 7}
    keys = f"{text}{',' if ':' in text else ':'}" + ",".join(f"{k}={v}" for k, v in more.items())
    assert replace(stenograd.Method(compressor=codec, **more), text="-") == replace(
        stenograd.method(keys), text="-"
    )
    for schedule in ("local:every=3", "diloco:every=4", "gossip:graph=ring,consensus=0.1"):
        about = stenograd.method(f"{schedule}/sign").schedule
        wanted = _made(stenograd.method, f"{schedule}/{text}")
        assert _made(stenograd.Method, compressor=codec, schedule=about) == wanted


def _made(make, *args, **kwargs):
    """A method without its text, or why there is none."""
    try:
        return replace(make(*args, **kwargs), text="-")
    except MethodError as refused:
        return str(refused).partition(": ")[2]


def test_the_table_of_texts_and_objects_is_true_and_has_every_name():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| `(\w+\(.*\))` \|$", page, re.MULTILINE)
    known = {**vars(stenograd.compression), **vars(stenograd.compressors), **vars(stenograd.schedules)}
    known |= {"Method": stenograd.Method, "method": stenograd.method}
    for text, written in rows:
        made, wanted = stenograd.method(eval(written, known)), stenograd.method(text)
        assert replace(made, text="-") == replace(wanted, text="-"), written
    assert {*entries(), *schedules(), *PRESETS} <= {text.partition(":")[0] for text, _ in rows}


def test_what_is_around_an_object_stays():
    sign, topk = (stenograd.method(name).compressor.inner for name in ("sign", "topk"))
    fed = stenograd.compression.ErrorFeedback(inner=topk, decay=0.9)
    assert stenograd.method(fed) == stenograd.method("topk:feedback_decay=0.9")
    assert stenograd.method(stenograd.compression.ErrorFeedback(inner=sign)) == stenograd.method("sign")
    for word in ("ef21", "ef21-sgdm"):
        wanted = stenograd.method(f"topk:feedback={word}")
        assert stenograd.method(wanted.compressor) == wanted
    wanted = stenograd.method("sign:feedback=ef21")
    assert stenograd.method(wanted.compressor) == wanted
    wanted = stenograd.method("lowbit:feedback=loco")
    assert stenograd.method(wanted.compressor) == wanted
    assert stenograd.Method(compressor=topk, text="mine").compressor is topk


def test_all_promised_names_exist():
    promised = "dense fp16 bf16 lowbit topk threshold randomk randomblock sign qsgd powersgd"
    assert set(promised.split()) <= set(stenograd.methods())


@pytest.mark.parametrize(
    "text", ["dense", "topk", "fp16:clip_norm=1.0", "local:every=4/topk", "local:every=4"]
)
def test_a_rounds_method_has_its_own_text(text):
    codec = text.rpartition("/")[2]
    assert str(stenograd.method(text).each_round()) == ("dense" if codec == "local:every=4" else codec)


@pytest.mark.parametrize(("name", "share"), [("dense", 1.0), ("fp16", 0.5), ("bf16", 0.5), ("powersgd", 0.0)])
def test_a_share_is_how_large_a_message_is(name, share):
    assert stenograd.method(name).share(2) == share


def test_what_acts_around_a_compressor_is_a_field_of_the_method():
    how = stenograd.method("topk:clip_value=1,clip_norm=4,warmup_steps=2,dense_below=3")
    assert (how.clip_value, how.clip_norm, how.warmup_steps, how.dense_below) == (1, 4, 2, 3)
    assert repr(how.compressor) == repr(stenograd.method("topk").compressor)
    assert stenograd.method("sign").dense_below == 1024
    assert stenograd.method("sign:dense_below=0").dense_below == 0
    made = stenograd.Method(compressor=how.compressor, clip_norm=2.0)
    assert made.text == "topk:clip_norm=2.0"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_limit_that_a_type_cannot_hold_limits_nothing(dtype):
    x = torch.tensor([3.0, -torch.finfo(dtype).max], dtype=dtype)
    before = x.clone()
    stenograd.method("dense:clip_value=1e300").clip(x, [2])
    assert torch.equal(x, before)
