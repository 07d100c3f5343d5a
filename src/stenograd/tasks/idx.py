"""A strict reader of IDX files, the format of MNIST.

An IDX file of bytes is `00 00 08 d`, then d sizes as big-endian uint32, then the bytes in row-major order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from stenograd.errors import DataError

__all__ = ["read_idx"]


def read_idx(path: Path, axes: int) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in `.gz`.

    Args:
        path: the file.
        axes: number of axes it must have (3 for images, 1 for labels).

    Returns:
        A uint8 tensor with that many axes.

    Raises:
        DataError: if the file is unreadable, of another kind, too short, too long or empty.
    """
    content = _content(path)
    header_bytes = 4 + 4 * axes
    if len(content) < header_bytes:
        raise DataError(f"{path}: expected a header of {header_bytes} bytes, found a file of {len(content)}")
    magic, *sizes = struct.unpack(f">{1 + axes}I", content[:header_bytes])
    expected_magic = 0x0800 + axes
    if magic != expected_magic:
        raise DataError(f"{path}: expected the magic number {expected_magic:#010x}, found {magic:#010x}")
    expected, found = math.prod(sizes), len(content) - header_bytes
    if expected == 0:
        raise DataError(f"{path}: expected at least one item, found the sizes {sizes}")
    if expected != found:
        state = "truncated" if found < expected else "followed by foreign bytes"
        raise DataError(
            f"{path}: expected {expected} bytes for the sizes {sizes}, found {found}: it is {state}"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=header_bytes).reshape(sizes)


def _content(path: Path) -> bytearray:
    """Return the whole file, unpacked; a bytearray because tensors want memory they may write to."""
    try:
        raw = path.read_bytes()
        return bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file, found a damaged one ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, found: {error.strerror}") from error
