"""Data as people have them: SQuAD's nesting with other levels, pandas' habits, answers without a place, encodings."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from refusals import refused
from test_formats import FORMATS

from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Reading

CONTEXT = "Ada was born in London."
ANSWER = {"text": "London", "answer_start": 16}
ENTRY = {"id": "q", "question": "Where?", "answers": [ANSWER]}
PARAGRAPH = {"context": CONTEXT, "qas": [ENTRY]}
ARTICLE = {"title": "Ada", "paragraphs": [PARAGRAPH]}
ROW = {"id": "q", "context": CONTEXT, "question": "Where?"}
EXPECTED = Question("q", "", CONTEXT, "Where?", ("London",), (16,))


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "data"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(tmp_path: Path, content: Any, v2: bool = False, **reading: str) -> list[Question]:
    return squad.open_file(write(tmp_path, content), v2, Reading(**reading)).questions()


def placed(questions: list[Question]) -> list[tuple[str, tuple[str, ...], tuple[int | None, ...]]]:
    return [(question.id, question.answer_texts, question.answer_starts) for question in questions]


# --- SQuAD's nesting -----------------------------------------------------------------------------

NESTED = {
    "list of paragraphs": [PARAGRAPH],
    "one paragraph": PARAGRAPH,
    "data twice": {"data": {"data": [ARTICLE]}},
    "question as an object": {"data": [{"paragraphs": [{"context": CONTEXT, "qas": ENTRY}]}]},
    "answer as an object": {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [{**ENTRY, "answers": ANSWER}]}]}]},
    "questions in the article": {"data": [{"context": CONTEXT, "qas": [ENTRY]}]},
    "rows among paragraphs": {"data": [{"paragraphs": [{**ROW, "answers": ANSWER}]}]},
}


@pytest.mark.parametrize("name", NESTED)
def test_levels_that_are_missing_or_repeated(tmp_path, name):
    assert placed(read(tmp_path, NESTED[name])) == [("q", ("London",), (16,))]


@pytest.mark.parametrize("name", ["JSON", "JSON Lines", "Parquet"])
def test_nested_rows_keep_squads_names(tmp_path, name):
    content = FORMATS[name]([ARTICLE])
    assert placed(read(tmp_path, content, question_column="query")) == [("q", ("London",), (16,))]


@pytest.mark.parametrize("copies", [ARTICLE, PARAGRAPH], ids=["articles", "paragraphs"])
def test_several_lines(tmp_path, copies):
    lines = [json.dumps(copies).replace('"q"', f'"q{n}"') for n in range(3)]
    assert [q.id for q in read(tmp_path, "\n".join(lines))] == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"data": [{"title": "Ada", "sections": [PARAGRAPH]}]}, ["data[0]", '"paragraphs"']),
        ({"data": [{"paragraphs": [{"context": CONTEXT, "questions": [ENTRY]}]}]}, ["paragraphs[0]", '"qas"']),
        ({"data": [{"paragraphs": [{"qas": [ENTRY]}]}]}, ["paragraphs[0]", '"context"']),
        ([{"context": CONTEXT, "qas": [{"question": "Where?"}]}], ["[0].qas[0].answers"]),
    ],
)
def test_missing_levels_are_named_without_flags(tmp_path, content, named):
    with refused(*named) as raised:
        read(tmp_path, content)
    assert "--" not in str(raised.value)


@pytest.mark.parametrize("answers", [[], None, [{"text": None, "answer_start": 0}], {"text": [], "answer_start": []}])
@pytest.mark.parametrize("name", ["nested", "JSON", "Parquet"])
def test_unanswered(tmp_path, name, answers):
    entry = {**ROW, "answers": answers}
    content = [{"context": CONTEXT, "qas": [entry]}] if name == "nested" else FORMATS[name]([entry])
    assert placed(read(tmp_path, content, v2=True)) == [("q", (), ())]
    with refused("no answer", "--version_2_with_negative"):
        read(tmp_path, content)


@pytest.mark.parametrize(("yes", "no"), [("True", "False"), (1.0, 0.0), ("1", "nan")])
@pytest.mark.parametrize("name", FORMATS)
def test_is_impossible_as_other_types(tmp_path, name, yes, no):
    row = {**ROW, "answers": "London", "answer_start": "16"}
    assert read(tmp_path, FORMATS[name]([{**row, "is_impossible": no}])) == [EXPECTED]
    with refused("is_impossible"):
        read(tmp_path, FORMATS[name]([{**row, "is_impossible": yes}]), v2=True)
    unanswered = FORMATS[name]([{**row, "is_impossible": yes, "answers": "", "answer_start": ""}])
    assert placed(read(tmp_path, unanswered, v2=True)) == [("q", (), ())]


# --- pandas' habits ------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "missing"), [("", "nan"), ("Unnamed: 0", ""), ("__index_level_0__", "None")])
def test_csv_of_pandas(tmp_path, caplog, index, missing):
    text = f"{index},id,context,question,answers,answer_start\n0,7.0,{CONTEXT},Where?,London,16.0\n"
    source = squad.open_file(write(tmp_path, text + f"1,,{CONTEXT},Who cooked?,{missing},{missing}\n"), True)
    questions, findings = source.load()
    assert placed(questions) == [("7", ("London",), (16,)), ("line 3", (), ())]
    assert findings.columns == f"id, context, question, answers, answer_start; the index column {index!r} is ignored"


@pytest.mark.parametrize("name", ["JSON", "JSON Lines", "Parquet"])
def test_numbers_of_pandas(tmp_path, name):
    first = {**ROW, "id": 7.0, "answers": "London", "answer_start": 16.0, "__index_level_0__": 0}
    second = {**first, "id": float("nan"), "answers": None, "answer_start": float("nan")}
    questions = read(tmp_path, FORMATS[name]([first, second]), v2=True)
    assert [(q.answer_texts, q.answer_starts) for q in questions] == [(("London",), (16,)), ((), ())]
    assert questions[0].id == "7"
    with refused("answer_start", "16.5"):
        read(tmp_path, FORMATS[name]([{**first, "answer_start": 16.5}]))
    with refused("answers[0].text", "2.5"):
        read(tmp_path, FORMATS[name]([{**first, "answers": 2.5}]))
    years = [{**ROW, "context": "In 1912.", "answers": 1912.0, "answer_start": 3}]  # a column of years
    assert placed(read(tmp_path, FORMATS[name](years))) == [("q", ("1912",), (3,))]


@pytest.mark.parametrize("name", FORMATS)
def test_texts_stay_texts(tmp_path, name):
    """No format turns words for missing values, numbers or dates into something else."""
    texts = {"007": "123", "1e3": "NA", "None": "None", "v1.0-3": "true", "z": "[1]", "set": "{1}"}
    rows = [
        {"id": id_, "context": f"{text} it", "question": "2020-01-01", "answers": text} for id_, text in texts.items()
    ]
    found = read(tmp_path, FORMATS[name](rows))
    assert [(q.id, q.context, q.question, q.answer_texts) for q in found] == [
        (id_, f"{text} it", "2020-01-01", (text,)) for id_, text in texts.items()
    ]


@pytest.mark.parametrize(
    "cell",
    [
        "{'text': ['London'], 'answer_start': [16]}",
        "{'text': array(['London'], dtype=object), 'answer_start': array([16], dtype=int32)}",
        "[{'text': np.str_('London'), 'answer_start': np.int64(16)}]",
    ],
)
def test_objects_in_cells(tmp_path, cell):
    assert read(tmp_path, FORMATS["CSV"]([{**ROW, "answers": cell}])) == [EXPECTED]
    with refused("column answers", "should be JSON"):
        read(tmp_path, FORMATS["CSV"]([{**ROW, "answers": "['London' 'Ada']"}]))


def test_one_text_with_a_list_of_places(tmp_path):
    context = "Ada met Ada."
    (question,) = read(tmp_path, [{**ROW, "context": context, "answers": "Ada", "answer_start": [8, 0]}])
    assert (question.answer_texts, question.answer_starts) == (("Ada", "Ada"), (8, 0))


def test_columns_by_other_names_are_logged(tmp_path):
    path = write(tmp_path, f"passage,question,answers\n{CONTEXT},Where?,London\n")
    _, findings = squad.open_file(path, False, Reading(context_column="passage")).load()
    assert findings.columns == "passage as context, question, answers"
    assert squad.open_file(write(tmp_path, [{**ROW, "answers": "London"}]), False).load()[1].columns == ""


# --- answers without a place, and Unicode --------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_answers_without_a_place_are_found(tmp_path, name):
    rows = [{**ROW, "answers": "London"}]
    assert read(tmp_path, FORMATS[name](rows)) == [EXPECTED]
    for context, reason in (("London and London", "more than once"), ("aLonLondo", "not in its context")):
        with refused("'q' (", "'London'", reason):
            read(tmp_path, FORMATS[name]([{**ROW, "context": context, "answers": "London"}]))


def test_further_answers_need_no_place(tmp_path):
    rows = [{**ROW, "answers": ["London", "n", "Paris"]}]
    assert placed(read(tmp_path, rows)) == [("q", ("London", "n", "Paris"), (16, None, None))]


@pytest.mark.parametrize(("of_context", "of_answer"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_unicode_forms(tmp_path, of_context, of_answer):
    context, answer = normalize(of_context, "Le café Émile."), normalize(of_answer, "Émile")
    start = context.index(normalize(of_context, answer))
    for place in (start, None):
        rows = [{**ROW, "context": context, "answers": {"text": [answer], "answer_start": [place]}}]
        assert placed(read(tmp_path, rows)) == [("q", (normalize(of_context, answer),), (start,))]
    rows[0]["answers"]["answer_start"] = [normalize(of_answer, context).index(answer)]
    with refused("'q'", "Unicode forms differ", "NFC"):
        read(tmp_path, rows)


def test_excel(tmp_path):
    text = f"context;question;answers\n{CONTEXT} Né à Paris.;Où?;London\n"
    with refused("cp1252", "CSV UTF-8"):
        read(tmp_path, text.encode("cp1252"))
    (question,) = read(tmp_path, text.encode("utf-8-sig"))
    assert question.question == "Où?"


def test_quotes_that_other_readers_drop(tmp_path):
    out = io.StringIO()
    csv.writer(out).writerows([["context", "question", "answers"], ['"a" b', "?", "b"]])
    assert read(tmp_path, out.getvalue())[0].answer_starts == (4,)
    with refused("line 2", "damaged CSV"):
        read(tmp_path, 'context,question,answers\n"a" b,?,b\n')
