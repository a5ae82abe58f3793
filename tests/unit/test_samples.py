"""Sample answers: right and wrong ones, spread over the questions, each with an excerpt of its context."""

from __future__ import annotations

import pytest

from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import EXCERPT, PER_KIND, sample_answers


def question(number: int, answers: tuple[str, ...] = ("red box", "box"), before: int = 0) -> Question:
    context = "x" * before + "red box" + "y" * before
    return Question(f"q{number}", "", context, f"what {number}?", answers, (before,) * len(answers))


def answer(number: int, text: str, probability: float = 0.75) -> Answer:
    return Answer(text, None, None, probability, 0.0, 0.0, f"q{number}", None, ())


def test_content_of_a_sample():
    right, wrong = sample_answers(
        [question(0), question(1)], [answer(0, "a red thing", 0.123456), answer(1, "The box!")], False, "squad"
    )
    assert (right["id"], right["exact_match"]) == ("q1", 100.0)
    asked = {"id": "q0", "question": "what 0?", "context": "red box", "answers": ["red box", "box"], "answer_start": 0}
    assert wrong == asked | {"prediction": "a red thing", "probability": 0.1235, "exact_match": 0.0, "f1": 50.0}


@pytest.mark.parametrize("wrong", [lambda n: n % 4 == 0, lambda n: n < 400])
def test_samples_are_spread_over_the_questions(wrong):
    count = 1600
    questions = [question(number) for number in range(count)]
    answers = [answer(number, "no" if wrong(number) else "box") for number in range(count)]
    found = sample_answers(questions, answers, False, "squad")
    for exact in (100.0, 0.0):
        numbers = [int(str(sample["id"])[1:]) for sample in found if sample["exact_match"] == exact]
        assert numbers == sorted(numbers) and len(numbers) == PER_KIND
        of_kind = [number for number in range(count) if wrong(number) is (exact == 0.0)]
        positions = [of_kind.index(number) / len(of_kind) for number in numbers]
        gaps = [after - before for before, after in zip([0, *positions], [*positions, 1], strict=True)]
        assert max(gaps) < 3 / PER_KIND, positions
    assert [sample["exact_match"] for sample in found] == [100.0] * PER_KIND + [0.0] * PER_KIND


def test_question_without_an_answer():
    questions = [question(0, answers=()), question(1, answers=(), before=1000)]
    found = sample_answers(questions, [answer(0, ""), answer(1, "red box")], True, "squad")
    assert [(sample["prediction"], sample["exact_match"], sample["answers"]) for sample in found] == [
        ("", 100.0, []),
        ("red box", 0.0, []),
    ]
    assert "red box" in str(found[1]["context"])  # without a gold answer, the excerpt is around the prediction


@pytest.mark.parametrize(("before", "marks"), [(10, 0), (EXCERPT, 2)])
def test_context_is_cut_around_the_answer(before, marks):
    (sample,) = sample_answers([question(0, before=before)], [answer(0, "box")], False, "squad")
    text, start = str(sample["context"]), sample["answer_start"]
    assert isinstance(start, int) and text[start:].startswith("red box")
    assert "red box" in text and text.count("…") == marks
    assert len(text) == (before * 2 + 7 if not marks else EXCERPT + 2)
