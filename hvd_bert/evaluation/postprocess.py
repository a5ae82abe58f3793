"""Logits to spans: the n best answers of each question from the logits of its windows.

Rules and file entries are those of `postprocess_qa_predictions` in transformers' run_qa example, with one
difference: run_qa pairs the `n_best_size` highest starts of a window with its `n_best_size` highest ends, and
can miss a good span (a start outside the top 20 with a very high end). Here every pair within
`max_answer_length` is scored, as a banded (T, max_answer_length) matrix for T context tokens. The result is
exact; run_qa's search approximates it.

Ties go to the earliest span, then to the shortest, so that the result does not depend on the order of the
windows or the number of ranks. Needs numpy only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float32]
Entry = dict[str, float | str]
# Score, start logit and end logit of "no answer". A question has the minimum of its windows, as in run_qa.
_Null = tuple[float, float, float]

# The null odds if there is no span to compare with: above any threshold and, unlike infinity, valid JSON.
CERTAINLY_NO_ANSWER = sys.float_info.max


@dataclass(frozen=True)
class SpanOptions:
    """Defines what counts as an answer, with run_qa's names and defaults."""

    n_best_size: int = 20
    max_answer_length: int = 30  # in tokens
    version_2_with_negative: bool = False
    null_score_diff_threshold: float = 0.0  # the answer is "" if the null odds are above this


@dataclass(frozen=True, slots=True)
class WindowLogits:
    """One window, [CLS] question [SEP] context piece [SEP] without padding, and its logits.

    T is the number of context tokens; the window has `context_start + T + 1` tokens in total.
    """

    question: int  # index into the questions passed to `answers_of`, which may be one rank's share
    context_start: int  # index of the first context token
    char_starts: IntArray  # (T,) first character of each context token, in the question's context
    char_ends: IntArray  # (T,) index after its last character
    start_logits: FloatArray  # (context_start + T + 1,)
    end_logits: FloatArray  # (context_start + T + 1,)


@dataclass(frozen=True)
class Answer:
    """The answer to one question, and the n best candidates."""

    id: str
    text: str  # "": no answer
    nbest: list[Entry]  # best first: text, start_logit, end_logit, probability (sums to 1)
    null_odds: float | None  # v2: score of "no answer" minus that of the best span
    spans: list[tuple[int, int] | None]  # of the n best: the characters [start, end) in the context; None: no answer

    @property
    def best_span(self) -> str:
        """The best answer that is not empty, whatever "no answer" scores; "" if there is no span."""
        return next((str(entry["text"]) for entry in self.nbest if entry["text"]), "")


@dataclass(frozen=True)
class _Spans:
    """Candidates as columns, all of length n."""

    score: FloatArray
    char_start: IntArray
    char_end: IntArray
    start_logit: FloatArray
    end_logit: FloatArray

    def __len__(self) -> int:
        return len(self.score)

    def best(self, count: int) -> _Spans:
        """The `count` best, best first. The last sort key only orders duplicates: one span in two windows."""
        order = np.lexsort((-self.start_logit, self.char_end, self.char_start, -self.score))[:count]
        return _Spans(*(column[order] for column in self._columns()))

    @staticmethod
    def concatenate(parts: Sequence[_Spans]) -> _Spans:
        columns = zip(*(part._columns() for part in parts), strict=True)
        return _Spans(*map(np.concatenate, columns))

    def rows(self) -> Iterator[tuple[float, int, int, float, float]]:
        return zip(*(column.tolist() for column in self._columns()), strict=True)

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.score, self.char_start, self.char_end, self.start_logit, self.end_logit


def answers_of(questions: Sequence[Question], windows: Iterable[WindowLogits], options: SpanOptions) -> list[Answer]:
    """One answer per question, in the order of `questions`; the windows may be in any order.

    A candidate is a start and an end in the context of one window, with end >= start and at most
    `max_answer_length` tokens; its score is the sum of the two logits. The `n_best_size` best over all windows
    of a question are kept. Equal texts from two windows or two spans stay two entries, as in run_qa.

    v1.1: the best candidate is the answer. v2.0: the null score is the minimum of start[CLS] + end[CLS] over the
    windows. Its entry (text "") is among the n best by its score, or last if its score is too low. The best span
    is always included, too. A question without a candidate (no context token in any window, or no window) gets
    the answer "" with probability 1; run_qa gives the word "empty".

    Raises UserError if a logit is not finite.
    """
    found: list[tuple[list[_Spans], list[_Null]]] = [([], []) for _ in questions]
    for window in windows:  # at once: a GPU computes the next batch meanwhile
        _check(window, questions[window.question].id)
        parts, nulls = found[window.question]
        start_logit, end_logit = window.start_logits[0], window.end_logits[0]
        nulls.append((float(start_logit + end_logit), float(start_logit), float(end_logit)))
        if len(window.char_starts):
            parts.append(_best_of_window(window, options))
    return [_answer(q, parts, nulls, options) for q, (parts, nulls) in zip(questions, found, strict=True)]


def _answer(question: Question, parts: Sequence[_Spans], nulls: Sequence[_Null], options: SpanOptions) -> Answer:
    spans = _Spans.concatenate(parts).best(options.n_best_size) if parts else None
    if spans is None or not len(spans):
        return _no_candidate(question, nulls, options)

    scores = spans.score.astype(np.float64)
    places: list[tuple[int, int] | None] = [(char_start, char_end) for _, char_start, char_end, *_ in spans.rows()]
    entries: list[Entry] = [
        {"text": question.context[char_start:char_end], "start_logit": start_logit, "end_logit": end_logit}
        for _, char_start, char_end, start_logit, end_logit in spans.rows()
    ]
    text, null_odds = str(entries[0]["text"]), None
    if options.version_2_with_negative:
        null_score, start_logit, end_logit = min(nulls)
        null_odds = null_score - float(scores[0])
        if null_odds > options.null_score_diff_threshold:
            text = ""
        # On equal scores, the span comes first. The null entry replaces the worst span, but not the only one.
        rank = int(np.count_nonzero(scores >= null_score))
        kept = max(1, options.n_best_size - 1) if rank < options.n_best_size else options.n_best_size
        entries, scores, places = entries[:kept], scores[:kept], places[:kept]
        entries.insert(rank, {"text": "", "start_logit": start_logit, "end_logit": end_logit})
        places.insert(rank, None)
        scores = np.insert(scores, rank, null_score)

    weights = np.exp(scores - scores.max())
    for entry, probability in zip(entries, (weights / weights.sum()).tolist(), strict=True):
        entry["probability"] = probability
    return Answer(question.id, text, entries, null_odds, places)


def _best_of_window(window: WindowLogits, options: SpanOptions) -> _Spans:
    """The candidates of a window that may be among the n best of its question, unordered; T >= 1.

    All ties with the n-th best are kept, since only the comparison of all windows can break them.
    """
    num_tokens = len(window.char_starts)
    context = slice(window.context_start, window.context_start + num_tokens)
    starts, ends = window.start_logits[context], window.end_logits[context]
    without_text = window.char_ends <= window.char_starts
    if without_text.any():  # byte-level tokens of repeated blanks; alone they would give the answer ""
        starts, ends = (np.where(without_text, np.float32(-np.inf), side) for side in (starts, ends))

    # scores[s, k]: start s, end s + k; ends after the context are -inf.
    length = min(options.max_answer_length, num_tokens)
    padded_ends = np.concatenate((ends, np.full(length - 1, -np.inf, dtype=np.float32)))
    scores = (starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded_ends, length)).ravel()
    count = min(options.n_best_size, scores.size)
    floor = np.partition(scores, scores.size - count)[scores.size - count]
    chosen = np.flatnonzero((scores >= floor) & (scores > -np.inf))
    first, extra = np.divmod(chosen, length)
    last = first + extra
    char_starts, char_ends = window.char_starts[first], window.char_ends[last]
    return _Spans(scores[chosen], char_starts, char_ends, starts[first], ends[last])


def _no_candidate(question: Question, nulls: Sequence[_Null], options: SpanOptions) -> Answer:
    start_logit = end_logit = 0.0
    if options.version_2_with_negative and nulls:
        _, start_logit, end_logit = min(nulls)
    nothing: Entry = {"text": "", "start_logit": start_logit, "end_logit": end_logit, "probability": 1.0}
    null_odds = CERTAINLY_NO_ANSWER if options.version_2_with_negative else None
    return Answer(question.id, "", [nothing], null_odds, [None])


def _check(window: WindowLogits, question_id: str) -> None:
    for name, logits in (("start", window.start_logits), ("end", window.end_logits)):
        if not np.isfinite(logits).all():
            raise UserError(
                f"question {question_id}: the model's {name} logits are not finite (NaN or infinite). "
                "Its weights are damaged or its training diverged. Try a lower learning rate, or train without --fp16."
            )
