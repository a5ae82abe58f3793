"""The formats of data files give the same questions; the columns of flat rows, numbers as text."""

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
from tables import each, refused

from hvd_bert.data.sources import hub, squad
from hvd_bert.data.sources.squad import Question, Reading
from hvd_bert.errors import UserError

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
@each("name", FORMATS)
def test_formats(tmp_path, questions, to_rows, name, compress):
    rows = to_rows(questions)
    assert read(tmp_path, compress(FORMATS[name](rows)), v2=True) == questions
    names = {"question": "query", "context": "passage", "answers": "reply"}
    renamed = [{names.get(key, key): value for key, value in row.items()} for row in rows]
    assert read(tmp_path, compress(FORMATS[name](renamed)), COLUMNS, v2=True) == questions


@each("name", FORMATS)
def test_one_answer_as_text_with_its_place(tmp_path, questions, name):
    rows = [
        {"id": q.id, "title": q.title, "context": q.context, "question": q.question}
        | {"text": (*q.answer_texts, "")[0], "answer_start": (*map(str, q.answer_starts), "")[0]}
        for q in questions
    ]
    assert read(tmp_path, FORMATS[name](rows), Reading(answer_column="text"), v2=True) == questions


@each("name", ["JSON", "JSON Lines", "Parquet"])
def test_answers_as_objects(tmp_path, make_questions, to_rows, name):
    """A list of objects, or a single one; in evaluation a mistake in one does not lose its text."""
    questions = make_questions(3)
    rows = to_rows(questions)
    for row, question in zip(rows, questions, strict=True):
        row["answers"] = {"text": question.answer_texts[0], "answer_start": question.answer_starts[0]}
    assert read(tmp_path, FORMATS[name](rows)) == questions
    rows[1]["answers"]["answer_start"] = 999
    lists = [{**row, "answers": [row["answers"]]} for row in rows]
    for content in (rows, lists):
        kept = read(tmp_path, FORMATS[name](content), Reading(bad_examples="skip", purpose="evaluation"))
        assert kept == [questions[0], dataclasses.replace(questions[1], answer_starts=(None,)), questions[2]]


def test_gzipped_squad(tmp_path, make_questions, to_squad):
    assert read(tmp_path, gzip.compress(json.dumps(to_squad(make_questions(4))).encode())) == make_questions(4)


@each("name", FORMATS)
def test_whole_numbers_as_text_and_text_as_whole_numbers(tmp_path, make_questions, to_rows, to_squad, name):
    (question,) = make_questions(1)
    (row,) = to_rows([question])
    start = question.answer_starts[0]
    row = {**row, "id": 12, "answers": {"text": list(question.answer_texts), "answer_start": [f" {start}"]}}
    assert read(tmp_path, FORMATS[name]([row])) == [dataclasses.replace(question, id="12")]
    content = to_squad([question])
    entry = content["data"][0]["paragraphs"][0]["qas"][0]
    entry["id"], entry["answers"][0]["answer_start"] = 12, str(start)
    assert read(tmp_path, json.dumps(content).encode()) == [dataclasses.replace(question, id="12")]


@each("column", ["answers", "context", "question"])
@each("name", FORMATS)
def test_missing_columns_are_named_with_the_flags(tmp_path, make_questions, to_rows, name, column):
    rows = [{"query" if key == column else key: row[key] for key in row} for row in to_rows(make_questions(2))]
    for count in (1, 2):
        with pytest.raises(UserError, match=r"query.*--question_column, --context_column and --answer_column"):
            read(tmp_path, FORMATS[name](rows[:count]))


@each("name", [*FORMATS, "SQuAD", "hub"])
def test_questions_without_an_id_get_one(tmp_path, make_questions, to_rows, to_squad, name, monkeypatch):
    questions = make_questions(6)
    # A column that is there, with gaps; a column of Parquet has one type.
    keys: list[Any] = [None, "", "mine", None, "3" if name in ("Parquet", "hub") else 3, None]
    for kept in (None, keys):
        rows, document = to_rows(questions), to_squad(questions)
        entries = [q for article in document["data"] for paragraph in article["paragraphs"] for q in paragraph["qas"]]
        for number, entry in enumerate(entries if name == "SQuAD" else rows):
            del entry["id"]
            if kept and kept[number] is not None:
                entry["id"] = kept[number]
        if kept and name in ("CSV", "tab-separated", "Parquet", "hub"):
            rows = [{"id": None, **row} for row in rows]
        if name == "hub":
            monkeypatch.setattr(hub, "load", lambda *_, rows=rows: datasets.Dataset.from_list(rows))
            source = squad.open_hub(f"mine{kept}", "train", False)
        else:
            path = tmp_path / f"data {kept is None}"
            whole = json.dumps(document).encode()
            path.write_bytes(whole if name == "SQuAD" else FORMATS.get(name, as_lines)(rows))
            source = squad.open_file(path, False)
        found = source.questions()
        assert source.questions() == found
        assert [dataclasses.replace(q, id="", title="") for q in found] == [
            dataclasses.replace(q, id="", title="") for q in questions
        ]
        assert len({q.id for q in found}) == 6
        if kept:
            assert (found[2].id, found[4].id) == ("mine", "3")


def test_python_objects_in_csv_are_named(tmp_path, make_questions, to_rows):
    rows = [{**row, "answers": str(row["answers"])} for row in to_rows(make_questions(2))]
    with refused("2 wrong types", "line 2.answers", "JSON", "`answers`"):
        read(tmp_path, as_csv(rows))


def test_csv_rows_of_another_length(tmp_path, make_questions, to_rows):
    content = as_csv(to_rows(make_questions(2))) + b"one,two\n"
    with refused("1 malformed row", "line 4", "2 columns", "has 5"):
        read(tmp_path, content)
    assert read(tmp_path, content, Reading(bad_examples="skip")) == make_questions(2)
    lines = content.splitlines(keepends=True)
    with refused("1 malformed row", "line 3", "1 wrong type", "line 4.answers"):
        read(tmp_path, b"".join([*lines[:2], lines[3], lines[2].replace(b"{", b"")]))
    with refused("column context"):  # twice
        read(tmp_path, as_csv(to_rows(make_questions(2))).replace(b"title", b"context", 1))
    with refused("damaged CSV", "line 4"):
        read(tmp_path, content.replace(b"one,", b'"one,'))


@each("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_of_csv(tmp_path, make_questions, to_rows, end):
    content = as_csv(to_rows(make_questions(3))).replace(b"\r\n", end)
    assert read(tmp_path, content) == make_questions(3)
    with pytest.raises(UserError, match=r"damaged CSV|neither JSON nor CSV|no column"):
        read(tmp_path, content.replace(b"id,", b'"id"",', 1))


def test_parquet_with_damaged_text(tmp_path):
    text = pa.array([b"Ada\xff"]).view(pa.string())
    out = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table([text] * 4, names=["id", "context", "question", "answers"]), out)
    with pytest.raises(UserError, match=r"damaged Parquet file: .*utf-8.* Copy or download it again\."):
        read(tmp_path, out.getvalue().to_pybytes())


def test_contexts_of_130_000_characters(tmp_path, make_questions, to_rows):
    (question,) = make_questions(1)
    long = dataclasses.replace(question, context=question.context + " x" * 65_000)
    for convert in FORMATS.values():
        assert read(tmp_path, convert(to_rows([long]))) == [long]


# --- the hub, and prediction ---------------------------------------------------------------------


def test_hub_columns(monkeypatch, make_questions, to_rows):
    names = {"question": "query", "context": "passage", "answers": "reply"}
    rows = [{names.get(key, key): row[key] for key in row if key != "title"} for row in to_rows(make_questions(3))]
    rows = [{**row, "id": number, "unused": 1} for number, row in enumerate(rows)]
    monkeypatch.setattr(hub, "load", lambda *_: datasets.Dataset.from_list(rows))
    source = squad.open_hub("mine", "train", False, reading=COLUMNS)
    expected = [
        dataclasses.replace(question, id=str(number), title="") for number, question in enumerate(make_questions(3))
    ]
    assert source.questions() == expected


@each("name", FORMATS)
def test_prediction_needs_no_answers(tmp_path, questions, to_rows, name):
    rows = [{"context": row["context"], "question": row["question"]} for row in to_rows(questions)]
    found = read(tmp_path, FORMATS[name](rows), Reading(purpose="prediction"))
    assert [(q.context, q.question, q.answer_texts) for q in found] == [(q.context, q.question, ()) for q in questions]
    assert len({q.id for q in found}) == len(questions)
    with pytest.raises(UserError, match="no column answers"):
        read(tmp_path, FORMATS[name](rows))


def test_prediction_ignores_mistakes_in_answers(tmp_path, make_questions, to_squad):
    wrong = [dataclasses.replace(q, id="same", answer_starts=(-1,)) for q in make_questions(2)]
    content = to_squad(wrong)
    del content["data"][0]["paragraphs"][1]["qas"][0]["answers"]
    first, second = read(tmp_path, json.dumps(content).encode(), Reading(purpose="prediction"))
    assert (first.answer_texts, first.answer_starts) == (("red",), (None,))  # shown next to the prediction
    assert second.answer_texts == ()
    with pytest.raises(UserError, match=r"its question is empty\. Fix the file\.$"):
        read(tmp_path, json.dumps([{"context": "a", "question": ""}]).encode(), Reading(purpose="prediction"))


@each("answers", ["London", ["London"], 3, {"text": ["London"]}])
@each("name", ["JSON", "CSV", "SQuAD"])
def test_prediction_takes_answers_of_any_kind(tmp_path, make_questions, to_rows, to_squad, name, answers):
    (question,) = make_questions(1)
    if name in FORMATS:
        content = FORMATS[name]([{**row, "answers": answers} for row in to_rows([question])])
    else:
        document = to_squad([question])
        document["data"][0]["paragraphs"][0]["qas"][0]["answers"] = answers
        content = json.dumps(document).encode()
    (found,) = read(tmp_path, content, Reading(purpose="prediction"))
    assert found.answer_texts == ()
    with pytest.raises(UserError, match=r"wrong type|missing key"):
        read(tmp_path, content)


# --- cached windows ------------------------------------------------------------------------------


def test_digest_depends_on_how_the_data_are_read(tmp_path, make_questions, to_squad):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(to_squad(make_questions(3))))
    readings = [
        Reading(),
        COLUMNS,
        Reading(answer_column="text"),
        Reading(bad_examples="skip"),
        Reading(bad_examples="skip", purpose="evaluation"),
        Reading(purpose="prediction"),
    ]
    digests = [squad.open_file(path, False, reading).digest for reading in readings]
    assert len(set(digests)) == len(readings)
    # The same questions: windows for training serve evaluation, too.
    assert squad.open_file(path, False, Reading(purpose="evaluation")).digest == digests[0]
