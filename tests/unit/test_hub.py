"""Questions and images are read from the hub's download cache; without a cache, the error says what to do."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from image_data import load_images
from PIL import Image
from refusals import refused
from transformers import AutoTokenizer

from hvd_bert import hub
from hvd_bert.data.sources import squad


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Disable the network and use an empty download cache. Returns the path of the cache."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize(("cached_as", "asked_for"), [("squad", "rajpurkar/squad"), ("rajpurkar/squad", "squad")])
def test_squad_is_found_under_either_name(no_network, write_hub_cache, make_questions, cached_as, asked_for):
    questions = make_questions(7)
    write_hub_cache(no_network, {"train": questions}, cached_as)
    assert squad.open_hub(asked_for, "train", False).questions() == questions
    with refused("'validation'"):
        squad.open_hub(asked_for, "validation", False)


def test_digest_covers_the_rows_but_not_their_path(no_network, write_hub_cache, make_questions, monkeypatch):
    digests = []
    for folder, count in (("a", 5), ("b", 5), ("c", 6)):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(no_network / folder))
        write_hub_cache(no_network / folder, {"train": make_questions(count)})
        digests.append(squad.open_hub("squad", "train", False).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["squad", "/dev/zero", "train.json/", "a/b/c", " ", "..."])
def test_names_that_cannot_be_loaded(name):
    with refused(f"--dataset_name {name}", "--train_file", "--validation_file", "--config sample"):
        squad.open_hub(name, "train", False)


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
@pytest.mark.parametrize("family", ["deberta-v2", "xlm-roberta"])
def test_package_of_a_sentencepiece_tokenizer(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / ("spm.model" if family == "deberta-v2" else "sentencepiece.bpe.model")).touch()
    with refused(tmp_path, "pip install sentencepiece"):
        hub.load_pretrained(AutoTokenizer, str(tmp_path))


MADE = np.random.default_rng(0)
PIXELS = {"train": MADE.integers(0, 256, (7, 5, 4), dtype=np.uint8), "t10k": MADE.integers(0, 256, (3, 5, 4), np.uint8)}
LABELS = {"train": np.array([0, 1, 2, 0, 1, 2, 0], np.uint8), "t10k": np.array([2, 0, 9], np.uint8)}


def test_images_of_the_hub(no_network, write_hub_cache):
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
