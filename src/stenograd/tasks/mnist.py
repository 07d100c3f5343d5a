"""The mnist task: 60,000 handwritten digits from the four standard files."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from stenograd.errors import DataError
from stenograd.tasks.idx import read_idx
from stenograd.tasks.images import Images, ImageTask
from stenograd.tasks.models import mnist_cnn
from stenograd.tasks.recipe import Recipe

__all__ = ["Mnist"]

_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"


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
        super().__init__(_read(folder, "train"), _read(folder, "t10k"), brightest=255)

    def build(self) -> nn.Module:
        """Build the convolutional network of 431,080 parameters."""
        return mnist_cnn()


def _read(folder: Path, part: str) -> Images:
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
