"""Questions, how they are read, and which are refused: data with a mistake are."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

from hvd_bert.errors import UserError

SHORT = reprlib.Repr()
SHORT.maxstring = 80  # of data in messages


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one context.

    `answer_texts[i]` starts at character `answer_starts[i]` of `context`. Both are empty if the question has no answer
    (SQuAD v2.0).
    """

    id: str
    title: str
    context: str
    question: str
    answer_texts: tuple[str, ...]
    answer_starts: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """How the questions of a source are read. The columns are those of flat rows. Prediction needs no answers."""

    question_column: str = "question"
    context_column: str = "context"
    answer_column: str = "answers"
    needs_answers: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that must exist."""
        needed = (self.context_column, self.question_column, self.answer_column)
        return needed if self.needs_answers else needed[:2]

    def digest(self, content_digest: str, version_2_with_negative: bool) -> str:
        """SHA-256 of a content and of everything that decides which questions it gives, or whether it is refused.

        Otherwise windows that were cached by a run with one setting would hide an error from a run with another.
        """
        text = f"{content_digest} {version_2_with_negative}"
        if self != Reading():
            settings = {
                "question_column": self.question_column,
                "context_column": self.context_column,
                "answer_column": self.answer_column,
                "bad_examples": "error",  # these two as in earlier versions, whose checkpoints can be resumed
                "purpose": "training" if self.needs_answers else "prediction",
            }
            text += json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Mistake(Exception):
    """A mistake in the data. Its text begins with the place."""


def checked(
    name: str, items: Iterable[tuple[str, Question | Mistake]], version_2_with_negative: bool, reading: Reading
) -> list[Question]:
    """The questions, from their places and what is there. Raises UserError for mistakes."""
    questions: list[Question] = []
    mistakes: list[str] = []
    unanswered: list[str] = []
    places: dict[str, str] = {}  # by id
    for where, item in items:
        if isinstance(item, Mistake):
            mistakes.append(str(item))
            continue
        questions.append(item)
        label = f"question {SHORT.repr(item.id)} ({where})"
        reason = text_mistake(item)
        if reading.needs_answers:
            first = places.setdefault(item.id, where)
            reason = reason or _answer_mistake(item) or ("" if first == where else f"{first} has the same id")
            if not item.answer_texts and not version_2_with_negative:
                unanswered.append(label)
        if reason:
            mistakes.append(f"{label}: {reason}")
    refuse(name, mistakes)
    if unanswered:
        raise UserError(
            f"{name}: {len(unanswered)} of {len(questions)} questions have no answer. The first is {unanswered[0]}."
            " For SQuAD v2.0, add --version_2_with_negative."
        )
    if not questions:
        raise UserError(f"{name}: no questions found. Give a file with questions.")
    return questions


def refuse(name: str, mistakes: list[str]) -> None:
    """Raise UserError if there are mistakes."""
    if mistakes:
        total = f" ({len(mistakes)} mistakes in total)" if len(mistakes) > 1 else ""
        raise UserError(f"{name}: {mistakes[0]}{total}. Fix the file.")


def text_mistake(question: Question) -> str:
    """A mistake that makes the question unusable; "" if there is none."""
    if not question.context.strip():
        return "its context is empty"
    # A question of blanks has no tokens but does no harm, so it is accepted.
    if not question.question:
        return "its question is empty"
    answers = [("answer", text) for text in question.answer_texts]
    for part, text in (("id", question.id), ("context", question.context), ("question", question.question), *answers):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"its {part} contains an unpaired surrogate ({text[error.start]!a}), which is not a character"
    return ""


def _answer_mistake(question: Question) -> str:
    context = question.context
    for text, start in zip(question.answer_texts, question.answer_starts, strict=True):
        if not text.strip():
            return "an answer text is empty"
        if not (0 <= start < len(context) and context.startswith(text, start)):
            found = context[max(0, start) : start + len(text)] if start >= 0 else ""
            return (
                f"the answer {SHORT.repr(text)} does not start at character {start} of its context, which has"
                f" {len(context)} characters and {SHORT.repr(found)} there (offsets count Unicode characters from 0)"
            )
    return ""
