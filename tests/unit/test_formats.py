"""Questions from files of all formats, and from hub data sets with other column names."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from unicodedata import normalize

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from refusals import refused
from test_squad import write

from hvd_bert import hub
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Reading

Rows = Sequence[dict[str, Any]]
COLUMNS = Reading(question_column="query", context_column="passage", answer_column="reply")


def as_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows: Rows, delimiter: str = ",") -> bytes:
    """Format rows as CSV, with nested values as JSON."""
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


def read(tmp_path: Path, content: Any, reading: Reading = Reading(), v2: bool = False) -> list[Question]:  # noqa: B008
    return squad.open_file(write(tmp_path, content), v2, reading).questions()


@pytest.fixture
def questions(make_questions) -> list[Question]:
    """Make questions with commas, quotes, line breaks and non-ASCII characters, and a question without an answer."""
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
def test_questions_without_an_id_get_their_path(tmp_path, make_questions, to_rows, to_squad, name):
    questions = make_questions(3)
    for keys in ([None, None, None], [None, "", "mine"]):
        rows, document = to_rows(questions), to_squad(questions)
        entries = [q for article in document["data"] for paragraph in article["paragraphs"] for q in paragraph["qas"]]
        for entry, key in zip(entries if name == "SQuAD" else rows, keys, strict=True):
            entry["id"] = key
        found = read(tmp_path, document if name == "SQuAD" else FORMATS[name](rows))
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
def test_line_ends_and_long_texts_of_csv(tmp_path, make_questions, to_rows, end):
    questions = make_questions(3)
    questions[1] = dataclasses.replace(questions[1], context=questions[1].context + " x" * 100_000)
    assert read(tmp_path, as_csv(to_rows(questions)).replace(b"\r\n", end)) == questions


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
    first, second = read(tmp_path, content, predicting)
    assert first.answer_texts == ("red",)  # so that it can be shown next to the prediction
    assert second.answer_texts == ()
    for answers in ("London", 3.5, {"text": ["London"]}):
        content = as_lines([{**row, "answers": answers} for row in to_rows(make_questions(2))])
        texts = () if answers == 3.5 else ("London",)
        assert [question.answer_texts for question in read(tmp_path, content, predicting)] == [texts] * 2
        with refused("2 mistakes", "line 1, column answers"):
            read(tmp_path, content)
    with refused("its question is empty"):
        read(tmp_path, [{"context": "a", "question": ""}], predicting)


CONTEXT = "Ada was born in London."
ANSWER = {"text": "London", "answer_start": 16}
ENTRY = {"id": "q", "question": "Where?", "answers": [ANSWER]}
PARAGRAPH = {"context": CONTEXT, "qas": [ENTRY]}
ARTICLE = {"title": "Ada", "paragraphs": [PARAGRAPH]}
ROW = {"id": "q", "context": CONTEXT, "question": "Where?"}
EXPECTED = Question("q", "", CONTEXT, "Where?", ("London",), (16,))


def answers_of(questions: list[Question]) -> list[tuple[str, tuple[str, ...], tuple[int | None, ...]]]:
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
    assert answers_of(read(tmp_path, NESTED[name])) == [("q", ("London",), (16,))]


@pytest.mark.parametrize("name", ["JSON", "JSON Lines", "Parquet"])
def test_nested_rows_keep_squads_names(tmp_path, name):
    second = {"paragraphs": [{"context": CONTEXT, "qas": [{**ENTRY, "id": "second"}]}]}
    content = FORMATS[name]([ARTICLE, {"title": "", **second}])
    found = answers_of(read(tmp_path, content, Reading(question_column="query")))
    assert found == [("q", ("London",), (16,)), ("second", ("London",), (16,))]


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


@pytest.mark.parametrize("answers", [[], None, [{"text": None, "answer_start": 0}], {"text": [], "answer_start": [-1]}])
@pytest.mark.parametrize("name", ["nested", "JSON", "Parquet"])
def test_unanswered(tmp_path, name, answers):
    entry = {**ROW, "answers": answers}
    content = [{"context": CONTEXT, "qas": [entry]}] if name == "nested" else FORMATS[name]([entry])
    assert answers_of(read(tmp_path, content, v2=True)) == [("q", (), ())]
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
    assert answers_of(read(tmp_path, unanswered, v2=True)) == [("q", (), ())]


# --- values that pandas would convert ------------------------------------------------------------


@pytest.mark.parametrize(("index", "missing"), [("", "nan"), ("Unnamed: 0", ""), ("__index_level_0__", "None")])
def test_csv_of_pandas(tmp_path, caplog, index, missing):
    text = f"{index},id,context,question,answers,answer_start\n0,7.0,{CONTEXT},Where?,London,16.0\n"
    source = squad.open_file(write(tmp_path, text + f"1,,{CONTEXT},Who cooked?,{missing},{missing}\n"), True)
    questions, findings = source.load()
    assert answers_of(questions) == [("7", ("London",), (16,)), ("line 3", (), ())]
    assert findings.columns == f"id, context, question, answers, answer_start; the index column {index!r} is ignored"


@pytest.mark.parametrize("ids", [("1.0", "1", "07", " 7 "), ("1.0", "1.1"), ("2.0", "3.0")])
@pytest.mark.parametrize("name", FORMATS)
def test_ids_that_are_texts_stay_as_they_are(tmp_path, name, ids):
    found = read(tmp_path, FORMATS[name]([{**ROW, "id": id_, "answers": "London"} for id_ in ids]))
    by_pandas = ids[-1] == "3.0" and name in ("CSV", "tab-separated")  # where the file cannot tell a number from a text
    assert tuple(q.id for q in found) == (("2", "3") if by_pandas else ids)


@pytest.mark.parametrize("name", ["JSON", "JSON Lines", "Parquet"])
def test_numbers_of_pandas(tmp_path, name):
    first = {**ROW, "id": 7.0, "answers": "London", "answer_start": 16.0, "__index_level_0__": 0}
    second = {**first, "id": float("nan"), "answers": None, "answer_start": float("nan")}
    questions = read(tmp_path, FORMATS[name]([first, second]), v2=True)
    assert [(q.answer_texts, q.answer_starts) for q in questions] == [(("London",), (16,)), ((), ())]
    assert questions[0].id == "7"
    with refused("answer_start", "16.5"):
        read(tmp_path, FORMATS[name]([{**first, "answer_start": 16.5}]))


@pytest.mark.parametrize("name", FORMATS)
def test_texts_stay_texts(tmp_path, name):
    """Texts that look like missing values, numbers or dates are not converted, whatever the format."""
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


# --- answers without a start, and Unicode --------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_answers_without_a_start_are_found(tmp_path, name):
    rows = [{**ROW, "answers": "London"}]
    assert read(tmp_path, FORMATS[name](rows)) == [EXPECTED]
    for context, reason in (("London and London", "more than once"), ("aLonLondo", "not in its context")):
        with refused("'q' (", "'London'", reason):
            read(tmp_path, FORMATS[name]([{**ROW, "context": context, "answers": "London"}]))
    for unknown in (-1, "-1", -1.0):  # a converter's "not found"
        assert read(tmp_path, FORMATS[name]([{**rows[0], "answer_start": unknown}])) == [EXPECTED]
    with refused("character -2"):
        read(tmp_path, FORMATS[name]([{**rows[0], "answer_start": -2}]))


@pytest.mark.parametrize(
    ("context", "answer", "named"),
    [
        ("By Ada\xa0Lund.", "Ada Lund", ["kind of space", r"'Ada\xa0Lund'", "character 3"]),
        ("By Ada Lund.", "Ada  Lund ", ["'Ada  Lund '", "number of spaces", "'Ada Lund'", "character 3"]),
        ("In  OSLO.", "Oslo", ["case", "'OSLO'", "character 4"]),
        ("The “old” mill—house", '"old" mill--house', ["kind of quote or dash", "'“old” mill—house'"]),
        ("In \uff12015.", "2015", ["width", "'\uff12015'"]),
        ("A \ufb01sh.", "fish", ["another width", "'\ufb01sh'"]),
        ("Ada\u200bLund", "Ada\xa0lund", ["invisible", "number of spaces", " and case"]),
    ],
)
def test_texts_that_look_equal(tmp_path, context, answer, named):
    row = {"context": context, "question": "?"}
    for answers in (answer, {"text": [answer], "answer_start": [1]}):
        with refused(*named):
            read(tmp_path, [{**row, "answers": answers}])
    with refused("'Rome'", repr(answer)) as raised:  # the second is shown as it is, too
        read(tmp_path, [{**row, "answers": "Rome"}, {**row, "answers": answer}])
    assert str(raised.value).count("another") == 1


@pytest.mark.parametrize(
    ("context", "answer", "expected"),
    [
        ("It cost 0.5 in 1800.", 0.5, ("0.5", 8)),
        ("It cost 0.5 in 1800.", [1800.0, 0.5], ("1800", 15)),
        ("It cost 0.5 in 1800.", 1800, ("1800", 15)),
        ("It weighs 1800.0 g", 1800.0, ("1800.0", 10)),
        ("It weighs 1800 g", "1800.0", ("1800", 10)),
        ("1800, or 1800.0 g", "1800.0", ("1800.0", 9)),
        ("It is endless", float("inf"), None),
        ("It cost 0.50.", 0.5, None),
        ("It cost 1,800.", 1800.0, None),
        ("It cost 1,800.", 1800, None),
        ("It is True", True, None),
    ],
)
@pytest.mark.parametrize("name", ["JSON Lines", "Parquet"])
def test_numbers_as_answers(tmp_path, name, context, answer, expected):
    content = FORMATS[name]([{**ROW, "context": context, "answers": answer}])
    if expected:
        (question,) = read(tmp_path, content)
        assert (question.answer_texts[0], question.answer_starts[0]) == expected
    else:
        with refused("text in quotes"):
            read(tmp_path, content)


def test_decimals_as_answers(tmp_path):
    rows = [{**ROW, "context": "It cost 12.50.", "answers": Decimal("12.50")}]
    assert answers_of(read(tmp_path, as_parquet(rows))) == [("q", ("12.50",), (8,))]
    with refused("Decimal('12.50')"):
        read(tmp_path, as_parquet([{**rows[0], "context": "It cost 12.500."}]))


@pytest.mark.parametrize(
    ("columns", "texts", "starts"),
    [
        # Only the first answer must be in the context exactly once.
        ({"answers": ["London", "n", "Paris"]}, ("London", "n", "Paris"), (16, None, None)),
        ({"context": "Ada met Ada.", "answers": "Ada", "answer_start": [8, 0]}, ("Ada", "Ada"), (8, 0)),
        ({"answers": ["London", "Ada"], "answer_start": -1}, ("London", "Ada"), (16, 0)),
    ],
)
def test_several_answers_in_a_row(tmp_path, columns, texts, starts):
    assert answers_of(read(tmp_path, [{**ROW, **columns}])) == [("q", texts, starts)]


@pytest.mark.parametrize(("of_context", "of_answer"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_unicode_forms(tmp_path, of_context, of_answer):
    context, answer = normalize(of_context, "Le café Émile."), normalize(of_answer, "Émile")
    start = context.index(normalize(of_context, answer))
    for given in (start, None):
        rows = [{**ROW, "context": context, "answers": {"text": [answer], "answer_start": [given]}}]
        assert answers_of(read(tmp_path, rows)) == [("q", (normalize(of_context, answer),), (start,))]
    rows[0]["answers"]["answer_start"] = [normalize(of_answer, context).index(answer)]
    with refused("'q'", "Unicode form", "NFC"):
        read(tmp_path, rows)


# --- rows of words, and MRQA ---------------------------------------------------------------------

WORDS = {"question": ["Which", "river", "?"], "context": ["The", "Alm", "and", "the", "Hoge"]}


@pytest.mark.parametrize(
    "answers", [{"label": ["O", "B", "O", "O", "B"]}, {"answers": ["Alm", "Hoge"]}, {"question": "Which?"}]
)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_words_are_named(tmp_path, name, answers):
    rows = [{**WORDS, **answers}] * 2
    content = as_csv([{key: str(value) for key, value in row.items()} for row in rows])
    content = content if name in ("CSV", "tab-separated") else FORMATS[name](rows)
    for column in ("answers", *answers):
        with refused("a list of words", "2 mistakes in 2", "Join", "examples/tagger.py") as raised:
            read(tmp_path, content, Reading(answer_column=column))
        assert "columns" not in str(raised.value)


def test_one_row_of_words_and_columns_of_pandas(tmp_path):
    with refused("a list of words"):
        read(tmp_path, [{**ROW, "context": ["In", 1912], "answers": "1912"}])
    assert read(tmp_path, [{**ROW, "context": f"['a', '{CONTEXT}']", "answers": "Ada"}])[0].answer_starts == (7,)
    columns = {"context": [CONTEXT, CONTEXT], "question": ["Who?", "Where?"], "answers": ["Ada", "London"]}
    with refused("columns", 'orient="records"'):
        read(tmp_path, columns)


MILL = "Lund is a town. The mill of  Otto stood in Lund."
LINE = {"qid": "q0", "question": "Where?", "answers": ["Lund", "lund town"]}


def mrqa(*answers: tuple[str, list[tuple[int, int]]]) -> list[Any]:
    """Make MRQA's lines: a header, and a context with one question."""
    detected = [{"text": text, "char_spans": spans, "token_spans": [[0, 0]]} for text, spans in answers]
    paragraph = {"id": "", "context": MILL, "qas": [{**LINE, "detected_answers": detected}]}
    return [{"header": {"dataset": "Mills", "split": "train"}}, {**paragraph, "context_tokens": [["Lund", 0]]}]


def test_lines_of_mrqa(tmp_path):
    found = read(tmp_path, gzip.compress(as_lines(mrqa(("Lund", [(43, 46), (0, 3)]), ("otto", [(29, 32)])))))
    assert answers_of(found) == [("q0", ("Lund", "Lund", "Otto", "lund town"), (43, 0, 29, None))]
    for content in (mrqa(("of otto", [(25, 32)])), mrqa(("of  Otto", [(25, 33)]))):  # other case and spaces; end
        assert answers_of(read(tmp_path, as_lines(content)))[0][1:] == (
            ("of  Otto", "Lund", "lund town"),
            (25, None, None),
        )
    with refused("line 2", "'q0'", "character 1, not the answer 'town'", "--bad_examples repair"):
        read(tmp_path, as_lines([*mrqa(("town", [(1, 4)])), *mrqa(("Otto", [(29, 32)]))]))
    unanswered = {"context": MILL, "qas": [{**LINE, "answers": [], "question_tokens": [["Where", 0]]}]}
    assert answers_of(read(tmp_path, as_lines([unanswered]), v2=True)) == [("q0", (), ())]
    for wrong in ([(1, 2, 3)], {"start": [43, 0], "end": [46]}, {"start": [43]}):
        with refused("char_spans", "first and a last"):
            read(tmp_path, as_lines(mrqa(("Lund", wrong))))  # type: ignore[arg-type]


@pytest.mark.parametrize("column", ["answers", "detected_answers"])
@pytest.mark.parametrize("name", [*FORMATS, "hub"])
def test_flat_rows_of_mrqa(tmp_path, monkeypatch, name, column):
    detected = {"text": ["Lund"], "char_spans": [{"start": [43, 0], "end": [46, 3]}]}
    rows = [{"subset": "Mills", "context": MILL, **LINE, "detected_answers": detected}]
    reading, texts = Reading(answer_column=column), ("lund town",) if column == "answers" else ()
    if name == "hub":
        monkeypatch.setattr(hub, "load_split", lambda *_: datasets.Dataset.from_list(rows))
        found = squad.open_hub("mrqa", "train", False, reading=reading).questions()
    else:
        rows[0]["answers"] = json.dumps(LINE["answers"]) if name in ("CSV", "tab-separated") else LINE["answers"]
        found = read(tmp_path, FORMATS[name](rows), reading)
    assert answers_of(found) == [("q0", ("Lund", "Lund", *texts), (43, 0, *[None for _ in texts]))]


def test_detected_answers_of_other_tools_are_ignored(tmp_path):
    for detected in ("[", ["Ada"], {"text": "Ada"}, None):
        assert read(tmp_path, [{**ROW, "answers": "London", "qid": "x", "detected_answers": detected}]) == [EXPECTED]


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
