"""Questions, how they are read, and the mistakes in them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

Purpose = Literal["training", "evaluation", "prediction"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one context.

    `answer_texts[i]` starts at character `answer_starts[i]` of `context`; None: its place is not known, and only the
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
    """How the questions of a source are read.

    The columns are those of flat rows. `bad_examples`: whether a question with a mistake is an error or is left out.
    `purpose`: training needs the places of answers, evaluation only their texts, prediction neither.
    """

    question_column: str = "question"
    context_column: str = "context"
    answer_column: str = "answers"
    bad_examples: str = "error"
    purpose: Purpose = "training"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that must exist."""
        needed = (self.context_column, self.question_column, self.answer_column)
        return needed if self.purpose != "prediction" else needed[:2]

    def digest(self, content_digest: str, version_2_with_negative: bool) -> str:
        """SHA-256 of a content and of everything that decides which questions it gives, or whether it is refused.

        Otherwise windows that were cached by a run with one setting would hide an error from a run with another.
        """
        text = f"{content_digest} {version_2_with_negative}"
        same_questions = self.bad_examples == "error" and self.purpose == "evaluation"
        settings = asdict(replace(self, purpose="training") if same_questions else self)
        if settings != asdict(Reading()):
            text += json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BadExample:
    """A question, or a larger part of the data, with a mistake. `skipped`: it is left out."""

    where: str
    id: str | None
    kind: str
    reason: str
    skipped: bool


class Mistake(Exception):
    """A mistake in the data; the plural of `kind` ends with "s"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(slots=True)
class Found:
    """What is at a place of the data: a question, a mistake, or a question with a mistake in its answers."""

    where: str
    question: Question | None = None
    mistake: Mistake | None = None
