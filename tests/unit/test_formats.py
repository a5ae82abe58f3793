"""The formats of data files give the same questions; columns and ids of flat rows, also of the hub; prediction."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from refusals import refused

from hvd_bert import hub
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Reading

Rows = Sequence[dict[str, Any]]
COLUMNS = Reading(question_column="query", context_column="passage", answer_column="reply")


def as_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: Rows, delimiter: str = ",") -> bytes:
    """Objects are JSON in their cells."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow([json.dumps(value) if isinstance(value, dict) else value for value in row.values()])
    return out.getvalue().encode()


def as_parquet(rows: Rows) -> bytes:
    out = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "JSON": lambda rows: json.dumps({"data": list(rows)}).encode(),
    "JSON Lines": as_lines,
    "CSV": as_csv,
    "tab-separated": lambda rows: as_csv(rows, "\t"),
    "Parquet": as_parquet,
}


def read(tmp_path: Path, content: bytes, reading: Reading = Reading(), v2: bool = False) -> list[Question]:  # noqa: B008
    path = tmp_path / "data.any"  # the content decides, not the name
    path.write_bytes(content)
    return squad.open_file(path, v2, reading).questions()


@pytest.fixture
def questions(make_questions) -> list[Question]:
    """With commas, quotes, line breaks and other characters than ASCII, and one without an answer."""
    odd = 'He said, "東京\r\nis a;\tcity", and left.'
    made = [dataclasses.replace(question, context=f"{question.context} {odd}") for question in make_questions(5)]
    first = Question("first", 'A "title"', odd, 'Which "city"?', ("東京",), (odd.index("東京"),))
    return [first, *made, dataclasses.replace(first, id="none", answer_texts=(), answer_starts=())]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, questions, to_rows, name, compress):
    rows = to_rows(questions)
    assert read(tmp_path, compress(FORMATS[name](rows)), v2=True) == questions
    names = {"question": "query", "context": "passage", "answers": "reply"}
    renamed = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    assert read(tmp_path, compress(FORMATS[name](renamed)), COLUMNS, v2=True) == questions


@pytest.mark.parametrize("column", ["answers", "context", "question"])
@pytest.mark.parametrize("name", FORMATS)
def test_missing_columns_are_named_with_the_flags(tmp_path, make_questions, to_rows, name, column):
    rows = [{"query" if key == column else key: row[key] for key in row} for row in to_rows(make_questions(2))]
    for count in (1, 2):
        with refused("query", "--question_column, --context_column and --answer_column"):
            read(tmp_path, FORMATS[name](rows[:count]))


@pytest.mark.parametrize("name", ["JSON", "CSV", "Parquet", "SQuAD"])
def test_questions_without_an_id_get_their_place(tmp_path, make_questions, to_rows, to_squad, name):
    questions = make_questions(3)
    for keys in ([None, None, None], [None, "", "mine"]):
        rows, document = to_rows(questions), to_squad(questions)
        entries = [q for article in document["data"] for paragraph in article["paragraphs"] for q in paragraph["qas"]]
        for entry, key in zip(entries if name == "SQuAD" else rows, keys, strict=True):
            entry["id"] = key
        found = read(tmp_path, json.dumps(document).encode() if name == "SQuAD" else FORMATS[name](rows))
        assert [dataclasses.replace(q, id="", title="") for q in found] == [
            dataclasses.replace(q, id="", title="") for q in questions
        ]
        assert len({q.id for q in found}) == 3 and (found[2].id == "mine") == (keys[2] == "mine")


def test_rows_of_csv_that_cannot_be_read(tmp_path, make_questions, to_rows):
    rows = to_rows(make_questions(2))
    content = as_csv(rows)
    for wrong, named in (
        (as_csv([{**row, "answers": "[red"} for row in rows]), ("2 mistakes", "(line 2, column answers)", "JSON")),
        (content + b"one,two\n", ("line 4", "cells")),
        (content + b"1,2,3,4,5,6\n", ("line 4", "cells")),
        (content.replace(b"title", b"context", 1), ("one column context",)),
        (content + b'"one,two\n', ("damaged CSV", "line 4")),
    ):
        with refused(*named):
            read(tmp_path, wrong)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_of_csv(tmp_path, make_questions, to_rows, end):
    content = as_csv(to_rows(make_questions(3))).replace(b"\r\n", end)
    assert read(tmp_path, content) == make_questions(3)


def test_contexts_of_200_000_characters(tmp_path, make_questions, to_rows):
    (question,) = make_questions(1)
    long = dataclasses.replace(question, context=question.context + " x" * 100_000)
    assert read(tmp_path, as_csv(to_rows([long]))) == [long]


# --- the hub, and prediction ---------------------------------------------------------------------


def test_hub_columns(monkeypatch, make_questions, to_rows):
    names = {"question": "query", "context": "passage", "answers": "reply"}
    rows = [{names.get(key, key): row[key] for key in row if key != "title"} for row in to_rows(make_questions(3))]
    rows = [{**row, "id": number, "unused": 1} for number, row in enumerate(rows)]
    monkeypatch.setattr(hub, "load_split", lambda *_: datasets.Dataset.from_list(rows))
    source = squad.open_hub("mine", "train", False, reading=COLUMNS)
    expected = [
        dataclasses.replace(question, id=str(number), title="") for number, question in enumerate(make_questions(3))
    ]
    assert source.questions() == expected


@pytest.mark.parametrize("name", FORMATS)
def test_prediction_needs_no_answers(tmp_path, questions, to_rows, name):
    rows = [{"context": row["context"], "question": row["question"]} for row in to_rows(questions)]
    found = read(tmp_path, FORMATS[name](rows), Reading(purpose="prediction"))
    assert [(q.context, q.question, q.answer_texts) for q in found] == [(q.context, q.question, ()) for q in questions]
    assert len({q.id for q in found}) == len(questions)
    with refused("one column answers"):
        read(tmp_path, FORMATS[name](rows))


def test_prediction_ignores_mistakes_in_answers(tmp_path, make_questions, to_squad, to_rows):
    predicting = Reading(purpose="prediction")
    wrong = [dataclasses.replace(q, id="same", answer_starts=(-1,)) for q in make_questions(2)]
    content = to_squad(wrong)
    content["data"][0]["paragraphs"][0]["qas"][0]["is_impossible"] = "perhaps"
    del content["data"][0]["paragraphs"][1]["qas"][0]["answers"]
    first, second = read(tmp_path, json.dumps(content).encode(), predicting)
    assert first.answer_texts == ("red",)  # shown next to the prediction
    assert second.answer_texts == ()
    for answers in ("London", 3.5, {"text": ["London"]}):
        content = as_lines([{**row, "answers": answers} for row in to_rows(make_questions(2))])
        texts = () if answers == 3.5 else ("London",)
        assert [question.answer_texts for question in read(tmp_path, content, predicting)] == [texts] * 2
        with refused("2 mistakes", "line 1, column answers"):
            read(tmp_path, content)
    with refused("its question is empty"):
        read(tmp_path, json.dumps([{"context": "a", "question": ""}]).encode(), predicting)
