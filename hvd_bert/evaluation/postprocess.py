"""Converts logits to answers: finds the n best spans of each question from the logits of its windows.

The rules and the entries of the output files are those of `postprocess_qa_predictions` in transformers' run_qa example,
except for the search and for spans in several windows. run_qa pairs the `n_best_size` highest starts of a window with
its `n_best_size` highest ends, and can miss a good span (a start outside the top 20 with a very high end). Here every
pair within `max_answer_length` is scored, as a banded (T, max_answer_length) matrix for T context tokens. So the result
is exact, and run_qa's search approximates it. A span in several windows is one candidate, with its highest score, where
run_qa lists it once per window.

Among spans of equal score, the earliest wins, then the shortest, so that the result does not depend on the order of
the windows or the number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float32]
_Columns = npt.NDArray[np.float64]  # n candidates, [5, n]: score, start and end character, start and end logit
_Row = tuple[float, int | None, int | None, float, float]  # one candidate; None, None: "no answer"
_NO_ANSWER: _Row = (0.0, None, None, 0.0, 0.0)

# Null odds of a question without any span. Above all thresholds and, unlike infinity, valid JSON.
CERTAINLY_NO_ANSWER = sys.float_info.max


@dataclass(frozen=True)
class SpanOptions:
    """Settings for extracting answers, with run_qa's names and defaults."""

    n_best_size: int = 20
    max_answer_length: int = 30  # tokens
    version_2_with_negative: bool = False
    null_score_diff_threshold: float = 0.0  # v2.0: the answer is "" if the null odds exceed this
    listed: int = 0  # number of candidates to list, if more than n_best_size
    distinct_texts: bool = False  # of spans with the same text, only the best is listed


@dataclass(frozen=True, slots=True)
class WindowLogits:
    """The logits of a window ([CLS] question [SEP] context piece [SEP]) without padding. T: tokens of the piece."""

    question: int  # index into the questions passed to `answers_of`
    context_start: int  # index of the first context token in the window
    char_starts: IntArray  # (T,) index of each context token's first character in the context
    char_ends: IntArray  # (T,) index after its last character in the context
    start_logits: FloatArray  # (context_start + T + 1,)
    end_logits: FloatArray  # (context_start + T + 1,)


@dataclass(frozen=True)
class Candidate:
    """A possible answer: the characters [start, end) of the context.

    For "no answer", `text` is empty, and `start` and `end` are None.
    `probability`: exp(score) divided by its sum over the n best candidates. The keys of the question-answering pipeline
    of transformers 4 also work: candidate["answer"], ["start"], ["end"] and ["score"].
    """

    text: str
    start: int | None
    end: int | None
    probability: float
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.probability

    def __getitem__(self, key: str) -> Any:
        return {"answer": self.text, "start": self.start, "end": self.end, "score": self.score}[key]


@dataclass(frozen=True)
class Answer(Candidate):
    """The candidate that was chosen as a question's answer. `text` is "" if the context does not answer the question.

    `null_odds`: for SQuAD v2.0, the score of "no answer" minus that of the best span; else None. `nbest`: the best
    candidates, best first.
    """

    id: str = field(compare=False)
    null_odds: float | None
    nbest: tuple[Candidate, ...] = field(repr=False)

    @property
    def best_span(self) -> str:
        """Text of the best span, regardless of the score of "no answer"; "" if there is no span."""
        return next((candidate.text for candidate in self.nbest if candidate.text), "")


def answers_of(questions: Sequence[Question], windows: Iterable[WindowLogits], options: SpanOptions) -> list[Answer]:
    """Answer each question, in the order of `questions`. The windows may be in any order.

    A candidate is a start and an end in the context of one window, with end >= start and at most `max_answer_length`
    tokens. Its score is the sum of the two logits. The n best are the `n_best_size` best candidates over all windows
    of a question. A span that is in several windows has its highest score. Equal texts of two spans are two candidates.
    `listed` and `distinct_texts` change the list `nbest`, but no probability.

    v1.1: the best candidate is the answer. v2.0: the score of "no answer" is the minimum of start[CLS] + end[CLS] over
    the windows. "No answer" (text "") is sorted into the n best by its score; if its score is too low, it is the last
    entry. The best span is always included. A question without candidates gets the answer "" with probability 1, where
    run_qa gives "empty".

    Raises UserError if a logit is not finite.
    """
    found: list[tuple[list[_Columns], list[_Row]]] = [([], []) for _ in questions]
    for window in windows:  # handled one by one, while a GPU computes the next batch
        _check(window, questions[window.question].id)
        candidates, nulls = found[window.question]
        start_logit, end_logit = window.start_logits[0], window.end_logits[0]
        nulls.append((float(start_logit + end_logit), None, None, float(start_logit), float(end_logit)))
        if len(window.char_starts):
            candidates.append(_best_candidates(window, questions[window.question].context, options))
    return [_answer(q, *of_question, options) for q, of_question in zip(questions, found, strict=True)]


def _answer(question: Question, candidates: Sequence[_Columns], nulls: Sequence[_Row], options: SpanOptions) -> Answer:
    columns = np.concatenate(candidates, axis=1) if candidates else np.empty((5, 0))
    rows = listed = _best(columns, options.n_best_size)
    count = max(options.n_best_size, options.listed)
    if options.distinct_texts or count > options.n_best_size:
        listed = _best(columns, count, question.context if options.distinct_texts else None)
    is_answered, null_odds = bool(rows), None
    if options.version_2_with_negative:
        null = min(nulls, key=lambda row: (row[0], *row[3:]), default=_NO_ANSWER)  # of all windows, as in run_qa
        null_odds = null[0] - rows[0][0] if rows else CERTAINLY_NO_ANSWER
        is_answered = is_answered and not null_odds > options.null_score_diff_threshold
        rows, listed = _with_null(rows, null, options.n_best_size), _with_null(listed, null, count)
    elif not rows:
        rows = listed = [_NO_ANSWER]

    scores, listed_scores = (np.array([score for score, *_ in some]) for some in (rows, listed))
    total = np.exp(scores - scores.max()).sum()
    probabilities = np.exp(listed_scores - scores.max()) / total
    nbest = tuple(
        Candidate("" if start is None else question.context[start:end], start, end, probability, *logits)
        for (_, start, end, *logits), probability in zip(listed, probabilities.tolist(), strict=True)
    )
    # The threshold, not the order, decides between "no answer" and the best span.
    chosen = next(candidate for candidate in nbest if bool(candidate.text) == is_answered)
    return Answer(**vars(chosen), id=question.id, null_odds=null_odds, nbest=nbest)


def _with_null(rows: list[_Row], null: _Row, count: int) -> list[_Row]:
    """Insert "no answer" into the spans `rows` by its score, after spans of equal score.

    If there are `count` spans, "no answer" replaces the worst, unless that is the only span or "no
    answer" comes after all spans.
    """
    rank = sum(score >= null[0] for score, *_ in rows)
    spans = max(1, count - 1) if rank < count else count
    rows = rows[:spans]
    return [*rows[:rank], null, *rows[rank:]]


def _best(candidates: _Columns, count: int, text: str | None = None) -> list[_Row]:
    """Return the `count` best candidates with different positions or, if the context `text` is given, texts."""
    score, start, end, start_logit, _ = candidates
    # -start_logit, the key of lowest priority, orders only duplicates of a span from two windows.
    order = np.lexsort((-start_logit, end, start, -score))
    best: dict[str | tuple[int, int], _Row] = {}
    for index in order:
        score, start, end, *logits = candidates[:, index].tolist()
        place = int(start), int(end)
        key = place if text is None else text[slice(*place)]
        if key not in best:
            best[key] = (score, *place, *logits)
            if len(best) == count:
                break
    return [*best.values()]


def _best_candidates(window: WindowLogits, text: str, options: SpanOptions) -> _Columns:
    """Return a window's candidates that may be listed for its question, unordered. Requires T >= 1.

    Includes all candidates that tie with the n-th best, since ties are broken over all windows of the question.
    `text`: the context.
    """
    num_tokens = len(window.char_starts)
    context = slice(window.context_start, window.context_start + num_tokens)
    starts, ends = window.start_logits[context], window.end_logits[context]
    without_text = window.char_ends <= window.char_starts
    if without_text.any():  # byte-level tokens of repeated blanks would give the answer ""
        starts, ends = (np.where(without_text, np.float32(-np.inf), side) for side in (starts, ends))

    # scores[s, k]: score of the span from token s to token s + k; -inf if it ends after the context.
    length = min(options.max_answer_length, num_tokens)
    padded_ends = np.concatenate((ends, np.full(length - 1, -np.inf, dtype=np.float32)))
    scores = (starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded_ends, length)).ravel()
    listed = count = max(options.n_best_size, options.listed)
    different: set[str | tuple[int, int]] = set()
    while len(different) < listed:  # once, unless texts repeat or tokens share their characters (emoji)
        count = min(count, scores.size)
        floor = np.partition(scores, scores.size - count)[scores.size - count]
        chosen = np.flatnonzero((scores >= floor) & (scores > -np.inf))
        first, extra = np.divmod(chosen, length)
        last = first + extra
        char_starts, char_ends = window.char_starts[first], window.char_ends[last]
        for place in zip(char_starts.tolist(), char_ends.tolist(), strict=True):
            different.add(text[slice(*place)] if options.distinct_texts else place)
            if len(different) == listed:
                break
        if count == scores.size:
            break
        count *= 2
    return np.stack((scores[chosen], char_starts, char_ends, starts[first], ends[last]), dtype=np.float64)


def _check(window: WindowLogits, question_id: str) -> None:
    for name, logits in (("start", window.start_logits), ("end", window.end_logits)):
        if not np.isfinite(logits).all():
            raise UserError(
                f"question {question_id}: the model's {name} logits are not finite (NaN or infinite). "
                "Its weights are damaged or its training diverged. Try a lower learning rate, or train without --fp16."
            )
