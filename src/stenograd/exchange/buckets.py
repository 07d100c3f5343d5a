"""Buckets: which tensors travel together, and how per-tensor state is cut out of flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from stenograd.errors import bad_value

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Bucket",
    "KeptState",
    "assign",
    "gradient_like",
    "gradient_type",
    "join_state",
    "keep",
    "put_back",
    "split_state",
    "usual_bytes",
]

DEFAULT_BUCKET_BYTES = 4 << 20
# On a GPU a bucket takes about a hundred operations, however small it is; DDP's buckets are as large.
_BYTES_ON_A_GPU = 25 << 20

# Copies of a part of a bucket's state: by its key, and then by the tensor's place in the bucket.
KeptState: TypeAlias = Mapping[str, Mapping[int, Tensor]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype and device that are exchanged as one flat tensor.

    Args:
        names: parameter names, in the order in which they lie in the flat tensor.
        shapes: their shapes.
        dtype: element type.
        device: where they live.
        dense: whether they travel as they are, because they are small.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    dense: bool = False

    @property
    def numels(self) -> list[int]:
        """Number of elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    def empty(self) -> Tensor:
        """Allocate flat memory for all tensors."""
        return torch.empty(sum(self.numels), dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat tensor into views of the tensors' shapes."""
        pieces = flat.split(self.numels)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Return the type that a parameter's gradients have: its own, unless the program has set `grad_dtype`.

    Example:
        >>> gradient_type(torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.bfloat16
    """
    own: torch.dtype | None = getattr(parameter, "grad_dtype", None)  # torch has it from 2.10 on
    return parameter.dtype if own is None else own


def gradient_like(parameter: Tensor) -> Tensor:
    """Return a tensor of the form that a parameter's gradients have, whose values do not matter."""
    dtype = gradient_type(parameter)
    if dtype is parameter.dtype:
        return parameter
    return torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def usual_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of buckets that suits where tensors lie.

    Example:
        >>> usual_bytes([torch.ones(1)])
        4194304
    """
    return _BYTES_ON_A_GPU if any(t.is_cuda for t in tensors) else DEFAULT_BUCKET_BYTES


def assign(
    tensors: Mapping[str, Tensor],
    bucket_bytes: int,
    *,
    head: bool = False,
    tail: bool = True,
    dense_below: int = 0,
) -> list[Bucket]:
    """Put named tensors into buckets, in the order given; a tensor larger than a bucket is a bucket.

    A bucket holds one dtype on one device. It is closed as soon as the next tensor would overfill it; only
    an oversized tensor, which gets a bucket of its own, leaves one open that is less than a quarter full.

    Args:
        tensors: in the order in which they will become ready (backward order).
        bucket_bytes: largest size of a bucket of several tensors, at least 1.
        head: whether to close the first one as soon as a quarter of it is filled: a slow link is idle until
            it leaves.
        tail: whether to close one also before the last tensors that fill a quarter of it together: what is
            ready last is sent when nothing is left to compute meanwhile, so it should be little.
        dense_below: tensors with fewer elements get buckets of their own, which are marked as dense.

    Example:
        >>> import torch
        >>> sizes = {"d": torch.ones(3), "c": torch.ones(2), "b": torch.ones(9), "a": torch.ones(1)}
        >>> [b.names for b in assign(sizes, bucket_bytes=20)]
        [('d', 'c'), ('b',), ('a',)]
    """
    if bucket_bytes < 1:
        raise bad_value("bucket_bytes", "must be at least 1", bucket_bytes, "leave it out for the default")
    full: list[list[str]] = []
    # Tensors that travel densely are few bytes: they neither close the first bucket nor make a last one.
    large = {name: t for name, t in tensors.items() if t.numel() >= dense_below}
    last = _tail(large, bucket_bytes // 4) if tail else set()
    open_groups: dict[tuple[torch.dtype, torch.device, bool], tuple[list[str], int]] = {}
    for name, t in tensors.items():
        kind, nbytes = (t.dtype, t.device, t.numel() < dense_below), t.numel() * t.element_size()
        names, used = open_groups.get(kind, ([], 0))
        if names and nbytes > bucket_bytes > 4 * used:
            full.append([name])
            continue
        if names and (used + nbytes > bucket_bytes or (name in last and names[-1] not in last)):
            full.append(names)
            names, used = [], 0
        names, used = [*names, name], used + nbytes
        if head and name in large and not full and 4 * used >= bucket_bytes:
            full.append(names)
            names, used = [], 0
        open_groups[kind] = (names, used)
    full.extend(names for names, _ in open_groups.values() if names)
    place = {name: i for i, name in enumerate(tensors)}
    full.sort(key=lambda names: place[names[-1]])  # a bucket is ready with its last tensor
    return [_bucket(names, tensors, dense_below) for names in full]


def split_state(state: Mapping[str, Tensor], bucket: Bucket) -> dict[str, dict[str, Tensor]]:
    """Turn a bucket's state into one by parameter name: {parameter: {key: tensor}} (copies).

    A state tensor is either flat like the bucket, or belongs to tensor i and is called "key/i".
    """
    # Copies: an old residual's memory becomes the bucket's own, which the next step fills.
    out: dict[str, dict[str, Tensor]] = {name: {} for name in bucket.names}
    for key, value in state.items():
        base, slash, number = key.partition("/")
        if slash:
            out[bucket.names[int(number)]][base] = value.clone()
        else:
            for name, view in zip(bucket.names, bucket.views(value), strict=True):
                out[name][base] = view.clone()
    return out


def join_state(
    template: Mapping[str, Tensor], bucket: Bucket, saved: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Undo `split_state`: fill tensors like `template` (the bucket's fresh state) with saved ones.

    Raises:
        KeyError: a parameter or key is missing in saved.
        ConfigError: a saved tensor has another shape.
    """
    out: dict[str, Tensor] = {}
    for key, like in template.items():
        base, slash, number = key.partition("/")
        names = [bucket.names[int(number)]] if slash else bucket.names
        targets = [out.setdefault(key, torch.empty_like(like))] if slash else None
        if targets is None:
            targets = bucket.views(out.setdefault(key, torch.empty_like(like)))
        for name, target in zip(names, targets, strict=True):
            value = saved[name][base]
            if value.shape != target.shape:
                rule = f"must have shape {tuple(target.shape)}"
                advice = "keep a tensor's shape, or give it another name"
                raise bad_value(f"{base} of {name}", rule, tuple(value.shape), advice)
            target.copy_(value)
    return out


def keep(state: Mapping[str, Tensor], bucket: Bucket, chosen: Sequence[int]) -> KeptState:
    """Copy the state of some of a bucket's tensors, given by their indices, for `put_back`."""
    kept: dict[str, dict[int, Tensor]] = {}
    for key, value in state.items():
        _, slash, number = key.partition("/")
        if not slash:
            pieces = value.split(bucket.numels)
            kept[key] = {i: pieces[i].clone() for i in chosen}
        elif int(number) in chosen:
            kept[key] = {int(number): value}  # not a copy: only what is flat may be written over
    return kept


def put_back(state: Mapping[str, Tensor], bucket: Bucket, kept: KeptState) -> dict[str, Tensor]:
    """Return a bucket's new state in which some tensors have the state that `keep` copied.

    Example:
        >>> (bucket,) = assign({"a": torch.ones(1), "b": torch.ones(2)}, bucket_bytes=100, tail=False)
        >>> kept = keep({"residual": torch.tensor([1.0, 2.0, 3.0])}, bucket, [1])
        >>> put_back({"residual": torch.zeros(3)}, bucket, kept)
        {'residual': tensor([0., 2., 3.])}
    """
    new = dict(state)
    for key, pieces in kept.items():
        targets = () if "/" in key else new[key].split(bucket.numels)
        for i, piece in pieces.items():
            if targets:
                targets[i].copy_(piece)
            else:
                new[key] = piece
    return new


def _tail(tensors: Mapping[str, Tensor], nbytes: int) -> set[str]:
    """Return the last tensors that have so many bytes together, or fewer."""
    tail: set[str] = set()
    for name, t in reversed(list(tensors.items())):
        nbytes -= t.numel() * t.element_size()
        if nbytes < 0:
            break
        tail.add(name)
    return tail


def _bucket(names: Sequence[str], tensors: Mapping[str, Tensor], dense_below: int) -> Bucket:
    first, shapes = tensors[names[0]], tuple(tensors[name].shape for name in names)
    return Bucket(tuple(names), shapes, first.dtype, first.device, first.numel() < dense_below)
