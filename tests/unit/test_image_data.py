"""The images of examples/mnist_rnn.py: the hub's cache, scikit-learn's digits."""

from __future__ import annotations

import datasets
import numpy as np
import torch
from image_data import load_images
from PIL import Image
from refusals import refused
from test_hub import no_network  # noqa: F401  # a fixture

MADE = np.random.default_rng(0)
PIXELS = {"train": MADE.integers(0, 256, (7, 5, 4), dtype=np.uint8), "t10k": MADE.integers(0, 256, (3, 5, 4), np.uint8)}
LABELS = {"train": np.array([0, 1, 2, 0, 1, 2, 0], np.uint8), "t10k": np.array([2, 0, 9], np.uint8)}


def test_data_set_of_the_hub(no_network, write_hub_cache):  # noqa: F811
    with refused("--dataset_name", "scikit-learn's digits"):
        load_images("mnist")
    splits = {
        split: [{"image": Image.fromarray(i), "label": int(j)} for i, j in zip(PIXELS[part], LABELS[part], strict=True)]
        for split, part in (("train", "train"), ("test", "t10k"))
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    write_hub_cache(no_network, splits, "ylecun/mnist", "mnist", features)
    for part, images in zip(("train", "t10k"), load_images("mnist"), strict=True):
        assert images.pixels.dtype == torch.float32
        np.testing.assert_array_equal((images.pixels.numpy() * 255).round(), PIXELS[part])
        assert images.labels.tolist() == LABELS[part].tolist()
        assert images.classes == 10
