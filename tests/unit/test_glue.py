"""Data sets of the hub, from a cache as downloads create it: columns, labels and metrics are run_glue's."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from tables import each, refused
from test_world import make_world
from transformers import AutoModelForSequenceClassification, BertConfig

from hvd_bert.config.command_line import parse
from hvd_bert.config.data import GLUE
from hvd_bert.evaluation.classification import regression_scores
from hvd_bert.output import run_folder
from hvd_bert.tasks.base import load_task

WORDS = ("the box is red", "what is green ?", "red", "the green box in the red box", "is the box green ?")
# Columns as in `task_to_keys` of transformers' run_glue.py, and GLUE's metrics.
TASKS = {
    "cola": (("sentence",), ["matthews_correlation"]),
    "mnli": (("premise", "hypothesis"), ["accuracy"]),
    "mrpc": (("sentence1", "sentence2"), ["accuracy", "f1"]),
    "qnli": (("question", "sentence"), ["accuracy"]),
    "qqp": (("question1", "question2"), ["accuracy", "f1"]),
    "rte": (("sentence1", "sentence2"), ["accuracy"]),
    "sst2": (("sentence",), ["accuracy"]),
    "stsb": (("sentence1", "sentence2"), ["pearson", "spearmanr"]),
    "wnli": (("sentence1", "sentence2"), ["accuracy"]),
}
VALIDATION = {"mnli": {"validation_matched": "", "validation_mismatched": "_mm"}}
# Names of the classes on the hub; none for STS-B, whose labels are numbers from 0 to 5.
CLASSES = {"mnli": ["entailment", "neutral", "contradiction"], "stsb": None, "sst2": ["negative", "positive"]}
TWO = ["no", "yes"]


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, write_hub_cache):
    """hub_cache(name, config, columns, classes, splits): a data set whose splits have 7, 6, 5, ... rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def write(name, config, columns, classes, splits=("train", "validation"), label="label"):
        kind = datasets.ClassLabel(names=classes) if classes else datasets.Value("float32")
        features = datasets.Features(
            {**{column: datasets.Value("string") for column in columns}, label: kind, "idx": datasets.Value("int32")}
        )

        def rows(count):
            labels = [i % len(classes) if classes else i % 5 / 2 for i in range(count)]
            texts = [{column: WORDS[(i + n) % 5] for n, column in enumerate(columns)} for i in range(count)]
            return [{**texts[i], label: labels[i], "idx": i} for i in range(count)]

        content = {split: rows(7 - number) for number, split in enumerate(splits)}
        write_hub_cache(tmp_path / "hub", content, name, config, features)

    return write


@pytest.fixture
def make_task(tmp_path, tokenizer):
    """make_task(*flags) -> text classification with a tiny model."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    tokenizer.save_pretrained(tmp_path / "model")
    BertConfig(vocab_size=len(tokenizer), **shape).save_pretrained(tmp_path / "model")
    base = ["--task=text-classification", "--max_seq_length=32", "--strategy=none"]

    def make(*flags, model=("--config_name", "model")):
        return load_task(parse([*base, model[0], str(tmp_path / model[1]), *flags]), make_world())

    return make


def saved(task, folder):
    folder.mkdir()
    run_folder.save_model(folder, task)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_glue(hub_cache, make_task, name):
    assert TASKS.keys() == GLUE.keys()
    (columns, of_task), validation = TASKS[name], VALIDATION.get(name, {"validation": ""})
    classes = CLASSES.get(name, TWO)
    hub_cache("nyu-mll/glue", name, columns, classes, ("train", *validation))
    task = make_task("--task_name", name)
    assert task.names == (classes or ["LABEL_0"]) and task.model.config.num_labels == len(task.names)
    assert (len(task.train), len(task.dev)) == (7, sum(6 - number for number in range(len(validation))))
    metrics = task.evaluate(task.model).metrics
    combined = ["combined_score"] if len(of_task) > 1 else []
    assert next(iter(task.metrics)) == (combined or of_task)[0] == task.config.checkpoint.metric_for_best_model
    assert metrics.keys() >= task.metrics.keys() >= {f"{m}{end}" for m in of_task for end in validation.values()}
    if combined:
        assert metrics["combined_score"] == pytest.approx(np.mean([metrics[metric] for metric in of_task]))


def test_both_validation_sets_of_mnli(hub_cache, make_task):
    """As if each were evaluated by itself."""
    splits = ("train", "validation_matched", "validation_mismatched")
    hub_cache("glue", "mnli", ("premise", "hypothesis"), CLASSES["mnli"], splits)
    task = make_task("--task_name", "mnli", "--max_eval_samples", "4")
    both = task.evaluate(task.model)
    assert both.metrics["total"] == both.metrics["total_mm"] == 4
    assert "eval_loss" not in both.summary and not {"eval_loss", "eval_loss_mm"} & {*run_folder.of_task(task)["scores"]}
    assert list(both.files["eval_predictions.json"]) == ["0", "1", "2", "3", "0_mm", "1_mm", "2_mm", "3_mm"]
    of_hub = ["--dataset_name", "glue", "--dataset_config_name", "mnli", "--max_eval_samples", "4"]
    for split, ending in VALIDATION["mnli"].items():
        alone = make_task(*of_hub, "--validation_split_name", split)
        for metric, value in alone.evaluate(alone.model).metrics.items():
            assert both.metrics[metric + ending] == pytest.approx(value, abs=1e-6)


def test_regression(hub_cache, make_task, tmp_path, tokenizer):
    hub_cache("glue", "stsb", ("sentence1", "sentence2"), None)
    task = make_task("--task_name", "stsb", "--dropout", "0")
    batch = task.batch(np.arange(5))
    losses, values = task.forward(task.model, batch.content)
    saved(task, tmp_path / "saved")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert plain.config.problem_type == "regression"
    texts = [[WORDS[(i + n) % 5] for i in range(5)] for n in range(2)]
    encoded = tokenizer(*texts, padding=True, return_token_type_ids=True, return_tensors="pt")
    expected = plain(**encoded, labels=torch.tensor([0, 0.5, 1, 1.5, 2]))
    torch.testing.assert_close(values, expected.logits[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=0, atol=1e-5)
    evaluation = task.evaluate(task.model)
    assert evaluation.metrics["mse"] == pytest.approx(evaluation.metrics["eval_loss"], abs=1e-6)
    assert all(isinstance(value, float) for value in evaluation.files["eval_predictions.json"].values())
    again = make_task("--task_name=stsb", "--no_do_train", model=("--model_name_or_path", "saved"))
    scores = again.evaluate(again.model).metrics  # ranks of values that are almost equal turn on the last bits
    assert (
        scores["mse"] == pytest.approx(evaluation.metrics["mse"], rel=1e-6)
        and scores.keys() == evaluation.metrics.keys()
    )


def test_whole_numbers_are_learnt_as_numbers_on_request(make_task, tmp_path):
    (tmp_path / "train.csv").write_text("text,stars\nred,1\ngreen,5\nbox,3\n")
    flags = ["--train_file", str(tmp_path / "train.csv"), "--label_column_name", "stars"]
    assert make_task(*flags).names == ["1", "3", "5"]
    assert make_task(*flags, "--do_regression").dev is None and make_task(*flags, "--do_regression").regression
    (tmp_path / "train.csv").write_text("text,stars\nred,1.5\nred,good\n")
    with refused("train.csv: line 3", "'good'"):
        make_task(*flags, "--do_regression")


def test_columns_and_splits_of_the_hub(hub_cache, make_task):
    hub_cache("someone/reviews", "plain_text", ("title", "body"), ["bad", "good"], ("train", "test"), "stars")
    flags = ["--dataset_name=someone/reviews", "--text_column_names=body", "--label_column_name=stars"]
    task = make_task(*flags, "--validation_split_name", "test")
    assert task.names == ["bad", "good"] and len(task.dev) == 6
    assert task.evaluate(task.model).summary.endswith("on 6 texts")
    with refused("'validation'", "--validation_split_name"):
        make_task(*flags)
    with refused("reviews[train]", "title, body, stars, idx"):
        make_task("--dataset_name=someone/reviews", "--validation_split_name=test")


def test_labels_of_a_trained_model(hub_cache, make_task, tmp_path):
    """A model may spell them in capitals, as roberta-large-mnli does, or not name them at all."""
    hub_cache("glue", "sst2", ("sentence",), CLASSES["sst2"])
    task = make_task("--task_name", "sst2")
    evaluation = task.evaluate(task.model)
    for number, names in enumerate((["NEGATIVE", "POSITIVE"], ["LABEL_0", "LABEL_1"])):
        task.model.config.id2label, task.model.config.label2id = dict(enumerate(names)), {}
        saved(task, tmp_path / f"saved{number}")
        again = make_task("--task_name=sst2", "--no_do_train", model=("--model_name_or_path", f"saved{number}"))
        assert again.evaluate(again.model).metrics == evaluation.metrics
    assert again.names == CLASSES["sst2"]
    rows = "".join(f"{WORDS[i % 5]},{i % 2}\n" for i in range(6))  # the same, with the numbers of the classes
    (tmp_path / "dev.csv").write_text(f"sentence,label\n{rows}")
    flags = ["--no_do_train", "--validation_file", str(tmp_path / "dev.csv")]
    again = make_task(*flags, model=("--model_name_or_path", "saved1"))
    assert again.evaluate(again.model).metrics == evaluation.metrics
    with refused("--do_regression", "saved1"):
        make_task(*flags, "--do_regression", model=("--model_name_or_path", "saved1"))


def test_test_sets_without_labels_are_refused(tmp_path, monkeypatch, write_hub_cache, make_task):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = [{"sentence": "red", "label": 1}, {"sentence": "red", "label": -1}]
    write_hub_cache(tmp_path / "hub", {"train": rows}, "glue", "cola", features)
    with refused("glue/cola[train]", "row 1", "-1"):
        make_task("--task_name", "cola")


@each(
    "flags",
    [
        ["--task", "text-classification", "--task_name", "mrpc", "--train_file", "t.csv"],
        ["--task", "text-classification", "--task_name", "mrpc", "--text_column_names", "a"],
        ["--task_name", "mrpc"],
    ],
)
def test_flags_that_exclude_each_other(flags):
    with refused("--task_name", flags[-2]):
        parse(flags)


@each("labels", [[1.0, 2.5, 2.5, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
def test_correlations_are_those_of_scipy(labels):
    stats = pytest.importorskip("scipy.stats")
    predicted = np.array([0.3, 0.2, 3.0, -1.0, 3.0])
    found = regression_scores(predicted, np.array(labels))
    if len(set(labels)) == 1:
        assert (found["pearson"], found["spearmanr"]) == (0.0, 0.0)
    else:
        assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, labels).statistic)
        assert found["spearmanr"] == pytest.approx(stats.spearmanr(predicted, labels).statistic)
    assert found["mse"] == pytest.approx(np.mean((predicted - labels) ** 2))
