"""Reading SQuAD: all layouts, and each mistake with its message."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
from pathlib import Path

import pytest
from tables import check_refusal, each, refused

from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError


def write(tmp_path: Path, content: object, name: str = "file.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def complaint(path: Path, version_2_with_negative: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        squad.open_file(path, version_2_with_negative).questions()
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


# --- layouts -------------------------------------------------------------------------------------


def test_nested_and_flat_layouts_give_the_same_questions(tmp_path, make_questions, to_squad, to_rows):
    questions = make_questions(12, unanswered_every=4)
    rows = to_rows(questions)
    lines = "\n".join(json.dumps(row) for row in rows) + "\n"
    for number, content in enumerate((to_squad(questions), {"data": rows}, rows, lines)):
        path = write(tmp_path, content, f"{number}.json")
        assert squad.open_file(path, True).questions() == questions
    one = write(tmp_path, rows[1], "one.jsonl")  # a single row on one line
    assert squad.open_file(one, False).questions() == questions[1:2]


def test_byte_order_mark_and_missing_title(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(2))
    for article in content["data"]:
        del article["title"]
    path = tmp_path / "bom.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert [question.title for question in squad.open_file(path, False).questions()] == ["", ""]


def test_offsets_count_characters_of_the_unstripped_context(tmp_path, to_squad):
    context = " \U0001d49c and 東京 are names."
    question = Question("u", "t", context, " What? ", ("東京",), (context.index("東京"),))
    assert squad.open_file(write(tmp_path, to_squad([question])), False).questions() == [question]


@pytest.mark.slow
def test_source_does_not_keep_its_questions_in_memory(tmp_path, make_questions, to_squad):
    (question,) = make_questions(1)
    path = write(tmp_path, to_squad([dataclasses.replace(question, id="kept in memory")]))

    def in_memory() -> int:
        gc.collect()
        return sum(isinstance(obj, Question) and obj.id == "kept in memory" for obj in gc.get_objects())

    source = squad.open_file(path, False)
    questions = source.questions()
    assert in_memory() == 1
    assert questions == source.questions()
    del questions
    assert in_memory() == 0


def test_digest_is_that_of_the_content_and_the_flag(tmp_path, make_questions, to_squad, monkeypatch):
    path, same = (write(tmp_path, to_squad(make_questions(3)), name) for name in ("a.json", "b.json"))
    digest = squad.open_file(path, False).digest
    assert squad.open_file(same, False).digest == digest != squad.open_file(path, True).digest
    monkeypatch.setattr(squad, "_PIECE_BYTES", 7)
    assert squad.open_file(path, False).digest == digest
    assert squad.open_file(path, False).questions() == make_questions(3)  # compares the hash of the whole content
    path.write_bytes(path.read_bytes()[:-1] + b" ")  # changes only the last piece
    assert squad.open_file(path, False).digest != digest
    three, four = make_questions(3), make_questions(4)
    assert squad.from_questions("typed", three).questions() == three
    assert squad.from_questions("a", three).digest == squad.from_questions("b", make_questions(3)).digest
    assert squad.from_questions("a", three).digest != squad.from_questions("a", four).digest


def test_equal_contexts_are_one_object(tmp_path, make_questions, to_rows):
    row = to_rows(make_questions(1))[0]
    path = write(tmp_path, [row, {**row, "id": "other"}])
    first, second = squad.open_file(path, False).questions()
    assert first.context is second.context


# --- mistakes in the file ------------------------------------------------------------------------


def test_missing_file_and_folder_are_refused_at_once(tmp_path):
    with refused("nowhere.json"):
        squad.open_file(tmp_path / "nowhere.json", False)
    with refused(tmp_path, "Is a directory"):
        squad.open_file(tmp_path, False)


@each(
    ("content", "named"),
    [
        ("", []),
        ('{"data": [\n  {"title": }]}', ["line 2, column 13"]),
        ('{"id": "a"}\n{"id" "b"}', ["line 2, column 7"]),
        ("3", ["found 3"]),
        ('{"version": "1.1"}', ["'version'"]),
        ('{"data": {"a": 1}}', ['"data"']),
        ('{"data": []}', []),
        ('{"data": [{"title": "t", "paragraphs": []}]}', []),
        ('{"data": ["text"]}', ["data[0]", '"text"']),
        ('[{"id": "a"}]', ["context, question, answers", "found: id"]),
        ('[{"id": "a"}, {"context": "c", "question": "q", "answers": []}]', ["[0]", '"context"']),
    ],
)
def test_files_that_are_not_squad(tmp_path, content, named):
    check_refusal(complaint(write(tmp_path, content)), *named)


def test_file_that_changes_after_opening(tmp_path, make_questions, to_squad):
    path = write(tmp_path, to_squad(make_questions(3)))
    source = squad.open_file(path, False)
    write(tmp_path, to_squad(make_questions(4)))
    with refused(path):
        source.questions()


@each(
    ("place", "value", "named"),
    [
        (("title",), 3, "data[1].title"),
        (("paragraphs",), None, "data[1].paragraphs"),
        (("paragraphs", 2, "context"), ["a"], "data[1].paragraphs[2].context"),
        (("paragraphs", 2, "qas", 0), [], "data[1].paragraphs[2].qas[0]"),
        (("paragraphs", 2, "qas", 0, "id"), 7.5, "data[1].paragraphs[2].qas[0].id"),
        (("paragraphs", 2, "qas", 0, "answers", 0, "answer_start"), "35.5", "answers[0].answer_start"),
        (("paragraphs", 2, "qas", 0, "answers", 0, "answer_start"), True, "answers[0].answer_start"),
    ],
)
def test_wrong_structure_names_the_place(tmp_path, make_questions, to_squad, place, value, named):
    content = to_squad(make_questions(10))
    parent = content["data"][1]
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    check_refusal(complaint(write(tmp_path, content)), named, f"found {json.dumps(value)}")


@each(
    ("change", "named"),
    [({"answers": [{"text": "red"}]}, '"answer_start"'), ({"is_impossible": True}, '"is_impossible"')],
)
def test_answers_that_do_not_go_with_their_question(tmp_path, make_questions, to_squad, change, named):
    content = to_squad(make_questions(10))
    content["data"][1]["paragraphs"][2]["qas"][0] |= change
    check_refusal(complaint(write(tmp_path, content)), "data[1].paragraphs[2].qas[0]", named)


@each(
    ("answers", "words"),
    [
        ({"text": ["a"], "answer_start": []}, "[0].answers"),
        ({"text": [1], "answer_start": [0]}, "[0].answers[0].text"),
        ({"text": ["a"], "answer_start": [0.5]}, "[0].answers[0].answer_start"),
        ([], "'q0' ([0])"),
    ],
)
def test_wrong_answers_in_a_flat_row(tmp_path, make_questions, to_rows, answers, words):
    assert words in complaint(write(tmp_path, [{**to_rows(make_questions(1))[0], "answers": answers}]))


# --- mistakes in a question ----------------------------------------------------------------------


@each(
    ("change", "words"),
    [
        ({"context": " \n"}, "context"),
        ({"question": ""}, "question"),
        ({"answer_texts": (" ",), "answer_starts": (3,)}, "answer"),
        ({"answer_starts": (-1,)}, "answer_start -1 of the answer 'blue'"),
        ({"answer_starts": (4000,)}, "4000"),
        ({"question": "what \ud83d?"}, "'\\ud83d'"),
        ({"id": "q\udcff"}, "'\\udcff'"),
        ({"answer_starts": (4,)}, "character 4 of its context, which has '2 is'"),
        ({"answer_texts": ("blue ",)}, "'blue,'"),
        ({"answer_texts": ("Blue",)}, "'blue'"),
        ({"id": "q0"}, "[0]"),
    ],
)
def test_mistakes_name_the_question_and_its_place(tmp_path, make_questions, to_rows, change, words):
    questions = make_questions(3)
    fields = {name: getattr(questions[2], name) for name in Question.__dataclass_fields__}
    questions[2] = Question(**{**fields, **change})
    message = complaint(write(tmp_path, to_rows(questions)))
    assert words in message
    assert f"question {questions[2].id!r} ([2])" in message


@each("start", [1, 10**6])
def test_long_data_are_shortened_in_messages(tmp_path, make_questions, to_rows, start):
    long = "x" * 10**6
    first = make_questions(1)[0]
    question = dataclasses.replace(
        first, id=long, context=f"a {long}", answer_texts=("y" * 10**6,), answer_starts=(start,)
    )
    message = complaint(write(tmp_path, to_rows([question])))
    assert "question 'xxx" in message and "the answer 'yyy" in message
    assert len(message) < 1000


def test_all_mistakes_are_counted_and_the_first_is_shown(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(10))
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["context"] = "X" + paragraph["context"]
    message = complaint(write(tmp_path, content))
    assert "question 'q0' (data[0].paragraphs[0].qas[0])" in message
    assert "(10 mistakes in total). Fix the file." in message


def test_unanswered_questions_need_the_flag(tmp_path, make_questions, to_squad):
    path = write(tmp_path, to_squad(make_questions(10, unanswered_every=3)))
    assert len(squad.open_file(path, True).questions()) == 10
    message = complaint(path)
    assert "4 of 10 questions have no answer" in message
    assert "'q0' (data[0].paragraphs[0].qas[0])" in message
    assert "For SQuAD v2.0, add --version_2_with_negative" in message


def test_is_impossible_may_be_left_out(tmp_path, make_questions, to_squad):
    content = to_squad(make_questions(4, unanswered_every=2))
    plain = copy.deepcopy(content)
    for article in plain["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"][0].pop("is_impossible", None)
    with_flag, without = (
        squad.open_file(write(tmp_path, c, f"{number}.json"), True).questions()
        for number, c in enumerate((content, plain))
    )
    assert with_flag == without


# --- real SQuAD ----------------------------------------------------------------------------------


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "version_2", "count", "unanswered", "answers"),
    [
        ("train-v1.1.json", False, 3807, 0, 3807),
        ("dev-v1.1.json", False, 438, 0, 438),
        ("train-v2.0.json", True, 3861, 2033, 5823),
        ("dev-v2.0.json", True, 839, 411, 1396),
    ],
)
def test_real_files(squad_dir, name, version_2, count, unanswered, answers):
    questions = squad.open_file(squad_dir / name, version_2).questions()
    assert len(questions) == count
    assert sum(not question.answer_texts for question in questions) == unanswered
    assert sum(len(question.answer_texts) for question in questions) == answers


@pytest.mark.realdata
def test_real_v2_file_without_the_flag(squad_dir):
    assert "2033 of 3861 questions have no answer" in complaint(squad_dir / "train-v2.0.json")
