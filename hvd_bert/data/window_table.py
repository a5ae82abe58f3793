"""Questions -> windows of tokens, kept in memory-mapped Arrow.

One table serves training and evaluation. A row is one window, `[CLS] question [SEP] piece of the context [SEP]` or in
another family's layout (window_cutting.py makes them). Its columns:

    question        int32        index into `source.questions()`
    input_ids       list<int32>  the window's tokens, without padding
    context_start   int32        index in input_ids of the first token of the context piece
    context_end     int32        index after its last token: the final [SEP], or the special token in its place
    start_position, end_position
                    int32        first and last token (inclusive, indices in input_ids) of the first answer;
                                 0, 0 (the [CLS]) if this window does not contain the whole answer
    char_starts, char_ends
                    list<int32>  for each token of the piece, its characters [start, end) in the context
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tokenizers
from tqdm.auto import tqdm

from hvd_bert.data import cache
from hvd_bert.data.cache import default_cache_dir
from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.data.window_cutting import SCHEMA, QuestionBatch, WindowCounts, WindowOptions, WindowTokenizer
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import open_regular, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "WindowCounts",
    "WindowOptions",
    "WindowTable",
    "check_lengths",
    "default_cache_dir",
    "in_memory",
    "min_length",
    "prepare",
]

logger = logging.getLogger(__name__)

_FORMAT = 3  # part of the cache key; raise it with every change of the format or of the windows
_QUESTIONS_AT_ONCE = 1000
_Int32s = npt.NDArray[np.int32]
_DATA, _META = "windows.arrow", "windows.json"
_BLOCK = 2**20


class WindowTable:
    """Windows as Arrow record batches with the columns above, memory-mapped if they come from the cache.

    `counts`: statistics of the tokenization. `path`: the file; None for a table in memory.
    """

    def __init__(
        self, batches: Sequence[pa.RecordBatch], counts: WindowCounts | None = None, path: Path | None = None
    ) -> None:
        self._batches = list(batches)
        self._ends = np.cumsum([len(batch) for batch in self._batches])
        self._columns = {name: [_View(batch.column(name)) for batch in batches] for name in batches[0].schema.names}
        self.counts = counts or WindowCounts()
        self.path = path

    @staticmethod
    def from_columns(columns: dict[str, Any]) -> WindowTable:
        """A table in memory from some of the columns."""
        batches = pa.table(columns).cast(pa.schema([SCHEMA.field(name) for name in columns])).to_batches()
        return WindowTable(batches)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def arrow(self) -> pa.Table:
        """The table as a `pyarrow.Table`, without a copy."""
        return pa.Table.from_batches(self._batches)

    @property
    def lengths(self) -> _Int32s:
        """Tokens per window, int32 [windows]; reads only the offsets of the windows, not their tokens."""
        return np.concatenate([np.diff(view.offsets) for view in self._columns["input_ids"]])

    def column(self, name: str) -> _Int32s:
        """All values of a numeric column, int32 [windows]."""
        return np.concatenate([view.values for view in self._columns[name]])

    def numbers(self, name: str, ids: Sequence[int] | npt.NDArray[np.int64]) -> _Int32s:
        """A numeric column for the windows `ids`, int32 [len(ids)]."""
        return np.array([view.values[row] for view, row in self._places(name, ids)], dtype=np.int32)

    def lists(self, name: str, ids: Sequence[int] | npt.NDArray[np.int64]) -> list[_Int32s]:
        """A list column for the windows `ids`: int32 arrays, which are views of the file."""
        return [view.values[view.offsets[row] : view.offsets[row + 1]] for view, row in self._places(name, ids)]

    def _places(self, name: str, ids: Sequence[int] | npt.NDArray[np.int64]) -> list[tuple[_View, int]]:
        """The record batch of each window, as a view of one column, and the window's row in it."""
        numbers = np.searchsorted(self._ends, ids, side="right")
        views = [self._columns[name][number] for number in numbers]
        return [
            (view, int(id_) - int(self._ends[n]) + view.rows) for view, n, id_ in zip(views, numbers, ids, strict=True)
        ]


class _View:
    """A column of a record batch as numpy arrays on the same memory. Arrow's to_numpy would import pandas: 0.2 s."""

    def __init__(self, column: pa.Array) -> None:
        self.rows = len(column)
        lists = isinstance(column, pa.ListArray)
        self.offsets = _view(column.offsets) if lists else np.empty(0, np.int32)
        self.values = _view(column.values if lists else column)


def _view(numbers: pa.Array) -> _Int32s:
    whole = np.frombuffer(numbers.buffers()[1] or b"", dtype=np.int32)
    return whole[numbers.offset : numbers.offset + len(numbers)]


def check_lengths(options: WindowOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` for options that no window can satisfy."""
    length, stride = options.max_seq_length, options.doc_stride
    if options.max_samples is not None and options.max_samples < 1:
        raise UserError(f"The number of samples must be at least 1, not {options.max_samples}.")
    if stride < 0:
        raise UserError(f"--doc_stride {stride}: must be 0 or more.")
    if length > tokenizer.model_max_length:
        raise UserError(
            f"--max_seq_length {length}: this model's tokenizer allows at most {tokenizer.model_max_length}."
        )
    needed = min_length(stride, tokenizer)
    if length < needed:
        raise UserError(
            f"--max_seq_length {length} leaves no room for a question with --doc_stride {stride}: "
            f"use at least {needed} (--doc_stride is the overlap of neighboring windows)."
        )


def min_length(doc_stride: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length of a window with one token of the question and one new token of the context."""
    return doc_stride + int(tokenizer.num_special_tokens_to_add(pair=True)) + 2


def prepare(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    leader: bool = True,
    num_workers: int | None = None,
    show_progress: bool = False,
) -> WindowTable:
    """The windows of `source`, from the cache in `cache_dir` (default: `default_cache_dir()`) or built now.

    Call it on every rank. There is no collective: the first process builds and the others wait for its file lock.
    `overwrite_cache` rebuilds on the `leader` only, so that a node rebuilds once, not once per rank; other ranks may
    use the old copy, since the same key means the same content. The leader also logs truncated questions and lost
    answers. Only the building process shows a progress bar, so `show_progress` may be true on all ranks of a node.
    `num_workers` is the number of threads; default: one per core of this process.

    Raises `UserError` for unusable options, tokenizers or questions, and for a cache that cannot be written.
    """
    check_lengths(options, tokenizer)
    if num_workers is not None and num_workers < 1:
        raise UserError(f"--preprocessing_num_workers {num_workers}: must be at least 1.")
    window_tokenizer = WindowTokenizer(tokenizer, options)

    def build(folder: Path) -> None:
        with _threads(num_workers or len(os.sched_getaffinity(0))):
            _write(folder, source, window_tokenizer, show_progress)

    entry = cache.folder(
        Path(cache_dir) if cache_dir is not None else default_cache_dir(),
        _key(source, window_tokenizer),
        build,
        _is_whole,
        overwrite=overwrite_cache and leader,
    )
    table = _open(entry)
    if leader:
        _log_losses(source.name, table.counts)
    return table


def in_memory(questions: Sequence[Question], window_tokenizer: WindowTokenizer) -> WindowTable:
    """The windows of a few questions, without the cache. Call `check_lengths` before.

    Leaves the environment alone, which other threads of a program may use at the same time.
    """
    batch = QuestionBatch(window_tokenizer, questions, 0)
    return WindowTable(list(batch.record_batches()), batch.counts)


def _log_losses(name: str, counted: WindowCounts) -> None:
    if counted.shortened_questions:
        logger.warning(
            "%s: %d of %d questions were truncated to leave room for the context (raise --max_seq_length or lower "
            "--doc_stride)", name, counted.shortened_questions, counted.questions,
        )  # fmt: skip
    lost = counted.cut_answers + counted.tokenless_answers
    if lost:
        logger.warning(
            "%s: %d of %d answers are not completely inside any window; training treats them as missing (raise "
            "--doc_stride to keep longer answers whole)", name, lost, counted.answerable_questions,
        )  # fmt: skip


# --- the table on disk ---------------------------------------------------------------------------


def _key(source: Source, window_tokenizer: WindowTokenizer) -> str:
    parts = {
        "format": _FORMAT,
        "source": source.digest,
        "tokenizer": window_tokenizer.backend.to_str(),
        "special": [window_tokenizer.cls_id, window_tokenizer.sep_id, window_tokenizer.backend.encode_special_tokens],
        "tokenizers": tokenizers.__version__,
        "options": asdict(window_tokenizer.options),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, source: Source, window_tokenizer: WindowTokenizer, show_progress: bool) -> None:
    questions = source.questions()[: window_tokenizer.options.max_samples]
    total = WindowCounts()
    title = f"Tokenizing {source.name}"
    with (
        pa.OSFile(str(folder / _DATA), "wb") as file,
        pa.ipc.new_stream(file, SCHEMA) as writer,
        tqdm(total=len(questions), desc=title, unit="q", disable=not show_progress) as bar,
    ):
        for first in range(0, len(questions), _QUESTIONS_AT_ONCE):
            some = questions[first : first + _QUESTIONS_AT_ONCE]
            batch = QuestionBatch(window_tokenizer, some, first)
            for table_batch in batch.record_batches():
                writer.write_batch(table_batch)
            total += batch.counts
            bar.update(len(some))
    counts = asdict(total)
    (folder / _META).write_text(json.dumps({"crc32": _checksum(folder, counts), "counts": counts}))


def _is_whole(entry: Path) -> bool:
    try:
        meta = read_json(entry / _META)
        if meta["crc32"] != _checksum(entry, meta["counts"]):
            return False
        _open(entry)
        return True
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # pyarrow's errors are among them
        return False


def _checksum(folder: Path, counts: dict[str, int]) -> int:
    """CRC-32 of the table and its counts. It takes 0.05 s for SQuAD v1.1, so every rank computes it at every start."""
    crc = zlib.crc32(json.dumps(counts, sort_keys=True).encode())
    with open_regular(folder / _DATA) as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _open(entry: Path) -> WindowTable:
    meta = read_json(entry / _META)
    with pa.ipc.open_stream(pa.memory_map(str(entry / _DATA))) as stream:
        if stream.schema != SCHEMA:
            raise ValueError(f"{entry / _DATA} has other columns")
        return WindowTable(list(stream), WindowCounts(**meta["counts"]), entry / _DATA)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Tokenize with `count` threads of the tokenizer's own pool (Rust's rayon).

    Forked workers, as of `Dataset.map(num_proc=...)`, are unsafe after MPI_Init. The pool is created on first use
    and keeps its size in this process; a count of 1 always works.
    """
    variables = {"RAYON_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "true" if count > 1 else "false"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
