"""Questions, and how they are read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass


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
