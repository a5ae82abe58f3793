"""Questions with mistakes: `--bad_examples error` counts and shows them, `skip` leaves them out and lists them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tables import refused

from hvd_bert.data.sources import squad
from hvd_bert.data.sources.checks import kinds, summary
from hvd_bert.data.sources.questions import BadExample
from hvd_bert.data.sources.squad import Question, Reading, Source
from hvd_bert.errors import UserError

TRAINING = Reading(bad_examples="skip")
EVALUATION = Reading(bad_examples="skip", purpose="evaluation")


@pytest.fixture
def bad_data(make_questions, to_squad) -> dict[str, Any]:
    """SQuAD's JSON of 12 questions, of which the first 9 have mistakes; q2 and q3 have the same kind."""
    content = to_squad(make_questions(12))
    qas = [entry for article in content["data"] for paragraph in article["paragraphs"] for entry in paragraph["qas"]]
    qas[0]["answers"][0]["answer_start"] = -1
    qas[1]["answers"][0]["text"] = ""
    qas[2]["answers"][0]["answer_start"] += 1
    qas[3]["answers"][0]["answer_start"] -= 1
    qas[4]["id"] = "q9"  # so that q9 is the duplicate
    del qas[5]["answers"][0]["answer_start"]
    qas[6]["answers"][0]["answer_start"] = "here"
    qas[7]["question"] = ""
    qas[8]["answers"] = []
    return content


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def ids(source: Source) -> list[str]:
    return [question.id for question in source.questions()]


def test_error_counts_each_kind_and_shows_the_first(tmp_path, bad_data):
    path = write(tmp_path, bad_data)
    with pytest.raises(UserError) as refused:
        squad.open_file(path, False).questions()
    message = str(refused.value)
    assert message.startswith(f"{path}: 2 misplaced answers, the first: question 'q2' (data[0].paragraphs[2].qas[0]): ")
    for words in (
        "1 out-of-range offset: question 'q0' (data[0].paragraphs[0].qas[0]): answer_start -1 of",
        "1 empty answer: question 'q1' (data[0].paragraphs[1].qas[0]): ",
        "1 duplicate id: question 'q9' (data[1].paragraphs[4].qas[0]): data[0].paragraphs[4].qas[0] has the same id",
        '1 missing key: data[1].paragraphs[0].qas[0].answers[0] has no "answer_start"',
        '1 wrong type: data[1].paragraphs[1].qas[0].answers[0].answer_start should be a whole number (found "here")',
        "1 empty text: question 'q7' (data[1].paragraphs[2].qas[0]): its question is empty",
        "(8 mistakes in total). Fix the file. To leave these questions out, add --bad_examples skip.",
    ):
        assert words in message
    assert "\n" not in message


def test_training_skips_every_question_with_a_mistake(tmp_path, bad_data):
    source = squad.open_file(write(tmp_path, bad_data), False, TRAINING)
    assert ids(source) == ["q9", "q10", "q11"]
    bad = source.bad_examples()
    assert [example.id for example in bad] == ["q0", "q1", "q2", "q3", "q5", "q6", "q7", "q8", "q9"]
    assert all(example.skipped for example in bad)
    assert (bad[0].where, bad[0].kind) == ("data[0].paragraphs[0].qas[0]", "out-of-range offset")
    assert "answer_start -1 of the answer 'red'" in bad[0].reason
    assert kinds(bad) == {
        "misplaced answer": 2,
        **dict.fromkeys(("out-of-range offset", "empty answer", "missing key", "wrong type", "empty text"), 1),
        **dict.fromkeys(("unanswered question", "duplicate id"), 1),
    }
    assert re.fullmatch(r"mistakes in 9 questions \(misplaced answer: 2, .*\): 9 left out", summary(bad))


def test_evaluation_keeps_every_question_that_has_an_answer_text(tmp_path, bad_data, make_questions):
    source = squad.open_file(write(tmp_path, bad_data), False, EVALUATION)
    kept = {question.id: question for question in source.questions()}
    # q1 has an empty text, q7 no question, q8 no answer; the second q9 gets an id of its own.
    assert list(kept) == ["q0", "q2", "q3", "q9", "q5", "q6", "q9#2", "q10", "q11"]
    right = {question.id: question for question in make_questions(12)}
    for id_ in ("q0", "q2", "q3", "q5", "q6"):
        assert kept[id_] == dataclasses.replace(right[id_], answer_starts=(None,))
    assert kept["q9#2"] == dataclasses.replace(right["q9"], id="q9#2")
    bad = source.bad_examples()
    assert [example.id for example in bad if example.skipped] == ["q1", "q7", "q8"]
    assert summary(bad).startswith("mistakes in 9 questions (misplaced answer: 2, ")
    assert summary(bad).endswith(": 3 left out, 6 scored by the answer texts that they have")


def test_questions_without_an_answer_are_no_mistake_in_v2(tmp_path, bad_data):
    source = squad.open_file(write(tmp_path, bad_data), True, TRAINING)
    assert ids(source) == ["q9", "q8", "q10", "q11"]


def test_blank_answers_next_to_others(tmp_path, make_questions, to_rows):
    (question,) = make_questions(1)
    both = dataclasses.replace(question, answer_texts=(" ", "red"), answer_starts=(3, question.answer_starts[0]))
    path = write(tmp_path, to_rows([both]))
    assert squad.open_file(path, False, EVALUATION).questions() == [question]
    with refused("'q0'"):
        squad.open_file(path, False, TRAINING).questions()


def test_parts_that_hold_no_question(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(10))
    content["data"][0]["paragraphs"] = None
    content["data"][1]["paragraphs"][0] = "text"
    source = squad.open_file(write(tmp_path, content), False, TRAINING)
    assert ids(source) == ["q6", "q7", "q8", "q9"]
    assert [(bad.where, bad.id) for bad in source.bad_examples()] == [
        ("data[0]", None),
        ("data[1].paragraphs[0]", None),
    ]


@pytest.mark.parametrize("change", [{"id": "q\udcff"}, {"question": "\ud83d?"}, {"context": " "}])
def test_questions_that_no_use_can_do_with(tmp_path, make_questions, to_rows, change):
    good, bad = make_questions(2)
    path = write(tmp_path, to_rows([good, dataclasses.replace(bad, **change)]))
    for reading in (TRAINING, EVALUATION):
        assert squad.open_file(path, False, reading).questions() == [good]


def test_clean_data_are_the_same(tmp_path, make_questions, to_squad):
    path = write(tmp_path, to_squad(make_questions(5)))
    for reading in (TRAINING, EVALUATION):
        source = squad.open_file(path, False, reading)
        assert (source.questions(), source.bad_examples()) == (make_questions(5), [])


def test_bad_examples_are_read_once(make_questions):
    loads: list[Question] = []

    def load() -> tuple[list[Question], list[BadExample]]:
        loads.extend(make_questions(1))
        return make_questions(1), []

    source = Source("counted", "digest", load)
    source.questions()
    assert (source.bad_examples(), source.bad_examples()) == ([], [])
    assert len(loads) == 1
