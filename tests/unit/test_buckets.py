"""Buckets: what travels together, and state by parameter name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import ConfigError
from stenograd.exchange.buckets import assign, join_state, split_state
from stenograd.exchange.flat_parameters import Stream

_TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ),
    max_size=12,
)


def _named(spec):
    return {f"p{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(spec)}


@settings(max_examples=200)
@given(_TENSORS, st.integers(1, 400))
def test_every_tensor_is_in_one_bucket_of_its_dtype_and_size(spec, bucket_bytes):
    tensors = _named(spec)
    buckets = assign(tensors, bucket_bytes)
    assert sorted(n for b in buckets for n in b.names) == sorted(tensors)
    for b in buckets:
        assert {tensors[n].dtype for n in b.names} == {b.dtype}
        nbytes = sum(tensors[n].numel() * tensors[n].element_size() for n in b.names)
        assert nbytes <= bucket_bytes or len([n for n in b.names if tensors[n].numel()]) == 1


@settings(max_examples=100)
@given(_TENSORS, st.integers(1, 400), st.integers(1, 400))
def test_state_survives_another_bucketing(spec, first_bytes, second_bytes):
    """Flat state and per-tensor state, cut by name, put into other buckets and cut again, is the same."""
    tensors = _named(spec)

    def fresh(bucket):
        n = sum(bucket.numels)
        own = {f"q/{i}": torch.randn(2, i + 1) for i, s in enumerate(bucket.shapes) if len(s) == 2}
        return {"residual": torch.randn(n), **{k: torch.randn(3) for k in own}}

    def state_of(buckets):
        return {k: v for b in buckets for k, v in split_state(fresh(b), b).items()}

    first = assign(tensors, first_bytes)
    second = assign(tensors, second_bytes)
    saved = state_of(first)
    again = {k: v for b in second for k, v in split_state(join_state(fresh(b), b, saved), b).items()}
    assert again.keys() == saved.keys()
    for name, state in saved.items():
        assert state.keys() == again[name].keys()
        assert all(torch.equal(t, again[name][k]) for k, t in state.items())


def test_closed_in_the_order_in_which_they_become_ready():
    tensors = {
        "a": torch.ones(2),
        "b": torch.ones(2, dtype=torch.float64),
        "c": torch.ones(2),
        "d": torch.ones(1),
    }
    assert [b.names for b in assign(tensors, 16)] == [("b",), ("a", "c"), ("d",)]


def test_the_last_ones_stay_with_the_others_where_no_tail_is_wanted():
    tensors = {"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}
    assert [b.names for b in assign(tensors, 16)] == [("a", "b"), ("c",)]
    assert [b.names for b in assign(tensors, 16, tail=False)] == [("a", "b", "c")]


def test_the_first_bucket_leaves_when_a_quarter_of_it_is_filled():
    """4 bytes each: of a bucket of 32, two are a quarter. A tensor larger than one leaves by itself."""
    tensors = {name: torch.ones(1) for name in "abcdefgh"}
    names = [b.names for b in assign(tensors, 32, head=True, tail=False)]
    assert names == [("a", "b"), ("c", "d", "e", "f", "g", "h")]
    names = [b.names for b in assign(tensors, 32, head=True)]
    assert names == [("a", "b"), ("c", "d", "e", "f"), ("g", "h")]
    assert [b.names for b in assign({"a": torch.ones(9)}, 32, head=True)] == [("a",)]
    large = {"a": torch.ones(1), "b": torch.ones(9), "c": torch.ones(1), "d": torch.ones(1)}
    assert [b.names for b in assign(large, 32, head=True, tail=False)] == [("b",), ("a", "c", "d")]


def test_small_tensors_that_travel_densely_stay_together():
    """They are few bytes, so neither the first nor the last of them get a bucket of their own."""
    tensors = {"c": torch.ones(4), "b": torch.ones(1), "a": torch.ones(4), "z": torch.ones(1)}
    buckets = assign(tensors, 64, head=True, dense_below=2)
    assert [(b.names, b.dense) for b in buckets] == [(("c",), False), (("a",), False), (("b", "z"), True)]


def test_a_bucket_needs_room():
    with pytest.raises(ConfigError, match="bucket_bytes must be at least 1, got 0"):
        assign({}, 0)


def test_state_of_another_shape_is_refused():
    (bucket,) = assign({"a": torch.ones(2, 2)}, 100)
    saved = {"a": {"residual": torch.ones(3)}}
    with pytest.raises(ConfigError, match=r"residual of a must have shape \(2, 2\), got \(3,\): "):
        join_state({"residual": torch.ones(4)}, bucket, saved)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 40))
def test_a_slice_of_all_parameters_holds_those_of_its_bucket(numels, chunk):
    """Also where one that is larger than a bucket lies between two that would fit into one."""
    named = {f"p{i}": torch.full((n,), float(i)) for i, n in enumerate(numels)}
    stream = Stream(named)
    values = stream.read(stream.empty())
    cuts = list(stream.cuts(chunk, whole=True))
    for part, bucket in cuts:
        assert torch.equal(values[part], torch.cat([named[name] for name in bucket.names]))
    assert sum(part.stop - part.start for part, _ in cuts) == values.numel()
