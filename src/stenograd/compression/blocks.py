"""Dense codes in blocks with scales: one all-gather of them, or two phases in which ranks own chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from stenograd.compression.codec import Codec, written
from stenograd.compression.contract import Exchange, Facts, Payload, Site, State
from stenograd.kernels.bits import packed_bytes
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds, gather, scatter

__all__ = ["FEWEST_RANKS", "WHOLE", "BlockCodec", "Chunks", "chunks_for"]

WHOLE = 2**31 - 1  # elements per scale that give each tensor one, since blocks do not span tensors
FEWEST_RANKS = 4  # with fewer, an all-gather moves at most twice the code
_MOST = 2.08  # of the coded size may be moved by a rank
_SHORTEST = 16  # elements a block of the second encoding


@dataclass(frozen=True, slots=True)
class Chunks:
    """A flat tensor and its code cut into one chunk a rank, nearly equal in coded size.

    A code is `bits` bits an element, written one after another, and one float32 scale a block. Chunks start
    at multiples of eight elements, so at whole bytes of the code, and no block spans two chunks.

    Args:
        bits: bits an element.
        bounds: first element of each chunk, and the number of elements.
        numels: for each chunk, the lengths of the pieces of tensors in it.
        blocks: number of scales in each chunk.
    """

    bits: int
    bounds: tuple[int, ...]
    numels: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]

    @property
    def row_words(self) -> int:
        """Length of the longest coded chunk in int32 words; all are padded to it."""
        return _row_words(self.blocks, self.bounds, self.bits)

    def blocked(self, block: int) -> Chunks:
        """Return the same chunks with another number of elements a scale."""
        return _blocked(self, block)

    def finer(self, block: int) -> int:
        """Return the shortest block (its half, quarter, ...) with which the second phase keeps to `_MOST`."""
        return _finer(self, block)

    def span(self, rank: int) -> slice:
        """Return the elements of a rank's chunk."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def site(self, site: Site, rank: int | None = None) -> Site:
        """Return a site for a rank's chunk, or for all chunks one after another."""
        pieces = self.numels if rank is None else (self.numels[rank],)
        return replace(site, shapes=tuple(torch.Size((m,)) for piece in pieces for m in piece))

    def cut(self, payload: Payload) -> Tensor:
        """Return the code of the whole tensor as rows, one a chunk: its scales, then its bits."""
        codes, scales = payload
        pieces = [codes[start:stop] for start, stop in self._bytes()]
        return torch.stack([self.row((c, s)) for c, s in zip(pieces, scales.split(self.blocks), strict=True)])

    def row(self, payload: Payload) -> Tensor:
        """Return the code of one chunk as a row of int32 words, padded with zeros."""
        codes, scales = payload
        row = torch.zeros(self.row_words, dtype=torch.int32, device=codes.device)
        row[: scales.numel()] = scales.view(torch.int32)
        start = 4 * scales.numel()
        row.view(torch.uint8)[start : start + codes.numel()] = codes
        return row

    def read(self, row: Tensor, rank: int) -> Payload:
        """Return the code of a rank's chunk from its row."""
        (start, stop), blocks = self._bytes()[rank], self.blocks[rank]
        codes = row.view(torch.uint8)[4 * blocks : 4 * blocks + stop - start]
        return codes, row[:blocks].view(torch.float32)

    def join(self, rows: Iterable[Tensor]) -> Payload:
        """Return the code of the whole tensor from one row a chunk."""
        codes, scales = zip(*(self.read(row, rank) for rank, row in enumerate(rows)), strict=True)
        return torch.cat(codes), torch.cat(scales)

    def _bytes(self) -> list[tuple[int, int]]:
        return _spans(self.bounds, self.bits)


def chunks_for(site: Site, bits: int, block: int) -> Chunks | None:
    """Return how to average a code in two phases, or None where an all-gather moves no more.

    Args:
        site: tensors and world size.
        bits: bits an element.
        block: elements a scale; blocks do not span tensors.

    Example:
        >>> import torch
        >>> chunks_for(Site(shapes=(torch.Size((4096,)),), world_size=4), bits=1, block=1024).bounds
        (0, 1024, 2048, 3072, 4096)
    """
    if site.world_size < FEWEST_RANKS:
        return None
    numels = tuple(m for m in site.numels if m)
    chunks = _chunks(numels, bits, block, site.world_size)
    coded_bytes = packed_bytes(sum(numels), bits) + 4 * _blocks(numels, block)
    # Two rows go to each other rank, in place of one whole code.
    return chunks if 2 * 4 * chunks.row_words < coded_bytes else None


@dataclass(frozen=True, kw_only=True)
class BlockCodec(Codec):
    """A codec of `bits` bits per element and one scale per `block` elements, as `Chunks` describes them.

    Its payload is `(codes, scales)`, and a scale is NaN or infinite where something that it belongs to is. Up
    to three ranks gather all messages. From four ranks on, where that moves less, x is averaged in two
    phases: rank j collects chunk j of every code, averages, and all gather that, encoded. With `C` for
    encoding and decoding, rank j computes `a = (x_j + sum_{r != j} C(x_r)) / N` of chunk j and all ranks take
    `C(a)`. Its own chunk does not travel, so it enters uncompressed. What the second encoding loses is
    `N (a - C(a))` in this rank's error, which enters its next average divided by N and again uncompressed:
    one residual serves both encodings, and `average = mean_r(x_r - error_r)` holds.

    Then each rank moves `2 (N-1)/N` times the coded size, and decodes as much as two codes, whatever N is. It
    is unbiased only if what it draws is private to the rank and the key, which tell the second encoding from
    the first.

    Write `encode` and `read`; or for speed `encode`, `encode_error` and `combine`.

    Reference: Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
    Error-Compensated Compression", ICML 2019 (two encodings with a residual each); Bernstein et al., "signSGD
    with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019 (chunks owned by ranks).
    """

    @abstractmethod
    def form(self) -> tuple[int, int]:
        """Return the bits per element and the elements per scale."""

    def chunks(self, site: Site) -> Chunks | None:
        """Return how to average in two phases; None to gather all messages."""
        return chunks_for(site, *self.form())

    def again(self, chunks: Chunks) -> tuple[BlockCodec, Chunks]:
        """Return the codec of the second encoding, and the chunks as it writes them.

        What it loses is not averaged over the ranks, so a finer one may be worth its bytes.
        """
        return self, chunks

    def read(self, payload: Payload, site: Site) -> Tensor:
        """Return what one message says, in float32."""
        raise NotImplementedError(f"{type(self).__name__} reads no single message")

    def facts(self, site: Site) -> Facts:
        """One all-gather, or two phases where that moves less; scales tell what is finite."""
        return super().facts(site) if self.chunks(site) is None else Facts(rounds=2, finite=True)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Encode, gather, decode; or scatter, average, encode again and gather."""
        chunks = self.chunks(site)
        if chunks is None:
            return super().exchange(x, residual, state, site)
        return self._two_phases(chunks, x, residual, state, site)

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, encode and leave the rest in x."""
        x = x if residual is None else x.add_(residual)
        payload = self.encode(x, site)
        return payload, x.sub_(self.read(payload, site))

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Read one message."""
        return self.combine([payload], like, site)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Average the messages in rank order, in float32 or wider."""
        wide = torch.promote_types(like.dtype, torch.float32)
        total = site.out(like).zero_() if like.dtype == wide else torch.zeros_like(like, dtype=wide)
        for payload in payloads:
            total += self.read(payload, site)
        return total.div_(len(payloads)).to(like.dtype)

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Look at the scales."""
        return finite_of(scales for _, scales in payloads)

    def _two_phases(
        self, chunks: Chunks, x: Tensor, residual: Tensor | None, state: State, site: Site
    ) -> Rounds[Exchange]:
        world, local = site.world_size, chunks.span(site.rank)
        # Another key: with the draws of the first encoding again, the second would not be unbiased.
        whole, part = chunks.site(site), replace(chunks.site(site, site.rank), key=~site.key, buffer=None)
        # a copy: encoding writes over x
        own = x[local].to(torch.promote_types(x.dtype, torch.float32), copy=True)
        if residual is not None:
            own.add_(residual[local])
        payload, error = written(self, x, residual, whole)
        rows = yield from scatter(chunks.cut(payload))
        received = [chunks.read(row, site.rank) for rank, (row,) in enumerate(rows) if rank != site.rank]
        average = self.combine(received, own, part)
        average.mul_((world - 1) / world).add_(own, alpha=1 / world)  # (sum_{r != j} C(x_r) + x_j) / N
        codec, chunks = self.again(chunks)
        second, lost = written(codec, average, None, part)
        if error is not None and lost is not None:
            error[local] = lost.mul_(world).to(error.dtype)  # N (a - C(a))
        everyone = yield from gather(chunks.row(second))
        final = chunks.join(row for (row,) in everyone)
        # Scales of the second encoding tell of the first's, since NaN and infinity stay in an average.
        return Exchange(codec.decode(final, x, whole), state, error, codec.finite([final]))


@lru_cache(maxsize=1024)
def _spans(bounds: tuple[int, ...], bits: int) -> list[tuple[int, int]]:
    """Return the bytes of each chunk's code."""
    return list(pairwise(packed_bytes(bound, bits) for bound in bounds))


@lru_cache(maxsize=1024)
def _row_words(blocks: tuple[int, ...], bounds: tuple[int, ...], bits: int) -> int:
    sizes = zip(blocks, _spans(bounds, bits), strict=True)
    return max(scales + -(-(stop - start) // 4) for scales, (start, stop) in sizes)


@lru_cache(maxsize=1024)
def _blocked(chunks: Chunks, block: int) -> Chunks:
    return replace(chunks, blocks=tuple(_blocks(piece, block) for piece in chunks.numels))


@lru_cache(maxsize=1024)
def _finer(chunks: Chunks, block: int) -> int:
    world_size = len(chunks.blocks)
    code = sum(stop - start for start, stop in chunks._bytes()) + 4 * sum(chunks.blocks)
    # A rank sends `N - 1` rows in each phase, so this is what the first leaves for a row of the second.
    row_words = _MOST * code / (4 * (world_size - 1)) - chunks.row_words
    while block >= 2 * _SHORTEST and chunks.blocked(block // 2).row_words <= row_words:
        block //= 2
    return block


@lru_cache(maxsize=1024)
def _chunks(numels: tuple[int, ...], bits: int, block: int, world_size: int) -> Chunks:
    bounds = _bounds(numels, bits, block, world_size)
    pieces: list[list[int]] = [[] for _ in range(world_size)]
    chunk, at = 0, 0
    for numel in numels:
        left = numel
        while left:
            # More than one step where chunks are empty: such a one ends where it begins.
            while bounds[chunk + 1] <= at:
                chunk += 1
            pieces[chunk].append(min(left, bounds[chunk + 1] - at))
            at += pieces[chunk][-1]
            left -= pieces[chunk][-1]
    blocks = tuple(_blocks(piece, block) for piece in pieces)
    return Chunks(bits, bounds, tuple(map(tuple, pieces)), blocks)


def _bounds(numels: tuple[int, ...], bits: int, block: int, world_size: int) -> tuple[int, ...]:
    """Cut where the code's size reaches multiples of 1/N, up to eight elements."""
    costs = [m * bits + 32 * _blocks([m], block) for m in numels]  # in bits
    ends, reached = list(accumulate(numels)), list(accumulate(costs))
    total, numel = (reached[-1], ends[-1]) if numels else (0, 0)
    bounds, at = [0], 0
    for chunk in range(1, world_size):
        target = total * chunk // world_size
        while at < len(numels) and reached[at] < target:
            at += 1
        missing = numels[at] * (reached[at] - target) // costs[at] if at < len(numels) else 0
        end = ends[at] - missing if at < len(numels) else numel
        bounds.append(max(bounds[-1], min(8 * ((end + 4) // 8), numel)))  # whole bytes
    return (*bounds, numel)


def _blocks(numels: Sequence[int], block: int) -> int:
    return sum(-(-m // block) for m in numels)
