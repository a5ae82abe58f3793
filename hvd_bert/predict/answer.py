"""An answer as programs and files get it, with its place in the context."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_bert.evaluation.postprocess import Answer


@dataclass(frozen=True)
class Candidate:
    """A possible answer: the characters [start, end) of the context, or "no answer": "" without a place."""

    text: str
    start: int | None
    end: int | None
    score: float  # probability among the n best
    start_logit: float
    end_logit: float


@dataclass(frozen=True)
class FoundAnswer:
    """The answer to a question. `text` is "" if the context does not answer it; then `start` and `end` are None.

    `score`: its probability among the n best. `null_odds`: for SQuAD 2.0, the score of "no answer" minus that of the
    best span. `nbest`: the best candidates, best first.
    """

    text: str
    start: int | None
    end: int | None
    score: float
    null_odds: float | None
    nbest: tuple[Candidate, ...]

    @staticmethod
    def of(answer: Answer) -> FoundAnswer:
        """The same answer as the evaluation has it."""
        candidates = tuple(
            Candidate(
                text=str(entry["text"]),
                start=span[0] if span else None,
                end=span[1] if span else None,
                score=float(entry["probability"]),
                start_logit=float(entry["start_logit"]),
                end_logit=float(entry["end_logit"]),
            )
            for entry, span in zip(answer.nbest, answer.spans, strict=True)
        )
        # Not always the first: the threshold for "no answer" may prefer another.
        chosen = next(candidate for candidate in candidates if bool(candidate.text) == bool(answer.text))
        return FoundAnswer(chosen.text, chosen.start, chosen.end, chosen.score, answer.null_odds, candidates)
