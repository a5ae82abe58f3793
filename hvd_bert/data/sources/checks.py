"""Checks of all questions of a source. Data with a mistake are refused."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_bert.data.sources.entries import SHORT
from hvd_bert.data.sources.questions import Mistake, Question, Reading
from hvd_bert.errors import UserError


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
