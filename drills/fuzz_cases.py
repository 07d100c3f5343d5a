"""What the fuzzer does to each decoder: a function that runs one case and says what the decoder did.

A case raises `Wrong` where the decoder was wrong: an error that Stenograd does not name, other answers than
the reference's, a result of another form, or a write outside its memory.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from file_damage import Checkpoints, Kernel, Wrong
from guarded import GuardedInput, GuardedOutput
from torch import Tensor

import stenograd
from stenograd.comm.packing import pack
from stenograd.compression.contract import Compressor, Site
from stenograd.compression.sparse import Message
from stenograd.data.requests import gather_ragged
from stenograd.errors import StenogradError
from stenograd.kernels.cpu import indices as cpu_places
from stenograd.kernels.cpu import quantize as cpu_quantize
from stenograd.kernels.cpu import scatter as cpu_scatter
from stenograd.kernels.cpu import sign as cpu_sign
from stenograd.kernels.values import unpack_values
from stenograd.launch.failure_detector import Presence
from stenograd.simulate import run
from stenograd.testing.checks import Plain
from stenograd.testing.methods import configurations

reference_places = Plain("indices")
reference_quantize = Plain("quantize")
reference_scatter = Plain("scatter")
reference_sign = Plain("sign")
plain_values = Plain("values")

__all__ = ["CASES", "Wrong", "warm"]

Case = Callable[[random.Random], str]

_MOST = 600  # elements of a case: enough for several blocks, words and cache lines
_INPUTS = [GuardedInput(1 << 16) for _ in range(6)]
_FILES = tempfile.TemporaryDirectory(prefix="fuzz-")
_OUTPUT = GuardedOutput(_MOST)


def warm() -> None:
    """Load the compiled kernels once, for all processes that are forked later."""
    for case in (_elias_fano, _scatter, _sign, partial(_values, "int8"), partial(_qsgd, 4)):
        for seed in range(3):
            case(random.Random(seed))


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """Return "answer" and the result, or the name of Stenograd's error and None."""
    try:
        return "answer", call()
    except StenogradError as error:
        return type(error).__name__, None
    except Exception as error:
        raise Wrong(f"{type(error).__name__}: {str(error)[:300]}") from error


def same(a: Any, b: Any) -> bool:
    """Whether results are equal; any NaN equals any other."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def damaged(tensors: Sequence[Tensor], draw: random.Random) -> tuple[Tensor, ...]:
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


def bytes_changed(tensors: Sequence[Tensor], draw: random.Random) -> tuple[Tensor, ...]:
    """Return tensors of the same form, some of whose bytes are others: what the network could do."""
    while True:
        out = damaged(tensors, draw)
        if [t.shape for t in out] == [t.shape for t in tensors]:
            return out


def _numbers(count: int, draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    return torch.randn(count, generator=generator)


def _places(n: int, k: int, draw: random.Random) -> Tensor:
    return torch.tensor(sorted(draw.sample(range(n), k)), dtype=torch.int32)


def _pieces(n: int, draw: random.Random) -> list[int]:
    cuts = sorted(draw.randrange(n + 1) for _ in range(draw.randrange(3)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


def _guarded(payloads: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    places = iter(_INPUTS)
    return [tuple(next(places).put(t) for t in payload) for payload in payloads]


def _compared(fast: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> str:
    """Run both versions of a kernel on copies right before forbidden pages."""
    ours, theirs = outcome(lambda: fast(*arguments)), outcome(lambda: plain(*arguments))
    if ours[0] != theirs[0] or (ours[0] == "answer" and not same(ours[1], theirs[1])):
        raise Wrong(f"numba: {ours}, plain torch: {theirs}")
    return ours[0]


def _into_guards(fast: Callable[..., Any], plain: Callable[..., Any], n: int, *arguments: Any) -> str:
    """Like `_compared`, for kernels that write into memory they are given."""
    ours = outcome(lambda: fast(*arguments, _OUTPUT.room(n)).clone())
    if not _OUTPUT.is_intact(n):
        raise Wrong("wrote outside its memory")
    theirs = outcome(lambda: plain(*arguments, None))
    if ours[0] != theirs[0] or (ours[0] == "answer" and not same(ours[1], theirs[1])):
        raise Wrong(f"numba: {ours}, plain torch: {theirs}")
    return ours[0]


def _elias_fano(draw: random.Random) -> str:
    n = draw.randrange(1, draw.choice([9, 70, 600, 5000, 1 << 20]))
    k = draw.randrange(min(n, 64) + 1)
    payload = damaged((reference_places.pack_places(_places(n, k, draw), n),), draw)
    ((packed,),) = _guarded([payload])
    return _compared(cpu_places.unpack_places, reference_places.unpack_places, packed, n, k)


def _values(kind: str, draw: random.Random) -> str:
    count = draw.randrange(_MOST)
    payload = damaged(plain_values.pack_values(_numbers(count, draw), kind), draw)
    (packed,) = _guarded([payload])
    return _compared(unpack_values, plain_values.unpack_values, packed, kind, count)


def _scatter(draw: random.Random) -> str:
    n = draw.randrange(1, _MOST)
    whole = [(k := draw.randrange(n + 1)) and (_places(n, k, draw), _numbers(k, draw)) for _ in range(2)]
    vectors = _guarded([damaged(v, draw) for v in whole if v] or [(_places(n, 1, draw), _numbers(1, draw))])
    return _into_guards(cpu_scatter.scatter_mean, reference_scatter.scatter_mean, n, vectors, n)


def _sign(draw: random.Random) -> str:
    n, block = draw.randrange(1, _MOST), draw.choice([1, 7, 16, 64, 1024])
    numels = _pieces(n, draw)
    encode = partial(reference_sign.sign_encode_feedback, block=block, numels=numels)
    payloads = _guarded([damaged(encode(_numbers(n, draw), None), draw) for _ in range(draw.choice([1, 3]))])
    return _into_guards(
        cpu_sign.sign_decode_mean, reference_sign.sign_decode_mean, n, payloads, block, numels
    )


def _qsgd(bits: int, draw: random.Random) -> str:
    n, block = draw.randrange(1, _MOST), draw.choice([1, 7, 64, 512])
    numels = _pieces(n, draw)
    encode = partial(reference_quantize.qsgd_encode_feedback, bits=bits, block=block, numels=numels)
    sent = [encode(_numbers(n, draw), None, seed=draw.getrandbits(30)) for _ in range(draw.choice([1, 3]))]
    payloads = _guarded([damaged(payload, draw) for payload in sent])
    both = cpu_quantize.qsgd_decode_mean, reference_quantize.qsgd_decode_mean
    return _into_guards(*both, n, payloads, bits, block, numels)


def _message(values: str | None, is_compact: bool, draw: random.Random) -> str:
    n = draw.randrange(1, _MOST)
    message = Message(n, draw.randrange(1, n + 1), is_compact, values)
    payload = message.write(_places(n, message.count, draw), _numbers(message.count, draw))
    name, read = outcome(lambda: message.read(damaged(payload, draw)))
    if name == "answer" and is_compact:  # plain int32 places are checked when they are scattered
        _formed(name, read[0], (message.count,), torch.int32)
    return name


def _formed(name: str, result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if name == "answer" and (tuple(result.shape) != shape or result.dtype != dtype):
        raise Wrong(f"{tuple(result.shape)} {result.dtype} instead of {shape} {dtype}")
    return name


def _exchange(text: str, draw: random.Random) -> str:
    """Bytes of what rank 0 gets in an exchange are others; it must end with an average or a named error."""
    compressor, size = stenograd.method(text).compressor, draw.choice([2, 3, 4, 5])
    shapes = [draw.choice([(5,), (24, 20), (16, 3, 3), (130,), ()]) for _ in range(draw.randrange(1, 3))]
    cut = tuple(torch.Size(shape) for shape in shapes)
    n, step = sum(shape.numel() for shape in cut), draw.randrange(5)
    sites = [Site(shapes=cut, rank=rank, world_size=size, step=step) for rank in range(size)]
    parts = [_rounds(compressor, _numbers(n, draw), site) for site in sites]
    name, ranks = outcome(lambda: run([_tampered(parts[0], draw), *parts[1:]]))
    return _formed(name, ranks[0].average if ranks else None, (n,), torch.float32)


def _rounds(compressor: Compressor, x: Tensor, site: Site) -> Any:
    return compressor.exchange(x, None, compressor.init(x, site), replace(site, error=True))


def _tampered(rounds: Generator[Any, Any, Any], draw: random.Random) -> Generator[Any, Any, Any]:
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


def _ragged(draw: random.Random) -> str:
    lengths = [draw.randrange(20) for _ in range(3)]
    parts = [gather_ragged(_numbers(m, draw), _places(40, m, draw), most=40) for m in lengths]
    return outcome(lambda: run([_tampered(parts[0], draw), *parts[1:]]))[0]


def _pack(draw: random.Random) -> str:
    kinds = (torch.uint8, torch.float64, torch.bfloat16, torch.int32, torch.bool)
    tensors = tuple(
        torch.zeros(draw.choice([(), (0,), (3,), (2, 3)]), dtype=draw.choice(kinds)) for _ in range(3)
    )
    packed, unpack = pack(tensors)
    (row,) = damaged((packed,), draw)
    name, back = outcome(lambda: unpack(row))
    if name == "answer" and [(t.shape, t.dtype) for t in back] != [(t.shape, t.dtype) for t in tensors]:
        raise Wrong(f"unpacked {back}")
    return name


def _text(draw: random.Random) -> str:
    """A method's text, with characters replaced, left out, doubled or put in."""
    names = stenograd.methods()
    keys = ["ratio=0.1", "bits=4", "block=64", "clip_norm=1", "warmup_steps=5", "values=int8", "rank=2"]
    text = list(f"{draw.choice(names)}:{','.join(draw.sample(keys, draw.randrange(3)))}")
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(text) + 1)
        character = draw.choice("0123456789.,:=-+eEinfa_ \x00\n\u00e9\u0663\U0001f600xtopk")
        text[at : at + draw.randrange(2)] = draw.choice([[], [character], [character] * 9])
    name, method = outcome(lambda: stenograd.method("".join(text)))
    if name == "answer" and str(stenograd.method(str(method))) != str(method):
        raise Wrong(f"{method} does not make itself")
    return name


def _changed(content: bytes, draw: random.Random) -> bytes:
    raw, at = bytearray(content), draw.randrange(len(content))
    how = draw.randrange(5)
    if how == 0:
        return bytes(raw[:at])
    if how == 4:
        return content
    if how == 1:
        raw[at] ^= 1 << draw.randrange(8)
    elif how == 2:
        raw[at : at + draw.randrange(40)] = draw.randbytes(draw.randrange(40))
    else:
        return draw.randbytes(draw.randrange(200))
    return bytes(raw)


class _RollCall:
    """Lines that whoever connects to a rank's listener may write; no socket is involved."""

    def __init__(self) -> None:
        self._presence: Presence | None = None

    def __call__(self, draw: random.Random) -> str:
        if self._presence is None:
            self._presence, *others = [Presence(rank, "127.0.0.1") for rank in range(4)]
            for one in (self._presence, *others):
                one.close()
            self._presence.meet({rank: one.card for rank, one in enumerate(others, 1)})
        token = json.loads(self._presence.card)[2]
        asked = json.dumps({"from": 1, "group": "world", "lost": [2, 3]}).encode()
        said = draw.choice([b"[]", b"3", b'{"lost": 3}', b"", asked, _changed(asked, draw)])
        signed = self._presence._mac(token, text) if (text := said.decode(errors="replace")) else ""
        line = json.dumps([text, signed]).encode()
        junk = [b"[]", b"3", b'{"to": 1}', b"", b'["", ""]', b"[3, 4]", line]
        line = draw.choice([_changed(line, draw), _changed(line, draw), draw.choice(junk)])
        try:
            self._presence._answer(line)
        except ValueError:
            return "refused"
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error} for {line!r}") from error
        return "answer"


@cache
def _made(files: type[Checkpoints] | type[Kernel]) -> Case:
    folder = Path(_FILES.name) / files.__name__
    folder.mkdir()
    return files(folder)


CASES: dict[str, Case] = {
    "places (Elias-Fano)": _elias_fano,
    "values float32": partial(_values, "float32"),
    "values bfloat16": partial(_values, "bfloat16"),
    "values int8": partial(_values, "int8"),
    "sparse mean": _scatter,
    "sign": _sign,
    **{f"qsgd {bits} bits": partial(_qsgd, bits) for bits in range(2, 9)},
    **{
        f"message {values or 'as is'}{' compact' if is_compact else ''}": partial(
            _message, values, is_compact
        )
        for values in (None, "float32", "bfloat16", "int8")
        for is_compact in (True, False)
    },
    **{f"exchange {text}": partial(_exchange, text) for text in configurations()},
    "gather of any lengths": _ragged,
    "unpack": _pack,
    "checkpoint": lambda draw: _made(Checkpoints)(draw),
    "kernel": lambda draw: _made(Kernel)(draw),
    "method text": _text,
    "roll call": _RollCall(),
}
