"""Data files and hub data sets -> `Question`s, all of them checked.

`open_file` reads the formats of `formats.py`, `open_hub` rows of the `datasets` library. Opening is fast: the content
is parsed and checked only when `Source.questions()` is called, on the rank that needs it.

Character offsets count Unicode code points from the start of the unstripped context: some of SQuAD's
contexts begin with a space, and their offsets count it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import BinaryIO

from hvd_bert.data.sources import formats, hub
from hvd_bert.data.sources.checks import checked
from hvd_bert.data.sources.questions import BadExample, Question, Reading, Source
from hvd_bert.errors import UserError
from hvd_bert.sample import files as sample
from hvd_bert.storage.reading import open_regular

__all__ = ["Question", "Reading", "Source", "from_questions", "open_file", "open_hub"]

_PIECE_BYTES = 2**20
_DEFAULT = Reading()


def open_file(path: str | os.PathLike[str], version_2_with_negative: bool, reading: Reading = _DEFAULT) -> Source:
    """Open a data file. Raises `UserError` if it cannot be read; `questions()` checks its content."""
    name = os.fspath(path)
    place = os.fspath(sample.located(path))
    digest = _digest(place)

    bad: list[BadExample] = []

    def load() -> list[Question]:
        content = _read(place)
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{name}: the file changed while it was being read. Run the command again.")
        questions, bad[:] = checked(name, formats.read(name, content, reading), version_2_with_negative, reading)
        return questions

    return Source(name, reading.digest(digest, version_2_with_negative), load, bad)


def open_hub(
    dataset_name: str,
    split: str,
    version_2_with_negative: bool,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
    reading: Reading = _DEFAULT,
) -> Source:
    """Open a split of a data set with flat rows, from the Hugging Face hub or its local cache (`cache_dir`).

    Raises `UserError` if it is not available or has other columns.
    """
    name = f"{dataset_name}[{split}]"
    rows = hub.load(dataset_name, split, dataset_config_name, cache_dir)
    rows = rows.select_columns(formats.check_columns(name, rows.column_names, reading))

    bad: list[BadExample] = []

    def load() -> list[Question]:
        located = ((f"row {number}", row) for number, row in enumerate(rows))
        questions, bad[:] = checked(name, formats.from_rows(located, reading), version_2_with_negative, reading)
        return questions

    return Source(name, reading.digest(hub.digest(rows), version_2_with_negative), load, bad)


def from_questions(name: str, questions: Iterable[Question]) -> Source:
    """Questions in memory (from a test, or typed by a user), used without checks."""
    kept = list(questions)
    content = json.dumps([astuple(question) for question in kept]).encode()
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: kept)


def _digest(name: str) -> str:
    """SHA-256 of a file, read in pieces to save memory: every rank computes it at each start."""
    sha256 = hashlib.sha256()
    with _opened(name) as file:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
    return sha256.hexdigest()


def _read(name: str) -> bytes:
    with _opened(name) as file:
        return file.read()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """Open a file for reading; errors inside the block become a UserError."""
    try:
        with open_regular(name) as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file (working directory: {os.getcwd()}). Check the path.") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror}. Give a readable data file.") from error
