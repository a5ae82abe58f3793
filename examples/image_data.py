"""Load labelled grey images for mnist_rnn.py: a data set on the hub, such as MNIST, or scikit-learn's digits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_bert import hub
from hvd_bert.errors import UserError

_DIGITS_TO_TEST_ON = 360  # a fifth of the digits


@dataclass(frozen=True)
class Images:
    """Labelled images. `pixels`: [images, rows, columns], fp32 from 0 to 1. `labels`: [images], int64."""

    pixels: Tensor
    labels: Tensor
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, ids: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels of the images `ids` on the device. `ids` may be empty."""
        chosen = torch.from_numpy(ids)
        return self.pixels[chosen].to(device), self.labels[chosen].to(device)

    def digest(self) -> str:
        """Return the SHA-256 of all pixels and labels."""
        sha256 = hashlib.sha256(self.pixels.numpy().tobytes())
        sha256.update(self.labels.numpy().tobytes())
        return sha256.hexdigest()


def load_images(dataset_name: str | None) -> tuple[Images, Images]:
    """Load training and test images. Raises UserError if they are not available."""
    splits = [_from_hub(dataset_name, split) for split in ("train", "test")] if dataset_name else _digits()
    shapes = [pixels.shape[1:] for pixels, _ in splits]
    if shapes[0] != shapes[1]:
        raise UserError(f"Training images are {shapes[0]}, test images {shapes[1]}: use images of the same size.")
    classes = 1 + max(int(labels.max()) for _, labels in splits)
    train, test = (
        Images(torch.from_numpy(pixels.astype(np.float32) / 255), torch.from_numpy(labels.astype(np.int64)), classes)
        for pixels, labels in splits
    )
    return train, test


def _from_hub(name: str, split: str) -> tuple[Any, Any]:
    rows = hub.load_split(name, split, ways_out="Leave the flag out for scikit-learn's digits.")
    try:
        pixels = np.stack([np.asarray(image) for image in rows["image"]])
        labels = np.asarray(rows["label"])
    except (KeyError, ValueError, ImportError) as error:
        raise UserError(
            f"--dataset_name {name}: `image` and `label` of {split!r} cannot be read ({error}); images must be of one"
            " size, and reading them needs Pillow (`pip install pillow`)."
        ) from None
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise UserError(f"--dataset_name {name}: the images are not grey with a byte per pixel.")
    return pixels, labels


def _digits() -> list[tuple[Any, Any]]:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in a fixed order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "The handwritten digits are scikit-learn's: `pip install scikit-learn`, or add --dataset_name mnist."
        ) from None
    pixels, labels = load_digits().images * (255 / 16), load_digits().target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:-_DIGITS_TO_TEST_ON], order[-_DIGITS_TO_TEST_ON:]
    return [(pixels[train], labels[train]), (pixels[test], labels[test])]
