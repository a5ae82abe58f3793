"""Scores of all questions and of groups of similar ones, the comparison of two models, and the worst mistakes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.config.data import DataArguments
from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import sample
from hvd_bert.evaluation.squad_metric import question_scores
from hvd_bert.tasks.question_answering import SCORES
from hvd_bert.tools.evaluate.paired import interval, mcnemar, verdict

Ids = NDArray[np.int64]
# Name of the group -> numbers of its questions. No group is empty.
Groups = dict[str, Ids]

QUESTION_WORDS = ("what", "who", "when", "where", "why", "which", "how many, how much", "how", "other")
_QUESTION_WORD = re.compile(r"\b(what|who(?:m|se)?|when|where|why|which|how(?: +(?:many|much))?)\b", re.IGNORECASE)
_ANSWER_LENGTHS = {"no answer": -1, "1": 1, "2": 2, "3": 3, "4-5": 5, "6-10": 10, "11 or more": np.inf}  # -> maximum


@dataclass(frozen=True)
class Scored:
    """The questions and a model's answers. `scores`: of each question in percent, by the names in SCORES.
    `sets`: of several files, the questions of each by its name."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    scores: Mapping[str, NDArray[np.float64]]
    sets: Mapping[str, range]


def scored(
    questions: Sequence[Question], answers: Sequence[Answer], sets: Mapping[str, range], data: DataArguments
) -> Scored:
    """The answers with their scores, whose means are the metrics of the evaluation."""
    found = []
    for question, answer in zip(questions, answers, strict=True):
        if answer.null_odds is not None and answer.null_odds > data.null_score_diff_threshold:
            found.append((float(not question.answer_texts),) * 2)  # the official script does not look at the texts
        else:
            found.append(question_scores(question, answer.text, data.version_2_with_negative))
    return Scored(questions, answers, dict(zip(SCORES, 100 * np.array(found).T, strict=True)), sets)


def score_slices(models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """The scores of one model, or of two, of all questions and of groups of them."""
    questions = models[0].questions
    groups = {
        "questions": by_answer(questions),
        "file": {name: np.array(part) for name, part in models[0].sets.items() if name},
        "question word": by_question_word(questions),
        "answer length in words": by_answer_length(questions),
        "context length in words": by_context_length(questions),
    }
    return {
        title: [{"slice": name} | _row(models, members) for name, members in parts.items()]
        for title, parts in groups.items()
        if parts
    }


def _row(models: Sequence[Scored], members: Ids) -> dict[str, Any]:
    first, *others = ({name: model.scores[name][members] for name in SCORES} for model in models)
    row = {"questions": len(members)} | {name: float(values.mean()) for name, values in first.items()}
    return row | (compare(first, others[0]) if others else {})


def compare(first: Mapping[str, NDArray[np.float64]], second: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """A second model's scores of the same questions, and whether the two models differ (docs/guides/evaluating.md)."""
    right, other_right = (scores["exact_match"] == 100 for scores in (first, second))
    only_right, only_other = int((right & ~other_right).sum()), int((other_right & ~right).sum())
    limits = {name: interval(values - second[name]) for name, values in first.items()}
    return {
        "compared": {name: float(values.mean()) for name, values in second.items()},
        "interval": limits,
        "verdict": {name: verdict(*low_high) for name, low_high in limits.items()},
        "only_right": only_right,
        "only_compared_right": only_other,
        "mcnemar_p": mcnemar(only_right, only_other),
    }


def mistakes(model: Scored, count: int) -> list[dict[str, Any]]:
    """The `count` worst wrong answers: the lowest F1 first, and of equal ones the highest probability."""
    found = [
        sample(model.questions[i], model.answers[i]) | {name: float(model.scores[name][i]) for name in SCORES}
        for i in np.flatnonzero(model.scores["exact_match"] < 100).tolist()
    ]
    return sorted(found, key=lambda mistake: (mistake["f1"], -mistake["probability"]))[:count]


def question_word(question: str) -> str:
    """The first question word in an English question, as in `QUESTION_WORDS`."""
    found = _QUESTION_WORD.search(question)
    word = " ".join(found[0].lower().split()) if found else "other"
    if word.startswith("who"):
        return "who"  # whom, whose
    return "how many, how much" if word.startswith("how ") else word


def by_answer(questions: Sequence[Question]) -> Groups:
    """All questions, and if there are both those with and without an answer."""
    kinds = _groups([int(not question.answer_texts) for question in questions], ("with an answer", "without an answer"))
    return {"all": np.arange(len(questions))} | (kinds if len(kinds) > 1 else {})


def by_question_word(questions: Sequence[Question]) -> Groups:
    """Groups by the first question word."""
    return _groups([QUESTION_WORDS.index(question_word(question.question)) for question in questions], QUESTION_WORDS)


def by_answer_length(questions: Sequence[Question]) -> Groups:
    """Groups by the length of the first gold answer in words."""
    lengths = [len(question.answer_texts[0].split()) if question.answer_texts else -1 for question in questions]
    return _groups(np.searchsorted([*_ANSWER_LENGTHS.values()], lengths), [*_ANSWER_LENGTHS])


def by_context_length(questions: Sequence[Question]) -> Groups:
    """Up to four groups of about the same size, by the length of the context in words."""
    lengths = np.array([len(question.context.split()) for question in questions])
    quartiles = np.unique(np.quantile(lengths, (0.25, 0.5, 0.75), method="lower"))
    parts = np.searchsorted(quartiles, lengths)
    groups = {}
    for part in np.unique(parts):
        members = np.flatnonzero(parts == part)
        shortest, longest = lengths[members].min(), lengths[members].max()
        groups[f"{shortest}-{longest}" if shortest < longest else f"{shortest}"] = members
    return groups


def _groups(numbers: Sequence[int] | NDArray[np.int64], names: Sequence[str]) -> Groups:
    """The elements by the number of their name, in the order of the names."""
    members = {name: np.flatnonzero(np.array(numbers) == number) for number, name in enumerate(names)}
    return {name: found for name, found in members.items() if len(found)}
