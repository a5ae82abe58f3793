"""Tasks by class, and what `DatasetTask` does for a task of one's own."""

from __future__ import annotations

import documented
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import each, refused
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import save
from hvd_bert.output import run_folder
from hvd_bert.tasks.base import load_task, task_class
from hvd_bert.tasks.dataset import Examples, to_device


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """The module `digits` of the guide."""
    (tmp_path / "digits.py").write_text(documented.own_task())
    (tmp_path / "needy.py").write_text("import nowhere")
    (tmp_path / "syntax.py").write_text("import torch\nclass Digits(\n")
    monkeypatch.syspath_prepend(tmp_path)


@each(
    ("task", "named"),
    [
        ("digitz:Digits", "No module named 'digitz'"),
        (":Digits", "MODULE:CLASS"),
        ("..digits:Digits", "MODULE:CLASS"),
        ("needy:Digits", "No module named 'nowhere'"),
        ("syntax:Digits", "syntax.py, line 2"),
        ("digits:Digit", "no class Digit"),
        ("digits:load_digits", "no class load_digits"),
        ("digits:DatasetTask", "forward, load, score"),
    ],
)
def test_wrong_names(own_task, task, named):
    with refused(f"--task {task}", named):
        task_class(task)


def test_own_task_is_evaluated_and_saved(own_task, tmp_path):
    task = load_task(parse(["--task", "digits:Digits", "--per_device_eval_batch_size", "100"]), make_world())
    assert task.plan.num_windows == 1500 and task.config.checkpoint.metric_for_best_model == "accuracy"
    evaluation = task.evaluate(task.model)
    pixels, labels = task.dev.collate(np.arange(297))
    classes = task.model(pixels).argmax(1)
    assert evaluation.metrics["accuracy"] == pytest.approx(float((classes == labels).double().mean()))
    assert evaluation.files == {"eval_predictions.json": classes.tolist()}
    assert evaluation.summary == f"accuracy {evaluation.metrics['accuracy']:.4f}  loss" + evaluation.summary[21:]
    run_folder.save_model(tmp_path, task)
    task.model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    again = load_task(parse(["--task", "digits:Digits", "--seed", "42"]), make_world())
    assert all(torch.equal(a, b) for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True))
    assert (task.fingerprint(), task.identity()) == (again.fingerprint(), again.identity())
    assert task.dev.digest != task.train.digest


def test_evaluation_takes_the_saved_weights(own_task, tmp_path):
    flags = ["--task", "digits:Digits", "--no_do_train"]
    trained = load_task(parse(["--task", "digits:Digits", "--seed", "1"]), make_world())
    run_folder.save_model(tmp_path, trained)
    task = load_task(parse([*flags, "--model_name_or_path", str(tmp_path)]), make_world())
    assert task.evaluate(task.model).metrics == trained.evaluate(trained.model).metrics
    with refused("--no_do_train", "--model_name_or_path"):
        load_task(parse(flags), make_world())
    save_file({"0.weight": torch.zeros(128, 64)}, tmp_path / "model.safetensors")
    for folder, named in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Missing key")):
        with refused(folder / "model.safetensors", named):
            load_task(parse([*flags, "--model_name_or_path", str(folder)]), make_world())


MASKED = """
import torch
from transformers import BertConfig, BertForMaskedLM
from hvd_bert.tasks.dataset import DatasetTask, Examples

class Masked(DatasetTask):
    metrics = {"eval_loss": "min"}

    def load(self, config):
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        self.model = BertForMaskedLM(BertConfig(vocab_size=50, **sizes))  # its input and output embeddings are tied
        tokens = torch.arange(40).reshape(4, 10)
        self.train = self.dev = Examples.of_tensors(tokens)

    def forward(self, model, batch):
        losses = torch.nn.functional.cross_entropy(model(*batch).logits.mT, batch[0], reduction="none").mean(1)
        return losses, losses

    def score(self, outputs):
        return {}
"""


def test_evaluation_takes_the_saved_weights_of_a_model_of_transformers(tmp_path, monkeypatch):
    (tmp_path / "masked.py").write_text(MASKED)
    monkeypatch.syspath_prepend(tmp_path)
    config = parse(["--task", "masked:Masked", "--seed", "1"])
    trained = load_task(config, make_world())
    run_folder.save_model(tmp_path, trained)
    flags = ["--task", "masked:Masked", "--no_do_train", "--model_name_or_path", str(tmp_path)]
    left_as_it_is = load_task(parse(flags), make_world())  # no run has written the folder
    save(config.as_flat(), tmp_path / "train_config.yaml")
    task = load_task(parse(flags), make_world())
    loss = trained.evaluate(trained.model).metrics
    assert task.evaluate(task.model).metrics == loss != left_as_it_is.evaluate(left_as_it_is.model).metrics


def test_batch_without_examples_has_one_that_does_not_count(own_task):
    task = load_task(parse(["--task", "digits:Digits"]), make_world())
    full, empty = task.batch(np.array([3, 4])), task.batch(np.empty(0, np.int64))
    assert (full.num_windows, full.num_tokens, full.num_positions) == (2, 2, 2)
    assert (empty.num_windows, empty.num_tokens, empty.num_positions) == (0, 0, 0)
    assert len(task.losses(task.model, full)) == 2 and len(task.losses(task.model, empty)) == 1


def test_model_without_a_weight_to_train_is_refused(own_task, tmp_path):
    frozen = (
        "from digits import Digits\n\nclass Frozen(Digits):\n    def load(self, config):\n        super().load(config)"
    )
    (tmp_path / "frozen.py").write_text(f"{frozen}\n        self.model.requires_grad_(False)\n")
    with refused("--task frozen:Frozen", "frozen"):
        load_task(parse(["--task", "frozen:Frozen"]), make_world())


def test_limits_of_examples(own_task):
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
