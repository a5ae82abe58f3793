"""Labelled texts: columns, labels and tokens are run_glue's; what cannot be read is named with its place."""

from __future__ import annotations

import gzip
import io
import json

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from tables import each, refused

from hvd_bert.data.sources import texts
from hvd_bert.data.sources.texts import Columns
from hvd_bert.tasks.text_classification import tokenized

ROWS = [
    {"idx": 0, "sentence2": "the box is green", "sentence1": "the box is red", "label": 1},
    {"idx": 1, "sentence2": "is the box red ?", "sentence1": "what colour is the box ?", "label": 0},
    {"idx": 2, "sentence2": "red", "sentence1": "the red box of the red box in the red box", "label": 10},
]


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "texts.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@each("name", ["texts.CSV", "texts.csv.gz", "texts.parquet", "texts.JSONL", "texts.json.gz"])
def test_formats_and_names(write, name):
    row = {"text": "a", "label": "x"}
    content = b"text,label\na,x\n" if "csv" in name.lower() else lines(row).encode()
    if name.endswith(".parquet"):
        out = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist([row]), out)
        content = out.getvalue()
    found = texts.open_file(write(gzip.compress(content) if name.endswith(".gz") else content, name), "--train_file")
    assert (found.first, found.labels) == (["a"], ["x"])


def test_csv(write):
    rows = [["sentence1", "sentence2", "label"], ["a box", '"is ""it"", red ?"', "9"], ['"a\n b"', "c", "10"]]
    found = texts.open_file(write("".join(",".join(row) + "\n" for row in rows), "texts.csv"), "--train_file")
    assert (found.first, found.second) == (["a box", "a\n b"], ['is "it", red ?', "c"])
    assert found.labels == [9, 10], "a file without types: numbers, so that 10 comes after 9"


@each(
    ("labels", "expected"),
    [
        (["1", "2", "10"], [1, 2, 10]),
        (["5.000", "3.8", "-1"], [5.0, 3.8, -1.0]),
        (["1e-05", ".5", "+1.5", "2."], [1e-05, 0.5, 1.5, 2.0]),
        (["1.5", "x"], ["1.5", "x"]),
        (["1", "2", "3", "5+"], ["1", "2", "3", "5+"]),
        (["01", "1", "1_0"], ["01", "1", "1_0"]),
        (["none", "NA"], ["none", "NA"]),
    ],
)
def test_labels_are_numbers_if_all_are(write, labels, expected):
    csv = write("text,label\n" + "".join(f"a,{label}\n" for label in labels), "t.csv")
    found = texts.open_file(csv, "--train_file").labels
    assert found == expected and {type(label) for label in found} == {type(expected[0])}
    rows = lines(*({"text": "a", "label": label} for label in expected))
    assert texts.open_file(write(rows), "--train_file").labels == expected


@each("name", ["t.csv", "t.jsonl"])
@each("wrong", ["nan", "-inf", "1e400", "NA", "", None, float("nan")])
@each("labels", [[0, 1, 1], [0.5, 1, 4.75]])
def test_label_that_is_no_number_among_numbers_is_refused(write, labels, wrong, name):
    rows = [{"text": "a", "label": label} for label in [*labels, wrong]]
    csv = "text,label\n" + "".join(f"a,{'' if row['label'] is None else row['label']}\n" for row in rows)
    path = write(csv if name == "t.csv" else lines(*rows), name)
    with refused(path, "line 5" if name == "t.csv" else "line 4"):
        texts.open_file(path, "--train_file")


def test_regression_takes_numbers_only(write):
    path = write("text,label\na,1\nb,2\nc,good\nd,good\ne,good\n", "t.csv")
    assert texts.open_file(path, "--train_file").labels == ["1", "2", "good", "good", "good"]
    with refused("line 4", "'good'", "3 mistakes"):
        texts.open_file(path, "--train_file", Columns(numbers=True))


REVIEW = {"label": "x", "title": "good", "body": "a box", "by": "me", "stars": "x"}


@each(
    ("row", "columns", "first", "second"),
    [
        (REVIEW, Columns(("title",), "stars"), "good", None),
        (REVIEW, Columns(("title", "body"), "stars"), "good", "a box"),
        (REVIEW, Columns(label="stars"), "x", "good"),  # the first two
        ({"text": "a", "label": "x"}, Columns(), "a", None),
        ({"id": "7", "premise": "a", "hypothesis": "b", "label": "x"}, Columns(), "a", "b"),
        ({"other": "c", "label": "x", "sentence2": "b", "sentence1": "a"}, Columns(), "a", "b"),
    ],
)
def test_columns_are_those_that_are_named_or_run_glues(write, row, columns, first, second):
    found = texts.open_file(write(lines(row)), "--train_file", columns)
    assert (found.first, found.second, found.labels) == ([first], None if second is None else [second], ["x"])


@each("names", [("a", "a"), ("a", ""), ("label",), ("a", "b", "c")])
def test_wrong_names_of_columns(names):
    with refused(f"--text_column_names {','.join(names)}: "):
        Columns(names)


def test_quotes_between_tabs_are_text(write):
    rows = [["sentence", "label"], ['"unbalanced', "9"], ['is "it" red ?', "10"], ['"', "11"]]
    found = texts.open_file(write("".join("\t".join(row) + "\n" for row in rows), "texts.tsv"), "--train_file")
    assert (found.first, found.labels) == (['"unbalanced', 'is "it" red ?', '"'], [9, 10, 11])


def test_columns_of_the_training_file_are_read_from_another(write):
    train = texts.open_file(write(lines({"text": "a", "label": "x"})), "--train_file")
    dev = write(lines({"source": "s", "text": "b", "label": "x"}), "dev.jsonl")
    assert texts.open_file(dev, "--validation_file", train.columns).first == ["b"]
    with refused("source, label", "`label` and `text`"):
        texts.open_file(write(lines({"source": "s", "label": "x"})), "--validation_file", train.columns)


@each(
    ("content", "name", "named"),
    [
        ("", "t.jsonl", "not JSON Lines"),
        ("text,label\n", "t.csv", "no rows"),
        ("text,label\na,1\n", "t.txt", "not JSON Lines"),
        ("text,label\na,1\n".encode("utf-16"), "t.csv", "byte 0"),
        ('{"text": "a", "label": 1}\n{"text"', "t.jsonl", "line 2"),
        ("[1]\n", "t.jsonl", "line 1"),
        ('{"text": "a"}\n', "t.jsonl", "`label`"),
        ('{"text": 3, "label": 1}\n', "t.jsonl", "line 1.text"),
        ('{"text": "a", "label": true}\n', "t.jsonl", "line 1: the label"),
        ('{"text": "\\ud800", "label": 1}\n', "t.jsonl", "line 1: `text`"),
        ('{"text": "a", "label": "\\ud800"}\n', "t.jsonl", "line 1: `label`"),
        ("text,label\na,1\nb\n", "t.csv", "line 3"),
        ('text,label\n"a,1\nb,2\n', "t.csv", "damaged CSV"),
        ("text,label,text\na,1,b\n", "t.csv", "column text"),
    ],
)
def test_mistakes_name_their_place(write, content, name, named):
    with refused(name, named):
        texts.open_file(write(content, name), "--train_file")


def test_empty_split_of_the_hub_and_missing_file(tmp_path):
    with refused("me/mine[test]"):
        texts.open_hub(datasets.Dataset.from_dict({"text": [], "label": []}), "me/mine[test]")
    with refused("--validation_file", "none.csv"):
        texts.open_file(str(tmp_path / "none.csv"), "--validation_file")


@pytest.mark.parametrize("max_seq_length", [64, 12])
@pytest.mark.parametrize("pairs", [False, True])
def test_tokens_are_those_of_run_glue(write, tokenizer, pairs, max_seq_length):
    rows = ROWS if pairs else [{"sentence": row["sentence1"], "label": row["label"]} for row in ROWS]
    source = texts.open_file(write(lines(*rows)), "--train_file")
    table = tokenized(source, tokenizer, max_seq_length)
    arguments = (source.first, source.second) if pairs else (source.first,)
    limit = {"max_length": max_seq_length, "truncation": True}
    expected = tokenizer(*arguments, padding=False, return_token_type_ids=True, **limit)
    assert [ids.tolist() for ids in table.lists("input_ids", range(len(rows)))] == expected["input_ids"]
    starts = zip(table.column("context_start"), table.lengths, strict=True)
    types = [[0] * start + [1] * (length - start) for start, length in starts]
    assert types == expected["token_type_ids"]
    with refused("--max_seq_length 2", f"{2 + pairs} special tokens"):
        tokenized(source, tokenizer, 2)
