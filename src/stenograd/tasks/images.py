"""Tasks that classify small grey images: digits, glyphs and mnist, with a strict reader of MNIST's files.

An IDX file of bytes is `00 00 08 d`, then d sizes as big-endian uint32, then the bytes in row-major order.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stenograd.errors import DataError, StenogradError
from stenograd.tasks.base import Recipe, Task
from stenograd.tasks.models import digits_cnn, mnist_cnn

__all__ = ["Digits", "Glyphs", "ImageTask", "Images", "Mnist", "read_idx"]

Images = tuple[Tensor, Tensor]  # uint8 pixels (samples, height, width), uint8 labels (samples,)
_FONT = (
    "xxx x.x x.x x.x xxx",
    ".x. xx. .x. .x. xxx",
    "xxx ..x xxx x.. xxx",
    "xxx ..x xxx ..x xxx",
    "x.x x.x xxx ..x ..x",
    "xxx x.. xxx ..x xxx",
    "xxx x.. xxx x.x xxx",
    "xxx ..x ..x .x. .x.",
    "xxx x.x xxx x.x xxx",
    "xxx x.x xxx ..x xxx",
)
_SIDE, _HEIGHT, _WIDTH = 8, 5, 3
_BRIGHTEST = 16  # as in scikit-learn's digits, whose shapes and sizes this task has
# Of 16. After ten epochs with two workers dense training ends at 100 % and top-k of 1 % at 92 %; with 3 they
# end at 94 % and 73 %, which would show the noise more than the methods.
_NOISE = 1
_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"


class ImageTask(Task):
    """A task that classifies images.

    Args:
        train: training images and labels.
        evaluation: evaluation images and labels.
        brightest: the pixel value that becomes 1.0.
    """

    def __init__(self, train: Images, evaluation: Images, brightest: float) -> None:
        self._train = train
        self._evaluation = evaluation
        self._brightest = brightest
        self.train_size = len(train[1])
        self.eval_size = len(evaluation[1])

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels in [0, 1] of shape (batch, 1, height, width), and labels of shape (batch,)."""
        return self._batch(self._train, indices)

    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels in [0, 1] of shape (batch, 1, height, width), and labels of shape (batch,)."""
        return self._batch(self._evaluation, indices)

    def _batch(self, images: Images, indices: Tensor) -> tuple[Tensor, Tensor]:
        pixels, labels = images
        return pixels[indices].unsqueeze(1).float() / self._brightest, labels[indices].long()


class _SmallImages(ImageTask):
    """Ten classes of 8x8 pixels, with one recipe and network for all."""

    recipe = Recipe(epochs=20, batch_size=32, lr=0.05, momentum=0.9, weight_decay=1e-4)

    def build(self) -> nn.Module:
        """Build the small convolutional network."""
        return digits_cnn()


class Digits(_SmallImages):
    """1,437 digits for training and 360 for evaluation, with about a tenth of either in each class.

    Raises:
        StenogradError: if scikit-learn is not installed.

    Example:
        >>> inputs, targets = Digits().eval_batch(torch.arange(4))
        >>> inputs.shape, targets.shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4]))
    """

    name = "digits"

    def __init__(self) -> None:
        pixels, labels = _load_digits()
        held_out = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
        # Every fifth of the digits sorted by class: 360 of 1,797, a fifth of each class to within one digit.
        held_out[labels.argsort(stable=True)[::5]] = True
        train = pixels[~held_out], labels[~held_out]
        evaluation = pixels[held_out], labels[held_out]
        super().__init__(train, evaluation, brightest=16)


def _load_digits() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's file, in 15 ms; to import it takes each worker 1.3 s."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        advice = "install it with `pip install stenograd[examples]`"
        raise StenogradError(f"the digits task needs scikit-learn: {advice}")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    else:  # a version that keeps it elsewhere
        from sklearn.datasets import load_digits

        rows = np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)
    return torch.from_numpy(rows[:, :-1].reshape(-1, 8, 8).copy()), torch.from_numpy(rows[:, -1].copy())


class Glyphs(_SmallImages):
    """1,437 drawn digits for training and 360 for evaluation, always the same ones.

    Each is one of ten shapes of 5 x 3 pixels at a random place in 8 x 8 pixels, with a random brightness,
    under uniform noise.

    Example:
        >>> inputs, targets = Glyphs().eval_batch(torch.arange(4))
        >>> inputs.shape, targets.shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4]))
    """

    name = "glyphs"

    def __init__(self) -> None:
        generator = torch.Generator(device="cpu").manual_seed(0)
        super().__init__(_draw(1437, generator), _draw(360, generator), brightest=_BRIGHTEST)


def _draw(count: int, generator: torch.Generator) -> Images:
    """Return pixels of 0 to 16, shape (count, 8, 8), and labels, shape (count,), both uint8."""
    shapes = torch.tensor(
        [[[c == "x" for c in row] for row in digit.split()] for digit in _FONT], device="cpu"
    )

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape or (count,), generator=generator, device="cpu")

    labels = whole(0, 9)
    tops, lefts = whole(0, _SIDE - _HEIGHT), whole(0, _SIDE - _WIDTH)
    ink = shapes[labels] * whole(_BRIGHTEST // 2, _BRIGHTEST)[:, None, None]
    pixels = whole(0, _NOISE, count, _SIDE, _SIDE)
    for image, shape, top, left in zip(pixels, ink, tops.tolist(), lefts.tolist(), strict=True):
        image[top : top + _HEIGHT, left : left + _WIDTH] += shape
    return pixels.clamp(max=_BRIGHTEST).to(torch.uint8), labels.to(torch.uint8)


class Mnist(ImageTask):
    """The 60,000 training and 10,000 evaluation digits of MNIST.

    Args:
        data: the folder with the four IDX files, each gzipped (`.gz`) or not.

    Raises:
        DataError: if data is None, or a file is missing, damaged or does not match the others.

    Reference:
        Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to document
        recognition", Proceedings of the IEEE, 1998.
    """

    name = "mnist"
    recipe = Recipe(epochs=10, batch_size=64, lr=0.005, momentum=0.9, weight_decay=1e-5)

    def __init__(self, data: str | Path | None) -> None:
        if data is None:
            raise DataError(f"the mnist task needs its files: give (--data) a folder with {_FILES} (or .gz)")
        folder = Path(data)
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise DataError(f"{folder}: expected a folder with {_FILES} (or .gz), found {found}")
        super().__init__(_read_pair(folder, "train"), _read_pair(folder, "t10k"), brightest=255)

    def build(self) -> nn.Module:
        """Build the convolutional network of 431,080 parameters."""
        return mnist_cnn()


def _read_pair(folder: Path, part: str) -> Images:
    images_path, labels_path = _find(folder, f"{part}-images", 3), _find(folder, f"{part}-labels", 1)
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_path}: expected images of [28, 28], found {list(images.shape[1:])}")
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, as many as {images_path.name} has images, "
            f"found {len(labels)}"
        )
    if labels.max() > 9:
        raise DataError(f"{labels_path}: expected labels from 0 to 9, found {int(labels.max())}")
    return images, labels


def _find(folder: Path, stem: str, axes: int) -> Path:
    """Return the file under the first of its four usual names that exists."""
    candidates = [f"{stem}{mark}idx{axes}-ubyte{packed}" for packed in ("", ".gz") for mark in "-."]
    for name in candidates:
        if (folder / name).exists():
            return folder / name
    raise DataError(
        f"{folder / candidates[0]}: expected this file or one named {', '.join(candidates[1:])}, found none"
    )


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
