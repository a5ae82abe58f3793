"""Damaged and unsuitable model folders: loading raises a UserError that names the folder and the reason."""

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
from refusals import refused
from safetensors.torch import load_file
from test_families import small
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForQuestionAnswering,
    GPT2Config,
    PegasusConfig,
    PreTrainedTokenizerFast,
    T5Config,
)

from hvd_bert import QuestionAnswerer
from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import window_table
from hvd_bert.data.sources import squad
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.errors import UserError
from hvd_bert.hub import DEFAULT_MODEL, LFS_POINTER
from hvd_bert.model import loading
from hvd_bert.model.bert import load_model
from hvd_bert.model.families import model_class
from hvd_bert.model.loading import load_config, num_weights
from hvd_bert.model.lora import add_adapters
from hvd_bert.tasks.tokenizer import load_tokenizer

LENGTH = 32  # max_seq_length of these tests


@pytest.fixture(scope="module")
def good(tmp_path_factory, tokenizer) -> Path:
    """Make the folder of a small, intact model."""
    folder, sizes = tmp_path_factory.mktemp("good"), {"hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_all(folder: Path, make_questions: Callable[..., list[squad.Question]]) -> None:
    """Load tokenizer and model and make windows, as a run does before training."""
    args = ModelArguments(model_name_or_path=str(folder))
    tokenizer = load_tokenizer(args)
    load_model(args, tokenizer, LENGTH, seed=1)
    window_table.prepare(squad.from_questions("q", make_questions(1)), tokenizer, WindowOptions(LENGTH, 8))


# --- damage: a function that damages the folder, and a pattern of the reported reason ------------------

Damage = Callable[[Path], object]
CASES: dict[str, tuple[Damage, str]] = {}


def without(*files: str) -> Damage:
    return lambda folder: [(folder / file).unlink() for file in files]


def in_place(file: str, name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        hostile.ALL[name](folder / file)

    return damage


def with_settings(file: str, settings: dict[str, Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | settings))

    return damage


for name in hostile.CONTENTS:
    for file in ("config.json", "tokenizer_config.json"):
        CASES[f"{file}: {name}"] = in_place(file, name), ""
for file in ("config.json", "tokenizer.json", "model.safetensors"):
    CASES[f"{file}: a folder"] = in_place(file, "folder"), ""

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 3}, "heads"),
    ({"max_position_embeddings": LENGTH - 1}, f"--max_seq_length {LENGTH}.* {LENGTH - 1}"),
    ({"vocab_size": 20}, "20"),
    ({"num_hidden_layers": 3}, "bert.encoder.layer.2"),
    ({"intermediate_size": 40}, "intermediate.dense.weight"),
    ({"hidden_size": 2 * 10**5}, "GiB of memory"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantization_config"),
]
for settings, words in SETTINGS:
    CASES[f"config.json: {json.dumps(settings)[:60]}"] = with_settings("config.json", settings), words

CASES["tokenizer_config.json: left"] = with_settings("tokenizer_config.json", {"padding_side": "left"}), "left"
charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
CASES["tokenizer.json: panic"] = with_settings("tokenizer.json", {"normalizer": charsmap}), "PanicException"


def with_a_large_token_id(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["box"] = 2**26
    (folder / "tokenizer.json").write_text(json.dumps(content))


CASES["a token id far beyond the embeddings"] = with_a_large_token_id, "embeddings.* 67108864"


def with_added_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[NEW0]", "[NEW1]"])
    tokenizer.save_pretrained(folder)


CASES["tokens added to the tokenizer"] = with_added_tokens, "resize_token_embeddings"


@pytest.mark.parametrize(
    ("name", "remedy"), [("model_name_or_path", "resize_token_embeddings"), ("config_name", "vocab_size")]
)
def test_tokens_added_to_another_folders_tokenizer(good, tmp_path, name, remedy):
    folder = shutil.copytree(good, tmp_path / "more")
    with_added_tokens(folder)
    args = ModelArguments(**{name: str(good)}, tokenizer_name=str(folder))
    with refused(good, folder, remedy):
        load_model(args, load_tokenizer(args), LENGTH, seed=1)


def with_pickle(write: Callable[[Path, hostile.Canary], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(folder / "pytorch_model.bin", hostile.Canary(folder / "ran"))

    return damage


CASES["weights: pickle"] = with_pickle(lambda path, code: code.pickled(path)), "pickled objects"
CASES["weights: torch.save"] = with_pickle(lambda path, code: torch.save({"a": code}, path)), "pickled objects"
CASES["weights: cut off"] = lambda folder: os.truncate(folder / "model.safetensors", 2000), ""
CASES["no weights"] = without("model.safetensors"), ""
CASES["no config"] = without("config.json"), "config.json"
CASES["adapter"] = lambda folder: os.rename(folder / "config.json", folder / "adapter_config.json"), "merge_and_unload"
CASES["no vocabulary"] = without("tokenizer.json", "tokenizer_config.json"), "has no vocabulary"


POINTER = f"{LFS_POINTER}\noid sha256:{'0' * 64}\nsize 12345\n"


def with_pointer(file: str, *removed: str) -> Damage:
    def damage(folder: Path) -> None:
        without(*removed)(folder)
        (folder / file).write_text(POINTER)

    return damage


for file, *removed in (
    ["config.json"],
    ["pytorch_model.bin", "model.safetensors"],
    ["vocab.txt", "tokenizer.json", "tokenizer_config.json"],
):
    CASES[f"{file}: a git-lfs pointer"] = with_pointer(file, *removed), f"{file}: .*`git lfs pull`"


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        with_pickle(lambda path, _: torch.save(change(weights), path))(folder)

    return damage


PREFIX = "module._orig_mod."
renamed = with_weights(lambda weights: {PREFIX + key: value for key, value in weights.items()})
CASES[f"weights: {PREFIX}bert"] = renamed, f"'{PREFIX}'"
renamed = with_weights(lambda weights: {PREFIX + key.removeprefix("bert."): value for key, value in weights.items()})
CASES[f"weights: {PREFIX}embeddings"] = renamed, f"'{PREFIX}'"
CASES["weights: wrapped"] = with_weights(lambda weights: {"epoch": 3, "model": weights}), "entries epoch, model"


SHARD = "model-00001-of-00001.safetensors"


def with_a_pipe_as_shard(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / SHARD)


CASES["tokenizer.json: a pipe"] = in_place("tokenizer.json", "fifo"), "tokenizer.json"
CASES["a shard: a pipe"] = with_a_pipe_as_shard, SHARD


@pytest.mark.parametrize("setting", ["return_dict", "output_attentions", "output_hidden_states"])
def test_settings_of_the_output_format_change_no_answers(setting: str, good, tmp_path) -> None:
    folder = shutil.copytree(good, tmp_path / "other")
    with_settings("config.json", {setting: setting != "return_dict"})(folder)
    ask = {"question": "where is it?", "context": "it is here.", "top_k": 3}
    found, expected = (QuestionAnswerer(model, max_seq_length=LENGTH)(**ask) for model in (folder, good))
    assert found == expected


def test_rank_of_adapters_above_the_layers_size(good, tokenizer) -> None:
    args = ModelArguments(model_name_or_path=str(good), lora_rank=10**9)
    with refused("--lora_rank 1000000000", 16):
        add_adapters(load_model(args, tokenizer, LENGTH, seed=1), args, seed=1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_damage_is_reported_in_one_message(good, tmp_path, make_questions, name):
    folder = shutil.copytree(good, tmp_path / "damaged")
    damage, words = CASES[name]
    damage(folder)
    with refused(folder) as raised:
        load_all(folder, make_questions)
    assert re.search(words, str(raised.value)), raised.value
    assert not (folder / "ran").exists()


def test_a_pickle_of_tensors_only_is_loaded(good, tmp_path, make_questions):
    folder = shutil.copytree(good, tmp_path / "old")
    weights = BertForQuestionAnswering.from_pretrained(good).state_dict()
    with_pickle(lambda path, _: torch.save(weights, path))(folder)
    load_all(folder, make_questions)


def test_head_of_another_size_gets_new_weights(tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels = 5
    saved = BertForQuestionAnswering(config)
    saved.save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path))
    model = load_model(args, tokenizer, LENGTH, seed=1)
    assert "qa_outputs.weight: [5, 16] instead of [2, 16]" in caplog.text
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, saved.bert.encoder.layer[0].output.dense.weight)
    with refused(tmp_path, "qa_outputs.weight: [5, 16] instead of [2, 16]"):
        load_model(args, tokenizer, LENGTH, seed=1, needs_head=True)


def test_memory_must_hold_all_copies(good, monkeypatch):
    args = ModelArguments(model_name_or_path=str(good))
    config = load_config(str(good), args)
    size = 4 * num_weights(config, model_class(config))
    monkeypatch.setattr(loading, "free_memory", lambda: 4 * size)
    load_config(str(good), args, copies=4)
    with pytest.raises(UserError, match="GiB of memory"):
        load_config(str(good), args, copies=5)


def words_only(folder: Path, words: list[str]) -> ModelArguments:
    """Make a model folder with only a configuration and a vocabulary. Returns the arguments that load it."""
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>", *words]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    BertConfig(vocab_size=len(pieces)).save_pretrained(folder)
    return ModelArguments(model_name_or_path=str(folder))


CASED = ["Berlin", "be", "##rlin"]


@pytest.mark.parametrize(
    ("words", "file", "content", "expected"),
    [
        (["##Berlin", "Ber", "##lin"], None, {}, ["Ber", "##lin"]),
        (["berlin"], None, {}, ["berlin"]),
        (CASED, "tokenizer_config.json", {"model_max_length": 64}, ["Berlin"]),
        (CASED, "tokenizer_config.json", {"do_lower_case": True}, ["be", "##rlin"]),
        (CASED, "tokenizer.json", {"lowercase": True}, ["be", "##rlin"]),
    ],
)
def test_cased_vocabulary_is_not_lower_cased(tmp_path, caplog, words, file, content, expected):
    caplog.set_level("INFO")
    args = words_only(tmp_path / "model", words)
    if file == "tokenizer.json":
        load_tokenizer(args).save_pretrained(tmp_path / "saved")
        whole = json.loads((tmp_path / "saved" / file).read_text())
        content = {**whole, "normalizer": whole["normalizer"] | content}
        caplog.clear()
    if file:
        (tmp_path / "model" / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(args)
    assert tokenizer.tokenize("Berlin") == expected
    assert ("not lower-cased" in caplog.text) == (expected != ["berlin"] and expected != ["be", "##rlin"])
    tokenizer.save_pretrained(tmp_path / "again")
    assert load_tokenizer(ModelArguments(tokenizer_name=str(tmp_path / "again"))).tokenize("Berlin") == expected


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere/at/all", "someone/uncached", DEFAULT_MODEL])
def test_missing_model(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with refused(f"'{name}'", "no such folder") as raised:
        load_config(name, ModelArguments(model_name_or_path=name))
    assert ("--config sample" in str(raised.value)) == (name == DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("data.jsonl", ["is a file", "--train_file", "save_pretrained"]),
        ("runs", ["runs/a, runs/c, runs/d (and 1 more)"]),
        ("runs/b", ["config", "Name another"]),
        ("runs/c", ["runs/c/checkpoint-4"]),
        (".", ["runs/a"]),
    ],
)
@pytest.mark.parametrize("load", [load_tokenizer, lambda args: load_config(args.model_name_or_path, args)])
def test_paths_that_are_no_model(tmp_path, monkeypatch, load, name, named):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a", "runs/c/checkpoint-4", "runs/tokens"):
        BertConfig().save_pretrained(folder)
    for run in ("runs/c", "runs/d"):  # c was interrupted, and d is of a custom task
        Path(run).mkdir(exist_ok=True)
        Path(run, "train_config.yaml").touch()
    Path("runs/b").mkdir()
    Path("data.jsonl").write_text('{"id": 1}')
    with refused(name, *named) as raised:
        load(ModelArguments(name))
    assert ("no model or tokenizer" in str(raised.value)) == (load is load_tokenizer and name != "data.jsonl")


# --- families other than BERT -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GPT2Config(n_embd=16, n_layer=1, n_head=2), "a gpt2 model, a decoder"),  # its eos is beyond the vocabulary
        (T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), "a t5 model, an encoder-decoder"),
        (PegasusConfig(d_model=16), "a pegasus model, an encoder-decoder"),  # has no span head
    ],
)
def test_models_that_generate_text_are_described(tokenizer, tmp_path, config, kind):
    config.vocab_size = len(tokenizer)
    config.save_pretrained(tmp_path)
    with refused(f"{tmp_path} is {kind}", "families albert, bert,"):
        load_model(ModelArguments(config_name=str(tmp_path)), tokenizer, 32, seed=1)
    unmarked = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})))
    unmarked.save_pretrained(tmp_path)
    with refused(f"{tmp_path} is {kind}", "[CLS] a [SEP] b [SEP]", "families albert, bert,"):
        load_tokenizer(ModelArguments(config_name=str(tmp_path)))


def test_settings_that_a_family_needs_or_refuses(tokenizer, tmp_path):
    def load(name: str, **settings: Any) -> None:
        config = small(name)
        for key, value in (settings | {"vocab_size": len(tokenizer)}).items():
            setattr(config, key, value)
        config.save_pretrained(tmp_path)
        load_model(ModelArguments(config_name=str(tmp_path)), tokenizer, 32, seed=1)

    load("jina_embeddings_v3", position_embedding_type="rotary")
    with refused("pad_token_id"):
        load("roberta", pad_token_id=None)
    load("longformer", attention_window=128)  # wider than the model's positions
