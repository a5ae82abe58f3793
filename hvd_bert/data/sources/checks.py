"""Checks of all questions of a source. A mistake is an error, or its question is left out (`--bad_examples`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hvd_bert.data.sources.entries import SHORT
from hvd_bert.data.sources.questions import BadExample, Found, Mistake, Question, Reading
from hvd_bert.errors import UserError

_UNANSWERED = "unanswered question"


def checked(
    name: str, items: Iterable[Found], version_2_with_negative: bool, reading: Reading
) -> tuple[list[Question], list[BadExample]]:
    """The questions to use, and those with mistakes. Raises UserError for mistakes unless these are to be skipped."""
    questions: list[Question] = []
    bad: list[BadExample] = []
    places: dict[str, str] = {}  # by id
    for item in items:
        question, mistake = _judged(item, places, version_2_with_negative, reading)
        if mistake:
            id_ = item.question.id if item.question else None
            bad.append(BadExample(item.where, id_, mistake.kind, mistake.reason, question is None))
        if question:
            places[question.id] = item.where
            questions.append(question)
    if not questions and not bad:
        raise UserError(f"{name}: no questions found. Give a file with questions.")
    refuse_mistakes(name, bad, len(questions), reading)
    return questions, bad


def refuse_mistakes(name: str, bad: list[BadExample], kept: int, reading: Reading, unit: str = "questions") -> None:
    """Raise UserError for mistakes; with `--bad_examples skip` only if nothing is left."""
    if bad and reading.bad_examples != "skip":
        count = kept + sum(example.skipped for example in bad)
        way_out = "" if reading.purpose == "prediction" else f" To leave these {unit} out, add --bad_examples skip."
        raise UserError(f"{name}: {_refusal(bad, count, way_out)}")
    if bad and not kept:
        raise UserError(f"{name}: all {unit} have mistakes: {_counted(bad)}. Fix the file.")


def kinds(bad: Iterable[BadExample]) -> dict[str, int]:
    """How many examples have each kind of mistake, the most frequent first."""
    return dict(Counter(example.kind for example in bad).most_common())


def summary(bad: list[BadExample], unit: str = "questions") -> str:
    """How many examples have a mistake and of which kind, how many are left out, and what becomes of the others."""
    skipped = sum(example.skipped for example in bad)
    counts = ", ".join(f"{kind}: {number}" for kind, number in kinds(bad).items())
    kept = f", {len(bad) - skipped} scored by the answer texts that they have" if skipped < len(bad) else ""
    return f"mistakes in {len(bad)} {unit} ({counts}): {skipped} left out{kept}"


def _judged(
    item: Found, places: dict[str, str], version_2_with_negative: bool, reading: Reading
) -> tuple[Question | None, Mistake | None]:
    """The question as it is used if mistakes are skipped, None if it is left out; and its mistake, if it has one."""
    question = item.question
    if question is None:
        return None, item.mistake
    mistake = text_mistake(question)
    if mistake:
        return None, mistake
    if reading.purpose == "prediction":
        return _with_answers_that_fit(question), None
    mistake = item.mistake or _answer_mistake(question)
    if mistake is None and question.id in places:
        mistake = Mistake("duplicate id", f"{places[question.id]} has the same id")
    if mistake is None and not question.answer_texts and not version_2_with_negative:
        mistake = Mistake(_UNANSWERED, "it has no answer")
    if mistake is None:
        return question, None
    if reading.purpose == "training":
        # Later questions with this id are duplicates of this one even if it is left out.
        places.setdefault(question.id, item.where)
        return None, mistake
    kept = _with_answers_that_fit(question)
    return (_with_new_id(kept, places) if kept.answer_texts else None), mistake


def text_mistake(question: Question) -> Mistake | None:
    """A mistake that makes the question unusable."""
    if not question.context.strip():
        return Mistake("empty text", "its context is empty")
    # A question of blanks has no tokens but does no harm, so it is accepted.
    if not question.question:
        return Mistake("empty text", "its question is empty")
    answers = [("answer", text) for text in question.answer_texts]
    for part, text in (("id", question.id), ("context", question.context), ("question", question.question), *answers):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"an unpaired surrogate ({text[error.start]!a}), which is not a character"
            return Mistake("invalid character", f"its {part} contains {found}")
    return None


def _answer_mistake(question: Question) -> Mistake | None:
    for number, (text, start) in enumerate(zip(question.answer_texts, question.answer_starts, strict=True)):
        if not text.strip():
            return Mistake("empty answer", "an answer text is empty")
        # Answers after the first may have no place: they are for the metric.
        if not _is_there(question.context, text, start) and not (number and start is None):
            return _misplaced(question.context, text, start)
    return None


def _is_there(context: str, text: str, start: int | None) -> bool:
    return start is not None and 0 <= start < len(context) and context.startswith(text, start)


def _misplaced(context: str, text: str, start: int | None) -> Mistake:
    label = f"the answer {SHORT.repr(text)}"
    if start is None:
        return Mistake("misplaced answer", f"{label} has no place in its context")
    if not 0 <= start < len(context):
        reason = f"answer_start {start} of {label} is outside its context, which has {len(context)} characters"
        return Mistake("out-of-range offset", reason)
    return Mistake(
        "misplaced answer",
        f"{label} does not start at character {start} of its context, which has"
        f" {SHORT.repr(context[start : start + len(text)])} there (offsets count Unicode characters from 0)",
    )


def _with_answers_that_fit(question: Question) -> Question:
    """The question without blank answers; the place of an answer that is not there is unknown."""
    pairs = [
        (text, start if _is_there(question.context, text, start) else None)
        for text, start in zip(question.answer_texts, question.answer_starts, strict=True)
        if text.strip()
    ]
    return replace(
        question, answer_texts=tuple(text for text, _ in pairs), answer_starts=tuple(start for _, start in pairs)
    )


def _with_new_id(question: Question, places: dict[str, str]) -> Question:
    """The question; a second one with the same id becomes ID#2, since predictions are stored by id."""
    id_, number = question.id, 1
    while id_ in places:
        number += 1
        id_ = f"{question.id}#{number}"
    return replace(question, id=id_)


# --- messages ------------------------------------------------------------------------------------


def _refusal(bad: list[BadExample], count: int, way_out: str) -> str:
    mistakes = [example for example in bad if example.kind != _UNANSWERED]
    if mistakes:
        total = f" ({len(mistakes)} mistakes in total)" if len(mistakes) > 1 else ""
        return f"{_counted(mistakes)}{total}. Fix the file.{way_out}"
    return (
        f"{len(bad)} of {count} questions have no answer. The first is {_label(bad[0])}."
        f" For SQuAD v2.0, add --version_2_with_negative.{way_out}"
    )


def _counted(bad: list[BadExample]) -> str:
    """Each kind of mistake with its number and the first example."""
    first = {example.kind: example for example in reversed(bad)}
    return "; ".join(
        f"{number} {kind}{'s, the first' if number > 1 else ''}: {_described(first[kind])}"
        for kind, number in kinds(bad).items()
    )


def _described(example: BadExample) -> str:
    if example.reason.startswith(example.where):
        return example.reason
    return f"{example.where if example.id is None else _label(example)}: {example.reason}"


def _label(example: BadExample) -> str:
    return f"question {SHORT.repr(example.id)} ({example.where})"
