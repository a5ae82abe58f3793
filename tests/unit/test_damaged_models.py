"""Damaged and unsuitable model folders: one UserError that names the folder and the reason, before any training."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from tables import each, refused
from test_families import small
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification

from hvd_bert import QuestionAnswerer
from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import window_table
from hvd_bert.data.sources import hub, squad
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.errors import UserError
from hvd_bert.model import loading
from hvd_bert.model.bert import load_model, load_tokenizer
from hvd_bert.model.loading import load_config, num_weights

LENGTH = 32  # max_seq_length of these tests
INDEX = "model.safetensors.index.json"

pytestmark = pytest.mark.timeout(300)  # a fifo that is opened, or a model with a million layers


@pytest.fixture(scope="module")
def good(tmp_path_factory, tokenizer) -> Path:
    """A small model's folder."""
    folder = tmp_path_factory.mktemp("good")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64,
    )  # fmt: skip
    BertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_all(folder: Path, make_questions: Callable[..., list[squad.Question]]) -> None:
    """What a run does with a model before it trains."""
    args = ModelArguments(model_name_or_path=str(folder))
    tokenizer = load_tokenizer(args)
    load_model(args, tokenizer, LENGTH, seed=1)
    window_table.prepare(squad.from_questions("q", make_questions(1)), tokenizer, WindowOptions(LENGTH, 8))


# --- damage: a function of the folder, and a pattern of the reason ------------------------------------

Damage = Callable[[Path], object]
CASES: dict[str, tuple[Damage, str]] = {}


def without(*files: str) -> Damage:
    return lambda folder: [(folder / file).unlink() for file in files]


def in_place(file: str, what: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in {file, "model.safetensors"} if file == INDEX else {file}:
            (folder / name).unlink(missing_ok=True)
        hostile.ALL[what](folder / file)

    return damage


def with_settings(file: str, settings: dict[str, Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | settings))

    return damage


for name in hostile.ALL:
    CASES[f"config.json: {name}"] = in_place("config.json", name), "config.json"
for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
    for name in ("a list", "5,000 digits", "fifo"):
        CASES[f"{file}: {name}"] = in_place(file, name), file
for file in (INDEX, "model.safetensors"):
    for name in hostile.NO_FILES:
        CASES[f"{file}: {name}"] = in_place(file, name), file

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "7"}, "hidden_size"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_attention_heads": 3}, "heads"),
    ({"hidden_size": 2 * 10**5}, "GiB of memory"),
    ({"return_dict": False}, "return_dict"),
    ({"chunk_size_feed_forward": 7}, "chunk_size_feed_forward .* 7"),
    ({"is_decoder": True}, "is_decoder"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantization_config"),
    ({"quantization_config": "x"}, "AttributeError"),
    ({"pad_token_id": 10**6}, "Padding_idx"),
    ({"id2label": [1]}, "AttributeError"),
    ({"dtype": "float99"}, "float99"),
    ({"model_type": ["bert"]}, "TypeError"),
    ({"model_type": None}, "`None`"),
    ({"auto_map": 3}, "TypeError"),
]
for settings, words in SETTINGS:
    CASES[f"config.json: {json.dumps(settings)[:60]}"] = with_settings("config.json", settings), words

for settings, words in (
    ({"auto_map": 3}, "AttributeError"),
    ({"tokenizer_class": 3}, "AttributeError"),
    ({"cls_token": 3}, "cls_token"),
    ({"added_tokens_decoder": [1]}, "AttributeError"),
    ({"added_tokens_decoder": {"3": {"content": 3}}}, "TypeError"),
    ({"model_max_length": "x"}, "model_max_length"),
    ({"padding_side": "left"}, "left"),
):
    CASES[f"tokenizer_config.json: {json.dumps(settings)}"] = with_settings("tokenizer_config.json", settings), words

for part in ("truncation", "added_tokens", "model"):
    CASES[f"tokenizer.json: {part} is 3"] = with_settings("tokenizer.json", {part: 3}), "Exception|TypeError"
charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
CASES["tokenizer.json: panic"] = with_settings("tokenizer.json", {"normalizer": charsmap}), "PanicException"


def with_vocabulary(**changed: Any) -> Damage:
    """`None` removes a token, a number is its new id."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"] | changed
        content["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number is not None}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return damage


CASES["a token id that is text"] = with_vocabulary(box="8"), "expected u32"
CASES["a token id beyond the embeddings"] = with_vocabulary(box=5000), "token id 5000, .* embeddings"
CASES["a token id beyond all memory"] = with_vocabulary(box=2**31), "token id 2147483648, .* embeddings"


def with_vocab_txt(content: Callable[[list[str]], bytes]) -> Damage:
    """A folder whose only vocabulary is a vocab.txt."""

    def damage(folder: Path) -> None:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        (folder / "tokenizer.json").unlink()
        with_settings("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})(folder)
        (folder / "vocab.txt").write_bytes(content(sorted(vocabulary, key=vocabulary.__getitem__)))

    return damage


CASES["vocab.txt: latin-1"] = with_vocab_txt(lambda words: "\n".join([*words, "\xe4"]).encode("latin-1")), "UTF-8"
CASES["vocab.txt: duplicates"] = with_vocab_txt(lambda words: "\n".join([*words, "the", "the"]).encode()), "token id"
CASES["vocab.txt: empty"] = with_vocab_txt(lambda words: b""), "has no vocabulary"
CASES["vocab.txt: fifo"] = in_place("vocab.txt", "fifo"), "vocab.txt is not a regular file"


def with_index(content: object) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(json.dumps(content))
        os.mkfifo(folder / "fifo")

    return damage


for file in ("nowhere", "fifo", "../other/model.safetensors", "/etc/passwd", "a\0b", "\ud800", "", 3):
    CASES[f"index: {file!r}"] = with_index({"metadata": {}, "weight_map": {"qa_outputs.weight": file}}), INDEX
for content in ([], {"weight_map": [3]}, {"weight_map": {}}):
    CASES[f"index: {content}"] = with_index(content), INDEX


def with_pickle(write: Callable[[Path, hostile.Canary], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(folder / "pytorch_model.bin", hostile.Canary(folder / "ran"))

    return damage


CASES["weights: pickle"] = with_pickle(lambda path, code: code.pickled(path)), "pickled objects"
CASES["weights: torch.save"] = with_pickle(lambda path, code: torch.save({"a": code}, path)), "pickled objects"
CASES["weights: a pickled list"] = with_pickle(lambda path, _: torch.save([1], path)), "TypeError"
CASES["weights: cut off"] = lambda folder: os.truncate(folder / "model.safetensors", 2000), ""
for name, files in {
    "no weights": ["model.safetensors"],
    "no config": ["config.json"],
    "no vocabulary": ["tokenizer.json", "tokenizer_config.json"],
}.items():
    CASES[name] = without(*files), ""
CASES["weights: an empty pickle"] = with_pickle(lambda path, _: path.write_bytes(b"")), "EOFError"


@each("name", CASES)
def test_damage_is_one_message(good, tmp_path, make_questions, name):
    folder = shutil.copytree(good, tmp_path / "damaged")
    damage, words = CASES[name]
    damage(folder)
    with refused(folder) as raised:
        load_all(folder, make_questions)
    assert re.search(words, str(raised.value)), raised.value
    assert not (folder / "ran").exists()


def test_good_folder(good, make_questions):
    load_all(good, make_questions)


def test_prediction_needs_a_span_head(good, tmp_path, make_questions):
    folder = shutil.copytree(good, tmp_path / "classifier")
    BertForSequenceClassification(BertConfig.from_pretrained(good)).save_pretrained(folder)
    load_all(folder, make_questions)  # training makes a new head
    with refused("qa_outputs.bias", "qa_outputs.weight"):
        QuestionAnswerer(folder, max_seq_length=LENGTH)
    assert list(QuestionAnswerer(good, max_seq_length=LENGTH).answers(make_questions(1)))


def test_pickled_tensors_alone_are_loaded(good, tmp_path, make_questions):
    folder = shutil.copytree(good, tmp_path / "old")
    weights = BertForQuestionAnswering.from_pretrained(good).state_dict()
    with_pickle(lambda path, _: torch.save(weights, path))(folder)
    load_all(folder, make_questions)


def test_text_that_the_tokenizer_fails_with(good, tmp_path, tokenizer):
    folder = shutil.copytree(good, tmp_path / "damaged")
    with_vocabulary(**{"[UNK]": None})(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[UNK]"]
    content["model"]["unk_token"] = "[none]"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    damaged = load_tokenizer(ModelArguments(model_name_or_path=str(folder)))
    question = squad.Question("q", "", "The box is \u2603.", "What is the box?", (), ())
    with refused("--tokenizer_name"):
        window_table.prepare(squad.from_questions("q", [question]), damaged, WindowOptions(LENGTH, 8))


def test_memory_for_all_copies(good, monkeypatch):
    args = ModelArguments(model_name_or_path=str(good))
    size = 4 * num_weights(load_config(str(good), args))
    monkeypatch.setattr(loading, "free_memory", lambda: 4 * size)
    load_config(str(good), args, copies=4)
    with pytest.raises(UserError, match="GiB of memory"):
        load_config(str(good), args, copies=5)


@pytest.mark.parametrize("name", ["./models/bert", "runs/x", "a/b/c"])
def test_missing_folder_is_not_only_an_unreachable_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    for load in (load_tokenizer, lambda args: load_config(name, args)):
        with pytest.raises(UserError, match=rf"'{name}' cannot be loaded \(no such folder in {tmp_path}"):
            load(ModelArguments(model_name_or_path=name))


def test_folder_without_a_configuration_says_what_is_missing(good, tmp_path, make_questions):
    folder = shutil.copytree(good, tmp_path / "incomplete")
    (folder / "config.json").unlink()
    (folder / "vocab.txt").write_text("[UNK]\nred\n")
    for left in (["tokenizer.json"], ["tokenizer_config.json"], ["vocab.txt"], []):
        with pytest.raises(UserError, match=r"incomplete' cannot be loaded \(it has no config\.json"):
            load_all(folder, make_questions)
        for name in left:
            (folder / name).unlink()


def words_only(folder: Path, words: list[str]) -> ModelArguments:
    """The arguments for a BERT whose tokenizer is only a vocabulary."""
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>", *words]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertConfig(vocab_size=len(pieces)).save_pretrained(folder)
    return ModelArguments(model_name_or_path=str(folder))


@pytest.mark.parametrize(
    ("words", "file", "content", "expected"),
    [
        (["Berlin", "be", "##rlin"], None, {}, ["Berlin"]),
        (["##Berlin", "Ber", "##lin"], None, {}, ["Ber", "##lin"]),
        (["berlin"], None, {}, ["berlin"]),
        (["Berlin", "be", "##rlin"], "tokenizer_config.json", {"model_max_length": 64}, ["Berlin"]),
        (["Berlin", "be", "##rlin"], "tokenizer_config.json", {"do_lower_case": True}, ["be", "##rlin"]),
        (["Berlin", "be", "##rlin"], "tokenizer.json", {"lowercase": False}, ["Berlin"]),
        (["Berlin", "be", "##rlin"], "tokenizer.json", {"lowercase": True}, ["be", "##rlin"]),
    ],
)
def test_cased_vocabulary_is_not_lower_cased(tmp_path, caplog, words, file, content, expected):
    args = words_only(tmp_path / "model", words)
    if file == "tokenizer.json":
        load_tokenizer(args).save_pretrained(tmp_path / "saved")
        whole = json.loads((tmp_path / "saved" / file).read_text())
        content = {**whole, "normalizer": whole["normalizer"] | content}
        caplog.clear()
    if file:
        (tmp_path / "model" / file).write_text(json.dumps(content))
    with caplog.at_level("INFO"):
        tokenizer = load_tokenizer(args)
    assert tokenizer.tokenize("Berlin") == expected
    assert ("not lower-cased" in caplog.text) == (expected != ["berlin"] and expected != ["be", "##rlin"])
    tokenizer.save_pretrained(tmp_path / "again")
    again = load_tokenizer(ModelArguments(tokenizer_name=str(tmp_path / "again")))
    assert again.tokenize("Berlin") == expected


@each(
    ("name", "remedy"),
    [
        ("damaged", r"\(config.json is not JSON: .*\)\. Fix or replace it, name another model"),
        ("/nowhere", r"\(no such folder\)\. Check the path"),
        ("./nowhere/at/all", r"\. Check the path"),
        ("someone/uncached", r"\. Check the name, name a local folder, or download the model into the hub's cache"),
        ("someone/cached", r"\. Delete the model's folder in the hub's cache .*models--someone--cached. and download"),
    ],
)
def test_remedy_fits_the_reason(tmp_path, monkeypatch, name, remedy):
    cached = tmp_path / "cache" / "models--someone--cached"
    for folder in (tmp_path / "damaged", cached / "snapshots" / ("0" * 40)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "reachable", lambda: False)
    args = ModelArguments(model_name_or_path=name, cache_dir=str(tmp_path / "cache"))
    sample = "`python -m hvd_bert.train --config sample`"  # predict and evaluate have no such flag
    with pytest.raises(UserError, match=rf"'{name}' cannot be loaded .*{remedy}.*, or try {sample}"):
        load_config(name, args)


# --- other families than BERT -------------------------------------------------------------------------


def load_small(name, settings, tokenizer, folder):
    config = small(name)
    config.vocab_size = len(tokenizer)
    for key, value in settings.items():
        setattr(config, key, value)
    config.save_pretrained(folder)
    return load_model(ModelArguments(config_name=str(folder)), tokenizer, 32, seed=1)


def test_rotary_positions_of_the_hubs_jina_models(tokenizer, tmp_path):
    load_small("jina_embeddings_v3", {"position_embedding_type": "rotary"}, tokenizer, tmp_path)
    with refused("position_embedding_type"):
        load_small("roberta", {"position_embedding_type": "rotary"}, tokenizer, tmp_path)


def test_longformer_with_fewer_positions_than_its_window(tokenizer, tmp_path):
    load_small("longformer", {"attention_window": 128}, tokenizer, tmp_path)
