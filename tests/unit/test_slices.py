"""Groups of questions: by question word, length of the answer, length of the context."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_bert.data.sources.questions import Question
from hvd_bert.tools.evaluate import slices
from hvd_bert.tools.evaluate.slices import Groups


def question(text: str = "?", answers: tuple[str, ...] = ("red",), context: str = "red") -> Question:
    return Question("q", "", context, text, answers, (0,) * len(answers))


def listed(groups: Groups) -> dict[str, list[int]]:
    return {name: members.tolist() for name, members in groups.items()}


def test_question_words():
    words = {
        "What is it?": "what",
        "In what year did Who sing?": "what",
        "To whom does it belong?": "who",
        "How  many boxes are there?": "how many, how much",
        "How long is it?": "how",
        "Whatever the whole somehow shows": "other",
    }
    assert {text: slices.question_word(text) for text in words} == words


def test_groups_by_answer_length():
    answers = ["a b c d", "a", "", "a b c d e f g h i j k", "a b", "one two three four five", "a b c d e f g h i j"]
    questions = [question(answers=(text, "x")) if text else question(answers=()) for text in answers]
    expected = {"no answer": [2], "1": [1], "2": [4], "4-5": [0, 5], "6-10": [6], "11 or more": [3]}
    assert listed(slices.by_answer_length(questions)) == expected


def test_groups_by_context_length_are_quartiles():
    contexts = ["w " * length for length in (8, 1, 5, 2, 6, 3, 7, 4)]
    groups = listed(slices.by_context_length([question(context=context) for context in contexts]))
    assert groups == {"1-2": [1, 3], "3-4": [5, 7], "5-6": [2, 4], "7-8": [0, 6]}
    assert listed(slices.by_context_length([question(context="one two")] * 3)) == {"2": [0, 1, 2]}


@given(st.lists(st.builds(question, st.text(), st.just(()) | st.tuples(st.text(min_size=1)), st.text()), min_size=1))
def test_every_question_is_in_one_group(questions):
    for groups in (
        slices.by_question_word(questions),
        slices.by_answer_length(questions),
        slices.by_context_length(questions),
    ):
        assert all(len(members) for members in groups.values())
        assert sorted(np.concatenate(list(groups.values())).tolist()) == list(range(len(questions)))
