"""Selects samples of right and wrong answers from an evaluation, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.squad_metric import question_scores

PER_KIND = 10  # samples of right answers, and of wrong answers
EXCERPT = 400  # length of a context excerpt in characters
GOLDEN_RATIO = (5**0.5 - 1) / 2


def sample_answers(
    questions: Sequence[Question], answers: Sequence[Answer], version_2_with_negative: bool, answer_language: str
) -> list[dict[str, Any]]:
    """Choose up to PER_KIND right answers, then up to PER_KIND wrong answers, both in the order of the questions.

    The choice depends only on the questions and answers, and is spread evenly over the questions.
    """
    found: dict[bool, dict[int, dict[str, Any]]] = {True: {}, False: {}}
    # For each n, the first n questions of this order are spread evenly, so scoring can stop early.
    for i in sorted(range(len(answers)), key=lambda number: number * GOLDEN_RATIO % 1):
        exact, f1 = question_scores(questions[i], answers[i].text, version_2_with_negative, answer_language)
        if len(found[exact == 1]) < PER_KIND:
            scores = {"exact_match": 100.0 * exact, "f1": 100.0 * f1}
            found[exact == 1][i] = sample(questions[i], answers[i]) | scores
        elif all(len(samples) == PER_KIND for samples in found.values()):
            break
    return [samples[i] for samples in found.values() for i in sorted(samples)]


def sample(question: Question, answer: Answer) -> dict[str, Any]:
    """Describe an answer and its question, as an entry of eval_samples.json."""
    excerpt, start = _excerpt(question, answer)
    return {
        "id": question.id,
        "question": question.question,
        "context": excerpt,
        "answers": list(dict.fromkeys(question.answer_texts)),
        "answer_start": start,
        "prediction": answer.text,
        # Rounded, since further digits depend on the number of ranks.
        "probability": round(answer.probability, 4),
    }


def _excerpt(question: Question, answer: Answer) -> tuple[str, int | None]:
    """Cut an excerpt around the first gold answer or, if its position is unknown, around the prediction.

    Returns the excerpt, with "…" for omissions, and the gold answer's start in it or None.
    """
    context = question.context
    gold = question.answer_starts[0] if question.answer_starts else None
    middle = context.find(answer.text) if gold is None else gold
    start = max(0, min(middle - EXCERPT // 2, len(context) - EXCERPT))
    before, after = "…" if start > 0 else "", "…" if start + EXCERPT < len(context) else ""
    excerpt = f"{before}{context[start : start + EXCERPT]}{after}"
    return excerpt, None if gold is None else gold - start + len(before)
