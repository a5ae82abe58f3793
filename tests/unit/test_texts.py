"""Labelled texts: columns, labels and tokens are run_glue's; what cannot be read is named with its place."""

from __future__ import annotations

import gzip
import io
import json
import re

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet
from tables import each

from hvd_bert.data.sources import texts
from hvd_bert.data.sources.questions import Reading
from hvd_bert.data.sources.texts import Columns
from hvd_bert.errors import UserError
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
        (["5.000", "3.8", "-1"], [5.0, 3.8, -1.0]),
        (["1.0", "2.0"], [1.0, 2.0]),
        (["1e-05", ".5", "+1.5", "2.", "3"], [1e-05, 0.5, 1.5, 2.0, 3.0]),
        (["1.5", "x"], ["1.5", "x"]),
        (["1.2.3", "1.0"], ["1.2.3", "1.0"]),
        (["1", "2", "other", "NA"], ["1", "2", "other", "NA"]),
        (["1", "01", "1_0"], ["1", "01", "1_0"]),  # not written as Python prints numbers
    ],
)
def test_fractions_are_numbers_to_learn(write, labels, expected):
    csv = write("text,label\n" + "".join(f"a,{label}\n" for label in labels), "t.csv")
    found = texts.open_file(csv, "--train_file").labels
    assert found == expected and {type(label) for label in found} == {type(expected[0])}


def test_whole_numbers_among_fractions_are_fractions(write):
    found = texts.open_file(write(lines({"text": "a", "label": 5}, {"text": "b", "label": 4.5})), "--train_file").labels
    assert found == [5.0, 4.5] and all(isinstance(label, float) for label in found)


@each("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
@each("wrong", ["nan", "-inf", "1e400", "NA", "N/A", "NULL", "none", "", None, float("nan"), "x"])
@each("labels", [[0, 1], [0.5, 1.0, 4.75]])
def test_label_that_is_no_number_among_numbers_is_a_mistake(write, labels, wrong, ending):
    if wrong == "x" and ending != ".jsonl" and labels == [0, 1]:
        return  # a third class: text has no types
    good = (labels * 20)[:40]
    found = [*good[:7], wrong, *good[7:]]
    if ending == ".parquet":
        found = found if wrong is None or isinstance(wrong, float) else [*map(str, found)]
        out = io.BytesIO()
        parquet.write_table(pa.table({"text": ["a"] * 41, "label": found}), out)
        path, place = write(out.getvalue(), "t.parquet"), "row 7"
    elif ending == ".jsonl":
        path, place = write(lines(*({"text": "a", "label": label} for label in found))), "line 8"
    else:
        found = ["" if label is None else label for label in found]
        rows = [["text", "label"], *(["a", str(label)] for label in found)]
        separator = "," if ending == ".csv" else "\t"
        path, place = write("".join(separator.join(row) + "\n" for row in rows), f"t{ending}"), "line 9"
    with pytest.raises(UserError, match=rf"{re.escape(path)}: 1 wrong label: {place}: .*--bad_examples skip"):
        texts.open_file(path, "--train_file")
    kept = texts.open_file(path, "--train_file", reading=Reading(bad_examples="skip"))
    assert kept.labels == good and {type(label) for label in kept.labels} <= {int, float}
    assert [(bad.where, bad.skipped) for bad in kept.bad] == [(place, True)] and place not in kept.places


def test_regression_takes_numbers_only(write):
    path = write("text,label\na,1\nb,2\nc,good\nd,good\ne,good\n", "t.csv")
    assert texts.open_file(path, "--train_file").labels == ["1", "2", "good", "good", "good"]
    reading = Reading(bad_examples="skip")
    found = texts.open_file(path, "--train_file", Columns(numbers=True), reading)
    assert found.labels == [1, 2] and [bad.where for bad in found.bad] == ["line 4", "line 5", "line 6"]


def test_rows_with_mistakes_are_left_out(write):
    path = write('[1]\n{"text": "a", "label": "x"}\n{"text": 3, "label": "x"}\n{"text": "b", "label": null}\n')
    found = texts.open_file(path, "--train_file", reading=Reading(bad_examples="skip"))
    assert (found.first, found.places) == (["a"], ["line 2"])
    assert [(bad.where, bad.kind) for bad in found.bad] == [
        ("line 1", "malformed row"), ("line 3", "wrong type"), ("line 4", "wrong label")
    ]  # fmt: skip
    with pytest.raises(UserError, match="all texts have mistakes: 1 malformed row"):
        texts.open_file(write("[1]\n"), "--train_file", reading=Reading(bad_examples="skip"))


REVIEW = {"label": "x", "title": "good", "body": "a box", "by": "me", "stars": "x"}


@each(
    ("row", "columns", "first", "second"),
    [
        (REVIEW, Columns(("title",), "stars"), "good", None),
        (REVIEW, Columns(("title", "body"), "stars"), "good", "a box"),
        (REVIEW, Columns(("title", "body"), "stars", " / "), "good / a box", None),
        (REVIEW, Columns(("body", "title", "by"), "stars", ""), "a boxgoodme", None),
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
    with pytest.raises(UserError, match=f"--text_column_names {','.join(names)}: give "):
        Columns(names)


def test_quotes_between_tabs_are_text(write):
    rows = [["sentence", "label"], ['"unbalanced', "9"], ['is "it" red ?', "10"], ['"', "11"]]
    found = texts.open_file(write("".join("\t".join(row) + "\n" for row in rows), "texts.tsv"), "--train_file")
    assert (found.first, found.labels) == (['"unbalanced', 'is "it" red ?', '"'], [9, 10, 11])


def test_columns_of_the_training_file_are_read_from_another(write):
    train = texts.open_file(write(lines({"text": "a", "label": "x"})), "--train_file")
    dev = write(lines({"source": "s", "text": "b", "label": "x"}), "dev.jsonl")
    assert texts.open_file(dev, "--validation_file", train.columns).first == ["b"]
    with pytest.raises(
        UserError, match=r"found the columns source, label, but needs a column `label` and `text`. Name"
    ):
        texts.open_file(write(lines({"source": "s", "label": "x"})), "--validation_file", train.columns)


@each(
    ("content", "name", "message"),
    [
        ("", "t.jsonl", "the file is empty"),
        ("text,label\n", "t.csv", "there are no rows"),
        ("text,label\na,1\n", "t.txt", "not JSON Lines. .* or a file that ends in .csv or .tsv"),
        ("version https://git-lfs.github.com/spec/v1\n", "t.csv", "a git-LFS pointer, not the data"),
        ("text,label\na,1\n".encode("utf-16"), "t.csv", "not UTF-8 text"),
        ('{"text": "a", "label": 1}\n{"text"', "t.jsonl", "not JSON: .* at line 2"),
        ("[1]\n", "t.jsonl", "line 1: it is not a JSON object"),
        ('{"text": "a"}\n', "t.jsonl", "needs a column `label`"),
        ('{"text": 3, "label": 1}\n', "t.jsonl", "line 1.text should be text"),
        ('{"text": "a", "label": NaN}\n', "t.jsonl", "line 1: the label must be text or a number, not nan"),
        ('{"text": "a", "label": null}\n', "t.jsonl", "must be text or a number, not None"),
        (
            '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n',
            "t.jsonl",
            "1 wrong label: line 1: the label 1 is not text, as most are",
        ),
        ('{"text": "\\ud800", "label": 1}\n', "t.jsonl", "`text` contains an unpaired surrogate"),
        ('{"text": "a", "label": "\\ud800"}\n', "t.jsonl", "`label` contains an unpaired surrogate"),
        ("text,label\na,1\nb\n", "t.csv", "line 3: it has 1 columns"),
        ('text,label\n"a,1\nb,2\n', "t.csv", "damaged CSV: .* at line 3. Put texts"),
        (b"text,label\n\xff,1\n", "t.csv", "not UTF-8 text"),
        ("text,label,text\na,1,b\n", "t.csv", "the first line names the column text more than once"),
    ],
)
def test_mistakes_name_their_place(write, content, name, message):
    with pytest.raises(UserError, match=message):
        texts.open_file(write(content, name), "--train_file")


def test_empty_split_of_the_hub():
    with pytest.raises(UserError, match=r"me/mine\[test\]: there are no rows. Name another split."):
        texts.open_hub(datasets.Dataset.from_dict({"text": [], "label": []}), "me/mine[test]")


def test_missing_file_names_the_flag(tmp_path):
    with pytest.raises(UserError, match=r"--validation_file .*none.csv: no such file"):
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
    with pytest.raises(UserError, match=f"--max_seq_length 2: {2 + pairs} special tokens leave no room for a text"):
        tokenized(source, tokenizer, 2)
