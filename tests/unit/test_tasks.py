"""Loading of task classes by name, and `DatasetTask`, tested with the guide's example task."""

from __future__ import annotations

import json
from dataclasses import replace

import documented
import numpy as np
import pandas
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_predict import answered, read_rows
from test_world import make_world
from transformers import BertConfig, BertForMaskedLM

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import save
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError
from hvd_bert.output import run_folder
from hvd_bert.predict.rows import predict_file
from hvd_bert.tasks.base import load_task, task_class
from hvd_bert.tasks.dataset import DatasetTask, Examples, to_device
from hvd_bert.tasks.rows import column, load_rows
from hvd_bert.tasks.trained import as_trained


@pytest.fixture
def custom_task(tmp_path, monkeypatch):
    """Add modules to the import path: the guide's `digits`, and others whose import fails."""
    (tmp_path / "digits.py").write_text(documented.custom_task())
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "syntax.py").write_text("import torch\nclass Digits(\n")
    (tmp_path / "sub" / "tasks").mkdir(parents=True)
    (tmp_path / "sub" / "tasks" / "lacking.py").write_text("import no_such_package.part")
    (tmp_path / "sub" / "tasks" / "relative.py").write_text("from .util import load")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "task_and_named",
    [
        ("digitz:Digits", "No module named 'digitz'", "PYTHONPATH"),
        ("digits.py:Digits", "'digits.py'", "such as digits:Digits"),
        ("./digits.py:Digits", "such as digits:Digits"),
        ("sub.digits:Digits", "'sub.digits'", "PYTHONPATH"),
        ("sub.tasks.lacking:Digits", "pip install no_such_package`", "PYTHONPATH"),
        ("sub.tasks.relative:Digits", "'sub.tasks.util'", "import sub.tasks.relative"),
        (":Digits", "MODULE:CLASS"),
        ("syntax:Digits", "syntax.py, line 2", "import syntax"),
        ("leaving:Digits", "SystemExit: 0", "import leaving"),
        ("digits:Digit", "has no attribute 'Digit'", "a class of digits"),
        ("digits:load_digits", "no subclass of Task"),
        ("digits:DatasetTask", "forward, load, score"),
    ],
)
def test_wrong_names(custom_task, task_and_named):
    task, *named = task_and_named
    with refused(f"--task {task}", *named):
        task_class(task)


def test_custom_task_is_evaluated_and_saved(custom_task, tmp_path):
    task = load_task(parse(["--task", "digits:Digits", "--per_device_eval_batch_size", "100"]), make_world())
    assert task.plan.num_windows == 1500
    evaluation = task.evaluate(task.model)
    pixels, labels = task.dev.collate(np.arange(297))
    classes = task.model(pixels).argmax(1)
    assert evaluation.metrics["accuracy"] == pytest.approx(float((classes == labels).double().mean()))
    assert evaluation.files == {"eval_predictions.json": classes.tolist()}
    task.predictions = lambda classes: {"digit": classes, "first": [*classes[:2]]}  # converted to JSON
    task.score = lambda classes: {"accuracy": torch.tensor(0.5), "numpy": np.float32(0.5), "number": 1}
    found = task.evaluate(task.model)
    written = json.loads(json.dumps([found.files["eval_predictions.json"], found.metrics]))
    assert written[0] == {"digit": classes.tolist(), "first": classes[:2].tolist()}
    assert written[1] | {"eval_loss": 0} == {"accuracy": 0.5, "numpy": 0.5, "number": 1, "eval_loss": 0}
    assert evaluation.summary == f"accuracy {evaluation.metrics['accuracy']:.4f}  loss" + evaluation.summary[21:]
    run_folder.save_model(tmp_path, task)
    task.model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    again = load_task(parse(["--task", "digits:Digits", "--seed", "42"]), make_world())
    assert all(torch.equal(a, b) for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True))
    assert (task.fingerprint(), task.identity()) == (again.fingerprint(), again.identity())
    assert task.dev.digest != task.train.digest


def evaluating(task, folder, *flags):
    return load_task(
        parse(["--task", task, "--no_do_train", "--model_name_or_path", str(folder), *flags]), make_world()
    )


def test_evaluation_takes_the_saved_weights(custom_task, tmp_path):
    trained = load_task(parse(["--task", "digits:Digits", "--seed", "1"]), make_world())
    run_folder.save_model(tmp_path, trained)
    task = evaluating("digits:Digits", tmp_path)
    assert task.evaluate(task.model).metrics == trained.evaluate(trained.model).metrics
    with refused("--no_do_train", "--model_name_or_path"):
        load_task(parse(["--task", "digits:Digits", "--no_do_train"]), make_world())
    for weights, named in (({"0.weight": (128, 64)}, "Missing key"), ({"0.lora_A.0.weight": (8, 8)}, "--lora_rank")):
        save_file({name: torch.zeros(shape) for name, shape in weights.items()}, tmp_path / "model.safetensors")
        with refused(tmp_path, named):
            evaluating("digits:Digits", tmp_path)
    with refused(tmp_path / "nowhere" / "model.safetensors", "No such file"):
        evaluating("digits:Digits", tmp_path / "nowhere")


# A task whose `load` depends on the training's settings.
MASKED = """
import torch
from transformers import AutoTokenizer, BertForMaskedLM
from hvd_bert.tasks.dataset import DatasetTask, Examples

class Masked(DatasetTask):
    metrics = {"eval_loss": "min"}

    def load(self, config):
        name, self.settings = config.model.model_name_or_path, config
        self.model, tokenizer = BertForMaskedLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        tokens = torch.tensor(tokenizer(open(config.data.train_file).read().split("\\n"), padding=True)["input_ids"])
        self.train = self.dev = Examples.of_tensors(tokens)

    def forward(self, model, batch):
        losses = torch.nn.functional.cross_entropy(model(*batch).logits.mT, batch[0], reduction="none").mean(1)
        return losses, losses

    def score(self, outputs):
        return {}
"""


@pytest.fixture
def base_model(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "masked.py").write_text(MASKED)
    (tmp_path / "texts.txt").write_text("the box\nis red")
    tokenizer.save_pretrained("base")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("base")


def test_evaluation_gets_the_settings_of_the_training_and_its_weights(base_model, tmp_path):
    task = "masked:Masked"
    config = parse(["--task", task, "--model_name_or_path=base", "--train_file=texts.txt", "--seed=1"])
    trained = load_task(config, make_world())
    for weights in trained.model.parameters():
        weights.data += 0.1 * torch.randn(weights.shape)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for folder in (checkpoint.parent, checkpoint):
        run_folder.save_model(folder, trained)
    save(config.as_flat(), checkpoint.parent / "train_config.yaml")
    (tmp_path / "run").rename(tmp_path / "moved")
    for folder in (tmp_path / "moved", tmp_path / "moved" / "checkpoint-3"):
        again = evaluating(task, folder)
        assert again.evaluate(again.model).metrics == trained.evaluate(trained.model).metrics
        assert (again.trained, again.settings.model.model_name_or_path) == (str(folder), "base")
        assert again.settings.train.seed == 1 and trained.trained is None
    (tmp_path / "other.txt").write_text("green")
    assert len(evaluating(task, folder, "--train_file=other.txt").dev) == 1


def test_evaluation_of_a_model_from_elsewhere(base_model):
    """Without a training's settings, a transformers model keeps the weights that the task's `load` gave it."""
    task = evaluating("masked:Masked", "base", "--train_file=texts.txt")
    assert task.trained is None and task.settings.model.model_name_or_path == "base"


def test_data_set_of_an_evaluation_replaces_the_files_of_the_training(tmp_path):
    save(parse(["--task=a:A", "--train_file=a.csv"]).as_flat(), tmp_path / "train_config.yaml")
    words = ["--task=a:A", "--no_do_train", f"--model_name_or_path={tmp_path}", "--dataset_name=me/mine"]
    data = as_trained(parse(words)).data
    assert (data.train_file, data.dataset_name) == (None, "me/mine")


def test_predictions_of_a_file(custom_task, tmp_path, monkeypatch):
    trained = load_task(parse(["--task", "digits:Digits"]), make_world())
    run_folder.save_model(tmp_path, trained)
    pixels = trained.dev.collate(np.arange(3))[0]
    rows = [{"name": str(n), "pixels": (image * 16).tolist()} for n, image in enumerate(pixels)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [tmp_path, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.csv", "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(type(trained), "predictions", lambda self, classes: classes.squeeze())  # a number for one row
        answered(*words, by=lambda flags, world: predict_file(flags, "digits:Digits", world))
    found = read_rows(tmp_path / "out.csv")
    classes = trained.model(pixels).argmax(1).tolist()
    assert [(row["name"], json.loads(row["pixels"]), row["prediction"]) for row in found] == [
        (n, row["pixels"], label) for n, (row, label) in enumerate(zip(rows, classes, strict=True))
    ]
    for name, named in (("inputs", "`inputs`"), ("predictions", "`predictions`")):
        with monkeypatch.context() as patch:
            patch.setattr(type(trained), name, getattr(DatasetTask, name))
            with refused("--task digits:Digits", named, error=CollectiveError):
                answered(*words, by=lambda flags, world: predict_file(flags, "digits:Digits", world))


def shapes_of_the_batch(model, batch):
    return torch.zeros(len(batch[1])), torch.zeros(len(batch[1]), len(batch[1]))


@pytest.mark.parametrize(
    ("method", "returned", "named"),
    [
        ("forward", lambda model, batch: (model(batch[0]).mean(), None), ["`forward`", "[]", 'reduction="none"']),
        ("forward", shapes_of_the_batch, ["`forward`", "[1]", "[8]"]),
        ("score", lambda classes: {"f1": 1.0}, ["`score`", "accuracy", "`metrics`"]),
        ("score", lambda classes: 0.5, ["`score`", "0.5"]),
        ("score", lambda classes: {1: 0.5}, ["`score`", "1"]),
        ("predictions", lambda classes: {("a", "b"): 1}, ["`predictions`", "('a', 'b')"]),
        *[
            (method, lambda classes, value=value: {"accuracy": value}, [f"`{method}`", "'accuracy'"])
            for method, values in (("score", (None, "0.5", {0.5}, b"0.5", torch.ones(2))), ("predictions", ({1}, b"1")))
            for value in values
        ],
    ],
)
def test_wrong_results_of_a_method_are_named(custom_task, method, returned, named):
    task = load_task(parse(["--task", "digits:Digits"]), make_world())
    setattr(task, method, returned)
    with refused("digits:Digits", *named, error=UserError):
        task.losses(task.model, task.batch(np.arange(2)))
        task.evaluate(task.model)


@pytest.mark.parametrize(
    ("attribute", "changed", "named"),
    [
        ("train", lambda train: replace(train, lengths=train.lengths[:0]), ["training data", "no examples"]),
        ("dev", lambda dev: replace(dev, lengths=dev.lengths[:0]), ["`dev`", "no examples"]),
        ("metrics", lambda metrics: {"accuracy": "best"}, ["`metrics`", "'accuracy'", "'best'"]),
    ],
)
def test_wrong_attributes_are_refused_before_the_training(custom_task, attribute, changed, named):
    class Wrong(task_class("digits:Digits")):
        def load(self, config):
            super().load(config)
            setattr(self, attribute, changed(getattr(self, attribute)))

    with refused(*named):
        load_task(parse(["--task", "digits:Digits"]), make_world(), Wrong)


@pytest.mark.parametrize("name", ["t.csv", "t.CSV.gz", "t.tsv", "t.parquet", "t.jsonl", "t.json.gz", "csv.json"])
def test_rows_of_each_format_without_the_index_of_pandas(tmp_path, name):
    rows = pandas.DataFrame({"text": ['a "red" box', "NA"], "label": [10.0, 9.0]}, index=["x", "y"])
    path = tmp_path / name
    if "parquet" in name:
        rows.to_parquet(path)
    elif "csv" in name.lower():
        rows.to_csv(path, compression="gzip" if "gz" in name else None)
    elif "json" in name:
        rows.to_json(path, orient="records", lines="jsonl" in name)
    else:  # tab-separated as in GLUE, where quotes are text
        path.write_text('text\tlabel\na "red" box\t10.0\nNA\t9.0\n')
    assert load_rows(parse([f"--train_file={path}"]), "train").to_dict() == {
        "text": ['a "red" box', "NA"],
        "label": ["10.0", "9.0"] if "csv" in name.lower() or "tsv" in name else [10.0, 9.0],
    }


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"text,label\n", ["no rows"]),
        ("text\n\u00e9\n".encode("cp1252"), ["CSV UTF-8"]),
        (b"text,text\na,b\n", ["2 columns", "'text'"]),
        (b"text,label\na,1\nb\n", ["line 3", "cells"]),
        (b'{"text": "a"}\n[1]\n', ["line 2", "1"]),
        (
            b'{"text": "a"}\n{"text": "b", "id": 12345678901234567890123}\n',
            ["row 2", "'id'", "12345678901234567890123"],
        ),
        (b'[{"text": "\\ud800"}]', ["row 1", "'text'"]),
        (b'[{"id": null}, {"id": 7}, {"id": 8}, {"id": "007"}]', ["row 4", "'id'", "007"]),
        (b'[{"id": "007"}, {"id": 7}]', ["row 2", "'id'", "7"]),
        (b'[{"more": {"a": [1]}}, {"more": {"a": ["b"]}}]', ["row 2", "'more'"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, named):
    (tmp_path / "t").write_bytes(content)
    with refused(f"--train_file {tmp_path / 't'}", *named):
        load_rows(parse([f"--train_file={tmp_path / 't'}"]), "train")


def test_rows_need_a_file_the_column_and_its_values(tmp_path):
    (tmp_path / "t.csv").write_text("text,label\na,1\nb,\n")
    rows = load_rows(parse([f"--train_file={tmp_path / 't.csv'}"]), "train")
    for name, named in (("label", "Row 2 of the train data"), ("other", "text, label")):
        with refused(named, f"`{name}`"):
            column(rows, name)
    with refused("--train_file", "--no_do_train"):
        load_rows(parse([f"--validation_file={tmp_path / 't.csv'}"]), "train")
    with refused("--train_file", "weights"):
        load_rows(parse(["--train_file", f"{tmp_path / 't.csv'}:2"]), "train")
    assert load_rows(parse([f"--train_file={tmp_path / 't.csv'}"]), "validation") is None


def test_model_without_a_weight_to_train_is_refused(custom_task, tmp_path):
    frozen = (
        "from digits import Digits\n\nclass Frozen(Digits):\n    def load(self, config):\n        super().load(config)"
    )
    (tmp_path / "frozen.py").write_text(f"{frozen}\n        self.model.requires_grad_(False)\n")
    with refused("--task frozen:Frozen", "frozen"):
        load_task(parse(["--task", "frozen:Frozen"]), make_world())


def test_limits_of_examples(custom_task):
    flags = ["--task", "digits:Digits", "--max_train_samples", "20"]
    assert load_task(parse(flags), make_world()).plan.num_windows == 20
    with refused("--max_eval_samples 7", "--task digits:Digits"):
        load_task(parse([*flags, "--max_eval_samples", "7"]), make_world())


def test_items_of_a_data_set():
    items = [{"x": torch.tensor([float(n), 1.0]), "y": n} for n in range(5)]
    examples = Examples.of_dataset(items, "digest", lengths=np.array([1, 2, 3, 4, 5], np.int32))
    batch = to_device(examples.collate(np.array([4, 1])), torch.device("cpu"))
    assert batch["x"].tolist() == [[4.0, 1.0], [1.0, 1.0]] and batch["y"].tolist() == [4, 1]
    assert len(examples) == 5 and Examples.of_dataset(items, "digest").lengths.tolist() == [1] * 5


def test_run_of_a_custom_task_cannot_answer_questions(custom_task, tmp_path):
    save(parse(["--task", "digits:Digits"]).as_flat(), tmp_path / "train_config.yaml")
    with refused(tmp_path, "--task digits:Digits"):
        load_task(parse(["--no_do_train", "--model_name_or_path", str(tmp_path)]), make_world())
