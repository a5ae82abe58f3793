"""Text classification: logits of packed texts are transformers', scores are scikit-learn's, files load again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tables import each, refused
from test_world import make_world
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

from hvd_bert.config.command_line import parse
from hvd_bert.evaluation.classification import classification_scores
from hvd_bert.model.attention import windows_of
from hvd_bert.output import run_folder
from hvd_bert.strategies.dp import join_windows, split_windows
from hvd_bert.tasks.base import load_task

COLOURS = ("red", "green", "box of the box", "what is in the box of the red box ?")


@pytest.fixture
def make_task(tmp_path, tokenizer):
    """make_task(*flags) -> the task with a tiny model and 12 pairs of texts."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    BertConfig(vocab_size=len(tokenizer), **shape).save_pretrained(folder)
    rows = [
        {"sentence1": COLOURS[i % 4], "sentence2": COLOURS[i // 4], "label": ("yes", "no", "maybe")[i % 3]}
        for i in range(12)
    ]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--train_file={tmp_path}/train.jsonl", f"--validation_file={tmp_path}/dev.jsonl"]
    base = ["--task", "text-classification", "--max_seq_length", "64", "--strategy", "none", *files]

    def make(*flags, config=folder):
        return load_task(parse([*base, "--config_name", str(config), *flags]), make_world())

    return make


def test_logits_and_saved_model_are_transformers(make_task, tmp_path, tokenizer):
    task = make_task("--dropout", "0")
    saved = tmp_path / "saved"
    saved.mkdir()
    run_folder.save_model(saved, task)
    plain = AutoModelForSequenceClassification.from_pretrained(saved, attn_implementation="eager")
    assert type(plain).__name__ == json.loads((saved / "config.json").read_text())["architectures"][0]
    assert plain.config.id2label == {0: "maybe", 1: "no", 2: "yes"}
    ids = np.array([0, 3, 7, 11])
    batch = task.batch(ids)
    losses, probabilities = task.forward(task.model, batch.content)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    texts = [[rows[i][name] for i in ids] for name in ("sentence1", "sentence2")]
    labels = torch.tensor([plain.config.label2id[rows[i]["label"]] for i in ids])
    encoded = tokenizer(*texts, padding=True, return_token_type_ids=True, return_tensors="pt")
    expected = plain(**encoded, labels=labels)
    torch.testing.assert_close(probabilities, expected.logits.softmax(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=0, atol=1e-5)
    assert batch.num_tokens == batch.num_positions == sum(batch.content[0].lengths)


def test_padded_batches_have_the_same_losses(make_task):
    packed, padded = make_task("--dropout", "0"), make_task("--dropout", "0", "--pad_to_max_length")
    ids = np.arange(12)
    one, other = (task.losses(task.model, task.batch(ids)) for task in (packed, padded))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert padded.batch(ids).num_positions == 12 * 64 > packed.batch(ids).num_positions
    empty = packed.batch(ids[:0])
    assert (empty.num_windows, empty.num_tokens, empty.num_positions) == (0, 0, 0)
    assert len(packed.losses(packed.model, empty)) == 1


def test_evaluation_and_saved_labels(make_task, tmp_path):
    task = make_task()
    task.model.train()
    evaluation = task.evaluate(task.model)
    assert task.model.training
    predictions = evaluation.files["eval_predictions.json"]
    assert predictions.keys() == {str(row) for row in range(12)} and set(predictions.values()) <= {"yes", "no", "maybe"}
    assert set(task.metrics) | {"total"} == set(evaluation.metrics) and evaluation.metrics["total"] == 12
    assert evaluation.summary.startswith("accuracy 0.") and evaluation.summary.endswith("on 12 texts")
    (tmp_path / "saved").mkdir()
    run_folder.save_model(tmp_path / "saved", task)
    saved = ["--task", "text-classification", "--model_name_or_path", str(tmp_path / "saved"), "--max_seq_length", "64"]
    saved += ["--no_do_train", "--validation_file", str(tmp_path / "dev.jsonl")]
    again = load_task(parse(saved), make_world())
    assert again.names == task.names and again.plan is None
    assert again.evaluate(again.model).metrics == evaluation.metrics


def test_saved_head_keeps_its_labels(make_task, tmp_path):
    task = make_task()
    task.model.config.id2label = {0: "yes", 1: "maybe", 2: "no"}
    (tmp_path / "saved").mkdir()
    run_folder.save_model(tmp_path / "saved", task)
    saved = ["--model_name_or_path", str(tmp_path / "saved")]
    for flags in ([], ["--no_do_train"]):  # both with --train_file
        again = make_task(*saved, *flags, config=tmp_path / "saved")
        assert again.names == ["yes", "maybe", "no"]
        assert torch.equal(again.model.classifier.weight, task.model.classifier.weight)


def test_evaluation_needs_a_trained_head(make_task, tmp_path):
    with refused("--model_name_or_path", "--config_name"):
        make_task("--no_do_train")
    make_task().model.bert.save_pretrained(tmp_path / "encoder")
    model = ["--model_name_or_path", str(tmp_path / "encoder"), "--tokenizer_name", str(tmp_path / "model")]
    with refused("classifier.bias", "classifier.weight"):
        make_task(*model, "--no_do_train")


def test_labels_are_those_of_all_rows(make_task):
    task = make_task("--max_train_samples", "2", "--max_eval_samples", "5")
    assert task.names == ["maybe", "no", "yes"] and (len(task.train), len(task.dev)) == (2, 5)


def test_wrong_uses(make_task, tmp_path):
    AutoConfig.for_model("splinter").save_pretrained(tmp_path / "refused")  # a family without a head
    with refused(tmp_path / "refused", "splinter"):
        make_task("--tokenizer_name", str(tmp_path / "model"), config=tmp_path / "refused")
    with refused("--doc_stride", "--task question-answering"):
        make_task("--doc_stride", "64")
    with refused("--metric_for_best_model exact_match", "text-classification", "accuracy"):
        make_task("--metric_for_best_model", "exact_match")
    (tmp_path / "dev.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": "never"}\n')
    with refused("dev.jsonl: line 1", "'never'", "maybe, no, yes"):
        make_task()


def test_dp_splits_and_joins_texts(make_task):
    task = make_task("--dropout", "0")
    model, (batch, _) = task.model.eval(), task.batch(np.arange(5)).content
    inputs = {"input_ids": batch.input_ids, "token_type_ids": batch.token_type_ids, "position_ids": batch.position_ids}
    inputs |= {"windows": windows_of(batch.lengths, batch.input_ids.device)}
    joined = join_windows([model(**part) for part in split_windows(inputs, 2)], torch.device("cpu"))
    torch.testing.assert_close(joined.logits, model(**inputs).logits, rtol=0, atol=1e-6)


# Predictions, labels, number of classes: also with a single class, and with one that nothing has.
KNOWN = [
    ([0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0], 2),
    ([1, 1, 1], [1, 1, 1], 2),
    ([0, 0, 0], [0, 0, 1], 2),
    ([0, 1, 2, 2, 1, 0, 3], [0, 2, 2, 2, 1, 1, 0], 5),
]


@pytest.mark.filterwarnings("ignore:A single label was found")
@each(("predicted", "labels", "classes"), KNOWN)
def test_scores_are_those_of_scikit_learn(predicted, labels, classes):
    metrics = pytest.importorskip("sklearn.metrics")
    found = classification_scores(np.array(predicted), np.array(labels), classes)
    average = "binary" if classes == 2 else "macro"
    assert found == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(labels, predicted),
            "f1": metrics.f1_score(labels, predicted, average=average, zero_division=0),
            "matthews_correlation": metrics.matthews_corrcoef(labels, predicted),
            "total": len(labels),
        }
    )
