"""Groups of similar questions."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvd_bert.data.sources.questions import Question

# Name of the group -> numbers of its questions. No group is empty.
Groups = dict[str, NDArray[np.int64]]

QUESTION_WORDS = ("what", "who", "when", "where", "why", "which", "how many, how much", "how", "other")
_QUESTION_WORD = re.compile(r"\b(what|who(?:m|se)?|when|where|why|which|how(?: +(?:many|much))?)\b", re.IGNORECASE)
_ANSWER_LENGTHS = {1: "1", 2: "2", 3: "3", 5: "4-5", 10: "6-10"}  # maximum -> name


def question_word(question: str) -> str:
    """The first question word in an English question, as in `QUESTION_WORDS`."""
    found = _QUESTION_WORD.search(question)
    word = " ".join(found[0].lower().split()) if found else "other"
    if word.startswith("who"):
        return "who"  # whom, whose
    return "how many, how much" if word.startswith("how ") else word


def by_answer(questions: Sequence[Question]) -> Groups:
    """All questions, and if there are both those with and without an answer."""
    answerable = np.array([bool(question.answer_texts) for question in questions])
    groups = {"all": np.arange(len(questions))}
    if 0 < answerable.sum() < len(questions):
        groups |= {"with an answer": np.flatnonzero(answerable), "without an answer": np.flatnonzero(~answerable)}
    return groups


def by_question_word(questions: Sequence[Question]) -> Groups:
    """Groups by the first question word."""
    return _groups([question_word(question.question) for question in questions], QUESTION_WORDS)


def by_answer_length(questions: Sequence[Question]) -> Groups:
    """Groups by the length of the first gold answer in words."""
    bounds, names = list(_ANSWER_LENGTHS), (*_ANSWER_LENGTHS.values(), "11 or more")

    def name(question: Question) -> str:
        if not question.answer_texts:
            return "no answer"
        return names[bisect_left(bounds, len(question.answer_texts[0].split()))]

    return _groups([name(question) for question in questions], ("no answer", *names))


def by_context_length(questions: Sequence[Question]) -> Groups:
    """Up to four groups of about the same size, by the length of the context in words."""
    lengths = np.array([len(question.context.split()) for question in questions])
    quartiles = np.unique(np.quantile(lengths, (0.25, 0.5, 0.75), method="lower"))
    numbers = np.searchsorted(quartiles, lengths)
    groups = {}
    for number in np.unique(numbers):
        members = np.flatnonzero(numbers == number)
        shortest, longest = lengths[members].min(), lengths[members].max()
        groups[f"{shortest}-{longest}" if shortest < longest else f"{shortest}"] = members
    return groups


def _groups(names: Sequence[str], order: Sequence[str]) -> Groups:
    """The numbers of the elements with each name, in that order of names."""
    found = np.array(names)
    return {name: np.flatnonzero(found == name) for name in order if name in set(names)}
