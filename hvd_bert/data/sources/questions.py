"""Questions, the settings for reading them, and the mistakes for which they are refused or left out."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from unicodedata import category, normalize
from unicodedata import name as name_of

from hvd_bert.errors import UserError

SHORT = reprlib.Repr()
SHORT.maxstring = 80  # length limit of texts quoted in messages
MRQA = ("detected_answers", "qid")  # read if the answers have char_spans
_SHOWN = 5  # maximum number of mistakes in a message
UNANSWERED, WORDS = "unanswered question", "list of words"
_WAYS_OUT = {
    UNANSWERED: "For questions without an answer, as in SQuAD v2.0, add --version_2_with_negative.",
    WORDS: "Join the words with spaces and give answers as texts, or train a tagger: examples/tagger.py.",
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context.

    `answer_texts[i]` starts at character `answer_starts[i]` of `context`. If the start is None (unknown), only the
    metric uses the text. Both are empty if the question has no answer (SQuAD v2.0).
    """

    id: str
    title: str
    context: str
    question: str
    answer_texts: tuple[str, ...]
    answer_starts: tuple[int | None, ...]


@dataclass(frozen=True)
class Reading:
    """Settings for reading a source. The column names apply to flat rows only.

    `bad_examples`: "error", "skip" to leave out questions with a mistake, or "repair" to move answers before that.
    `purpose`: "training" needs the answers' positions, "evaluation" needs their texts, and "prediction" needs neither.
    """

    question_column: str = "question"
    context_column: str = "context"
    answer_column: str = "answers"
    bad_examples: str = "error"
    purpose: str = "training"

    @cached_property
    def names(self) -> dict[str, str]:
        """Column names of flat rows, by SQuAD key. Another order would change the digests of hub data sets."""
        names = ("id", "title", "context", "question", "answers", "answer_start", "is_impossible", *MRQA)
        given = {"context": self.context_column, "question": self.question_column, "answers": self.answer_column}
        return {name: given.get(name, name) for name in names}

    def digest(self, content_digest: str, version_2_with_negative: bool) -> str:
        """Hash the content's digest with the settings that decide which questions are used or refused. Returns SHA-256.

        If the hash lacked the settings, windows cached by one run would hide an error from a run with other settings.
        """
        text = f"{content_digest} {version_2_with_negative}"
        same_questions = self.bad_examples == "error" and self.purpose == "evaluation"
        reading = replace(self, purpose="training") if same_questions else self
        if reading != Reading():
            text += json.dumps(asdict(reading), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Mistake(Exception):
    """A mistake in the data.

    `kind`: category, for counts. `reason`: a function if only a shown mistake needs it. `path`: path in the file.
    `given`: the row's id, context and question. `question`: the question, if an evaluation can score it. `repaired`:
    the question with its answers moved to the only occurrences of their texts, if that is the whole mistake.
    """

    given: tuple[Any, Any, Any] = (None, None, None)
    question: Question | None = None
    repaired: Question | None = None

    def __init__(self, kind: str, reason: str | Callable[[], str], path: str) -> None:
        super().__init__()
        self.kind, self.reason, self.path = kind, reason, path

    def __str__(self) -> str:
        reason = self.reason if isinstance(self.reason, str) else self.reason()
        return f"{self.path}: {reason}" if self.path else reason


Found = tuple[str, Question | Mistake]  # (path in the file, question or mistake)


@dataclass(frozen=True)
class Findings:
    """The mistakes and columns that were found in a source.

    Attributes:
        columns: Description of the columns of flat rows; "" if they have SQuAD's names.
        mistakes: Kind of mistake -> number of questions. Empty with `--bad_examples error`.
        first: Descriptions of the first mistakes, with their paths.
        left_out: Number of questions left out.
        repaired, first_repaired: Number of questions with moved answers, and descriptions of the first ones.
    """

    columns: str = ""
    mistakes: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    left_out: int = 0
    repaired: int = 0
    first_repaired: list[str] = field(default_factory=list)

    @staticmethod
    def joined(several: Sequence[Findings]) -> Findings:
        """Add up the counts of several sources. Drops `columns` and `first`."""
        mistakes: Counter[str] = Counter()
        for findings in several:
            mistakes.update(findings.mistakes)
        return Findings(
            mistakes=dict(mistakes),
            left_out=sum(findings.left_out for findings in several),
            repaired=sum(findings.repaired for findings in several),
            first_repaired=[text for findings in several for text in findings.first_repaired][:_SHOWN],
        )


def checked(
    name: str, found: Iterable[Found], version_2_with_negative: bool, reading: Reading
) -> tuple[list[Question], Findings]:
    """Select the usable questions. Raises UserError if there are none, or for mistakes unless `reading` skips them.

    When mistakes are skipped, an evaluation still uses the questions that it can score by their answers' texts.
    """
    questions: list[Question] = []
    mistakes: list[Mistake] = []
    moved: list[Mistake] = []
    paths: dict[str, str] = {}  # question id -> path of its first occurrence
    left_out = 0
    for where, item in found:
        mistake, question = (item, item.question) if isinstance(item, Mistake) else (None, item)
        repaired = mistake.repaired if mistake and reading.bad_examples == "repair" else None
        question = repaired or question
        unusable = _unusable(where, question, paths, version_2_with_negative, reading) if question else mistake
        remaining = unusable or (None if repaired else mistake)
        if remaining:
            mistakes.append(remaining)
        if question and not unusable and (remaining is None or reading.purpose == "evaluation"):
            questions.append(question)
            moved += [mistake] if mistake and repaired else []
        else:
            left_out += 1
    if mistakes and (reading.bad_examples == "error" or not questions):
        first, *others = map(str, mistakes[:_SHOWN])
        shown = "; ".join([first, *(other if len(other) <= 120 else f"{other[:117]}..." for other in others)])
        total = f" ({len(mistakes)} mistakes in {len(questions) + left_out} questions)" if others else ""
        kinds = {mistake.kind for mistake in mistakes}
        ways_out = " ".join(["Fix the file.", *(way_out for kind, way_out in _WAYS_OUT.items() if kind in kinds)])
        if once := sum(mistake.repaired is not None for mistake in mistakes):
            ways_out += f" To move the misplaced answers of {once} question(s) to the only occurrence of their text,"
            ways_out += " add --bad_examples repair."
        if questions and reading.purpose != "prediction":
            ways_out += " To leave out the questions with mistakes, add --bad_examples skip."
        raise UserError(f"{name}: {shown}{total}. {ways_out}")
    if not questions:
        raise UserError(f"{name}: no questions found. Give a file with questions.")
    counts = dict(Counter(mistake.kind for mistake in mistakes).most_common())
    first_mistakes, first_moved = ([*map(str, some[:_SHOWN])] for some in (mistakes, moved))
    return questions, Findings(
        mistakes=counts, first=first_mistakes, left_out=left_out, repaired=len(moved), first_repaired=first_moved
    )


def _unusable(
    where: str, question: Question, paths: dict[str, str], version_2_with_negative: bool, reading: Reading
) -> Mistake | None:
    """Return the mistake that makes a question unusable for its purpose, or None. Records the id in `paths`."""
    label = where if question.id == where else f"question {SHORT.repr(question.id)} ({where})"
    if reason := text_mistake(question):
        return Mistake("unusable text", reason, label)
    if reading.purpose == "prediction":
        return None
    if (first := paths.setdefault(question.id, where)) != where:
        return Mistake("duplicate id", f"{first} has the same id", label)
    if not question.answer_texts and not version_2_with_negative:
        return Mistake(UNANSWERED, "it has no answer", label)
    return None


def text_mistake(question: Question) -> str:
    """Describe the first mistake in the question's texts. Returns "" without mistakes."""
    if not question.context.strip():
        return "its context is empty or missing"
    # A question of blanks is accepted: it has no tokens, but its windows are valid.
    if not question.question:
        return "its question is empty or missing"
    answers = [("answer", text) for text in question.answer_texts]
    for name, text in (("id", question.id), ("context", question.context), ("question", question.question), *answers):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"its {name} contains an unpaired surrogate ({text[error.start]!a}), which is not a character"
    return ""


# --- texts that look equal -----------------------------------------------------------------------


def _plain_marks(text: str) -> str:
    """Replace quotes of all kinds by one kind, and dashes as well."""
    table = {}
    for character in set(text):
        name = name_of(character, "")
        if "QUOTATION" in name or "APOSTROPHE" in name or "PRIME" in name or name in ("GRAVE ACCENT", "ACUTE ACCENT"):
            table[ord(character)] = "'"
        elif category(character) == "Pd" or "MINUS" in name:
            table[ord(character)] = "-"
    return re.sub(r"(['-])\1+", r"\1", text.translate(table))


def _without(text: str, kind: str) -> str:
    """Return a text without the characters of a Unicode category."""
    return "".join(character for character in text if category(character) != kind)


# Differences between texts that look alike -> the function that removes each. Later ones remove more.
_DIFFERENCES: dict[str, Callable[[str], str]] = {
    "Unicode form (normalize both to NFC)": partial(normalize, "NFC"),
    "invisible character": partial(_without, kind="Cf"),
    "kind of space": partial(re.sub, r"\s", " "),
    "number of spaces": lambda text: text.replace(" ", ""),
    "kind of quote or dash": _plain_marks,
    "accent": lambda text: _without(normalize("NFD", text), "Mn"),
    "width or other compatibility form": partial(normalize, "NFKC"),
    "case": str.casefold,
}


def plain(text: str, differences: Iterable[str] = tuple(_DIFFERENCES)) -> str:
    """Return a text without the differences of texts that look alike."""
    for name in differences:
        text = _DIFFERENCES[name](text)
    return text


def look_alike(text: str, context: str) -> str:
    """Describe where the context has a text that looks like `text`, and what differs. Returns "" if it has none."""

    def position(differences: Sequence[str]) -> int:
        return plain(context, differences).find(plain(text, differences))

    needed = list(_DIFFERENCES)
    if not plain(text) or position(needed) < 0:
        return ""
    for name in reversed(_DIFFERENCES):
        fewer = [other for other in needed if other != name]
        needed = fewer if position(fewer) >= 0 else needed
    first = position(needed)
    lengths = range(len(context) + 1)  # of the context's beginnings
    start, end = (
        bisect_right(lengths, length, key=lambda count: len(plain(context[:count], needed))) - 1
        for length in (first, first + len(plain(text, needed)))
    )
    found = SHORT.repr(context[start:end].rstrip())
    return f"with another {' and '.join(needed)} it is at character {start}: {found}"
