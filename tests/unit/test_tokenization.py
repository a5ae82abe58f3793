"""Cutting of questions into windows: labels compared with a slow search, single cases, unsupported tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from hvd_bert.data.sources.squad import Question
from hvd_bert.data.window_cutting import WindowOptions, WindowTokenizer, cut


def to_windows(tokenizer, questions, length=384, stride=128):
    """Cut questions into windows. Returns the table's rows, and the counts of questions and windows."""
    batches, counts = cut(WindowTokenizer(tokenizer, WindowOptions(length, stride)), questions, 0)
    return [row for batch in batches for row in batch.to_pylist()], counts


def ask(context, answer=None, question="what?", start=None) -> Question:
    if answer is None:
        return Question("id", "", context, question, (), ())
    start = context.index(answer) if start is None else start
    return Question("id", "", context, question, (answer,), (start,))


def spans_of(row) -> list[tuple[int, int]]:
    return list(zip(row["char_starts"], row["char_ends"], strict=True))


def answer_of(question: Question, row) -> str:
    """Return the text that a window's labels mark in the context."""
    start = row["char_starts"][row["start_position"] - row["context_start"]]
    return question.context[start : row["char_ends"][row["end_position"] - row["context_start"]]]


# --- any text --------------------------------------------------------------------------------------

# ASCII, composed and decomposed accents, CJK, Hangul (which NFD decomposes), emoji outside the BMP,
# several kinds of blanks, a zero-width joiner and a control character.
LETTERS = ["the", "red", "boxes", "I", "42", ".", ",", "-", "é", "e\u0301", "ñ", "\ufb01", "İ", "ß"]
OTHERS = ["東", "京", "한", "글", "🙂", "👩\u200d🚀", "\x07"]
BLANKS = [" ", " ", " ", "  ", "\n", "\t", "\u00a0", "\u3000"]
PIECES = LETTERS + OTHERS + BLANKS
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=80).map("".join).filter(str.strip)


@st.composite
def cases(draw):
    """Draw questions, window length and stride. Each context has up to three questions."""
    questions = []
    for context in draw(st.lists(texts, min_size=1, max_size=3)):
        for _ in range(draw(st.integers(1, 3))):
            text, start = None, None
            if draw(st.booleans()):
                start = draw(st.integers(0, len(context) - 1))
                text = context[start : draw(st.integers(start + 1, len(context)))]
                text = text if text.strip() else None
            asked = draw(st.sampled_from(["what", "  the red?", "é 東?"]))
            questions.append(ask(context, text, asked, start))
    stride = draw(st.integers(0, 12))
    return questions, draw(st.integers(stride + 12, stride + 40)), stride


@given(cases())
@settings(max_examples=300)
def test_label_is_exact_in_each_window_with_the_whole_answer(tokenizer, case):
    questions, length, stride = case
    rows, counts = to_windows(tokenizer, questions, length, stride)
    found, tokenless = set(), 0
    for index, question in enumerate(questions):
        encoding = tokenizer(question.context, add_special_tokens=False, return_offsets_mapping=True)
        expected = []  # the context's tokens that share a character with the answer
        if question.answer_texts:
            text, start = question.answer_texts[0], question.answer_starts[0]
            end = start + len(text.rstrip())
            start += len(text) - len(text.lstrip())
            spans = enumerate(encoding["offset_mapping"])
            expected = [token for token, span in spans if span[0] < end and span[1] > start]
            tokenless += not expected
        begin = 0  # number of context tokens before the window
        for row in (row for row in rows if row["question"] == index):
            size = row["context_end"] - row["context_start"]
            label = row["start_position"], row["end_position"]
            if expected and begin <= expected[0] and expected[-1] < begin + size:
                shift = row["context_start"] - begin
                assert label == (expected[0] + shift, expected[-1] + shift)
                found.add(index)
            else:
                assert label == (0, 0)
            begin += size - stride
    answerable = sum(bool(question.answer_texts) for question in questions)
    assert counts.answerable_questions == answerable
    assert counts.tokenless_answers == tokenless
    assert counts.cut_answers == answerable - tokenless - len(found)


# --- single cases ----------------------------------------------------------------------------------


def test_label_of_the_first_answer(tokenizer):
    question = Question("id", "", "red, green and red", "what?", ("green", "red"), (5, 0))
    (row,), _ = to_windows(tokenizer, [question])
    assert answer_of(question, row) == "green"


def test_long_question_leaves_room_for_the_context_and_is_counted(tokenizer):
    question = ask(" ".join(["the"] * 7), question=" ".join(["red"] * 50))
    rows, counts = to_windows(tokenizer, [question, ask("the box")], length=20, stride=4)
    assert counts.shortened_questions == 1
    long_rows = [row for row in rows if row["question"] == 0]
    assert all(len(row["input_ids"]) == 20 for row in long_rows)
    assert [row["context_end"] - row["context_start"] for row in long_rows] == [5, 5, 5]
    assert [row["char_starts"][0] for row in long_rows] == [0, 4, 8]


@pytest.mark.parametrize(
    ("tokens", "length", "stride", "step"),
    [
        *((64, 384, 128, 189), (65, 384, 128, 188), (200, 384, 128, 53)),  # as run_qa
        *((250, 384, 128, 32), (2000, 384, 128, 32), (90, 100, 0, 7), (90, 100, 64, 16)),
        *((30, 100, 64, 3), (64, 100, 64, 1)),  # as run_qa: these settings leave no room for any question
    ],
)
def test_windows_of_a_long_question_advance_by_a_quarter(tokenizer, tokens, length, stride, step):
    rows, counts = to_windows(tokenizer, [ask("red " * 600, "red", "the " * tokens), ask("red")], length, stride)
    starts = [row["char_starts"][0] // 4 for row in rows if row["question"] == 0]
    size = rows[0]["context_end"] - rows[0]["context_start"]
    assert set(np.diff(starts)) == {step} and starts[-1] + size >= 600 > starts[-2] + size
    crowded = size - stride < max(1, size // 4)
    assert (counts.crowded_questions, counts.crowded_windows) == ((1, len(rows) - 1) if crowded else (0, 0))


def test_leading_blanks_of_a_question_are_stripped(tokenizer):
    (row,), counts = to_windows(tokenizer, [ask("the box", question=" " * 25000 + "red?")])
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert tokens == ["[CLS]", "red", "?", "[SEP]", "the", "box", "[SEP]"]
    assert counts.shortened_questions == 0


def test_texts_without_a_token_still_give_a_window(tokenizer):
    (row,), counts = to_windows(tokenizer, [ask("\x07", "\x07", question=" ")])
    assert row["input_ids"] == [2, 3, 3]
    assert row["context_start"] == row["context_end"] == 2
    assert counts.tokenless_answers == 1


# --- unsupported tokenizers ------------------------------------------------------------------------


def test_slow_tokenizers_and_left_padding_are_refused(make_tokenizer, monkeypatch):
    other = make_tokenizer()
    other.padding_side, other.name_or_path = "left", "NAME"
    with refused("NAME", "padding_side", "--tokenizer_name"):
        WindowTokenizer(other, WindowOptions())
    monkeypatch.setattr(type(other), "is_fast", False)
    with refused("NAME", "slow", "--tokenizer_name"):
        WindowTokenizer(other, WindowOptions())


UNSUPPORTED = {
    "context first": "[CLS] $B [SEP] $A [SEP]",
    "[CLS] last": "$A [SEP] $B [SEP] [CLS]",
    "two tokens at the end": "[CLS] $A [SEP] $B [SEP] [SEP]",
    "token types of three parts": "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:2",
}


@pytest.mark.parametrize("pair", UNSUPPORTED.values(), ids=[*UNSUPPORTED])
def test_unsupported_layouts_are_refused(tokenizer, pair):
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()  # another test may have enabled padding
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A", pair=pair, special_tokens=special)
    other = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]")
    encoded = backend.encode("a", "b")
    with refused(type(other).__name__, " ".join(encoded.tokens), encoded.type_ids, "--tokenizer_name"):
        WindowTokenizer(other, WindowOptions())
