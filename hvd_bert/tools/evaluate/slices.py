"""Score all questions and groups of questions (slices), compare two models, and find the worst mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.config.settings import Config
from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import sample
from hvd_bert.evaluation.squad_metric import question_scores, split
from hvd_bert.tasks.question_answering import SCORES, QuestionSet
from hvd_bert.tools.evaluate.paired import interval, mcnemar, verdict

Ids = NDArray[np.int64]
Scores = Mapping[str, NDArray[np.float64]]  # name in SCORES -> score of each question in percent
ANSWERED = ("with an answer", "without an answer")
QUESTION_WORDS = ("what", "who", "when", "where", "why", "which", "how many, how much", "how", "other")
_QUESTION_WORD = re.compile(r"\b(what|who(?:m|se)?|when|where|why|which|how(?: +(?:many|much))?)\b", re.IGNORECASE)
# Slice -> maximum number of words; -1 stands for no answer.
_ANSWER_LENGTHS = {"no answer": -1, "1": 1, "2": 2, "3": 3, "4-5": 5, "6-10": 10, "11 or more": np.inf}


def scored(questions: Sequence[Question], answers: Sequence[Answer], config: Config) -> Scores:
    """Score each answer. The means of the scores are the metrics of the evaluation."""
    found, data = [], config.data
    rules = data.version_2_with_negative, data.answer_language
    for question, answer in zip(questions, answers, strict=True):
        if answer.null_odds is not None and answer.null_odds > data.null_score_diff_threshold:
            found.append((float(not question.answer_texts),) * 2)  # the official script then counts "no answer"
        else:
            found.append(question_scores(question, answer.text, *rules))
    return dict(zip(SCORES, 100 * np.array(found).T, strict=True))


def score_slices(dev: QuestionSet, models: Sequence[Scores], answer_language: str) -> dict[str, list[dict[str, Any]]]:
    """Score the slices of the questions. Returns title -> a row per slice, with the scores of one or two models."""
    return {
        title: [{"slice": name} | _row(models, members) for name, members in slices.items()]
        for title, slices in slices_of(dev.questions, dev.sets, answer_language).items()
        if slices
    }


def _row(models: Sequence[Scores], members: Ids) -> dict[str, Any]:
    """Score a slice. For two models, also test whether their scores differ (docs/guides/evaluating.md)."""
    first, *others = ({name: scores[name][members] for name in SCORES} for scores in models)
    row = {"questions": len(members)} | {name: float(values.mean()) for name, values in first.items()}
    if not others:
        return row
    second = others[0]
    right, other_right = (scores["exact_match"] == 100 for scores in (first, second))
    only_right, only_other = int((right & ~other_right).sum()), int((other_right & ~right).sum())
    limits = {name: interval(values - second[name]) for name, values in first.items()}
    return row | {
        "compared": {name: float(values.mean()) for name, values in second.items()},
        "interval": limits,
        "verdict": {name: verdict(*low_high) for name, low_high in limits.items()},
        "only_right": only_right,
        "only_compared_right": only_other,
        "mcnemar_p": mcnemar(only_right, only_other),
    }


def mistakes(
    questions: Sequence[Question], answers: Sequence[Answer], scores: Scores, count: int
) -> list[dict[str, Any]]:
    """List the worst `count` answers without an exact match: lowest F1 first, then highest probability."""
    found = [
        sample(questions[i], answers[i]) | {name: float(scores[name][i]) for name in SCORES}
        for i in np.flatnonzero(scores["exact_match"] < 100).tolist()
    ]
    return sorted(found, key=lambda mistake: (mistake["f1"], -mistake["probability"]))[:count]


def slices_of(
    questions: Sequence[Question], sets: Mapping[str, range], answer_language: str
) -> dict[str, dict[str, Ids]]:
    """Divide the questions into slices, by several criteria. Returns title -> slice -> indices of its questions.

    `sets`: file -> indices of its questions. `answer_language`: a key of `LANGUAGES`, whose words are counted.
    """
    lengths = [_answer_length(question, answer_language) for question in questions]
    contexts = np.array([len(split(question.context, answer_language)) for question in questions])
    answered = _by_label([ANSWERED[not question.answer_texts] for question in questions], ANSWERED)
    return {
        "questions": {"all": np.arange(len(questions))} | (answered if len(answered) > 1 else {}),
        "file": {name: np.array(numbers) for name, numbers in sets.items() if name},
        "question word": _by_label([_question_word(question.question) for question in questions], QUESTION_WORDS),
        "answer length in words": _by_label(lengths, _ANSWER_LENGTHS),
        "context length in words": _by_quartile(contexts),
    }


def _by_label(labels: Sequence[str], order: Iterable[str]) -> dict[str, Ids]:
    return {name: np.flatnonzero(np.array(labels) == name) for name in order if name in labels}


def _question_word(question: str) -> str:
    """Find the first question word of an English question. Returns an entry of `QUESTION_WORDS`."""
    found = _QUESTION_WORD.search(question)
    word = " ".join(found[0].lower().split()) if found else "other"
    if word.startswith("who"):
        return "who"  # whom, whose
    return "how many, how much" if word.startswith("how ") else word


def _answer_length(question: Question, answer_language: str) -> str:
    """Classify the length of the first gold answer. Returns a key of `_ANSWER_LENGTHS`."""
    length = len(split(question.answer_texts[0], answer_language)) if question.answer_texts else -1
    return next(name for name, maximum in _ANSWER_LENGTHS.items() if length <= maximum)


def _by_quartile(lengths: Ids) -> dict[str, Ids]:
    """Divide the questions by length into up to four groups of about equal size. Returns length range -> indices."""
    groups, previous = {}, -1
    for longest in np.unique(np.quantile(lengths, (0.25, 0.5, 0.75, 1), method="lower")).tolist():
        members = np.flatnonzero((previous < lengths) & (lengths <= longest))
        shortest, previous = lengths[members].min(), longest
        groups[f"{shortest}-{longest}" if shortest < longest else f"{longest}"] = members
    return groups
