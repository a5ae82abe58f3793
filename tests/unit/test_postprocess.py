"""Span search, compared with a slow but simple reference, and tests of each of run_qa's rules."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from hvd_bert.data.sources.squad import Question
from hvd_bert.evaluation.postprocess import Answer, Candidate, SpanOptions, WindowLogits, answers_of

NUM_QUESTION_TOKENS = 3  # [CLS] word [SEP], so the context starts at index 3
V2 = {"version_2_with_negative": True}
Case = tuple[list[Question], list[WindowLogits], SpanOptions]


def question(num_words: int, id_: str = "q", different: int = 100) -> Question:
    """Make a question whose context is "w0 w1 w2 ...", one token per word, with so many `different` words."""
    context = " ".join(f"w{i % different}" for i in range(num_words))
    return Question(id=id_, title="", context=context, question="?", answer_texts=(), answer_starts=())


def window(
    q: Question, first: int, starts: list[float], ends: list[float], null: Sequence[float] = (0.0, 0.0), index: int = 0
) -> WindowLogits:
    """Make a window of len(starts) words from word `first`, with logits `starts` and `ends` on the context.

    `null`: start and end logit of [CLS]. `index`: the question's number. The question's tokens and the final [SEP]
    have high logits, so a span that wrongly contains one would be the best.
    """
    words = q.context.split()
    begins = [len(" ".join(words[:i])) + (i > 0) for i in range(first, first + len(starts))]
    stops = [begin + len(words[first + i]) for i, begin in enumerate(begins)]
    return WindowLogits(
        question=index,
        context_start=NUM_QUESTION_TOKENS,
        char_starts=np.array(begins, dtype=np.int32),
        char_ends=np.array(stops, dtype=np.int32),
        start_logits=np.array([null[0], 99.0, 99.0, *starts, 99.0], dtype=np.float32),
        end_logits=np.array([null[1], 99.0, 99.0, *ends, 99.0], dtype=np.float32),
    )


def reference(q: Question, windows: list[WindowLogits], options: SpanOptions) -> Answer:
    """Find the answer by sorting all (start, end) pairs of all windows and applying run_qa's final steps."""
    spans: list[tuple[float, int, int, float, float]] = []
    for w in windows:
        for s in range(len(w.char_starts)):
            for e in range(s, len(w.char_starts)):
                if e - s + 1 <= options.max_answer_length:
                    start = float(w.start_logits[w.context_start + s])
                    end = float(w.end_logits[w.context_start + e])
                    spans.append((-(start + end), int(w.char_starts[s]), int(w.char_ends[e]), -start, end))
    count = max(options.n_best_size, options.listed)
    own, listed = (
        best(q, sorted(spans), *how) for how in ((False, options.n_best_size), (options.distinct_texts, count))
    )
    text, null_odds = (listed[0]["text"] if listed else ""), None
    if options.version_2_with_negative:
        nulls = [(float(w.start_logits[0]), float(w.end_logits[0])) for w in windows]
        start, end = min(nulls, key=lambda pair: (sum(pair), pair))
        null = {"text": "", "start_logit": start, "end_logit": end, "score": start + end, "span": None}
        null_odds = null["score"] - listed[0]["score"] if listed else None
        if listed and null_odds > options.null_score_diff_threshold:
            text = ""
        own, listed = with_null(own, null, options.n_best_size), with_null(listed, null, count)
    elif not listed:
        own = listed = [{"text": "", "start_logit": 0.0, "end_logit": 0.0, "score": 0.0, "span": None}]
    total = sum(math.exp(entry["score"]) for entry in own)
    nbest = []
    for entry in listed:
        start, end = entry["span"] or (None, None)
        logits = entry["start_logit"], entry["end_logit"]
        nbest.append(Candidate(entry["text"], start, end, math.exp(entry["score"]) / total, *logits))
    chosen = next(candidate for candidate in nbest if candidate.text == text)
    return Answer(**vars(chosen), id=q.id, null_odds=null_odds, nbest=tuple(nbest))


def best(q: Question, spans: list[Any], distinct_texts: bool, count: int) -> list[dict[str, Any]]:
    different: dict[Any, Any] = {}
    for span in spans:
        different.setdefault(q.context[span[1] : span[2]] if distinct_texts else span[1:3], span)
    return [
        {"text": q.context[a:b], "start_logit": -start, "end_logit": end, "score": -score, "span": (a, b)}
        for score, a, b, start, end in [*different.values()][:count]
    ]


def with_null(listed: list[dict[str, Any]], null: dict[str, Any], count: int) -> list[dict[str, Any]]:
    both = sorted([*listed, null], key=lambda entry: -entry["score"])[:count]
    if null not in both:
        both.append(null)
    return [*both, listed[0]] if listed and both == [null] else both


def assert_same(got: Answer, expected: Answer) -> None:
    assert got.id == expected.id
    if expected.null_odds is not None:
        assert got.null_odds == expected.null_odds
    for mine, theirs in zip((got, *got.nbest), (expected, *expected.nbest), strict=True):
        assert (mine.text, mine.start, mine.end) == (theirs.text, theirs.start, theirs.end)
        assert (mine.start_logit, mine.end_logit) == (theirs.start_logit, theirs.end_logit)
        assert mine.probability == pytest.approx(theirs.probability, rel=1e-9)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw up to six questions with overlapping windows, and options. Logits are coarse, so that ties are common."""
    grid = st.integers(-4, 4).map(lambda n: n / 2)
    questions, windows = [], []
    for index in range(draw(st.integers(1, 6))):
        q = question(draw(st.integers(0, 9)), f"q{index}", draw(st.sampled_from([2, 100])))
        num_words = len(q.context.split())
        size = draw(st.integers(1, 9))
        for first in range(0, max(1, num_words), draw(st.integers(1, size))):
            num = min(size, num_words - first)
            starts, ends = (draw(st.lists(grid, min_size=num, max_size=num)) for _ in "se")
            windows.append(window(q, first, starts, ends, draw(st.tuples(grid, grid)), index))
            if draw(st.booleans()):  # neighboring tokens share their characters, as the bytes of an emoji
                for offsets in (windows[-1].char_starts, windows[-1].char_ends):
                    offsets[1::2] = offsets[: num - num % 2 : 2]
        questions.append(q)
    options = SpanOptions(
        n_best_size=draw(st.sampled_from([1, 2, 3, 20])),
        max_answer_length=draw(st.sampled_from([1, 2, 4, 30])),
        version_2_with_negative=draw(st.booleans()),
        null_score_diff_threshold=draw(st.sampled_from([-1.0, 0.0, 1.5])),
        listed=draw(st.sampled_from([0, 5, 30])),
        distinct_texts=draw(st.booleans()),
    )
    return questions, windows, options


@given(cases(), st.randoms(use_true_random=False))
def test_equals_the_reference_for_each_question_in_any_order(case: Case, rng: random.Random) -> None:
    questions, windows, options = case
    got = answers_of(questions, rng.sample(windows, len(windows)), options)
    assert len(got) == len(questions)
    for index, (q, answer) in enumerate(zip(questions, got, strict=True)):
        assert_same(answer, reference(q, [w for w in windows if w.question == index], options))
        assert answer.best_span == next((c.text for c in answer.nbest if c.start is not None), "")


def only(windows: list[WindowLogits], q: Question, **options: Any) -> Answer:
    (answer,) = answers_of([q], windows, SpanOptions(**options))
    return answer


def test_text_is_cut_by_characters() -> None:
    q = Question(id="q", title="", context="un-do  it", question="?", answer_texts=(), answer_starts=())
    w = window(question(4), 0, [1, 9, 0, 0], [0, 0, 0, 9])
    w = WindowLogits(0, 3, np.array([0, 2, 3, 7]), np.array([2, 3, 5, 9]), w.start_logits, w.end_logits)
    assert only([w], q).text == "-do  it"


def test_tokens_without_characters_are_no_answer() -> None:
    q = question(2)
    w = window(q, 0, [9, 0], [9, 0])
    w = WindowLogits(0, 3, w.char_starts, np.array([0, 5]), w.start_logits, w.end_logits)
    assert only([w], q).nbest == (Candidate("w1", 3, 5, 1.0, 0.0, 0.0),)


def test_null_without_spans() -> None:
    q = question(0)
    for windows in ([], [window(q, 0, [], [], null=(-5, -6))]):
        assert only(windows, q).nbest == (Candidate("", None, None, 1.0, 0.0, 0.0),)
        answer = only(windows, q, null_score_diff_threshold=1e30, **V2)
        assert (answer.text, answer.best_span, len(answer.nbest)) == ("", "", 1)
        assert answer.null_odds is not None and 1e30 < answer.null_odds < math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite(bad: float) -> None:
    q = question(2)
    with refused("question q", "end logits"):
        only([window(q, 0, [0, 0], [0, bad])], q)
