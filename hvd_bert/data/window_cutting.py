"""Splits questions and their contexts into windows of tokens, one batch of questions at a time.

A window is `[CLS] question [SEP] piece of the context [SEP]`, or the counterpart with the tokenizer's own special
tokens, for example `<s> question </s></s> piece of the context </s>`. A context that is too long for one window is
split into pieces that overlap by `doc_stride` tokens, exactly as a fast tokenizer does with
`truncation="only_second", stride=doc_stride, return_overflowing_tokens=True` (as in Hugging Face's run_qa), except that
the windows of a question above 64 tokens advance by at least a quarter of their piece. run_qa's may advance by a token.
Here each context is tokenized once, not once per question, which takes about half the time. A test verifies that both
give the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tokenizers

from hvd_bert.data.counts import WindowCounts, has_several_answers, is_unspaced
from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError, as_user_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOWS_AT_ONCE = 4096  # per record batch; bounds memory even if a context has a window per token
_LONG_QUESTION = 64  # tokens, the maximum length of a question in BERT's own script for SQuAD
_NO_TOKENS = (-1, -1)
_NUMBER, _NUMBERS = pa.int32(), pa.list_(pa.int32())
SCHEMA = pa.schema(
    {
        "question": _NUMBER,
        "input_ids": _NUMBERS,
        "context_start": _NUMBER,
        "context_end": _NUMBER,
        "start_position": _NUMBER,
        "end_position": _NUMBER,
        "char_starts": _NUMBERS,
        "char_ends": _NUMBERS,
    }
)
_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WindowOptions:
    """Options for cutting windows. Lengths are in tokens; `max_seq_length` includes special tokens.

    `doc_stride`: overlap of neighboring windows, as in run_qa. `max_samples`: number of questions to use, from the
    first one on; None means all.
    """

    max_seq_length: int = 384
    doc_stride: int = 128
    max_samples: int | None = None


@dataclass(frozen=True)
class Layout:
    """Ids of the special tokens before the question, between question and context, and after the context."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of special tokens in a window."""
        return len(self.before) + len(self.between) + len(self.after)

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> Layout:
        """Return the tokenizer's layout for a pair of texts. Raises UserError if the tokenizer is not supported."""
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise UserError(
                f"{name}: a slow tokenizer, which does not report the positions of its tokens in the text. "
                "Give one with a tokenizer.json or a vocab.txt with --tokenizer_name."
            )
        if tokenizer.padding_side != "right":
            raise UserError(
                f"{name}: this tokenizer pads on the left; run_qa then puts the context before the question, which is"
                ' not supported. Set "padding_side" in its tokenizer_config.json to "right" if its model puts padding'
                " there, or name another with --tokenizer_name."
            )
        with as_user_error(lambda reason: f"The tokenizer fails ({reason}). Name another with --tokenizer_name."):
            backend = _plain_copy(tokenizer)
            texts = [backend.encode(text, add_special_tokens=False).ids for text in "ab"]
            pair = backend.encode("a", "b")
            (first, middle), (second, last) = (_range(pair.sequence_ids, text) for text in range(2))
        ids, types = pair.ids, pair.type_ids
        layout = Layout(tuple(ids[:first]), tuple(ids[middle:second]), tuple(ids[last:]))
        if (
            ids != [*layout.before, *texts[0], *layout.between, *texts[1], *layout.after]
            or types not in ([0] * len(ids), [0] * second + [1] * (len(ids) - second))
            or not layout.before
            or tokenizer.cls_token_id not in (None, layout.before[0])  # the first token stands for "no answer"
            or len(layout.after) != 1
        ):
            raise UserError(
                f"{name}: this tokenizer lays out the question 'a' and its context 'b' as {' '.join(pair.tokens)} with"
                f" token types {types}. Supported are layouts such as [CLS] a [SEP] b [SEP], which start with the"
                " tokenizer's cls_token and end with one special token, and whose token types are 0 or change from 0"
                " to 1 with the context. Name another tokenizer with --tokenizer_name."
            )
        return layout


class WindowTokenizer:
    """A copy of a tokenizer's backend without truncation and padding, with its layout and the options for cutting.

    Raises UserError if the tokenizer is not supported.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: WindowOptions) -> None:
        self.layout = Layout.of(tokenizer)
        self.backend = _plain_copy(tokenizer)
        self.options = options
        self.unk_id = tokenizer.unk_token_id
        self.special_ids = (tokenizer.cls_token_id, tokenizer.sep_token_id, self.unk_id)


@dataclass(frozen=True, slots=True)
class _Context:
    """A context's tokens: the id and the character range [start, end) of each.

    `unknown`: whether the vocabulary lacks each token. `unspaced`: whether the text has hardly any spaces.
    """

    ids: _Int32s
    char_starts: _Int32s
    char_ends: _Int32s
    unknown: npt.NDArray[np.bool_]
    unspaced: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """A question cut into windows.

    `head`: tokens before the context piece, equal in all windows. `span`: indices of the first answer's first and last
    token in the context; -1, -1 without such tokens. `shortest`: tokens of the shortest answer; 0 without an answer.
    `pieces`: the context tokens [start, stop) of each window. `shortened`: whether the question was truncated.
    `crowded`: whether its windows advance by at most a quarter. `unknown`: whether the vocabulary lacks at least half
    of the question's tokens.

    [CLS] question tokens [SEP] tokens of the piece [SEP]
    <-------- head ----------->^context_start       ^context_end
    """

    number: int
    question: Question
    context: _Context
    head: _Int32s
    span: tuple[int, int]
    shortest: int
    pieces: list[tuple[int, int]]
    shortened: bool
    crowded: bool
    unknown: bool

    def label(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices of the first answer's first and last token in the window of a piece; 0, 0 without both."""
        first, last = self.span
        if not start <= first <= last < stop:
            return 0, 0
        shift = len(self.head) - start
        return first + shift, last + shift

    @property
    def has_unknown_answer(self) -> bool:
        """Whether the vocabulary lacks all tokens of the first answer."""
        first, last = self.span
        return bool(self.context.unknown[first : last + 1].all())


def cut(
    window_tokenizer: WindowTokenizer, questions: Sequence[Question], first_number: int
) -> tuple[Iterator[pa.RecordBatch], WindowCounts]:
    """Cut questions into windows. Returns record batches for the window table, made on demand, and the counts.

    `first_number`: the value of the column `question` for the first question.
    """
    layout, options = window_tokenizer.layout, window_tokenizer.options
    contexts = _tokenized_contexts(window_tokenizer, questions)
    # Strip leading blanks as run_qa does: some of SQuAD's questions have thousands.
    texts = [question.question.lstrip() for question in questions]
    encodings = window_tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    room = options.max_seq_length - layout.size
    longest = room - options.doc_stride - 1
    cuts = []
    for number, (question, encoding) in enumerate(zip(questions, encodings, strict=True), first_number):
        ids, length, context = encoding.ids[:longest], len(encoding), contexts[question.context]
        head = np.array([*layout.before, *ids, *layout.between], dtype=np.int32)
        pieces, crowded = _pieces(len(context.ids), room - len(ids), options.doc_stride, length > _LONG_QUESTION)
        span, shortest = _answers(question, context, window_tokenizer.backend)
        unknown = 2 * ids.count(window_tokenizer.unk_id) >= len(ids) > 0
        is_shortened = length > longest
        cuts.append(_Cut(number, question, context, head, span, shortest, pieces, is_shortened, crowded, unknown))
    windows = [(cut, *piece) for cut in cuts for piece in cut.pieces]
    batches = (
        _record_batch(windows[begin : begin + _WINDOWS_AT_ONCE], layout)
        for begin in range(0, len(windows), _WINDOWS_AT_ONCE)
    )
    return batches, _counts(cuts, contexts.values())


def _counts(cuts: Sequence[_Cut], contexts: Iterable[_Context]) -> WindowCounts:
    answered = [cut for cut in cuts if cut.question.answer_starts[:1] not in ((), (None,))]
    with_tokens = [cut for cut in answered if cut.span != _NO_TOKENS]
    found = sum(any(cut.label(*piece) != (0, 0) for piece in cut.pieces) for cut in with_tokens)
    crowded = [cut for cut in cuts if cut.crowded]
    sizes = [(context.char_ends - context.char_starts, context.unknown) for context in contexts]
    return WindowCounts(
        questions=len(cuts),
        windows=sum(len(cut.pieces) for cut in cuts),
        shortened_questions=sum(cut.shortened for cut in cuts),
        crowded_questions=len(crowded),
        crowded_windows=sum(len(cut.pieces) for cut in crowded),
        answerable_questions=len(answered),
        cut_answers=len(with_tokens) - found,
        tokenless_answers=len(answered) - len(with_tokens),
        unknown_questions=sum(cut.unknown for cut in cuts),
        unknown_answers=sum(cut.has_unknown_answer for cut in with_tokens),
        several_answers=sum(has_several_answers(cut.question) for cut in cuts),
        unspaced_contexts=sum(cut.context.unspaced for cut in cuts),
        context_characters=sum(int(widths.sum()) for widths, _ in sizes),
        unknown_characters=sum(int(widths[unknown].sum()) for widths, unknown in sizes),
        answer_lengths=tuple(np.bincount([cut.shortest for cut in cuts]).tolist()),
    )


def _tokenized_contexts(window_tokenizer: WindowTokenizer, questions: Sequence[Question]) -> dict[str, _Context]:
    texts = list(dict.fromkeys(question.context for question in questions))  # neighboring questions share a context
    contexts = {}
    encodings = window_tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        starts, ends = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int32).reshape(-1, 2).T
        ids = np.array(encoding.ids, dtype=np.int32)
        contexts[text] = _Context(ids, starts, ends, ids == window_tokenizer.unk_id, is_unspaced(text))
    return contexts


def _answers(question: Question, context: _Context, backend: tokenizers.Tokenizer) -> tuple[tuple[int, int], int]:
    """Return the indices of the context's first and last token that overlap the first answer; -1, -1 if none does.

    Also returns the number of tokens of the shortest answer; 0 without an answer. Blanks around answers are ignored.
    """
    spans, lengths = [], []
    for text, start in dict.fromkeys(zip(question.answer_texts, question.answer_starts, strict=True)):
        if start is None:
            spans.append(_NO_TOKENS)
            lengths.append(len(backend.encode(text.strip(), add_special_tokens=False)))
            continue
        stop = start + len(text.rstrip())
        start += len(text) - len(text.lstrip())
        first = int(context.char_ends.searchsorted(start, side="right"))
        last = int(context.char_starts.searchsorted(stop, side="left")) - 1
        spans.append((first, last) if first <= last else _NO_TOKENS)
        lengths.append(max(0, last - first + 1))
    return next(iter(spans), _NO_TOKENS), min(filter(None, lengths), default=0)


def _pieces(length: int, capacity: int, overlap: int, is_long: bool) -> tuple[list[tuple[int, int]], bool]:
    """Split a context into overlapping pieces of at most `capacity` tokens, which advance further if `is_long`.

    Returns the pieces, and whether they advance by at most a quarter of `capacity`.
    """
    step, quarter = capacity - overlap, max(1, capacity // 4)
    is_crowded = step < quarter
    step = quarter if is_crowded and is_long else step
    starts = range(0, max(length - capacity, 0) + step, step)
    return [(start, min(start + capacity, length)) for start in starts], is_crowded and len(starts) > 1


def _record_batch(windows: Sequence[tuple[_Cut, int, int]], layout: Layout) -> pa.RecordBatch:
    after = np.array(layout.after, dtype=np.int32)
    tokens = [(cut.head, cut.context.ids[start:stop], after) for cut, start, stop in windows]
    labels = [cut.label(start, stop) for cut, start, stop in windows]
    sizes = [stop - start for _, start, stop in windows]
    columns = [
        _numbers([cut.number for cut, *_ in windows]),
        _lists([sum(map(len, parts)) for parts in tokens], chain.from_iterable(tokens)),
        _numbers([len(head) for head, _, _ in tokens]),
        _numbers([len(head) + len(ids) for head, ids, _ in tokens]),
        _numbers([first for first, _ in labels]),
        _numbers([last for _, last in labels]),
        _lists(sizes, (cut.context.char_starts[start:stop] for cut, start, stop in windows)),
        _lists(sizes, (cut.context.char_ends[start:stop] for cut, start, stop in windows)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)  # pa.record_batch would import pandas


def _range(sequence_ids: list[int | None], text: int) -> tuple[int, int]:
    """Return the index of the first token of text number `text` (0 or 1), and the index after its last token."""
    indices = [index for index, sequence in enumerate(sequence_ids) if sequence == text]
    return indices[0], indices[-1] + 1


def _plain_copy(tokenizer: Any) -> tokenizers.Tokenizer:
    """Copy the tokenizer's backend without truncation and padding, which must affect neither windows nor cache keys."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    return backend


def _lists(lengths: Sequence[int], values: Iterable[_Int32s]) -> pa.ListArray:
    return pa.ListArray.from_arrays(_numbers(np.cumsum([0, *lengths])), _numbers(np.concatenate(list(values))))


def _numbers(values: npt.ArrayLike) -> pa.Array:
    """Make an int32 Arrow array. `pa.array` would import pandas, which takes 0.2 s."""
    numbers = np.ascontiguousarray(values, np.int32)
    return pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(numbers)])
