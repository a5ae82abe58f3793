"""Slices of the questions, and comparisons of two models, with scipy's tests as the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_bert.data.sources.questions import Question
from hvd_bert.tools.evaluate.paired import RESAMPLES, interval, mcnemar, verdict
from hvd_bert.tools.evaluate.slices import slices_of


def question(text: str = "?", answers: tuple[str, ...] = ("red",), context: str = "red") -> Question:
    return Question("q", "", context, text, answers, (0,) * len(answers))


WORDS = ["What is it?", "In what year did Who sing?", "To whom is it?", "How  many are there?", "How long?", "Somehow"]
ANSWERS = ["a b c d", "a", "", "a b c d e f g h i j k", "a b", "one two three four five", "a b c d e f g h i j"]


@pytest.mark.parametrize(
    ("title", "questions", "expected"),
    [
        (
            "question word",
            [question(text) for text in WORDS],
            {"what": [0, 1], "who": [2], "how many, how much": [3], "how": [4], "other": [5]},
        ),
        (
            "answer length in words",
            [question(answers=(text, "x") if text else ()) for text in ANSWERS],
            {"no answer": [2], "1": [1], "2": [4], "4-5": [0, 5], "6-10": [6], "11 or more": [3]},
        ),
        (
            "context length in words",
            [question(context="w " * length) for length in (8, 1, 5, 2, 6, 3, 7, 4)],
            {"1-2": [1, 3], "3-4": [5, 7], "5-6": [2, 4], "7-8": [0, 6]},
        ),
        ("context length in words", [question(context="one two")] * 3, {"2": [0, 1, 2]}),
    ],
)
def test_slices(title, questions, expected):
    found = slices_of(questions, {}, "squad")[title]
    assert {name: members.tolist() for name, members in found.items()} == expected


def test_lengths_count_the_languages_words():
    found = slices_of([question(answers=("北京大学",), context="北京 大学")], {}, "zh")
    assert [*found["answer length in words"], *found["context length in words"]] == ["4-5", "4"]


@given(st.lists(st.builds(question, st.text(), st.just(()) | st.tuples(st.text(min_size=1)), st.text()), min_size=1))
def test_every_question_is_in_one_slice(questions):
    sets = {"": range(len(questions)), "a": range(len(questions))}
    for slices in slices_of(questions, sets, "squad").values():
        members = [members for name, members in slices.items() if name != "all"] or [slices["all"]]
        assert sorted(np.concatenate(members).tolist()) == list(range(len(questions))) and all(map(len, members))


def scores(model: int, shift: float = 0.0) -> np.ndarray:
    """Make a model's F1 on each of 400 questions, in percent.

    Every fourth score depends on `model` and is raised by `shift`; the others are the same for all models.
    """
    common = np.random.default_rng(7).choice([0.0, 40.0, 100 / 3, 100.0], 400)
    differing = np.random.default_rng(model).choice([0.0, 50.0, 200 / 3, 100.0], 400) + shift
    return np.where(np.arange(400) % 4, common, differing)


def test_interval_equals_scipys():
    stats = pytest.importorskip("scipy.stats")
    difference = scores(1, shift=12.0) - scores(2)
    scipys = stats.bootstrap((difference,), np.mean, method="percentile", n_resamples=RESAMPLES, batch=1000, rng=3)
    # scipy draws other resamples.
    close = pytest.approx(tuple(scipys.confidence_interval), abs=0.08 * scipys.standard_error)
    assert interval(difference) == interval(difference) == close


@pytest.mark.parametrize(
    ("difference", "found"),
    [
        (scores(1) - scores(1), "no clear difference"),
        (scores(1) - scores(2), "no clear difference"),
        (scores(1, shift=40.0) - scores(2), "A is better"),
        (scores(1) - scores(2, shift=40.0), "B is better"),
    ],
)
def test_verdict(difference, found):
    low, high = interval(difference)
    assert verdict(low, high) == found
    assert interval(-difference) == (-high, -low) and low <= high  # swapped models


@given(st.integers(0, 1200), st.integers(0, 1200))
def test_mcnemars_test_equals_the_binomial_test(first, second):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(expected, rel=1e-9, abs=1e-250)
