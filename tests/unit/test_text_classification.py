"""The examples of custom tasks for texts and tokens, and their variations."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from refusals import refused
from test_predict import answered, read_rows
from test_world import make_world
from transformers import AutoModelForSequenceClassification, BertConfig, EsmConfig, LayoutLMConfig

from hvd_bert.config.command_line import parse
from hvd_bert.config.data import ModelArguments
from hvd_bert.config.settings import save
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.model.loading import load_config
from hvd_bert.output import run_folder
from hvd_bert.predict.rows import predict_file
from hvd_bert.storage.writing import replacing
from hvd_bert.tasks.base import load_task
from hvd_bert.tasks.dataset import DatasetTask

TASK = "text_classification:TextClassification"
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = ("red", "green", "box of the box", "what is in the box of the red box ?")
CLASSES = ("yes", "no", "maybe")
ROWS = [{"sentence1": WORDS[i % 4], "sentence2": WORDS[i // 4], "label": CLASSES[i % 3]} for i in range(12)]
SEVERAL = "several_answers:SeveralAnswers"
LONG = "What is in the box ? " * 5
LISTS = [
    {"question": "what ?", "context": context, "answers": {"text": texts, "answer_start": starts}}
    for context, texts, starts in (
        ("red green box", ["red", "green"], [0, 4]),
        ("what is green", [], []),
        (f"{LONG}the red box {LONG}", [f"red box {LONG}".strip()], [len(LONG) + 4]),
        (f"{LONG}green {LONG}box", ["green", "box"], [len(LONG), 2 * len(LONG) + 6]),
    )
]
FILES = ("--train_file=train.jsonl", "--validation_file=train.jsonl")


@pytest.fixture
def workdir(tmp_path, tokenizer, monkeypatch):
    """Enter a new folder, whose modules can be imported, with a tiny model's configuration and pairs of texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer.save_pretrained("model")
    BertConfig(vocab_size=len(tokenizer), **SHAPE).save_pretrained("model")
    write("train.jsonl", *ROWS)
    return tmp_path


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(*flags, task=TASK, files=FILES, model="--config_name=model"):
    words = ["--task", task, "--max_seq_length", "64", "--strategy", "none", "--dropout=0", model, *files, *flags]
    return load_task(parse(words), make_world())


def saved(task, name="saved"):
    """Save the task's model and settings as a training does. Returns `name`, the folder."""
    Path(name).mkdir()
    run_folder.save_model(Path(name), task)
    save(task.config.as_flat(), Path(name) / "train_config.yaml")
    return name


def predicted(run, file, task=TASK, *more):
    """Run `hvd-bert predict` on `file`. Returns the rows that it writes."""
    words = (run, "--input", file, "--output", "out.parquet", "--overwrite", *more)
    answered(*words, by=lambda flags, world: predict_file(flags, task, world))
    return read_rows(Path("out.parquet"))


def test_losses_and_predictions_equal_transformers(workdir, tokenizer):
    packed, padded, ids = made(), made("--pad_to_max_length"), np.arange(12)
    plain = AutoModelForSequenceClassification.from_pretrained(saved(packed), attn_implementation="eager")
    texts = [[row[name] for row in ROWS] for name in ("sentence1", "sentence2")]
    encoded = tokenizer(*texts, padding=True, return_token_type_ids=True, return_tensors="pt")
    expected = plain(**encoded, labels=torch.tensor([plain.config.label2id[row["label"]] for row in ROWS]))
    for task in (packed, padded):
        losses, found = task.forward(task.model, task.batch(ids).content)
        torch.testing.assert_close(found, expected.logits.softmax(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(losses.mean(), expected.loss, rtol=0, atol=1e-5)
    assert [made.batch(ids).num_positions for made in (padded, packed)] == [12 * 64, packed.train.lengths.sum()]
    for row, given, scores in zip(predicted("saved", "train.jsonl"), ROWS, found.tolist(), strict=True):
        prediction = packed.classes[np.argmax(scores)]
        assert row == given | {"prediction": prediction, "probability": pytest.approx(max(scores), abs=1e-5)}


@pytest.mark.parametrize(
    ("row", "flags", "named"),
    [
        ({"text": "a"}, "", ["are x"]),
        ({"label": 0.5}, "", ["Row 1", "0.5", "similarity.py"]),
        ({}, "--train_file train.jsonl --validation_file t.jsonl", ["Row 1 of the valid", "maybe, no, yes"]),
        ({"label": " "}, "", ["Row 1", "' '"]),
        ({"label": "0.5"}, "", ["Row 1", "0.5", "similarity.py"]),
        ({"label": 1}, "--train_file train.jsonl --max_seq_length 2", ["--max_seq_length 2"]),
    ],
)
def test_refused_rows(workdir, row, flags, named):
    write("t.jsonl", ROWS[0] | {"label": "x"} | row)
    with refused(*named):
        made(files=["--train_file=t.jsonl", *flags.split()])


def test_label_of_a_missing_value_next_to_numbers(workdir):
    for labels in (["0", "NA"], ["yes", "NA"]):
        Path("t.csv").write_text("text,label\n" + "".join(f"a,{label}\n" for label in labels))
        with refused("Row 2", "'NA'") if labels[0] == "0" else contextlib.nullcontext():
            assert made(files=["--train_file=t.csv"]).classes == ["NA", "yes"]


def test_classes_of_several_files_and_of_a_saved_model(workdir):
    write("more.jsonl", {"sentence1": "a", "sentence2": "b", "label": "so"})
    task = made("--max_train_samples=2", "--max_eval_samples=5", "--train_file", "train.jsonl", "more.jsonl")
    assert task.classes == ["maybe", "no", "so", "yes"] and (len(task.train), len(task.dev)) == (2, 5)
    task = made("--seed=1")
    task.model.config.id2label = {0: "YES", 1: "maybe", 2: "no"}
    assert made(model=f"--model_name_or_path={saved(task)}").classes == ["yes", "maybe", "no"]


def test_columns_classes_and_matched_validation_data_of_glue_are_found(workdir, monkeypatch, write_hub_cache):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "hub")
    text, kind = datasets.Value("string"), datasets.ClassLabel(names=["entailment", "neutral"])
    features = datasets.Features({"premise": text, "hypothesis": text, "label": kind})
    content = dict.fromkeys(("train", "validation_matched"), [{"premise": "a", "hypothesis": "b", "label": 1}] * 2)
    write_hub_cache(workdir / "hub", content, "nyu-mll/glue", "mnli", features)
    task = made(files=["--dataset_name=glue", "--dataset_config_name=mnli"])
    assert task.model.config.text_columns == ["premise", "hypothesis"] and task.classes == kind.names
    assert set(task.evaluate(task.model).metrics) == {"accuracy", "f1", "matthews_correlation", "eval_loss"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.csv", "sentence1,sentence2,id,price,ok,day\n12,[1],007,1.50,True,2026-01-01\n"),
        ("in.csv", f"sentence1,id,sentence2\na,{'1' * 23},2026-01-01\n"),
        ("in.jsonl", '{"sentence1": 12, "sentence2": "1.0", "day": "2026-01-01", "more": {"a": 1}}\n'),
    ],
)
def test_predictions_keep_the_columns_of_the_input(workdir, name, content):
    Path(name).write_text(content)
    output = Path("out").with_suffix(Path(name).suffix)
    words = (saved(made()), "--input", name, "--output", output)
    answered(*words, by=lambda flags, world: predict_file(flags, TASK, world))
    given, found = (
        [*csv.DictReader(path.open())] if name.endswith("csv") else [*map(json.loads, path.open())]
        for path in (Path(name), output)
    )
    assert [
        row | {"prediction": new["prediction"], "probability": new["probability"]}
        for row, new in zip(given, found, strict=True)
    ] == found


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_dates_and_decimals_become_text_and_outputs_are_refused_before_predicting(workdir, monkeypatch, suffix):
    day, price = datetime.date(2026, 1, 2), Decimal("1.50")
    row = {"sentence1": "a", "sentence2": "b", "day": day, "price": price, "all": {"days": [day], "price": price}}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), "in.parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist([row | {"all": [{"image": b"\xff"}]}]), "bytes.parquet")
    words = (saved(made()), "--output", f"out{suffix}", "--input")
    answered(*words, "in.parquet", by=lambda flags, world: predict_file(flags, TASK, world))
    (found,) = read_rows(Path(f"out{suffix}"))
    inner = json.loads(found["all"]) if suffix == ".csv" else found["all"]
    assert (str(found["day"]), inner) == ("2026-01-02", {"days": ["2026-01-02"], "price": "1.50"})
    assert float(found["price"]) == 1.5
    monkeypatch.setattr(DatasetTask, "predict", None)
    with refused("'all'", "bytes", f"out{suffix}", error=CollectiveError):
        answered(*words, "bytes.parquet", "--overwrite", by=lambda flags, world: predict_file(flags, TASK, world))
    with replacing(workdir / f"out{suffix}"), refused("--output", "another process", error=CollectiveError):
        answered(*words, "in.parquet", "--overwrite", by=lambda flags, world: predict_file(flags, TASK, world))


@pytest.mark.parametrize("value", [1.5, True, ["a", "b"], datetime.date(2026, 1, 2)])
def test_values_that_are_not_text_are_refused_with_row_and_column(workdir, value):
    pyarrow.parquet.write_table(pa.table({"sentence1": [value], "sentence2": ["b"]}), "in.parquet")
    with refused("Row 1", "`sentence1`", error=CollectiveError):
        predicted(saved(made()), "in.parquet")


def test_words_that_are_not_text_are_refused(workdir):
    write("train.jsonl", *[{"words": [1, 2], "tags": ["O", "HUE"]}])
    with refused("--task tagger:Tagger", "`encode`"):
        made(task="tagger:Tagger")


def test_labels_and_columns_of_csv(workdir):
    """Numbers in CSV: labels 9 and 9.0 are equal and sorted by value, and columns of words are preferred as text."""
    lines = [f"{n},{n}.5,True,word {n},{label}\n" for n, label in enumerate(("10", "9.0", "9", "10.0", "-1"))]
    Path("t.csv").write_text("".join(["uid,price,ok,note,label\n", *lines]))
    task = made(files=["--train_file=t.csv", "--validation_file=t.csv"])
    assert task.classes == ["-1", "9", "10"] and task.labels == [2, 1, 1, 2, 0]
    assert task.model.config.text_columns == ["note"]
    Path("t.csv").write_text("text,label\n12,1\n13,0\n")
    assert made(files=["--train_file=t.csv"]).model.config.text_columns == ["text"]


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("similarity:Similarity", [row | {"label": float(i)} for i, row in enumerate(ROWS)]),
        ("tagger:Tagger", [{"words": ["the", "reddish"], "tags": ["O", "HUE"]}, {"words": ["is"], "tags": ["O"]}]),
        (SEVERAL, LISTS),
    ],
)
def test_variations_of_the_examples(workdir, task, rows):
    write("train.jsonl", *rows)
    packed, padded = made(task=task), made("--padding=longest", task=task)
    found, other = packed.evaluate(packed.model), padded.evaluate(padded.model)
    assert found.metrics == pytest.approx(other.metrics, abs=1e-5) and set(found.metrics) == set(packed.metrics)
    expected = found.files["eval_predictions.json"]
    expected = expected if isinstance(expected, dict) else {"prediction": pytest.approx(expected, abs=1e-5)}
    run = saved(packed)
    if "tags" in expected:
        with refused("'tags'", "--overwrite_columns", error=CollectiveError):
            predicted(run, "train.jsonl", task)
        assert not Path("out.parquet").exists()
    written = predicted(run, "train.jsonl", task, "--overwrite_columns")
    assert {column: [row[column] for row in written] for column in expected} == expected


def test_several_answers_are_tagged_in_overlapping_windows(workdir, tokenizer):
    write("train.jsonl", *LISTS)
    task = made("--max_seq_length=32", "--max_eval_samples=4", task=SEVERAL)
    pairs = [[row[name] for row in LISTS] for name in ("question", "context")]
    cut = tokenizer(*pairs, truncation="only_second", max_length=32, stride=5, return_overflowing_tokens=True)
    texts, labels = task.dev.collate(np.arange(len(task.dev)))
    assert texts.input_ids[0].tolist() == [token for window in cut["input_ids"] for token in window]
    outputs = torch.stack([labels.clamp(min=0), labels], -1)
    expected = {"prediction": [row["answers"]["text"] for row in LISTS]}
    expected |= {"prediction_start": [row["answers"]["answer_start"] for row in LISTS]}
    assert task.predictions(outputs) == expected and task.score(outputs) == {"f1": 1.0, "exact_match": 1.0}
    outputs[..., 0] = 0  # the tag O
    assert task.score(outputs) == {"f1": 0.0, "exact_match": 0.25}
    with refused("--train_file", "weights"):
        made(task=SEVERAL, files=["--train_file=train.jsonl:2"])
    write("train.jsonl", LISTS[0] | {"context": "red green red", "answers": {"text": ["green", "red"]}})
    with refused("--train_file", "answer_start"):
        made(task=SEVERAL)
    Path("own.py").write_text(
        "from several_answers import Reading, SeveralAnswers\n\n\n"
        "class Own(SeveralAnswers):\n    reading = Reading('ask', 'text', 'gold')\n"
    )
    write("train.jsonl", {"ask": "what ?", "text": "red box", "gold": {"text": ["box"], "answer_start": [4]}})
    task = made(task="own:Own")
    assert [question.answer_starts for question in task.dev.questions] == [(4,)]
    assert predicted(saved(task), "train.jsonl", "own:Own")[0].keys() > {"prediction", "prediction_start"}


@pytest.mark.parametrize("kind", [EsmConfig, LayoutLMConfig])
def test_families_without_a_span_head_train_with_the_head_of_the_task(workdir, tokenizer, kind):
    special = {"pad_token_id": tokenizer.pad_token_id, "mask_token_id": tokenizer.mask_token_id}
    kind(vocab_size=len(tokenizer), **special, **SHAPE).save_pretrained("model")
    write("train.jsonl", {"words": ["the", "reddish"], "tags": ["O", "HUE"]}, {"words": ["is"], "tags": ["O"]})
    task = made(task="tagger:Tagger")
    assert type(task.model).__name__.endswith("ForTokenClassification") and task.classes == ["HUE", "O"]
    task.losses(task.model, task.batch(np.arange(2))).sum().backward()
    assert np.isfinite(task.evaluate(task.model).metrics["eval_loss"])
    with refused("model", kind.model_type, "AutoModelForQuestionAnswering"):
        load_config("model", ModelArguments(model_name_or_path="model"))


def test_trained_model_needs_only_its_folder(workdir):
    task = made()
    task.model.bert.save_pretrained("encoder")
    with refused("encoder", "classifier.bias", "classifier.weight"):
        made("--no_do_train", "--tokenizer_name=model", model="--model_name_or_path=encoder")
    expected = task.evaluate(task.model)
    Path(saved(task)).rename("moved")
    Path("model").rename("gone")
    again = made("--no_do_train", model="--model_name_or_path=moved")
    assert again.evaluate(again.model).files == expected.files
    Path("unlabelled.csv").write_text("note,sentence2,sentence1\na,box,red\n")
    assert {"note", "prediction", "probability"} < predicted("moved", "unlabelled.csv")[0].keys()
