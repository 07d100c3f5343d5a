"""Signs, levels and 16-bit floats: numba against plain torch on the same data, bit for bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.kernels import KINDS, LAYOUTS, data, same
from torch.profiler import ProfilerActivity, profile

from stenograd.compression.contract import Site
from stenograd.compressors.qsgd import QSGD
from stenograd.compressors.sign import Sign
from stenograd.errors import ConfigError, WireError
from stenograd.kernels.cpu import quantize as cpu_quantize
from stenograd.kernels.cpu import sign as cpu_sign
from stenograd.kernels.quantize import qsgd_decode_mean, qsgd_encode_feedback
from stenograd.kernels.sign import sign_decode_mean, sign_encode_feedback
from stenograd.kernels.values import pack_values, unpack_values
from stenograd.testing.checks import Plain

plain_quantize = Plain("quantize")
plain_sign = Plain("sign")
plain_values = Plain("values")


@settings(max_examples=120)
@given(
    numels=LAYOUTS,
    block=st.sampled_from([1, 3, 32, 64, 100, 1024]),
    kind=st.sampled_from(KINDS),
    feedback=st.booleans(),
    seed=st.integers(0, 999),
)
def test_signs_and_scales_are_the_references(numels, block, kind, feedback, seed):
    x, r = data(sum(numels), kind, seed)
    mine, theirs = (r, r.clone()) if feedback else (None, None)
    before = x.clone()
    fast = cpu_sign.sign_encode_feedback(x, mine, block, numels)
    same((*fast, x), (*plain_sign.sign_encode_feedback(x.clone(), theirs, block, numels), before))
    if feedback:
        same((mine,), (theirs,))


@settings(max_examples=60)
@given(numels=LAYOUTS, block=st.sampled_from([1, 7, 64, 100]), ranks=st.integers(1, 5), at=st.integers(0, 9))
def test_the_mean_of_signs_is_the_references(numels, block, ranks, at):
    """The packed bits of a received buffer may start at any byte."""
    payloads = []
    for rank in range(ranks):
        x, _ = data(sum(numels), "normal", rank)
        bits, scales = cpu_sign.sign_encode_feedback(x, None, block, numels)
        payloads.append((torch.cat([torch.zeros(at, dtype=torch.uint8), bits])[at:], scales))
    out = torch.full((sum(numels),), float("nan"))
    assert cpu_sign.sign_decode_mean(payloads, block, numels, out) is out
    same((out,), (plain_sign.sign_decode_mean(payloads, block, numels),))


def test_what_signs_lose_stays_in_the_residual():
    x, r = data(5000, "normal", 1)
    v = x + r
    payload = sign_encode_feedback(x, r, 1024, [2000, 3000])
    sent = sign_decode_mean([payload], 1024, [2000, 3000])
    assert torch.equal(r, v - sent)
    means = [p.abs().mean() for t in v.split([2000, 3000]) for p in t.split(1024)]
    torch.testing.assert_close(payload[1], torch.stack(means), rtol=1e-6, atol=0)


@settings(max_examples=150)
@given(
    numels=LAYOUTS,
    block=st.sampled_from([1, 3, 32, 64, 100, 512]),
    bits=st.integers(2, 8),
    kind=st.sampled_from(KINDS),
    feedback=st.booleans(),
    seed=st.integers(-5, 2**64),
)
@example(numels=[2049, 3], block=32, bits=8, kind="normal", feedback=True, seed=1355)  # a tie by one rounding
def test_levels_are_the_references(numels, block, bits, kind, feedback, seed):
    x, r = data(sum(numels), kind, seed % 1000)
    mine, theirs = (r, r.clone()) if feedback else (None, None)
    fast = cpu_quantize.qsgd_encode_feedback(x, mine, bits, block, numels, seed)
    same(fast, plain_quantize.qsgd_encode_feedback(x.clone(), theirs, bits, block, numels, seed))
    if feedback:
        same((mine,), (theirs,))


@settings(max_examples=60)
@given(
    numels=LAYOUTS,
    block=st.sampled_from([1, 7, 64, 100]),
    bits=st.integers(2, 8),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_the_mean_of_any_codes_is_the_references(numels, block, bits, ranks, seed):
    """Any bytes of the right length decode to something: the largest code is the level after the last."""
    n, rng = sum(numels), np.random.default_rng(seed)
    blocks = sum(math.ceil(m / block) for m in numels)
    payloads = [
        (torch.from_numpy(rng.integers(0, 256, -(-n * bits // 8), dtype=np.uint8)), torch.rand(blocks))
        for _ in range(ranks)
    ]
    fast = cpu_quantize.qsgd_decode_mean(payloads, bits, block, numels)
    same((fast,), (plain_quantize.qsgd_decode_mean(payloads, bits, block, numels),))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_unbiased_and_the_error_stays_in_the_residual(bits):
    """The mean error over 4,000 seeds is within 5 sigma; sigma is at most (m / s) / 2 / sqrt(4000)."""
    v = torch.tensor([1.0, 0.7, -0.31, 0.05, 0.0, -1.0, 1e-3])
    step = 1 / ((1 << (bits - 1)) - 1)
    total = torch.zeros(7, dtype=torch.float64)
    for seed in range(4000):
        r = torch.zeros(7)
        payload = qsgd_encode_feedback(v, r, bits, 8, [7], seed)
        if seed < 20:
            assert torch.equal(r, v - qsgd_decode_mean([payload], bits, 8, [7]))
            assert (r.abs() <= step).all()
        total += r
    assert (total / 4000).abs().max() < 5 * step / 2 / math.sqrt(4000)
    assert total[0] == total[5] == total[4] == 0  # the ends and zero are levels


@pytest.mark.parametrize("uniforms", [plain_quantize.uniforms, plain_quantize.short_uniforms])
def test_the_hash_is_uniform_and_independent_over_places_and_seeds(uniforms):
    """256 bins of 2,560,000 numbers: chi-square has mean 255 and standard deviation 22.6."""
    n = 2_560_000
    u = uniforms(1, n)
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 256, 0, 1)
    assert abs(float(((counts - n / 256) ** 2).sum() / (n / 256)) - 255) < 5 * 22.6
    others = [uniforms(2, n), uniforms(1 << 32, n), uniforms(-1, n)]
    for other in (*others, u.roll(1), u.roll(2), u.roll(1024)):
        correlation = float(((u - 0.5) * (other - 0.5)).mean() * 12)
        assert abs(correlation) < 5 / math.sqrt(n)


CODES = {
    "sign": lambda x, r, n: sign_encode_feedback(x, r, 64, [n]),
    "qsgd": lambda x, r, n: qsgd_encode_feedback(x, r, 4, 64, [n], seed=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encode", CODES.values(), ids=CODES)
def test_nothing_to_add_is_the_same_as_zeros(encode, dtype):
    x = data(1000, "normal", 0)[0].to(dtype)
    with_zeros, alone = x.clone(), x.clone()
    same(encode(torch.zeros_like(x), with_zeros, 1000), encode(None, alone, 1000))
    assert torch.equal(with_zeros, alone)
    assert not torch.equal(alone, x)
    with pytest.raises(ConfigError, match="x and residual are both None: give what is to be sent"):
        encode(None, None, 1000)


@pytest.mark.parametrize("method", [Sign(), QSGD()])
def test_encoding_in_place_allocates_no_second_tensor(method):
    """Zeros to add to 2^20 elements would take 4 MiB."""
    x = data(1 << 20, "normal", 0)[0]
    site = Site(shapes=(x.shape,))
    method.encode_error(x, None, site)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        method.encode_error(x, None, site)
    assert sum(max(0, event.self_cpu_memory_usage) for event in seen.events()) < 1 << 20


def test_payloads_of_another_size_are_refused():
    bits, scales = sign_encode_feedback(torch.ones(20), None, 8, [20])
    codes, _ = qsgd_encode_feedback(torch.ones(20), None, 4, 8, [20], 0)
    for module in (cpu_sign, plain_sign):
        with pytest.raises(WireError, match="take 3 bytes, got 2"):
            module.sign_decode_mean([(bits[:2], scales)], 8, [20])
        with pytest.raises(WireError, match="3 blocks have as many scales, got 2"):
            module.sign_decode_mean([(bits, scales[:2])], 8, [20])
        with pytest.raises(ConfigError, match="numels must add up to the 20 elements, got 19"):
            module.sign_encode_feedback(torch.ones(20), None, 8, [19])
        with pytest.raises(ConfigError, match="block must be at least 1, got 0"):
            module.sign_encode_feedback(torch.ones(20), None, 0, [20])
    for module in (cpu_quantize, plain_quantize):
        with pytest.raises(WireError, match="20 values of 4 bits take 10 bytes, got 9"):
            module.qsgd_decode_mean([(codes[:9], scales)], 4, 8, [20])
        with pytest.raises(ConfigError, match="bits must be 2 to 8, got 9"):
            module.qsgd_encode_feedback(torch.ones(20), None, 9, 8, [20], 0)


@settings(max_examples=60)
@given(count=st.integers(0, 600), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_values_in_few_bits_are_the_references(count, kind, seed):
    x, _ = data(count, kind, seed)
    for name in ("float32", "bfloat16", "int8"):
        packed = pack_values(x, name)
        same(packed, plain_values.pack_values(x, name))
        back = unpack_values(packed, name, count)
        same((back,), (plain_values.unpack_values(packed, name, count),))
        if kind == "normal" and count:
            bound = {"float32": 0, "bfloat16": x.abs() / 256, "int8": x.abs().max() / 254 + 1e-6}[name]
            assert ((back - x).abs() <= bound).all()


def test_values_of_another_form_are_refused():
    packed = pack_values(torch.ones(300), "int8")
    with pytest.raises(WireError, match="300 values as int8 are"):
        unpack_values(packed[:1], "int8", 300)
    with pytest.raises(WireError, match="299 values as int8 are"):
        unpack_values(packed, "int8", 299)
    with pytest.raises(WireError, match="300 values as bfloat16 are"):
        unpack_values((packed[0],), "bfloat16", 300)
    with pytest.raises(ConfigError, match="kind must be one of"):
        pack_values(torch.ones(3), "int4")


def test_uniform_numbers_are_hashes_of_their_places_in_every_part():
    """Parts are hashed one after another; lowbias32 with two keys in Python's integers knows no parts."""
    first, second = plain_quantize.hash_keys(11)

    def hashed(place):
        h = place ^ first
        h = ((h ^ h >> 16) * 0x7FEB352D) % 2**32 ^ second
        h = ((h ^ h >> 15) * 0x846CA68B) % 2**32
        return h ^ h >> 16

    long, short = plain_quantize.uniforms(11, 70_001), plain_quantize.short_uniforms(11, 140_001)
    for place in (0, 32767, 32768, 65536, 70_000):
        h = hashed(place)
        assert long[place] == (h >> 8) / 2**24
        assert short[2 * place] == (h & 0xFFFF) / 2**16
        assert place == 70_000 or short[2 * place + 1] == (h >> 16) / 2**16
