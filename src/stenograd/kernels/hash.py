"""The hash that tells whether replicas are equal."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.kernels.backend import pick

__all__ = ["hash_tensor"]

_TAIL = 0x5851F42D4C957F2D  # odd, so a bijection; keeps the tail's places apart from the words'


def hash_tensor(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits: `h = H(words) + c H(tail)`, `H(w) = sum_i mix(w_i + (i + 1) golden) mod 2**64`.

    Words are 8 bytes each; the tail is what is left, followed by zeros, and the number of bytes. mix is
    splitmix64's finaliser, a bijection. So two tensors that differ within one aligned word (a flipped
    bit, NaN's payload, the sign of zero) always have different hashes, and others have equal ones with a
    chance of about 2**-64. It is no defence against someone who looks for equal ones.

    Args:
        tensor: strided, of any dtype, shape, layout in memory and device; read in logical order.

    Returns:
        0-d int64 on the tensor's device.

    Example:
        >>> bool(hash_tensor(torch.tensor([0.0])) == hash_tensor(torch.tensor([-0.0])))
        False
    """
    raw = _bytes(tensor)
    whole = raw.numel() // 8 * 8
    ending = raw.new_zeros(8)
    ending[: raw.numel() - whole] = raw[whole:]
    tail = torch.stack([ending.view(torch.int64)[0], torch.tensor(raw.numel(), device=raw.device)])
    return _hash(raw[:whole].view(torch.int64)) + _TAIL * _hash(tail)


def _hash(words: Tensor) -> Tensor:
    hashed: Tensor = pick("hash", "hash_words", words)(words)
    return hashed


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one element can have any stride
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    # words lie at multiples of 8
    return raw.clone() if raw.data_ptr() % 8 or raw.storage_offset() % 8 else raw
