"""Labelled grey images for mnist_rnn.py: MNIST's files, a data set of the hub, or the digits of scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_bert.data.sources import hub
from hvd_bert.errors import UserError

_DIGITS_TO_TEST_ON = 360  # a fifth
_UINT8 = 8  # IDX's number of the type


@dataclass(frozen=True)
class Images:
    """`pixels`: [images, rows, columns], fp32 of 0 to 1; `labels`: [images], int64; `classes`: 1 + the last label."""

    pixels: Tensor
    labels: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Pixels and labels of these images, there may be none, on the device."""
        chosen = torch.from_numpy(ids)
        return self.pixels[chosen].to(device), self.labels[chosen].to(device)

    def digest(self) -> str:
        """sha256 of all of them."""
        sha256 = hashlib.sha256(self.pixels.numpy().tobytes())
        sha256.update(self.labels.numpy().tobytes())
        return sha256.hexdigest()


def load_images(folder: Path | None, dataset_name: str | None) -> tuple[Images, Images]:
    """To train on, and to test on. Raises UserError where they cannot be had or are damaged."""
    if folder:
        parts = [_read_pair(folder, "train"), _read_pair(folder, "t10k")]
    elif dataset_name:
        parts = [_from_hub(dataset_name, "train"), _from_hub(dataset_name, "test")]
    else:
        parts = _digits()
    shapes = [pixels.shape[1:] for pixels, _ in parts]
    if shapes[0] != shapes[1]:
        raise UserError(f"The images to train on are {shapes[0]}, those to test on {shapes[1]}: take parts of one set.")
    classes = 1 + max(int(labels.max()) for _, labels in parts)
    train, test = (
        Images(torch.from_numpy(pixels.astype(np.float32) / 255), torch.from_numpy(labels.astype(np.int64)), classes)
        for pixels, labels in parts
    )
    return train, test


def _read_pair(folder: Path, part: str) -> tuple[Any, Any]:
    """Pixels [images, rows, columns] and labels [images] of one part of MNIST, uint8."""
    images, labels = _find(folder, f"{part}-images", 3), _find(folder, f"{part}-labels", 1)
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise UserError(f"{images} has {len(pixels)} images, but {labels} {len(classes)} labels: download both again.")
    return pixels, classes


def _find(folder: Path, name: str, dimensions: int) -> Path:
    # Some mirrors have a dot where MNIST's own names have a hyphen.
    names = [f"{name}{sign}idx{dimensions}-ubyte{end}" for sign in "-." for end in ("", ".gz")]
    found = [folder / candidate for candidate in names if (folder / candidate).is_file()]
    if not found:
        raise UserError(f"--train_file {folder}: no file {names[0]} or {names[1]}: MNIST's four files belong there.")
    return found[0]


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An IDX file of uint8 (the format of MNIST's files), gzipped or not. Raises UserError where it is damaged.

    Two zeros, the type, the number of dimensions, the size of each as a big-endian int32, then the values.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): download it again.") from None
    start = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, _UINT8, dimensions]) or len(content) < start:
        raise UserError(f"{path} is no IDX file of {dimensions} dimension(s) of bytes: download it again.")
    shape = [int(size) for size in np.frombuffer(content, ">i4", dimensions, offset=4)]
    if min(shape) < 1 or math.prod(shape) != len(content) - start:
        raise UserError(
            f"{path} says that it holds {' x '.join(map(str, shape))} bytes, but has {len(content) - start}:"
            " download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _from_hub(name: str, split: str) -> tuple[Any, Any]:
    ways_out = "Two ways out: MNIST's four files with --train_file FOLDER, or neither flag, for scikit-learn's digits."
    rows = hub.load(name, split, ways_out=ways_out)
    try:
        pixels = np.stack([np.asarray(image) for image in rows["image"]])
        labels = np.asarray(rows["label"])
    except (KeyError, ValueError, ImportError) as error:
        raise UserError(
            f"--dataset_name {name}: `image` and `label` of {split!r} cannot be read ({error}); images must be of one"
            " size, and reading them needs Pillow (`pip install pillow`)."
        ) from None
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise UserError(f"--dataset_name {name}: its images are not grey ones of a byte per pixel.")
    return pixels, labels


def _digits() -> list[tuple[Any, Any]]:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in an order that is always the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "The handwritten digits are scikit-learn's: `pip install scikit-learn`, or take MNIST with --train_file"
            " FOLDER."
        ) from None
    pixels, labels = load_digits().images * (255 / 16), load_digits().target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:-_DIGITS_TO_TEST_ON], order[-_DIGITS_TO_TEST_ON:]
    return [(pixels[train], labels[train]), (pixels[test], labels[test])]
