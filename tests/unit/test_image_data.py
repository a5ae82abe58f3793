"""The images of examples/mnist_rnn.py: MNIST's files, whole and damaged, the hub's cache, scikit-learn's digits."""

from __future__ import annotations

import gzip
import socket
import struct
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from image_data import load_images, read_idx
from PIL import Image
from tables import each, refused

MADE = np.random.default_rng(0)
PIXELS = {"train": MADE.integers(0, 256, (7, 5, 4), dtype=np.uint8), "t10k": MADE.integers(0, 256, (3, 5, 4), np.uint8)}
LABELS = {"train": np.array([0, 1, 2, 0, 1, 2, 0], np.uint8), "t10k": np.array([2, 0, 9], np.uint8)}


def idx(values: np.ndarray) -> bytes:
    """The values as an IDX file has them."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()


def write_mnist(folder: Path, sign: str = "-", zipped: bool = False) -> Path:
    for part in PIXELS:
        for name, values in ((f"images{sign}idx3", PIXELS[part]), (f"labels{sign}idx1", LABELS[part])):
            content = gzip.compress(idx(values)) if zipped else idx(values)
            (folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}").write_bytes(content)
    return folder


def check(train, test) -> None:
    for part, images in (("train", train), ("t10k", test)):
        assert images.pixels.dtype == torch.float32
        np.testing.assert_array_equal((images.pixels.numpy() * 255).round(), PIXELS[part])
        assert images.labels.tolist() == LABELS[part].tolist()
        assert images.classes == 10


@each("sign", ["-", "."])
@each("zipped", [False, True])
def test_mnists_files(tmp_path, sign, zipped):
    check(*load_images(write_mnist(tmp_path, sign, zipped), None))


def test_images_of_ids():
    train, _ = load_images(None, None)
    pixels, labels = train.take(np.array([5, 0]), torch.device("cpu"))
    assert torch.equal(pixels, torch.stack([train.pixels[5], train.pixels[0]]))
    assert labels.tolist() == [int(train.labels[5]), int(train.labels[0])]


WHOLE = idx(PIXELS["train"])


@each(
    ("content", "named"),
    [
        (b"", ""),
        (WHOLE[:10], ""),
        (idx(LABELS["train"]), ""),
        (b"<html>not found</html>", ""),
        (bytes([0, 0, 13, 3]) + WHOLE[4:], ""),  # floats
        (WHOLE[:-1], "7 x 5 x 4 bytes, but has 139"),
        (WHOLE + b"0", "7 x 5 x 4 bytes, but has 141"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3i", -7, -20, 1) + bytes(140), "-7 x -20 x 1"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3i", 0, 5, 4), "0 x 5 x 4"),
        (gzip.compress(WHOLE)[:-9], ""),
        (gzip.compress(WHOLE)[:-8] + bytes(8), ""),  # another checksum
        (b"\x1f\x8b" + bytes(30), ""),
    ],
)
def test_damaged_file(tmp_path, content, named):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with refused(path, named):
        read_idx(path, 3)


def test_missing_file(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with refused("t10k-labels-idx1-ubyte.gz"):
        load_images(tmp_path, None)


def test_labels_of_other_images(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS["t10k"]))
    with refused("7 images", "train-labels", "3 labels"):
        load_images(tmp_path, None)


def test_images_of_two_shapes(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS["t10k"].reshape(3, 4, 5)))
    with refused("(5, 4)", "(4, 5)"):
        load_images(tmp_path, None)


def test_digits_are_each_in_one_part_and_the_same_every_time():
    train, test = load_images(None, None)
    assert (len(train), len(test), train.classes) == (1437, 360, 10)
    assert train.pixels.shape[1:] == (8, 8)
    assert float(train.pixels.min()) == 0 and float(train.pixels.max()) == 1
    again, _ = load_images(None, None)
    assert again.digest() == train.digest() != test.digest()
    rows = {image.numpy().tobytes() for part in (train, test) for image in part.pixels}
    assert len(rows) == 1797


def test_without_scikit_learn_there_is_a_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused("`pip install scikit-learn`"):
        load_images(None, None)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the test's own, and no way to the hub."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def write(column: str = "image") -> None:
        from datasets.arrow_writer import ArrowWriter

        features = datasets.Features({column: datasets.Image(), "label": datasets.Value("int64")})
        target = tmp_path / "hub" / "ylecun___mnist" / "mnist" / "0.0.0" / "0123456789abcdef"
        target.mkdir(parents=True)
        splits = datasets.SplitDict(dataset_name="mnist")
        for split, part in (("train", "train"), ("test", "t10k")):
            with ArrowWriter(features=features, path=str(target / f"mnist-{split}.arrow")) as writer:
                for image, label in zip(PIXELS[part], LABELS[part], strict=True):
                    writer.write({column: Image.fromarray(image), "label": int(label)})
                num_examples, num_bytes = writer.finalize()
            splits.add(datasets.SplitInfo(split, num_bytes, num_examples, dataset_name="mnist"))
        datasets.DatasetInfo(
            features=features, builder_name="parquet", dataset_name="mnist", config_name="mnist",
            version="0.0.0", splits=splits,
        ).write_to_directory(str(target))  # fmt: skip

    return write


@pytest.mark.parametrize("name", ["mnist", "ylecun/mnist"])
def test_data_set_of_the_hub(hub, name):
    hub()
    check(*load_images(None, name))


def test_data_set_of_the_hub_without_images(hub):
    hub(column="picture")
    with refused("--dataset_name", "`image`", "`label`", "'train'"):
        load_images(None, "mnist")


def test_no_hub_names_the_ways_out_of_this_program(hub):
    with refused("--dataset_name") as caught:
        load_images(None, "mnist")
    assert "--train_file FOLDER" in str(caught.value) and "--validation_file" not in str(caught.value)
