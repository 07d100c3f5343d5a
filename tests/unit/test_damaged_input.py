"""Every decoder gets damaged input: it must answer rightly, or raise an error that Stenograd names.

Payloads are random bytes, have flipped bits or another length. Where a kernel exists twice, both must do the
same; inputs end right before a page that nobody may touch, and results lie between sentinels.
"""

import ctypes
import json
import mmap
import os
import random
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch
from damage import Checkpoints, Kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stenograd
from stenograd.compression.contract import Site
from stenograd.compression.sparse import Message
from stenograd.errors import StenogradError
from stenograd.exchange.sparse_rows import Rows, average_rows, write_rows
from stenograd.kernels.indices import pack_indices, unpack_indices
from stenograd.kernels.quantize import qsgd_decode_mean, qsgd_encode_feedback
from stenograd.kernels.scatter import scatter_mean
from stenograd.kernels.sign import sign_decode_mean, sign_encode_feedback
from stenograd.kernels.values import pack_values, unpack_values
from stenograd.launch.failure_detector import FailureDetector
from stenograd.simulate import run
from stenograd.testing.methods import configurations
from stenograd.wire.packing import pack
from stenograd.wire.requests import gather_ragged

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
MOST = 600  # elements of a case: enough for several blocks, words and cache lines
PAGE = mmap.PAGESIZE
SENTINEL, ZONE = 0x5A, 1024


class GuardedInput:
    """A place for tensors right before a page without any rights: reading behind their end is a crash."""

    def __init__(self, most_bytes):
        self.length = -(-most_bytes // PAGE) * PAGE
        self.all = np.frombuffer(mmap.mmap(-1, self.length + PAGE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        forbidden = ctypes.c_void_p(self.all.ctypes.data + self.length)
        assert libc.mprotect(forbidden, ctypes.c_size_t(PAGE), 0) == 0, os.strerror(ctypes.get_errno())

    def put(self, tensor):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return tensor
        place = torch.from_numpy(self.all[self.length - nbytes : self.length])
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@cache
def inputs():
    return [GuardedInput(1 << 16) for _ in range(6)]


def outcome(call):
    """Return "answer" and the result, or the name of Stenograd's error and None."""
    try:
        return "answer", call()
    except StenogradError as error:
        return type(error).__name__, None


def same(a, b):
    """Whether results are equal; any NaN equals any other."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def damaged(tensors, draw):
    """Return a payload as it is, or with random bytes, flipped bits or another length."""
    out = [t.clone() for t in tensors]
    index = draw.randrange(len(out))
    victim, how = out[index].reshape(-1), draw.randrange(6)
    if how in (1, 2) and victim.numel():
        raw = victim.view(torch.uint8)
        if how == 1:
            raw.copy_(torch.frombuffer(bytearray(draw.randbytes(raw.numel())), dtype=torch.uint8))
        for _ in range(draw.randrange(1, 9)):
            raw[draw.randrange(raw.numel())] ^= 1 << draw.randrange(8)
        out[index] = victim.view(out[index].shape)
    elif how == 3 and victim.numel():
        out[index] = victim[: draw.randrange(victim.numel())]
    elif how == 4:
        out[index] = torch.cat([victim, victim.new_zeros(draw.randrange(1, 9))])
    elif how == 5 and victim.numel():
        victim.view(torch.uint8).fill_(draw.choice([0, 255, 127, 128]))
    return tuple(out)


def bytes_changed(tensors, draw):
    """Return tensors of the same form, some of whose bytes are others: what the network could do."""
    while True:
        out = damaged(tensors, draw)
        if [t.shape for t in out] == [t.shape for t in tensors]:
            return out


def numbers(count, draw):
    return torch.randn(count, generator=torch.Generator().manual_seed(draw.getrandbits(32)))


def indices(n, k, draw):
    return torch.tensor(sorted(draw.sample(range(n), k)), dtype=torch.int32)


def pieces(n, draw):
    cuts = sorted(draw.randrange(n + 1) for _ in range(draw.randrange(3)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


def guarded(payloads):
    places = iter(inputs())
    return [tuple(next(places).put(t) for t in payload) for payload in payloads]


def compared(kernel, *arguments, writes=None):
    """Run both versions of a kernel, the fast one into memory between sentinels if it `writes` so much."""
    fast = kernel
    if writes is not None:
        memory = torch.full((4 * (writes + 2 * ZONE),), SENTINEL, dtype=torch.uint8)
        fast = partial(kernel, out=memory.view(torch.float32)[ZONE : ZONE + writes])
    ours = outcome(lambda: fast(*arguments))
    if writes is not None:
        around = torch.cat([memory[: 4 * ZONE], memory[4 * (ZONE + writes) :]])
        assert (around == SENTINEL).all(), "wrote outside its memory"
    with mock.patch.dict(os.environ, STENOGRAD_KERNELS="reference"):
        plain = outcome(lambda: kernel(*arguments))
    assert ours[0] == plain[0], f"numba: {ours}, plain torch: {plain}"
    assert ours[0] != "answer" or same(ours[1], plain[1]), f"numba: {ours}, plain torch: {plain}"


def elias_fano(draw):
    n = draw.randrange(1, draw.choice([9, 70, 600, 5000, 1 << 20]))
    k = draw.randrange(min(n, 64) + 1)
    ((packed,),) = guarded([damaged((pack_indices(indices(n, k, draw), n),), draw)])
    compared(unpack_indices, packed, n, k)


def values(kind, draw):
    count = draw.randrange(MOST)
    (packed,) = guarded([damaged(pack_values(numbers(count, draw), kind), draw)])
    compared(unpack_values, packed, kind, count)


def scatter(draw):
    n = draw.randrange(1, MOST)
    whole = [(k := draw.randrange(n + 1)) and (indices(n, k, draw), numbers(k, draw)) for _ in range(2)]
    vectors = [damaged(v, draw) for v in whole if v] or [(indices(n, 1, draw), numbers(1, draw))]
    compared(scatter_mean, guarded(vectors), n, writes=n)


def sign(draw):
    n, block = draw.randrange(1, MOST), draw.choice([1, 7, 16, 64, 1024])
    numels = pieces(n, draw)
    sent = [sign_encode_feedback(numbers(n, draw), None, block, numels) for _ in range(draw.choice([1, 3]))]
    payloads = guarded([damaged(payload, draw) for payload in sent])
    compared(sign_decode_mean, payloads, block, numels, writes=n)


def qsgd(bits, draw):
    n, block = draw.randrange(1, MOST), draw.choice([1, 7, 64, 512])
    numels = pieces(n, draw)
    sent = [
        qsgd_encode_feedback(numbers(n, draw), None, bits, block, numels, draw.getrandbits(30))
        for _ in range(draw.choice([1, 3]))
    ]
    payloads = guarded([damaged(payload, draw) for payload in sent])
    compared(qsgd_decode_mean, payloads, bits, block, numels, writes=n)


def message(kind, is_compact, draw):
    n = draw.randrange(1, MOST)
    form = Message(n, draw.randrange(1, n + 1), is_compact, kind)
    payload = form.write(indices(n, form.count, draw), numbers(form.count, draw))
    name, read = outcome(lambda: form.read(damaged(payload, draw)))
    if name == "answer" and is_compact:  # plain int32 indices are checked when they are scattered
        assert (read[0].shape, read[0].dtype) == ((form.count,), torch.int32)


def exchange(text, draw):
    """Bytes of what rank 0 gets in an exchange are others; it must end with an average or a named error."""
    compressor, size = stenograd.method(text).compressor, draw.choice([2, 3, 4, 5])
    shapes = [draw.choice([(5,), (24, 20), (16, 3, 3), (130,), ()]) for _ in range(draw.randrange(1, 3))]
    cut = tuple(torch.Size(shape) for shape in shapes)
    n, step = sum(shape.numel() for shape in cut), draw.randrange(5)
    parts = []
    for rank in range(size):
        site, x = Site(shapes=cut, rank=rank, world_size=size, step=step), numbers(n, draw)
        parts.append(compressor.exchange(x, None, compressor.init(x, site), replace(site, error=True)))
    _, ranks = outcome(lambda: run([tampered(parts[0], draw), *parts[1:]]))
    assert not ranks or (ranks[0].average.shape, ranks[0].average.dtype) == ((n,), torch.float32)


def tampered(rounds, draw):
    reply = None
    while True:
        try:
            request = rounds.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield request
        if isinstance(reply, tuple):
            reply = bytes_changed(reply, draw) if reply else reply
        else:
            other = draw.randrange(1, len(reply))
            reply[other] = bytes_changed(reply[other], draw)


def ragged(draw):
    lengths = [draw.randrange(20) for _ in range(3)]
    parts = [gather_ragged(numbers(m, draw), indices(40, m, draw), most=40) for m in lengths]
    outcome(lambda: run([tampered(parts[0], draw), *parts[1:]]))


def sparse_rows(draw):
    n = draw.randrange(1, 30)
    kept = [indices(n, draw.randrange(n), draw).long() for _ in range(3)]
    parts = [average_rows([Rows(at, numbers(len(at), draw)[:, None], n)], 3) for at in kept]
    name, found = outcome(lambda: run([tampered(parts[0], draw), *parts[1:]]))
    parameter = torch.zeros(n, 1)
    parameter.grad = torch.zeros(n, 1)
    if name == "answer":
        write_rows(parameter, found[0][0])


def packed(draw):
    kinds = (torch.uint8, torch.float64, torch.bfloat16, torch.int32, torch.bool)
    tensors = tuple(
        torch.zeros(draw.choice([(), (0,), (3,), (2, 3)]), dtype=draw.choice(kinds)) for _ in range(3)
    )
    flat, unpack = pack(tensors)
    (row,) = damaged((flat,), draw)
    name, back = outcome(lambda: unpack(row))
    assert name != "answer" or [(t.shape, t.dtype) for t in back] == [(t.shape, t.dtype) for t in tensors]


def method_text(draw):
    """A method's text, with characters replaced, left out, doubled or put in."""
    keys = ["ratio=0.1", "bits=4", "block=64", "clip_norm=1", "warmup_steps=5", "values=int8", "rank=2"]
    text = list(f"{draw.choice(stenograd.methods())}:{','.join(draw.sample(keys, draw.randrange(3)))}")
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(text) + 1)
        character = draw.choice("0123456789.,:=-+eEinfa_ \x00\n\u00e9\u0663\U0001f600xtopk")
        text[at : at + draw.randrange(2)] = draw.choice([[], [character], [character] * 9])
    name, made = outcome(lambda: stenograd.method("".join(text)))
    assert name != "answer" or str(stenograd.method(str(made))) == str(made)


def changed(content, draw):
    raw, at = bytearray(content), draw.randrange(len(content))
    how = draw.randrange(5)
    if how == 0:
        return bytes(raw[:at])
    if how == 1:
        raw[at] ^= 1 << draw.randrange(8)
    elif how == 2:
        raw[at : at + draw.randrange(40)] = draw.randbytes(draw.randrange(40))
    elif how == 3:
        return draw.randbytes(draw.randrange(200))
    return bytes(raw)


@cache
def detector():
    first, *others = [FailureDetector(rank, "127.0.0.1") for rank in range(4)]
    for one in (first, *others):
        one.close()
    first.meet({rank: one.card for rank, one in enumerate(others, 1)})
    return first


def roll_call(draw):
    """Lines that whoever connects to a rank's listener may write; no socket is involved."""
    token = json.loads(detector().card)[2]
    asked = json.dumps({"from": 1, "group": "world", "lost": [2, 3]}).encode()
    said = draw.choice([b"[]", b"3", b'{"lost": 3}', b"", asked, changed(asked, draw)])
    signed = detector()._mac(token, text) if (text := said.decode(errors="replace")) else ""
    line = json.dumps([text, signed]).encode()
    junk = [b"[]", b"3", b'{"to": 1}', b"", b'["", ""]', b"[3, 4]", line]
    line = draw.choice([changed(line, draw), changed(line, draw), draw.choice(junk)])
    with suppress(ValueError):  # refused
        detector()._answer(line)


CASES = {
    "indices (Elias-Fano)": elias_fano,
    "sparse mean": scatter,
    "sign": sign,
    **{f"values {kind}": partial(values, kind) for kind in ("float32", "bfloat16", "int8")},
    **{f"qsgd {bits} bits": partial(qsgd, bits) for bits in range(2, 9)},
    **{
        f"message {kind or 'as is'}{' compact' * is_compact}": partial(message, kind, is_compact)
        for kind in (None, "float32", "bfloat16", "int8")
        for is_compact in (True, False)
    },
    **{f"exchange {text}": partial(exchange, text) for text in configurations()},
    "gather of any lengths": ragged,
    "rows of sparse gradients": sparse_rows,
    "unpack": packed,
    "method text": method_text,
    "roll call": roll_call,
}
seeds = given(seed=st.integers(0, 2**63))
long = settings(max_examples=10_000, suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decoder", CASES)
def test_a_decoder_answers_rightly_or_names_the_error(decoder):
    long(seeds(lambda seed: CASES[decoder](random.Random(seed))))()


@pytest.mark.parametrize("files", [Checkpoints, Kernel])
def test_damaged_files_are_refused_by_name_or_made_anew(files, tmp_path):
    made = files(tmp_path)

    def damage(seed):
        made(random.Random(seed))  # which tells what came of it

    settings(long, max_examples=200)(seeds(damage))()
