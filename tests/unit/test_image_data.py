"""The images of examples/mnist_rnn.py: the hub's cache, scikit-learn's digits."""

from __future__ import annotations

import socket

import datasets
import numpy as np
import pytest
import torch
from image_data import load_images
from PIL import Image
from tables import refused

MADE = np.random.default_rng(0)
PIXELS = {"train": MADE.integers(0, 256, (7, 5, 4), dtype=np.uint8), "t10k": MADE.integers(0, 256, (3, 5, 4), np.uint8)}
LABELS = {"train": np.array([0, 1, 2, 0, 1, 2, 0], np.uint8), "t10k": np.array([2, 0, 9], np.uint8)}


def check(train, test) -> None:
    for part, images in (("train", train), ("t10k", test)):
        assert images.pixels.dtype == torch.float32
        np.testing.assert_array_equal((images.pixels.numpy() * 255).round(), PIXELS[part])
        assert images.labels.tolist() == LABELS[part].tolist()
        assert images.classes == 10


def test_digits_are_each_in_one_part_and_the_same_every_time():
    train, test = load_images(None)
    assert (len(train), len(test), train.classes) == (1437, 360, 10)
    assert train.pixels.shape[1:] == (8, 8)
    assert float(train.pixels.min()) == 0 and float(train.pixels.max()) == 1
    again, _ = load_images(None)
    assert again.digest() == train.digest() != test.digest()
    rows = {image.numpy().tobytes() for part in (train, test) for image in part.pixels}
    assert len(rows) == 1797


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the test's own, and no way to the hub."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def write() -> None:
        from datasets.arrow_writer import ArrowWriter

        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        target = tmp_path / "hub" / "ylecun___mnist" / "mnist" / "0.0.0" / "0123456789abcdef"
        target.mkdir(parents=True)
        splits = datasets.SplitDict(dataset_name="mnist")
        for split, part in (("train", "train"), ("test", "t10k")):
            with ArrowWriter(features=features, path=str(target / f"mnist-{split}.arrow")) as writer:
                for image, label in zip(PIXELS[part], LABELS[part], strict=True):
                    writer.write({"image": Image.fromarray(image), "label": int(label)})
                num_examples, num_bytes = writer.finalize()
            splits.add(datasets.SplitInfo(split, num_bytes, num_examples, dataset_name="mnist"))
        datasets.DatasetInfo(
            features=features, builder_name="parquet", dataset_name="mnist", config_name="mnist",
            version="0.0.0", splits=splits,
        ).write_to_directory(str(target))  # fmt: skip

    return write


def test_data_set_of_the_hub(hub):
    with refused("--dataset_name", "scikit-learn's digits"):
        load_images("mnist")
    hub()
    check(*load_images("mnist"))
