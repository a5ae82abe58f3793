"""One entry of a data file -> a `Question`, or the mistake in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from hvd_bert.data.sources.questions import SHORT, Mistake, Question, Reading

_TYPES = {str: "text", int: "a whole number", list: "a list", dict: "an object"}
_WHOLE_NUMBER = re.compile(r"\s*-?[0-9]{1,18}\s*")


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value, or the Mistake that it raises."""
    try:
        return function(*arguments)
    except Mistake as mistake:
        return mistake


# --- the two kinds of entries --------------------------------------------------------------------


def squad_question(where: str, title: str, context: str, entry: Any, reading: Reading) -> Question:
    """An entry of "qas" in SQuAD's JSON. Raises Mistake."""
    id_ = _id(where, entry)
    texts, starts = _answers(f"{where}.answers", reading, lambda: get(where, entry, "answers", list))
    if texts and entry.get("is_impossible") and reading.needs_answers:
        raise Mistake(f'{where} has "is_impossible": true, but also answers. Remove one of the two')
    return Question(id_, title, context, get(where, entry, "question", str), texts, starts)


def row_question(where: str, row: Any, reading: Reading, contexts: dict[str, str]) -> Question:
    """A flat row. Its answers are an object of two lists, or a list of objects as SQuAD's, or one such object.

    With a column "answer_start", they may be the text of one answer. Raises Mistake.

    `contexts`: those of earlier rows. About five rows share a context, of which one copy is kept.
    """
    context, column = get(where, row, reading.context_column, str), reading.answer_column
    texts, starts = _answers(f"{where}.{column}", reading, lambda: _row_answers(where, row, column))
    return Question(
        id=_id(where, row),
        title=get(where, row, "title", str, ""),
        context=contexts.setdefault(context, context),
        question=get(where, row, reading.question_column, str),
        answer_texts=texts,
        answer_starts=starts,
    )


def _row_answers(where: str, row: dict[str, Any], column: str) -> list[Any]:
    """The answers of a row as objects."""
    answers, at_answers = row.get(column), f"{where}.{column}"
    if "answer_start" in row and not isinstance(answers, dict | list):
        if answers in (None, "") and row["answer_start"] in (None, ""):
            return []
        return [{"text": answers, "answer_start": row["answer_start"]}]
    if isinstance(answers, str):
        answers = _parsed(at_answers, column, answers)
    if isinstance(answers, dict) and isinstance(answers.get("text"), list):
        pairs = zip_longest(answers["text"], get(at_answers, answers, "answer_start", list))
        return [{"text": text, "answer_start": start} for text, start in pairs]
    if isinstance(answers, dict):
        return [answers]
    found: list[Any] = get(where, row if answers is None else {column: answers}, column, list)
    return found


def _parsed(where: str, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        example = '{"text": ["London"], "answer_start": [16]}'
        raise Mistake(
            f"{where} should be JSON such as {example} ({shown(text)}). If `{column}` is plain text, add a column"
            " answer_start"
        ) from None


def _answers(where: str, reading: Reading, read: Callable[[], list[Any]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and starts. If answers are not needed, those that cannot be read are left out."""
    try:
        places = [(f"{where}[{number}]", answer) for number, answer in enumerate(read())]
        texts = tuple(get(place, answer, "text", str) for place, answer in places)
        return texts, tuple(_start(place, answer) for place, answer in places)
    except Mistake:
        if reading.needs_answers:
            raise
        return (), ()


# --- values --------------------------------------------------------------------------------------


def get(where: str, parent: Any, key: str, kind: type, default: Any = None) -> Any:
    """The value of a key, of the given type. Raises Mistake."""
    _expect(where, parent, dict)
    if parent.get(key) is None:
        if default is not None:
            return default
        if key not in parent:
            raise Mistake(f'{where} has no "{key}" ({shown(parent)})')
    return _expect(f"{where}.{key}", parent[key], kind)


def _id(where: str, entry: Any) -> str:
    """The entry's id, or its place if it has none: unique, and the same on all ranks."""
    _expect(where, entry, dict)
    value = entry.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text: str = get(where, entry, "id", str, where)
    return text or where


def _start(where: str, parent: Any) -> int:
    """A whole number, which may be in quotes."""
    value = parent.get("answer_start")
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    number: int = get(where, parent, "answer_start", int)
    return number


def _expect(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Mistake(f"{where} should be {_TYPES[kind]} ({shown(value)})")
    return value


def shown(value: Any) -> str:
    """The start of a value, for messages."""
    if isinstance(value, dict):
        return f"found an object with {', '.join(map(SHORT.repr, list(value)[:5])) or 'nothing in it'}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"found {text if len(text) <= 40 else text[:40] + '...'}"
