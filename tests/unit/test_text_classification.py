"""The example for text classification, as a user's own task, and its variations in the guide.

Packed texts give transformers' results, files and the hub's data sets are read, and a trained folder is enough to
evaluate, to predict and for transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import documented
import numpy as np
import pandas
import pytest
import torch
from tables import refused
from test_predict import answered, rows_of
from test_world import make_world
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, pipeline

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import save
from hvd_bert.model.attention import make_windows
from hvd_bert.output import run_folder
from hvd_bert.predict.rows import predict_file
from hvd_bert.strategies.dp import join_windows, split_windows
from hvd_bert.tasks.base import load_task

TASK = "text_classification:TextClassification"
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = ("red", "green", "box of the box", "what is in the box of the red box ?")


@pytest.fixture
def workdir(tmp_path, tokenizer, monkeypatch):
    """A folder with a tiny model, with 12 pairs of texts, and with the variations of the guide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(documented.REPOSITORY / "examples")
    for name in ("Tagger", "Similarity"):
        code = documented.own_task(name)
        assert len(code.splitlines()) <= 50
        (tmp_path / f"{name.lower()}.py").write_text(code)
    tokenizer.save_pretrained("model")
    BertConfig(vocab_size=len(tokenizer), **SHAPE).save_pretrained("model")
    rows = [
        {"sentence1": WORDS[i % 4], "sentence2": WORDS[i // 4], "label": ("yes", "no", "maybe")[i % 3]}
        for i in range(12)
    ]
    write("train.jsonl", *rows)
    write("dev.jsonl", *rows)
    return tmp_path


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(
    *flags, task=TASK, files=("--train_file=train.jsonl", "--validation_file=dev.jsonl"), model="--config_name=model"
):
    words = ["--task", task, "--max_seq_length", "64", "--strategy", "none", model, *files, *flags]
    return load_task(parse(words), make_world())


def saved(task, name="saved"):
    """The task's model in a folder as a training leaves it."""
    Path(name).mkdir()
    run_folder.save_model(Path(name), task)
    save(task.config.as_flat(), Path(name) / "train_config.yaml")
    return name


def evaluating(run, *flags, task=TASK):
    words = ["--task", task, "--model_name_or_path", run, "--no_do_train", "--strategy", "none", *flags]
    return load_task(parse(words), make_world())


def predicted(run, file, task=TASK, suffix=".jsonl"):
    """The rows that `hvd-bert predict` writes."""
    words = (run, "--input", file, "--output", f"out{suffix}", "--overwrite")
    answered(*words, by=lambda flags, world: predict_file(flags, task, world))
    return rows_of(Path(f"out{suffix}"))


def test_logits_predictions_and_the_saved_model_are_transformers(workdir, tokenizer):
    task = made("--dropout", "0")
    run, ids = saved(task), np.array([0, 3, 7, 11])
    plain = AutoModelForSequenceClassification.from_pretrained(run, attn_implementation="eager")
    assert plain.config.id2label == {0: "maybe", 1: "no", 2: "yes"}
    batch = task.batch(ids)
    losses, probabilities = task.forward(task.model, batch.content)
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    texts = [[rows[i][name] for i in ids] for name in ("sentence1", "sentence2")]
    labels = torch.tensor([plain.config.label2id[rows[i]["label"]] for i in ids])
    encoded = tokenizer(*texts, padding=True, return_token_type_ids=True, return_tensors="pt")
    expected = plain(**encoded, labels=labels)
    torch.testing.assert_close(probabilities, expected.logits.softmax(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=0, atol=1e-5)
    assert batch.num_tokens == batch.num_positions == sum(batch.content[0].lengths)
    files = task.evaluate(task.model).files
    assert task.evaluates and files["eval_predictions.json"]["prediction"][0] in ("maybe", "no", "yes")
    found = predicted(run, "dev.jsonl")
    pairs = [{"text": row["sentence1"], "text_pair": row["sentence2"]} for row in rows]
    for row, theirs, source in zip(found, pipeline("text-classification", model=run)(pairs), rows, strict=True):
        assert row == source | {"prediction": theirs["label"], "probability": pytest.approx(theirs["score"], abs=1e-5)}


def test_padded_batches_have_the_same_losses(workdir):
    packed, padded = made("--dropout", "0"), made("--dropout", "0", "--pad_to_max_length")
    ids = np.arange(12)
    one, other = (task.losses(task.model, task.batch(ids)) for task in (packed, padded))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert padded.batch(ids).num_positions == 12 * 64 > packed.batch(ids).num_positions


def test_dp_splits_and_joins_texts(workdir):
    task = made("--dropout", "0")
    model, (batch, _) = task.model.eval(), task.batch(np.arange(5)).content
    inputs = {"input_ids": batch.input_ids, "token_type_ids": batch.token_type_ids, "position_ids": batch.position_ids}
    inputs |= {"windows": make_windows(batch.lengths, batch.input_ids.device)}
    joined = join_windows([model(**part) for part in split_windows(inputs, 2)], torch.device("cpu"))
    torch.testing.assert_close(joined.logits, model(**inputs).logits, rtol=0, atol=1e-6)


# --- Data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.CSV.gz", "t.tsv", "t.parquet", "t.jsonl", "t.json.gz"])
def test_formats(workdir, name):
    rows = pandas.DataFrame({"id": ["7", "8"], "text": ['a "red" box', "NA"], "by": ["me", ""], "label": [1, 10]})
    kind = name.lower().split(".")[1]
    if kind == "parquet":
        rows.to_parquet(name)
    elif kind == "json":
        rows.to_json(name, orient="records", compression="gzip")
    elif kind == "jsonl":
        rows.to_json(name, orient="records", lines=True)
    elif kind == "tsv":  # as GLUE's: without quotes
        Path(name).write_text('id\ttext\tby\tlabel\n7\ta "red" box\tme\t1\n8\tNA\t\t10\n')
    else:
        rows.to_csv(name, index=False, compression="gzip" if name.endswith("gz") else None)
    (workdir / "own.py").write_text(
        "from text_classification import TextClassification\n"
        "class One(TextClassification):\n    text_columns = ('text',)\n"
    )
    task = made(task="own:One", files=[f"--train_file={name}"])
    tokens = task.train.collate(np.array([0, 1]))[0]
    first, second = task.tokenizer(['a "red" box', "NA"])["input_ids"]
    assert tokens.input_ids[0].tolist() == first + second and task.classes == ["1", "10"] and task.dev is None


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"text": "a", "label": 1}, ["text"]),
        ({"id": "7", "premise": "a", "hypothesis": "b", "note": "c", "label": 1}, ["premise", "hypothesis"]),
        ({"other": "c", "sentence2": "b", "label": 1, "sentence1": "a"}, ["sentence1", "sentence2"]),
    ],
)
def test_columns_of_texts(workdir, row, columns):
    write("t.jsonl", row, row | {"label": 0})
    task = made(files=["--train_file=t.jsonl"])
    assert task.model.config.text_columns == columns


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl"])
def test_index_and_whole_numbers_of_pandas(workdir, name):
    rows = pandas.DataFrame({"text": ["a", "b"], "label": [10, 9]}, index=["first", "second"])
    for part, frame in ((name, rows), (f"dev_{name}", rows.astype({"label": float}))):
        if name.endswith("jsonl"):
            frame.to_json(part, orient="records", lines=True)
        else:
            (frame.to_csv if name.endswith("csv") else frame.to_parquet)(part)
    task = made(files=[f"--train_file={name}", f"--validation_file=dev_{name}"])
    assert task.model.config.text_columns == ["text"] and task.classes == ["9", "10"] and task.labels == [1, 0]


GOOD = {"text": "a", "label": "x"}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([GOOD, {"text": "a", "label": None}], ["Row 2 of the train data", "`label`"]),
        ([{"text": "", "label": "y"}, GOOD], ["Row 1", "`text`"]),
        ([{"text": "a"}], ["`label`", "text"]),
        ([{"size": 1, "label": "x"}, {"size": 2, "label": "y"}], ["size", "text_columns"]),
        ([GOOD, GOOD], ["are x"]),
        ([{"text": "a", "label": 0.5}, {"text": "b", "label": 1.0}], ["Row 1", "0.5", "tasks.md"]),
        ([{"text": "a", "label": [0, 1]}], ["Row 1", "[0, 1]"]),
        ([GOOD, ["a"]], ["--train_file t.jsonl", "cannot be read"]),
    ],
)
def test_mistakes_in_the_data(workdir, rows, named):
    write("t.jsonl", *rows)
    with refused(*named):
        made(files=["--train_file=t.jsonl"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train_file=t.txt"], ["--train_file t.txt", ".csv", ".parquet"]),
        (["--train_file=nowhere.csv"], ["--train_file nowhere.csv", "no such file"]),
        (["--train_file=empty.csv"], ["--train_file empty.csv", "no data"]),
        (["--train_file", "train.jsonl", "dev.jsonl:2"], ["--train_file", "weights"]),
        (
            ["--train_file=train.jsonl", "--validation_file=odd.jsonl"],
            ["Row 1 of the valid", "never", "maybe, no, yes"],
        ),
        (["--validation_file=dev.jsonl"], ["--train_file", "--no_do_train"]),
        (["--train_file=cp1252.csv"], ["--train_file cp1252.csv", "'CSV UTF-8'"]),
        (["--train_file=train.jsonl", "--max_seq_length=2"], ["--max_seq_length 2"]),
        (["--train_file=train.jsonl", "--doc_stride=9"], ["--doc_stride", "--task question-answering"]),
    ],
)
def test_wrong_uses(workdir, flags, named):
    Path("empty.csv").write_text("text,label\n")
    Path("t.txt").touch()
    Path("cp1252.csv").write_text("text,label\né,1\n", encoding="cp1252")
    write("odd.jsonl", {"sentence1": "a", "sentence2": "b", "label": "'never'"})
    with refused(*named):
        made(files=flags)


def test_family_without_the_head_is_refused(workdir):
    AutoConfig.for_model("splinter").save_pretrained("refused")
    with refused("refused", "splinter", "AutoModelForSequenceClassification"):
        made("--tokenizer_name=model", model="--config_name=refused")


def test_classes_are_those_of_all_rows_and_of_several_files(workdir):
    write("more.jsonl", {"sentence1": "a", "sentence2": "b", "label": "so"})
    task = made("--max_train_samples=2", "--max_eval_samples=5", "--train_file", "train.jsonl", "more.jsonl")
    assert task.classes == ["maybe", "no", "so", "yes"] and (len(task.train), len(task.dev)) == (2, 5)


# Columns as in `task_to_keys` of transformers' run_glue.py.
GLUE = {
    "cola": ("sentence",), "mnli": ("premise", "hypothesis"), "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"), "qqp": ("question1", "question2"), "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip


@pytest.fixture
def hub_cache(workdir, monkeypatch, write_hub_cache):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "hub")

    def write_cache(config, columns, label, values, splits):
        features = {column: datasets.Value("string") for column in columns}
        features |= {"label": label, "idx": datasets.Value("int32")}
        rows = [{**dict.fromkeys(columns, WORDS[i % 4]), "label": value, "idx": i} for i, value in enumerate(values)]
        content = dict.fromkeys(splits, rows)
        write_hub_cache(workdir / "hub", content, "nyu-mll/glue", config, datasets.Features(features))
        return ["--dataset_name=glue", f"--dataset_config_name={config}"]

    return write_cache


@pytest.mark.parametrize("name", GLUE)
def test_tasks_of_glue(hub_cache, name):
    names = ["entailment", "neutral", "contradiction"] if name == "mnli" else ["no", "yes"]
    splits = ("train", "validation_matched" if name == "mnli" else "validation")
    files = hub_cache(name, GLUE[name], datasets.ClassLabel(names=names), [1, 0, 1, 0, 1], splits)
    task = made(files=files)
    assert task.model.config.text_columns == [*GLUE[name]] and task.classes == names
    assert set(task.evaluate(task.model).metrics) == {"accuracy", "f1", "matthews_correlation", "eval_loss"}


# --- Trained models -------------------------------------------------------------------------------


def test_saved_head_keeps_the_order_of_its_classes(workdir):
    task = made()
    task.model.config.id2label = {0: "YES", 1: "maybe", 2: "no"}
    again = made(model=f"--model_name_or_path={saved(task)}")
    assert again.classes == ["yes", "maybe", "no"]
    assert torch.equal(again.model.classifier.weight, task.model.classifier.weight)


def test_evaluation_needs_a_trained_head(workdir):
    made().model.bert.save_pretrained("encoder")
    with refused("encoder", "classifier.bias", "classifier.weight"):
        evaluating("encoder", "--tokenizer_name=model", "--validation_file=dev.jsonl")


def test_trained_model_needs_nothing_but_its_folder(workdir):
    task = made()
    run, expected = saved(task), task.evaluate(task.model)
    for name in ("model", "train.jsonl"):
        Path(name).rename(f"gone_{name}")
    Path(run).rename("moved")
    Path("unlabelled.csv").write_text("note,sentence2,sentence1\na,box,red\n")
    again = evaluating("moved", "--validation_file=dev.jsonl")
    found = again.evaluate(again.model)
    assert found.metrics == expected.metrics and found.files == expected.files
    for suffix in (".csv", ".parquet"):
        (row,) = predicted("moved", "unlabelled.csv", suffix=suffix)
        assert row.keys() == {"note", "sentence2", "sentence1", "prediction", "probability"}
        assert row["prediction"] in task.classes and row["probability"] >= 1 / 3


# --- Variations in the guide ----------------------------------------------------------------------


def test_regression_of_the_guide(hub_cache, tokenizer):
    numbers = [0, 0.5, 1, 1.5, 2]
    files = hub_cache("stsb", ("sentence1", "sentence2"), datasets.Value("float32"), numbers, ("train", "validation"))
    task = made("--dropout=0", task="similarity:Similarity", files=files)
    losses, values = task.forward(task.model, task.batch(np.arange(5)).content)
    run = saved(task)
    plain = AutoModelForSequenceClassification.from_pretrained(run, attn_implementation="eager")
    assert plain.config.problem_type == "regression"
    texts = [WORDS[i % 4] for i in range(5)]
    encoded = tokenizer(texts, texts, padding=True, return_token_type_ids=True, return_tensors="pt")
    expected = plain(**encoded, labels=torch.tensor(numbers))
    torch.testing.assert_close(values, expected.logits[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=0, atol=1e-5)
    evaluation = task.evaluate(task.model)
    assert evaluation.metrics["mse"] == pytest.approx(evaluation.metrics["eval_loss"], abs=1e-6)
    assert set(task.metrics) == set(evaluation.metrics)
    pandas.DataFrame({"sentence1": texts, "sentence2": texts}).to_csv("new.csv", index=False)
    found = [row["prediction"] for row in predicted(run, "new.csv", "similarity:Similarity")]
    assert found == pytest.approx(values.tolist(), abs=1e-5)


def test_token_classification_of_the_guide(workdir, tokenizer):
    words = [["the", "box", "is", "reddish"], ["green"], ["what", "is", "in", "the", "hall"]]
    tags = [["O", "THING", "O", "COLOUR"], ["COLOUR"], ["O", "O", "O", "O", "THING"]]
    write("t.jsonl", *({"words": row, "tags": of_row} for row, of_row in zip(words, tags, strict=True)))
    files = ["--train_file=t.jsonl", "--validation_file=t.jsonl"]
    packed, padded = (
        made("--dropout=0", *how, task="tagger:Tagger", files=files) for how in ([], ["--padding=longest"])
    )
    assert packed.classes == ["COLOUR", "O", "THING"]
    ids = np.array([2, 0, 1])
    found, others = (task.forward(task.model, task.batch(ids).content) for task in (packed, padded))
    torch.testing.assert_close(found[0], others[0], rtol=0, atol=1e-5)
    tagged = found[1][..., 1] >= 0
    assert torch.equal(found[1][tagged], others[1][tagged]) and tagged.sum() == 10
    plain, expected = type(packed.model).from_pretrained(saved(packed), attn_implementation="eager"), []
    for row in words:
        encoded = tokenizer(row, is_split_into_words=True, return_tensors="pt")
        firsts = [encoded.word_ids().index(number) for number in range(len(row))]
        expected.append([packed.classes[i] for i in plain(**encoded).logits[0, firsts].argmax(-1)])
    evaluation = packed.evaluate(packed.model)
    right = [a == b for row, of_row in zip(expected, tags, strict=True) for a, b in zip(row, of_row, strict=True)]
    assert evaluation.metrics["accuracy"] == pytest.approx(np.mean(right))
    assert evaluation.files["eval_predictions.json"] == {"tags": expected}
    write("new.jsonl", *({"words": row} for row in words))
    assert [row["tags"] for row in predicted("saved", "new.jsonl", "tagger:Tagger")] == expected
