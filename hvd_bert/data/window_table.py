"""Tables of windows in memory-mapped Arrow, for training and evaluation. window_cutting.py makes the rows:

question        int32        index into `source.questions()`
input_ids       list<int32>  the window's tokens, without padding
context_start   int32        index in input_ids of the first token of the context piece
context_end     int32        index in input_ids of the final [SEP] or its counterpart, which follows the piece
start_position, end_position
                int32        indices in input_ids of the first answer's first and last token (inclusive);
                             0, 0 (the [CLS]) without an answer or if the window lacks part of it
char_starts, char_ends
                list<int32>  for each token of the piece, its character range [start, end) in the context
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tokenizers
from tqdm.auto import tqdm

from hvd_bert.data import cache
from hvd_bert.data.cache import default_cache_dir
from hvd_bert.data.counts import Keys, WindowCounts, question_keys
from hvd_bert.data.sources.squad import Findings, Question, Source
from hvd_bert.data.window_cutting import SCHEMA, WindowOptions, WindowTokenizer, cut
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import convert, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FORMAT = 8  # part of the cache key; increase it whenever the file format or the windows change
_QUESTIONS_AT_ONCE = 1000
_Int32s = npt.NDArray[np.int32]
_DATA, _META, _KEYS = "windows.arrow", "windows.json", "questions.npy"


class WindowTable:
    """Windows in Arrow record batches with the columns above, or some of them. Memory-mapped if read from the cache."""

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        counts: WindowCounts | None = None,
        findings: Findings | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.batches = list(batches)
        sizes = [len(batch) for batch in batches]
        self._ends = np.cumsum(sizes)
        self._begins = self._ends - sizes
        self._numbers: dict[str, _Int32s] = {}
        self._lists: dict[str, list[tuple[_Int32s, _Int32s]]] = {}  # by column: (offsets, values) per record batch
        for name in batches[0].schema.names:
            columns = [batch.column(name) for batch in batches]
            if isinstance(columns[0], pa.ListArray):
                self._lists[name] = [(_view(column.offsets), _view(column.values)) for column in columns]
            else:
                self._numbers[name] = np.concatenate([_view(column) for column in columns])
        self.counts = counts or WindowCounts()
        self.findings = findings or Findings()
        self.keys = np.zeros((0, 2), np.uint64) if keys is None else keys  # of `question_keys`, from the cache only

    @staticmethod
    def from_columns(columns: dict[str, Any]) -> WindowTable:
        """Make an in-memory table. `columns`: values by name, for all or some of the columns above."""
        batches = pa.table(columns).cast(pa.schema([SCHEMA.field(name) for name in columns])).to_batches()
        return WindowTable(batches)

    @staticmethod
    def joined(tables: Sequence[WindowTable]) -> WindowTable:
        """Concatenate tables. Questions are renumbered consecutively across the tables, and `counts` are dropped.

        A single table is returned unchanged.
        """
        if len(tables) == 1:
            return tables[0]
        findings = Findings.joined([table.findings for table in tables])
        keys = np.concatenate([table.keys for table in tables])
        table = WindowTable([batch for table in tables for batch in table.batches], findings=findings, keys=keys)
        questions = np.cumsum([0, *(table.counts.questions for table in tables[:-1])], dtype=np.int32)
        table._numbers["question"] += np.repeat(questions, list(map(len, tables)))
        return table

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def lengths(self) -> _Int32s:
        """Tokens per window, int32 [windows]. Reads only the list offsets, not the tokens."""
        return np.concatenate([np.diff(offsets) for offsets, _ in self._lists["input_ids"]])

    def column(self, name: str) -> _Int32s:
        """Return all values of a numeric column, int32 [windows]."""
        return self._numbers[name]

    def numbers(self, name: str, ids: Sequence[int] | npt.NDArray[np.int64]) -> _Int32s:
        """Return a numeric column's values for the windows `ids`, int32 [len(ids)]."""
        return self._numbers[name][np.asarray(ids, dtype=np.int64)]

    def lists(self, name: str, ids: Sequence[int] | npt.NDArray[np.int64]) -> list[_Int32s]:
        """Return a list column's values for the windows `ids`: an int32 array per window, as a view of the table."""
        found = []
        for number, id_ in zip(np.searchsorted(self._ends, ids, side="right"), ids, strict=True):
            offsets, values = self._lists[name][number]
            row = int(id_ - self._begins[number])
            found.append(values[offsets[row] : offsets[row + 1]])
        return found


def _view(numbers: pa.Array) -> _Int32s:
    """View an int32 Arrow array as a numpy array. Arrow's to_numpy would import pandas, which takes 0.2 s."""
    whole = np.frombuffer(numbers.buffers()[1] or b"", dtype=np.int32)
    return whole[numbers.offset : numbers.offset + len(numbers)]


def check_lengths(options: WindowOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` if `max_seq_length` exceeds the tokenizer's limit or is too small for `doc_stride`."""
    length, stride = options.max_seq_length, options.doc_stride
    if length > tokenizer.model_max_length:
        raise UserError(
            f"--max_seq_length {length}: this model's tokenizer allows at most {tokenizer.model_max_length}."
        )
    needed = stride + int(tokenizer.num_special_tokens_to_add(pair=True)) + 2  # 2: a token each of question and context
    if length < needed:
        raise UserError(
            f"--max_seq_length {length} leaves no room for a question with --doc_stride {stride}: "
            f"use at least {needed} (--doc_stride is the overlap of neighboring windows)."
        )


def prepare(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    options: WindowOptions,
    *,
    leader: bool = True,
    show_progress: bool = False,
) -> WindowTable:
    """Load the windows of `source` from the cache, or build them. Every rank calls it; it runs no collectives.

    `leader`: true on one rank per host, which verifies the checksums of the cached windows. `show_progress` may be true
    on all ranks of a host, since only the process that builds the windows shows the progress bar.

    Raises `UserError` if the options, the tokenizer or the questions are unusable, or if the cache is damaged or cannot
    be written.
    """
    check_lengths(options, tokenizer)
    window_tokenizer = WindowTokenizer(tokenizer, options)

    def build(folder: Path) -> None:
        _write(folder, source, window_tokenizer, show_progress)

    return _opened(cache.entry(default_cache_dir(), _key(source, window_tokenizer), build, leader))


def in_memory(questions: Sequence[Question], window_tokenizer: WindowTokenizer) -> WindowTable:
    """Cut a few questions into windows, without the cache. Call `check_lengths` first."""
    batches, counts = cut(window_tokenizer, questions, 0)
    return WindowTable(list(batches), counts)


# --- the table on disk ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meta:
    """Content of windows.json."""

    counts: WindowCounts
    findings: Findings


def _key(source: Source, window_tokenizer: WindowTokenizer) -> str:
    parts = {
        "format": _FORMAT,
        "source": source.digest,
        "tokenizer": window_tokenizer.backend.to_str(),
        "special": [*window_tokenizer.special_ids, window_tokenizer.backend.encode_special_tokens],
        "tokenizers": tokenizers.__version__,
        "options": asdict(window_tokenizer.options),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, source: Source, window_tokenizer: WindowTokenizer, show_progress: bool) -> None:
    questions, findings = source.load()
    questions = questions[: window_tokenizer.options.max_samples]
    total = WindowCounts()
    title = f"Tokenizing {source.name}"
    with (
        pa.OSFile(str(folder / _DATA), "wb") as file,
        pa.ipc.new_stream(file, SCHEMA) as writer,
        tqdm(total=len(questions), desc=title, unit="q", disable=not show_progress) as bar,
    ):
        for first in range(0, len(questions), _QUESTIONS_AT_ONCE):
            some = questions[first : first + _QUESTIONS_AT_ONCE]
            batches, counts = cut(window_tokenizer, some, first)
            for batch in batches:
                writer.write_batch(batch)
            total += counts
            bar.update(len(some))
    np.save(folder / _KEYS, question_keys(questions))
    (folder / _META).write_text(json.dumps(asdict(_Meta(total, findings))))


def _opened(entry: Path) -> WindowTable:
    """Open the table in the cache folder `entry`. Raises UserError if the table is truncated or malformed."""
    with cache.reading(entry):
        meta, keys = convert(read_json(entry / _META), _Meta), np.load(entry / _KEYS, allow_pickle=False)
        with pa.ipc.open_stream(pa.memory_map(str(entry / _DATA))) as stream:
            table = WindowTable(list(stream), meta.counts, meta.findings, keys)
        if len(table) != meta.counts.windows:
            raise ValueError(f"{len(table)} windows in place of {meta.counts.windows}")
    return table
