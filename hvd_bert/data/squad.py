"""SQuAD's text -> `Question`s, all of them checked.

`open_file` reads SQuAD's own JSON (articles > paragraphs > questions) and flat rows
(`{"data": [row, ...]}`, a list of rows, or one row per line). A row is
`{"id", "title", "context", "question", "answers": {"text": [...], "answer_start": [...]}}`.
`open_hub` reads the same rows through the `datasets` library. Opening is fast: the text is parsed
and checked only when `Source.questions()` is called, on the rank that needs it.

Character offsets count Unicode code points from the start of the unstripped context: some of SQuAD's
contexts begin with a space, and their offsets count it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any, BinaryIO

from hvd_bert.data import hub
from hvd_bert.errors import UserError
from hvd_bert.sample import files as sample
from hvd_bert.storage.reading import open_regular

_PIECE_BYTES = 2**20
_GIVE = "Give a file in the format of train-v1.1.json."
_ROW_COLUMNS = ("id", "title", "context", "question", "answers")
_ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80  # of data in messages
_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one context.

    `answer_texts[i]` starts at character `answer_starts[i]` of `context`. Both are empty if the question
    has no answer (SQuAD v2.0).
    """

    id: str
    title: str
    context: str
    question: str
    answer_texts: tuple[str, ...]
    answer_starts: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A source of questions.

    `name` appears in messages (a path, or `squad[train]`). `digest` is the SHA-256 of the content and of
    the option that it is read with, so that equal digests mean equal questions.
    """

    name: str
    digest: str
    _load: Callable[[], list[Question]] = field(repr=False, compare=False)

    def questions(self) -> list[Question]:
        """All questions in the order of the file, parsed and checked.

        Each call parses again and keeps nothing: tokenization needs the questions once, training runs for hours.
        Raises `UserError` if the content is wrong.
        """
        return self._load()


def open_file(path: str | os.PathLike[str], version_2_with_negative: bool) -> Source:
    """Open a JSON file. Raises `UserError` if it cannot be read; `questions()` checks its content."""
    name = os.fspath(path)
    place = os.fspath(sample.located(path))
    digest = _digest(place)

    def load() -> list[Question]:
        content = _read(place)
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{name}: the file changed while it was being read. Run the command again.")
        return _checked(name, _from_json(name, content), version_2_with_negative)

    return Source(name, _reading_digest(digest, version_2_with_negative), load)


def open_hub(
    dataset_name: str,
    split: str,
    version_2_with_negative: bool,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
) -> Source:
    """Open a split of a data set with SQuAD's columns, from the Hugging Face hub or its local cache (`cache_dir`).

    Raises `UserError` if it is not available or has other columns.
    """
    name = f"{dataset_name}[{split}]"
    rows = hub.load(dataset_name, split, dataset_config_name, cache_dir)
    missing = [column for column in _ROW_COLUMNS if column not in rows.column_names]
    if missing:
        raise UserError(
            f"{name}: not in SQuAD's format: no column {', '.join(missing)} "
            f"(found: {', '.join(rows.column_names)}). Choose another --dataset_name."
        )
    rows = rows.select_columns(list(_ROW_COLUMNS))

    def load() -> list[Question]:
        located = ((f"row {number}", row) for number, row in enumerate(rows))
        return _checked(name, _from_rows(name, located), version_2_with_negative)

    return Source(name, _reading_digest(hub.digest(rows), version_2_with_negative), load)


def from_questions(name: str, questions: Iterable[Question]) -> Source:
    """Questions in memory (from a test, or typed by a user), used without checks."""
    kept = list(questions)
    content = json.dumps([astuple(question) for question in kept]).encode()
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: kept)


def _reading_digest(content_digest: str, version_2_with_negative: bool) -> str:
    # The flag decides whether the content is accepted. Without it in the digest, a cache filled with the
    # flag would hide the error from a run without it.
    return hashlib.sha256(f"{content_digest} {version_2_with_negative}".encode()).hexdigest()


# --- files ---------------------------------------------------------------------------------------


def _digest(name: str) -> str:
    """SHA-256 of a file, read in pieces to save memory: every rank computes it at each start."""
    sha256 = hashlib.sha256()
    with _opened(name) as file:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
    return sha256.hexdigest()


def _read(name: str) -> bytes:
    with _opened(name) as file:
        return file.read()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """Open a file for reading; errors inside the block become a UserError."""
    try:
        with open_regular(name) as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file (working directory: {os.getcwd()}). Check the path.") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}. Give a readable JSON file.") from error


def _from_json(name: str, content: bytes) -> Iterator[tuple[str, Question]]:
    """(place in the file, question) for each question, in any of the layouts."""
    document = _parse(name, content)
    if isinstance(document, list):
        return _from_rows(name, ((f"[{number}]", row) for number, row in enumerate(document)))
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise UserError(
            f'{name}: not in SQuAD\'s format: the file must be an object with a list under "data" '
            f"({_found(document)}). {_GIVE}"
        )
    entries = document["data"]
    if any(isinstance(entry, dict) and "paragraphs" in entry for entry in entries):
        return _from_articles(name, entries)
    return _from_rows(name, ((f"data[{number}]", row) for number, row in enumerate(entries)))


def _parse(name: str, content: bytes) -> Any:
    for magic, archive in _ARCHIVES.items():
        if content.startswith(magic):
            raise UserError(f"{name}: compressed with {archive}. Decompress the file first.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    if not text.strip():
        raise UserError(f"{name}: the file is empty. Give a file with questions.")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a whole JSON value, then more: one row per line
            return _parse_lines(name, text)
        raise UserError(f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists inside thousands of lists
        raise UserError(f"{name}: not in SQuAD's format: {error}. {_GIVE}") from error
    return [document] if isinstance(document, dict) and "context" in document else document


def _parse_lines(name: str, text: str) -> list[Any]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{name}: not JSON: {error.msg} at line {number}, column {error.colno} "
                    "(read as one JSON row per line)."
                ) from error
            except (ValueError, RecursionError) as error:  # as in _parse
                raise UserError(f"{name}: not in SQuAD's format: {error} at line {number}. {_GIVE}") from error
    return rows


def _from_articles(name: str, articles: list[Any]) -> Iterator[tuple[str, Question]]:
    for article_number, article in enumerate(articles):
        at_article = f"data[{article_number}]"
        title = _get(name, at_article, article, "title", str, default="")
        for paragraph_number, paragraph in enumerate(_get(name, at_article, article, "paragraphs", list)):
            at_paragraph = f"{at_article}.paragraphs[{paragraph_number}]"
            context = _get(name, at_paragraph, paragraph, "context", str)
            for number, entry in enumerate(_get(name, at_paragraph, paragraph, "qas", list)):
                where = f"{at_paragraph}.qas[{number}]"
                texts, starts = [], []
                for answer_number, answer in enumerate(_get(name, where, entry, "answers", list)):
                    at_answer = f"{where}.answers[{answer_number}]"
                    texts.append(_get(name, at_answer, answer, "text", str))
                    starts.append(_get(name, at_answer, answer, "answer_start", int))
                if texts and entry.get("is_impossible"):
                    raise UserError(
                        f'{name}: {where} has "is_impossible": true, but also answers. Remove one of the two.'
                    )
                yield (
                    where,
                    Question(
                        id=_get(name, where, entry, "id", str),
                        title=title,
                        context=context,
                        question=_get(name, where, entry, "question", str),
                        answer_texts=tuple(texts),
                        answer_starts=tuple(starts),
                    ),
                )


def _from_rows(name: str, rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Question]]:
    contexts: dict[str, str] = {}  # about five rows share a context: keep one copy in memory
    for where, row in rows:
        context = _get(name, where, row, "context", str)
        answers = _get(name, where, row, "answers", dict)
        at_answers = f"{where}.answers"
        texts = _get(name, at_answers, answers, "text", list)
        starts = _get(name, at_answers, answers, "answer_start", list)
        if len(texts) != len(starts):
            raise UserError(
                f"{name}: {at_answers} has {len(texts)} texts, but {len(starts)} answer_starts. Give one per text."
            )
        for number, (text, start) in enumerate(zip(texts, starts, strict=True)):
            _expect(name, f"{at_answers}.text[{number}]", text, str)
            _expect(name, f"{at_answers}.answer_start[{number}]", start, int)
        yield (
            where,
            Question(
                id=_get(name, where, row, "id", str),
                title=_get(name, where, row, "title", str, default=""),
                context=contexts.setdefault(context, context),
                question=_get(name, where, row, "question", str),
                answer_texts=tuple(texts),
                answer_starts=tuple(starts),
            ),
        )


def _get(name: str, where: str, parent: Any, key: str, kind: type, default: Any = None) -> Any:
    _expect(name, where, parent, dict)
    if key not in parent:
        if default is not None:
            return default
        raise UserError(f'{name}: {where} has no "{key}". SQuAD\'s format requires it.')
    return _expect(name, f"{where}.{key}", parent[key], kind)


def _expect(name: str, where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{name}: {where} should be {_KINDS[kind]} ({_found(value)}).")
    return value


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return f"found an object with {', '.join(map(_SHORT.repr, list(value)[:5])) or 'nothing in it'}"
    text = json.dumps(value, ensure_ascii=False)
    return f"found {text if len(text) <= 40 else text[:40] + '...'}"


# --- checks --------------------------------------------------------------------------------------


def _checked(name: str, located: Iterable[tuple[str, Question]], version_2_with_negative: bool) -> list[Question]:
    questions: list[Question] = []
    places: dict[str, str] = {}
    mistakes: list[str] = []
    unanswered: list[str] = []
    for where, question in located:
        questions.append(question)
        label = f"question {_SHORT.repr(question.id)} ({where})"
        if question.id in places:
            mistakes.append(f"{label}: {places[question.id]} has the same id")
        places.setdefault(question.id, where)
        mistake = _mistake(question)
        if mistake:
            mistakes.append(f"{label}: {mistake}")
        if not question.answer_texts:
            unanswered.append(label)
    if not questions:
        raise UserError(f"{name}: no questions found. Give a file with questions.")
    if mistakes:
        others = f" ({len(mistakes)} mistakes in total)" if len(mistakes) > 1 else ""
        raise UserError(f"{name}: {mistakes[0]}{others}. Fix the file.")
    if unanswered and not version_2_with_negative:
        raise UserError(
            f"{name}: {len(unanswered)} of {len(questions)} questions have no answer. The first is "
            f"{unanswered[0]}. For SQuAD v2.0, add --version_2_with_negative."
        )
    return questions


def _mistake(question: Question) -> str | None:
    """The mistake in a well-formed question, or None."""
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
    for text, start in zip(question.answer_texts, question.answer_starts, strict=True):
        if not text.strip():
            return "an answer text is empty"
        if not 0 <= start < len(question.context):
            return (
                f"answer_start {start} of the answer {_SHORT.repr(text)} is outside its context, "
                f"which has {len(question.context)} characters"
            )
        found = question.context[start : start + len(text)]
        if found != text:
            return (
                f"the answer {_SHORT.repr(text)} does not start at character {start} of its context, "
                f"which has {_SHORT.repr(found)} there (offsets count Unicode characters from 0)"
            )
    return None
