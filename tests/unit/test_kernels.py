"""Bit packing against numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import WireError
from stenograd.kernels.bits import block_views, pack_bits, packed_bytes, unpack_bits


def numpy_packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Write each value as `bits` bits, lowest first, and let numpy join them."""
    planes = np.unpackbits(values[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(planes.reshape(-1), bitorder="little")


@settings(max_examples=60)
@given(bits=st.integers(1, 8), count=st.integers(0, 70), seed=st.integers(0, 999), offset=st.integers(0, 9))
def test_packing_is_numpys_and_unpacking_undoes_it(bits, count, seed, offset):
    """Slices of larger buffers may start at any byte."""
    values = np.random.default_rng(seed).integers(0, 2**bits, count + offset, dtype=np.uint8)
    packed = pack_bits(torch.from_numpy(values)[offset:], bits)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tolist() == numpy_packed(values[offset:], bits).tolist()
    received = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed])[offset:]
    assert unpack_bits(received, bits, count).tolist() == values[offset:].tolist()


@pytest.mark.parametrize("bits", range(1, 9))
def test_neither_side_changes_its_input(bits):
    values = (torch.arange(64) % 2**bits).to(torch.uint8)
    kept = values.clone()
    packed = pack_bits(values, bits)
    kept_packed = packed.clone()
    unpack_bits(packed, bits, 64).zero_()
    assert torch.equal(values, kept)
    assert torch.equal(packed, kept_packed)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_packed_buffer_of_the_wrong_length_is_refused(bits):
    """10 values of b bits take ceil(10 b / 8) bytes."""
    packed = pack_bits(torch.ones(10, dtype=torch.uint8), bits)
    assert packed.numel() == packed_bytes(10, bits) == -(-10 * bits // 8)
    for wrong in (packed[:-1], torch.cat([packed, packed[:1]])):
        with pytest.raises(WireError, match=f"10 values of {bits} bits take {packed.numel()} bytes"):
            unpack_bits(wrong, bits, 10)


@pytest.mark.parametrize(
    ("numels", "shapes"),
    [
        ([], []),
        ([0], []),
        ([3], [(1, 3)]),
        ([4], [(1, 4)]),
        ([9], [(2, 4), (1, 1)]),
        ([4, 8, 0, 4], [(4, 4)]),
        ([3, 3], [(1, 3), (1, 3)]),
        ([4, 5, 6], [(2, 4), (1, 1), (1, 4), (1, 2)]),
    ],
)
def test_blocks_are_views_of_all_elements_and_span_no_tensors(numels, shapes):
    flat = torch.zeros(sum(numels))
    views = block_views(flat, 4, numels)
    assert [tuple(v.shape) for v in views] == shapes
    for v in views:
        v += 1
    assert flat.eq(1).all()
