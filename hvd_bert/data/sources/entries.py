"""Converts each row or nested entry of a data file to a `Question` or a `Mistake`."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import partial
from itertools import zip_longest
from typing import Any
from unicodedata import normalize

import msgspec

from hvd_bert.data.sources.questions import SHORT, WORDS, Found, Mistake, Question, Reading, look_alike, plain

LEVELS = ("data", "paragraphs", "qas")  # SQuAD's nested lists, from outer to inner
SQUAD = Reading().names
WHOLE = re.compile(r"-?[0-9]+\.0")  # a whole number as pandas writes it next to missing values
_Text = str | int  # whole numbers become texts: 1912.0 becomes "1912"
_NUMPY = re.compile(r"\b(?:np\.\w+|array)(?=\()|, dtype=[^)]+(?=\))")  # notation of numpy arrays in pandas' cells
_NAN = re.compile(r"(?<=[ (\[])nan(?=[,)\]}])")
_NO_COMMA = re.compile(r"(['\"])\s+\1")
_SPANS = "char_spans"  # key of the positions of MRQA's answers
_TYPES = {  # types of fields other than text
    "answer_start": "a whole number",
    "is_impossible": "true or false",
    _SPANS: "pairs of a first and a last character",
}
_WORDS_IN_CSV = re.compile(r"""\[\s*['"].*['"]\s*\]""", re.DOTALL)
_NOT_FOUND = re.compile(r"\s*-1(\.0)?\s*")  # answer_start of converters
_EXAMPLE = '{"text": ["London"], "answer_start": [16]}'


class _Entry(msgspec.Struct):
    context: _Text = ""
    question: _Text = ""
    title: _Text = ""
    id: _Text = ""
    is_impossible: bool | int = False  # int, since pandas may write 0.0 or 1.0


# --- SQuAD's nesting -----------------------------------------------------------------------------


def read_questions(where: str, node: Any, reading: Reading, outer: Mapping[str, Any] | None = None) -> Iterator[Found]:
    """Yield (path, question or mistake) for a flat row or for SQuAD's nested levels. Levels may be missing or repeated.

    `where`: path of `node` in the file. `outer`: title and context from the levels above.
    """
    outer = outer or {}
    names = SQUAD if "context" in outer else reading.names
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from read_questions(f"{where}[{number}]", item, reading, outer)
    elif not isinstance(node, dict):
        yield where, Mistake("wrong structure", f"should be an object or a list ({shown(node)})", where)
    elif isinstance(node.get("header"), dict) and all(value is None for key, value in node.items() if key != "header"):
        return  # MRQA's first line
    elif _holds_columns(where, node.get(names["question"]), node.get(names["context"])):
        reason = 'holds columns, not rows. Write rows, as pandas does with to_json(orient="records")'
        yield where, Mistake("wrong structure", reason, where)
    elif names["question"] in node:
        where = where or "[0]"
        row = {**outer, **node}
        try:
            yield where, _question(where, row, names, reading)
        except Mistake as mistake:
            mistake.given = _given(row, names)
            yield where, mistake
    else:
        inner = {**outer, **{key: node[key] for key in ("title", "context") if key in node}}
        level = next((level for level in LEVELS if level in node), "")
        if level and (level != "qas" or "context" in inner):
            yield from read_questions(f"{where}.{level}".lstrip("."), node[level], reading, inner)
            return
        has_context = "context" in inner or names["context"] in node
        needed = '"context"' if level else f'"qas" or "{names["question"]}"' if has_context else '"paragraphs" or "qas"'
        incomplete = Mistake("wrong structure", f"has no {needed} ({shown(node)})", where)
        incomplete.given = _given({**inner, **node}, names)
        yield where, incomplete


def _given(row: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, Any, Any]:
    return row.get(names["id"], row.get("qid")), row.get(names["context"]), row.get(names["question"])


def _holds_columns(where: str, question: Any, context: Any) -> bool:
    """Return whether an object holds the columns of many questions, and not the words of one."""
    if not isinstance(question, list) or not isinstance(context, list) or len(question) != len(context):
        return isinstance(question, dict)
    return where in ("", "data") or any(" " in str(text) for text in question)


# --- questions and answers -----------------------------------------------------------------------


def _question(where: str, row: Mapping[str, Any], names: Mapping[str, str], reading: Reading) -> Question:
    """Make a question with its answers. Raises Mistake, with the question if an evaluation can score it.

    For predictions, mistakes in the answers are ignored.
    """
    given = {field: row[name] for field, name in names.items() if name in row}
    values = {field: value for field, value in given.items() if value == value and value not in (None, "")}  # not NaN
    if reading.purpose == "prediction" or _is_missing(values.get("is_impossible")):
        values.pop("is_impossible", None)
    spans = values["detected_answers"] if _SPANS in str(values.get("detected_answers")) else None
    if not {"detected_answers", "question_tokens"}.isdisjoint(row):  # MRQA's
        values = {"id": values.get("qid", ""), **values}
    question: Question | None = None
    try:
        for field in ("context", "question"):
            if _is_words(field, values.get(field)):
                raise Mistake(WORDS, f"should be text, not a list of words ({shown(values[field])})", field)
        entry: _Entry = _converted("", values, _Entry)
        id_, context = str(entry.id) or where, sys.intern(str(entry.context))
        asked = partial(Question, id_, str(entry.title), context, str(entry.question))
        question = asked((), ())
        if "answers" not in given and not entry.is_impossible and not spans:
            raise Mistake("wrong structure", f"is missing ({shown(row)})", "answers")
        pairs = _given_answers(values, spans, context)
        texted = [pair for pair in pairs if not _is_missing(pair[0], context)]
        texts = tuple(text for text, _ in texted if isinstance(text, str))
        question = asked(texts, (None,) * len(texts))
        if len(texted) not in (0, len(pairs)):
            raise Mistake("empty answer", "an answer's text is empty", "answers")
        if texted and entry.is_impossible:
            raise Mistake("contradiction", "is true, but there are answers. Remove one", "is_impossible")
        found = [_find(f"answers[{number}]", context, *pair) for number, pair in enumerate(texted)]
        located = asked(tuple(text for text, *_ in found), tuple(start for _, start, _ in found))
        if moved := next((mistake for *_, mistake in found if mistake), None):
            moved.repaired = located
            raise moved
        return located
    except Mistake as mistake:
        if question and reading.purpose == "prediction":
            return question
        mistake.question = question if question and question.answer_texts else None
        path = mistake.path
        if "answer_start" in given and path.endswith(".answer_start"):
            path = "answer_start"
        field = re.split(r"\b", path)[1]
        path = path.replace(field, names.get(field, field), 1)
        mistake.path = f"{where}, column {path}" if re.fullmatch(r"\w+ \d+", where) else f"{where}.{path}"
        if question and question.id != where:
            mistake.path = f"question {SHORT.repr(question.id)} ({mistake.path})"
        raise


def _is_words(field: str, value: Any) -> bool:
    """Return whether a text is given as a list of words, or as such a list, each word in quotes, in a cell of CSV."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        return str in kinds and kinds <= {str, int, float}
    if not isinstance(value, str) or not _WORDS_IN_CSV.fullmatch(value):
        return False
    return field == "question" or all(word[0] in "'\"" for word in value[1:-1].split())


def _given_answers(values: Mapping[str, Any], spans: Any, context: str) -> list[tuple[Any, Any]]:
    """Pair a row's answer texts with their starts. `spans`: MRQA's answers, which come first, or None."""
    start = _parsed("answer_start", values.get("answer_start"), "")
    pairs = _pairs("answers", _parsed("answers", values.get("answers"), context), start, context)
    if not spans:
        return pairs
    located = _pairs("detected_answers", _parsed("detected_answers", spans, ""), None, context)
    texts = [text for text, _ in located]
    return located + [pair for pair in pairs if pair[0] not in texts and not _is_missing(pair[0], context)]


def _pairs(at: str, answers: Any, starts: Any, context: str) -> list[tuple[Any, Any]]:
    """Pair answer texts with starts. `answers`: an object, a text, or a list of either. `starts`: a start or a list."""
    if isinstance(answers, dict):
        if "text" not in answers:
            raise Mistake("wrong structure", f'has no "text" ({shown(answers)})', at)
        if _SPANS in answers:
            return _in_spans(at, answers["text"], answers[_SPANS], context)
        return _pairs(at, answers["text"], answers.get("answer_start"), context)
    if isinstance(answers, list) and any(isinstance(answer, dict) for answer in answers):
        return [pair for n, answer in enumerate(answers) for pair in _pairs(f"{at}[{n}]", answer, None, context)]
    texts = answers if isinstance(answers, list) else [answers]
    starts = starts if isinstance(starts, list) else [starts]
    starts = [] if all(map(_is_unknown, starts)) else starts
    texts = texts * len(starts) if len(texts) == 1 < len(starts) else texts  # one text that occurs several times
    if starts and len(starts) != len(texts):
        raise Mistake("wrong structure", f"there are {len(texts)} texts, but {len(starts)} answer_start", at)
    return list(zip_longest(texts, starts))


def _in_spans(at: str, text: Any, spans: Any, context: str) -> list[tuple[Any, Any]]:
    """Pair an answer's text with its starts in MRQA's spans, or the texts of the hub's columns with theirs.

    A span's last character belongs to it. Its text may differ from `text` in case and spaces, and then replaces it.
    """
    if isinstance(text, list) and isinstance(spans, list) and len(text) == len(spans):
        return [pair for some in zip(text, spans, strict=True) for pair in _in_spans(at, *some, context)]
    if isinstance(spans, dict):  # the hub's columns
        columns = [spans.get("start"), spans.get("end")]
        spans = [*zip_longest(*_converted(f"{at}.{_SPANS}", columns, list[list[int]]))]
    pairs = []
    for start, last in _converted(f"{at}.{_SPANS}", spans, list[tuple[int, int]]):
        found = context[start : last + 1] if start >= 0 else ""
        same = not context.startswith(str(text), start) and plain(found) == plain(str(text))
        pairs.append((found if same else text, start))
    return pairs or [(text, None)]


def _find(at: str, context: str, text: Any, start: Any) -> tuple[str, int | None, Mistake | None]:
    """Find an answer in its context. Returns its text in the context's Unicode form, and its start or None if unknown.

    If the answer is not at `start`, but exactly once elsewhere, returns this position and the mistake. Raises Mistake
    if it is neither, or if the first answer has no start and is not in the context exactly once.
    """
    is_number, text = not isinstance(text, str), _answer_text(f"{at}.text", text, context)
    start = None if _is_unknown(start) else _converted(f"{at}.answer_start", start, int)
    forms = (text, normalize("NFC", text), normalize("NFD", text))
    if start is not None and start >= 0:
        for form in forms:
            if context.startswith(form, start):
                return form, start, None
    answer = next((form for form in forms if form in context), text)
    position = context.find(answer)
    once = position >= 0 and context.rfind(answer) == position
    if start is None and (once or at != "answers[0]"):  # only the metric uses further answers, and it compares texts
        return (answer, position, None) if once else (text, None, None)
    describe = partial(_misplaced, context, text, start, position if once else None, is_number)
    mistake = Mistake("misplaced answer", describe, "answers")
    if once:
        return answer, position, mistake
    raise mistake


def _misplaced(context: str, text: str, start: int | None, only: int | None, is_number: bool) -> str:
    """Describe a misplaced answer. `only`: where its text is, if it is in the context exactly once."""
    reason = f"the answer {SHORT.repr(text)} is not in its context"
    if start is not None:
        found = context[start : start + len(text)] if start >= 0 else ""
        reason = f"the context has {SHORT.repr(found)} at character {start}, not the answer {SHORT.repr(text)}"
    elif text in context:
        reason = f"the answer {SHORT.repr(text)} is in its context more than once: add its answer_start"
    elsewhere = "" if only is None else f"the answer is at character {only}"
    if text not in context:
        elsewhere = look_alike(text, context) or ("write answers as text in quotes" if is_number else "")
    return f"{reason}; {elsewhere}" if elsewhere else reason


# --- values --------------------------------------------------------------------------------------


def _parsed(field: str, value: Any, context: str) -> Any:
    """Parse a cell in the notation of JSON, Python or numpy. Returns plain texts and other values unchanged.

    Raises Mistake if a text begins like a list or an object but cannot be parsed.
    """
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    if value in context and value.strip("[{}] "):  # an answer's text, such as the footnote number [1]
        return value
    for parse in (json.loads, _literal, lambda text: _literal(_NAN.sub("None", _NUMPY.sub("", text)))):
        try:
            return parse(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise Mistake("wrong structure", f"should be JSON such as {_EXAMPLE}, or an answer's text ({shown(value)})", field)


def _literal(text: str) -> Any:
    """Parse a literal in Python's notation. Raises ValueError and the errors of ast.literal_eval."""
    if _NO_COMMA.search(text):
        raise ValueError("texts without a comma between them, as in numpy's arrays, which Python would join")
    return ast.literal_eval(text)


def _converted(path: str, value: Any, kind: Any) -> Any:
    """Convert a value to the type `kind`: "16" and 16.0 become 16, "False" becomes False. Raises Mistake."""
    try:
        return msgspec.convert(value.strip() if kind is int and isinstance(value, str) else value, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for half of a surrogate pair
        field = path or str(error).partition(" - at ")[2].strip("`$.") or "is_impossible"
        found = value if path else value[field]
        text = "text in quotes" if isinstance(found, int | float) else "text"
        expected = _TYPES.get(field.rpartition(".")[2], text)
        raise Mistake("wrong type", f"should be {expected} ({shown(found)})", field) from None


def _answer_text(path: str, answer: Any, context: str) -> str:
    """Convert an answer to text. 1800.0 is "1800" or "1800.0", and 0.5 is "0.5", if the context has this number."""
    number = answer
    if isinstance(answer, str) and WHOLE.fullmatch(answer) and answer not in context:
        number = float(answer)  # pandas writes 1800 as 1800.0 to CSV if an answer is missing
    if isinstance(number, float | Decimal):
        for text in [f"{number:.0f}"] * (number % 1 == 0) + [str(number)]:
            if re.search(rf"(?<!\d)(?<!\d[.,]){re.escape(text)}(?![.,]?\d)", context):
                return text
    return as_text(path, answer)


def as_text(path: str, value: Any) -> str:
    """Convert a text or an integer to text. Raises Mistake for other types."""
    return str(_converted(path, value, _Text))


def _is_missing(value: Any, context: str = "") -> bool:
    """Return whether a value is None, NaN, empty, or a word such as "null" that does not occur in `context`."""
    if isinstance(value, str):
        word = value.strip().lower()
        return not word or (word in ("nan", "none", "null", "na", "<na>") and value not in context)
    return value is None or bool(value != value)


def _is_unknown(start: Any) -> bool:
    """Return whether an answer's start is missing or -1."""
    return _is_missing(start) or bool(_NOT_FOUND.fullmatch(str(start)))


def shown(value: Any) -> str:
    """Describe a value for a message: its start, or an object's first keys."""
    if isinstance(value, dict):
        return f"found an object with {', '.join(map(SHORT.repr, list(value)[:5])) or 'nothing in it'}"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"found {text if len(text) <= 40 else text[:40] + '...'}"
