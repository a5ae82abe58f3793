"""A few right and wrong answers of an evaluation, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.squad_metric import question_scores

PER_KIND = 10
EXCERPT = 400  # characters of the context
GOLDEN_RATIO = (5**0.5 - 1) / 2


def sample_answers(
    questions: Sequence[Question], answers: Sequence[Answer], version_2_with_negative: bool
) -> list[dict[str, Any]]:
    """Up to `PER_KIND` right answers and as many wrong ones, each in the order of the questions.

    They depend only on the questions and answers, and are spread evenly over the questions.
    """
    found: dict[bool, dict[int, dict[str, Any]]] = {True: {}, False: {}}
    # Any first part of this order is spread evenly, so that few questions have to be scored.
    for i in sorted(range(len(answers)), key=lambda number: number * GOLDEN_RATIO % 1):
        exact, f1 = question_scores(questions[i], answers[i].text, version_2_with_negative)
        if len(found[exact == 1]) < PER_KIND:
            scores = {"exact_match": 100.0 * exact, "f1": 100.0 * f1}
            found[exact == 1][i] = sample(questions[i], answers[i]) | scores
        elif all(len(samples) == PER_KIND for samples in found.values()):
            break
    return [samples[i] for samples in found.values() for i in sorted(samples)]


def sample(question: Question, answer: Answer) -> dict[str, Any]:
    """An answer with its question, for people to read."""
    excerpt, place = _excerpt(question, answer)
    return {
        "id": question.id,
        "question": question.question,
        "context": excerpt,
        "answers": list(dict.fromkeys(question.answer_texts)),
        "answer_start": place,
        "prediction": answer.text,
        # The digits after these depend on the number of ranks.
        "probability": round(answer.probability, 4),
    }


def _excerpt(question: Question, answer: Answer) -> tuple[str, int | None]:
    """The context around the gold answer, else around the predicted one, and the first gold answer's place in it.

    "…" marks an omission.
    """
    context = question.context
    place = question.answer_starts[0] if question.answer_starts else None
    middle = context.find(answer.text) if place is None else place
    start = max(0, min(middle - EXCERPT // 2, len(context) - EXCERPT))
    cut = context[start : start + EXCERPT]
    excerpt = "…" * (start > 0) + cut + "…" * (start + EXCERPT < len(context))
    return excerpt, None if place is None else place - start + (start > 0)
