"""The hash of replicas, and what the guard refuses at construction."""

import pytest
import torch
from torch import nn

import stenograd
from stenograd.kernels.cpu import hash as cpu_hash
from stenograd.kernels.hash import hash_tensor
from stenograd.testing.checks import Plain

reference_hash = Plain("hash")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.complex64,
    torch.bool,
]


def _bytes(t):
    return (torch.view_as_real(t) if t.is_complex() else t).view(-1).view(torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, 16_384, 16_385, 40_000])
def test_both_kernels_agree(size):
    words = torch.randint(-(2**62), 2**62, (size,))
    assert torch.equal(reference_hash.hash_words(words), cpu_hash.hash_words(words))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_flipped_bit_is_seen(dtype):
    """11 elements, so that a tail is left over for most types."""
    t = torch.randint(0, 2, (11,)).float().to(dtype)
    before, raw, seen = int(hash_tensor(t)), _bytes(t), set()
    for at in range(raw.numel()):
        for bit in range(8):
            raw[at] ^= 1 << bit
            seen.add(int(hash_tensor(t)))
            raw[at] ^= 1 << bit
    assert int(hash_tensor(t)) == before
    assert len(seen | {before}) == 8 * raw.numel() + 1, "all those tensors have different hashes"


def test_bits_and_order_count_and_layout_does_not():
    zero, nan = torch.zeros(4), torch.full((4,), torch.nan)
    assert hash_tensor(zero) != hash_tensor(-zero)
    other = nan.clone()
    other.view(torch.int32)[2] += 1  # another payload
    assert hash_tensor(nan) != hash_tensor(other)
    x = torch.randn(40, 30)
    for a, b in [(0, 1), (0, 2), (3, 1100)]:
        swapped = x.clone()
        swapped.view(-1)[[a, b]] = x.view(-1)[[b, a]]
        assert hash_tensor(swapped) != hash_tensor(x)
    assert hash_tensor(x.t()) == hash_tensor(x.t().contiguous())
    assert hash_tensor(torch.cat([zero, x.view(-1)])[4:]) == hash_tensor(x.view(-1))
    assert hash_tensor(torch.zeros(())) != hash_tensor(torch.zeros(2)) != hash_tensor(torch.zeros(0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check_every": -1}, "check_every must be a whole number"),
        ({"check_every": 1.5}, "check_every must be a whole number"),
        ({"repair": True}, "check_every must be at least 1 with repair"),
    ],
)
def test_wrong_options_are_refused(options, says):
    model = nn.Linear(2, 1)
    with pytest.raises(stenograd.errors.ConfigError, match=says):
        stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
