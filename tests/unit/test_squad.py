"""Questions from SQuAD's layouts, nested and flat, and refused files: the message locates each mistake."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import os
from pathlib import Path

import pytest
from refusals import check_refusal, refused

from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Reading
from hvd_bert.errors import UserError
from hvd_bert.storage import reading


def write(tmp_path: Path, content: object, name: str = "data.any") -> Path:  # the file name does not matter
    path = tmp_path / name
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    return path


def check(path: Path, *named: str) -> None:
    """Check that the file is refused with a message that begins with its path and contains `named`."""
    with pytest.raises(UserError) as caught:
        squad.open_file(path, False).questions()
    assert str(caught.value).startswith(f"{path}: ")
    check_refusal(str(caught.value), *named)


# --- layouts -------------------------------------------------------------------------------------


def test_nested_and_flat_layouts_give_the_same_questions(tmp_path, make_questions, to_squad, to_rows):
    questions = make_questions(12, unanswered_every=4)
    rows = to_rows(questions)
    lines = "\n".join(json.dumps(row) for row in rows) + "\n"
    for content in (to_squad(questions), {"data": rows}, rows, lines):
        assert squad.open_file(write(tmp_path, content), True).questions() == questions
    single = write(tmp_path, rows[1])  # JSON lines with a single row
    assert squad.open_file(single, False).questions() == questions[1:2]


def test_byte_order_mark_and_missing_keys(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(2, unanswered_every=2))
    for article in content["data"]:
        del article["title"]
        for paragraph in article["paragraphs"]:
            paragraph["qas"][0].pop("is_impossible", None)
    source = squad.open_file(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(content).encode()), True)
    assert [(q.id, q.title, len(q.answer_texts)) for q in source.questions()] == [("q0", "", 0), ("q1", "", 1)]


def test_offsets_count_characters_of_the_unstripped_context(tmp_path, to_squad):
    context = " \U0001d49c and 東京 are names."
    question = Question("u", "t", context, " What? ", ("東京",), (context.index("東京"),))
    assert squad.open_file(write(tmp_path, to_squad([question])), False).questions() == [question]


def test_digest_depends_on_the_content_and_on_the_reading(tmp_path, make_questions, to_squad, monkeypatch):
    path, same = (write(tmp_path, to_squad(make_questions(3)), name) for name in ("a.json", "b.json"))
    digest = squad.open_file(path, False).digest
    assert squad.open_file(same, False).digest == digest
    readings = [Reading(), Reading(answer_column="text"), Reading(purpose="prediction")]
    others = {squad.open_file(path, v2, reading).digest for reading in readings for v2 in (False, True)}
    assert len(others) == 6 and digest in others
    monkeypatch.setattr(reading, "BLOCK", 7)
    assert squad.open_file(path, False).questions() == make_questions(3)  # several blocks per file
    source = squad.open_file(path, False)
    path.write_bytes(path.read_bytes()[:-1] + b" ")  # changes only the final block
    assert squad.open_file(path, False).digest != digest
    with refused(path):
        source.questions()


def test_digests_are_equal_in_all_versions(tmp_path):
    """Pin the digests: checkpoints record them, and a run of an earlier version must stay resumable."""
    path = write(tmp_path, "[]")
    for purpose in ("training", "evaluation"):
        assert squad.open_file(path, False, Reading(purpose=purpose)).digest[:12] == "3afc98b77b19"
    assert squad.open_file(path, True, Reading(answer_column="reply")).digest[:12] == "5f2a2ad13551"


# --- files without questions ---------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, named in (("nowhere.json", "no such file"), ("", "is a directory"), ("pipe", "a pipe or a device")):
        with refused(tmp_path / path, named):
            squad.open_file(tmp_path / path, False)


JSON = b'{"data": [' + b'"text", ' * 100 + b"1]}"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (bz2.compress(JSON), ["byte", "Decompress"]),
        (gzip.compress(JSON, mtime=0)[:-20], ["gzip"]),
        (b"PAR1" + bytes(100) + b"PAR1", ["Parquet"]),
        ('{"data": []}'.encode("utf-16"), ["byte 0", "UTF-16", "UTF-8"]),
        (b"\n <!DOCTYPE html><html><head>Sign in</head></html>", ["html", "Give JSON"]),
        ("", ["no questions"]),
        ('{"data": [\n  {"title": }]}', ["line 2 column 13"]),
        ('{"id": "a"}\n{"id" "b"}', ["line 2"]),
        ("[" * 20_000, ["not JSON"]),
        ('{"id": "a"}\n' + "9" * 5000, ["line 2"]),
        ('{"' + "x" * 10**6 + '": 1}', ["found 'xxx"]),
        ('{"context": {"0": "c"}, "question": {"0": "q"}, "answers": {"0": "c"}}', ["columns", 'orient="records"']),
        ('{"data": [{"title": "t", "paragraphs": []}]}', ["no questions"]),
        ('{"data": ["text"]}', ["data[0]", '"text"']),
        ('[{"id": "a"}, {"context": "c", "question": "q", "answers": []}]', ["[0]", '"paragraphs"']),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_files_without_questions(tmp_path, content, named):
    check(write(tmp_path, content), *named)


# --- mistakes in an entry ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("paragraphs", 2, "context"), ["a"], "data[1].paragraphs[2].qas[0].context"),
        (("paragraphs", 2, "qas", 0), "text", "data[1].paragraphs[2].qas[0]"),
        (("paragraphs", 2, "qas", 0, "answers", 0, "answer_start"), True, "answers[0].answer_start"),
        (("paragraphs", 2, "qas", 0, "answers", 0), {"answer": "red"}, "answers[0]"),
        (("paragraphs", 2, "qas", 0, "answers", 0, "answer_start"), "\ud83d", "answers[0].answer_start"),
        (("paragraphs", 2, "qas", 0, "is_impossible"), "maybe", '"maybe"'),
        (("paragraphs", 2, "qas", 0, "is_impossible"), "\ud83d", "is_impossible"),
    ],
)
def test_wrong_structure_names_the_path(tmp_path, make_questions, to_squad, keys, value, named):
    content = to_squad(make_questions(10))
    parent = content["data"][1]
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    check(write(tmp_path, content), named)


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"text": ["a", "b"], "answer_start": [1]}, "[0].answers"),
        ({"text": [[1]], "answer_start": [0]}, "[0].answers[0].text"),
    ],
)
def test_wrong_answers_in_a_flat_row(tmp_path, make_questions, to_rows, answers, named):
    check(write(tmp_path, [{**to_rows(make_questions(1))[0], "answers": answers}]), named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"context": " \n"}, ["context"]),
        ({"question": ""}, ["question"]),
        ({"answer_texts": (" ",), "answer_starts": (3,)}, ["no answer"]),
        ({"answer_texts": (" ", "blue"), "answer_starts": (3, 47)}, ["empty"]),
        ({"answer_starts": (-2,)}, ["the answer 'blue'", "character -2"]),
        ({"question": "what \ud83d?"}, ["'\\ud83d'"]),
        ({"answer_starts": (4,)}, ["character 4", "'2 is'"]),
        ({"id": "q0"}, ["[0]"]),
    ],
)
def test_mistakes_name_the_question_and_its_path(tmp_path, make_questions, to_rows, change, named):
    questions = make_questions(3)
    questions[2] = dataclasses.replace(questions[2], **change)
    check(write(tmp_path, to_rows(questions)), f"question {questions[2].id!r} ([2]", *named)


def test_the_first_five_mistakes_are_shown_and_all_are_counted(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(10))
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["context"] = "X" + paragraph["context"]
    content["data"][1]["paragraphs"][1] = "text"
    path = write(tmp_path, content)
    check(path, *(f"question 'q{n}' (data[0].paragraphs[{n}].qas[0].answers)" for n in range(5)), "10 mistakes")
    with pytest.raises(UserError) as caught:
        squad.open_file(path, False).questions()
    assert "'q5'" not in str(caught.value)
