"""Several tensors as bytes, whole and row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import WireError
from stenograd.wire.packing import pack, pack_rows

_DTYPES = [torch.uint8, torch.bool, torch.float16, torch.int32, torch.float32, torch.int64]
_SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=2), st.sampled_from(_DTYPES), st.booleans()), min_size=1
)


def _tensor(shape, dtype, strided):
    t = (torch.arange(max(1, torch.Size(shape).numel())) % 100)[: torch.Size(shape).numel()].view(shape)
    t = t.to(dtype)
    return t.t().contiguous().t() if strided and t.ndim == 2 else t


def _same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@settings(max_examples=100)
@given(_SPECS, st.integers(1, 5))
def test_rows_are_packed_as_each_alone(specs, rows):
    """Row i of every tensor, as `pack` writes it; and back."""
    tensors = tuple(_tensor((rows, *shape), dtype, strided) for shape, dtype, strided in specs)
    packed, unpack = pack_rows(tensors)
    assert packed.shape[0] == rows
    for i in range(rows):
        alone, _ = pack(tuple(t[i] for t in tensors))
        assert torch.equal(packed[i], alone)
        assert all(_same(a, t[i]) for a, t in zip(unpack(packed[i].clone()), tensors, strict=True))


def test_another_length_is_refused():
    _, unpack = pack_rows((torch.ones(2, 3),))
    with pytest.raises(WireError, match="expected 12 bytes, got 11"):
        unpack(torch.zeros(11, dtype=torch.uint8))
