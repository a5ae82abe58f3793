"""A training's model card: it contains no private paths and never replaces a user's README.md."""

from __future__ import annotations

import json
import shlex
import socket
from itertools import pairwise
from typing import Any

import documented
import export_onnx
import numpy as np
import pytest
from huggingface_hub import ModelCard
from test_text_classification import made, saved, workdir  # noqa: F401  # a fixture
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  # fixtures
from transformers import BertConfig, BertForQuestionAnswering

from hvd_bert.config.command_line import parse
from hvd_bert.config.data import QUESTION_ANSWERING
from hvd_bert.config.settings import FLAGS
from hvd_bert.output import card

MODEL = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def training_results(**changes: Any) -> dict[str, Any]:
    """Make the content of a train_results.json. `changes`: entries to replace or add."""
    results = {
        "scores": ["accuracy"],
        "strategy": "ddp",
        "unit": "images",
        "train_windows": 1500,
        "global_batch": 16,
        "train_steps": 200,
        "steps_per_epoch": 94,
        "learning_rate": 1e-3,
        "world_size": 2,
        "precision": "fp32",
        "device_name": "A processor",
        "versions": {"torch": "2", "cuda": None},
        "from_hub": {},
    }
    return results | changes


def test_card_of_a_training(base, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    train(base, "--output_dir", str(out))
    content = (out / "README.md").read_text()
    found = ModelCard(content).data
    scores = json.loads((out / "eval_results.json").read_text())
    assert (found.library_name, found.pipeline_tag) == ("transformers", "question-answering")
    assert (found.base_model, found.license, found.language, found.datasets) == (None, None, None, None)
    assert {result.metric_type: result.metric_value for result in found.eval_results} == {
        name: scores[name] for name in ("exact_match", "f1")
    }
    assert {result.dataset_name for result in found.eval_results} == {"squad.json"}
    assert "AutoModelForQuestionAnswering" in content
    words = shlex.split(documented.fences("docs/guides/sharing.md")[0].commands[0])
    uploaded = [file for option, name in pairwise(words) if option == "--include" for file in out.glob(name)]
    assert {file.name for file in uploaded} == {"README.md", *MODEL}
    for file in uploaded:
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content and socket.gethostname().encode() not in content, file


def test_an_onnx_file_computes_the_models_logits(tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="needs env/setup.sh --dev")
    from onnx.reference import ReferenceEvaluator

    monkeypatch.chdir(tmp_path)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **size)).eval()
    model.save_pretrained("runs/mine")
    tokenizer.save_pretrained("runs/mine")
    export_onnx.main("runs/mine", "model.onnx")
    questions, passages = ["Who?", "Where is the red box?", "What?"], ["Ada.", "It is in the north of the town.", "A."]
    inputs = tokenizer(questions, passages, padding=True, return_token_type_ids=True, return_tensors="pt")
    found = ReferenceEvaluator("model.onnx").run(None, {name: values.numpy() for name, values in inputs.items()})
    for logits, expected in zip(found, model(**inputs).to_tuple(), strict=True):
        np.testing.assert_allclose(logits, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", [None, "notes.md", "missing.md"])
def test_a_users_card_stays(tmp_path, caplog, target):
    path, settings = tmp_path / "README.md", parse(["--task", "digits:Digits"]).as_flat()
    if target:
        (tmp_path / "notes.md").write_text("mine")
        path.symlink_to(target)
    else:
        path.write_text("mine")
    with caplog.at_level("INFO", "hvd_bert"):
        card.write(tmp_path, settings, training_results(), {})
    assert f"{path} exists and is not replaced" in caplog.text and path.is_symlink() == bool(target)
    assert not path.exists() or path.read_text() == "mine"


def test_card_of_a_classification(workdir):  # noqa: F811
    task, scores = made(), {"accuracy": 0.5, "f1": float("nan"), "matthews_correlation": 0.1, "eval_loss": 1.0}
    out, settings = workdir / saved(task), task.config.as_flat() | {"train_file": str(workdir / "a|b`.jsonl")}
    card.write(out, settings, training_results(scores=["accuracy", "f1", "matthews_correlation"], unit="texts"), scores)
    content = (out / "README.md").read_text()
    found = ModelCard(content).data
    assert found.pipeline_tag == "text-classification" and found.metrics == ["accuracy", "matthews_correlation"]
    assert "AutoModelForSequenceClassification" in content and "| `f1`" not in content
    assert r"| `a\|b'.jsonl`: 1,500 texts |" in content


@pytest.mark.parametrize(
    ("dataset", "config", "shown"),
    [("nyu-mll/glue", "b/c", "`nyu-mll/glue`, configuration `b/c`"), ("{}/numbers", None, "`numbers`")],
)
def test_card_of_a_custom_task_and_a_model_that_is_not_transformers(tmp_path, dataset, config, shown):
    (tmp_path / "numbers").mkdir()  # a folder that the task reads itself
    flags = ["--task", "digits:Digits", "--dataset_name", dataset.format(tmp_path)]
    settings = parse([*flags, *(["--dataset_config_name", config] if config else [])]).as_flat()
    content = card.text(tmp_path, settings, training_results(from_hub=card.from_hub(settings)), {"accuracy": 0.97})
    found = ModelCard(content).data
    assert (found.library_name, found.pipeline_tag, found.metrics) == (None, None, ["accuracy"])
    assert "AutoModel" not in content and "safetensors.torch.load_file" in content
    assert found.datasets == (dataset if config else None) and f"Evaluated on {shown}." in content
    (result,) = found.eval_results
    assert (result.dataset_config, result.dataset_split) == (config, None), "the task chooses the split"
    assert found.base_model is None and "bert-base-uncased" not in content


def test_names_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model_name_or_path": "google-bert/bert-base-uncased", "tokenizer_name": "me/mine"}
    names["dataset_name"] = "rajpurkar/squad_v2"
    settings = parse([word for name, value in names.items() for word in (f"--{name}", value)]).as_flat()
    assert card.from_hub(settings) == names
    found = ModelCard(card.text(tmp_path, settings, training_results(from_hub=names), {"accuracy": 1})).data
    assert (found.base_model, found.datasets) == (names["model_name_or_path"], names["dataset_name"])
    (result,) = found.eval_results
    assert (result.dataset_type, result.dataset_split) == (names["dataset_name"], "validation")
    (tmp_path / "me" / "mine").mkdir(parents=True)  # takes precedence over a hub repository of this name
    assert "tokenizer_name" not in card.from_hub(settings)


@pytest.mark.parametrize("dataset", [None, "/secret/x"])
def test_no_setting_shows_a_path(tmp_path, dataset):
    settings = dict.fromkeys(FLAGS, "/secret/x") | {"dataset_name": dataset, "task": QUESTION_ANSWERING}
    settings["dataset_config_name"] = None  # it cannot be a path
    settings |= {"validation_file": ["a=/secret/x", "/secret/y/"], "answer_language": "zh"}
    content = card.text(tmp_path, settings, training_results(), {"accuracy": 1})
    assert content.count("--answer_language zh") == 2, "in the metric's name and below the scores"
    assert "secret" not in content and ("Evaluated on `a=x, y`" in content) == (dataset is None)
