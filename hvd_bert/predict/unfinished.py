"""The answers of a run that is not finished, in a file next to its output: a rerun resumes after them."""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hvd_bert.errors import UserError
from hvd_bert.storage import written
from hvd_bert.storage.reading import parse_json
from hvd_bert.storage.writing import make_folder, replacing

Row = dict[str, Any]
COMMAND = "predict"  # in the record of a folder


class Unfinished:
    """The file OUTPUT.unfinished: a line that identifies the run, then a line per block of answers, in any order.

    `done`: the blocks that are in the file.
    """

    def __init__(self, output: Path, run: Mapping[str, str]) -> None:
        """Create the file, or resume from it. `run`: what must be the same, by the words that name it in a message.

        Raises OSError, and UserError if the file is damaged or of another run.
        """
        make_folder(output.parent)
        self.output, self.path = output, output.with_name(f"{output.name}.unfinished")
        written.claim(output.parent, output.name, self.path.name, command=COMMAND)
        self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115  # closed by `close`
        self._places: dict[int, int] = {}  # of each block, where its line starts
        try:
            self._lock()
            self._read(run)
        except BaseException:
            self.close()
            raise

    @property
    def done(self) -> set[int]:
        return set(self._places)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {self.output}: another process is writing it. Name another file.") from None
        except OSError:  # a file system without locks
            pass

    def _read(self, run: Mapping[str, str]) -> None:
        """Find the blocks. Cuts off a line that a killed process left incomplete."""
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):
            self._file.truncate(0)
            self._file.write(json.dumps(dict(run)).encode() + b"\n")
            self._file.flush()
            return
        with self._reading():
            before = dict(parse_json(first))
        changed = [what for what, value in run.items() if before.get(what) != value]
        if changed:
            raise UserError(
                f"{self.path} has the answers of an unfinished run, and since then {' and '.join(changed)} changed."
                " Rerun the command as it was to resume, or delete this file to start again."
            )
        place = self._file.tell()
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                break
            with self._reading():
                self._places[int(line.partition(b"\t")[0])] = place
            place += len(line)

    def add(self, block: int, rows: Sequence[Row]) -> None:
        """Append a block's answers. Raises OSError."""
        self._places[block] = self._file.seek(0, 2)
        self._file.write(f"{block}\t{json.dumps(rows, ensure_ascii=False)}\n".encode())
        self._file.flush()

    def finish(self) -> None:
        """Write the output from all blocks in their order, atomically, and remove the file.

        Raises OSError, and UserError if the file is damaged.
        """
        with replacing(self.output, durable=True) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            write_rows(file, self.output.suffix, self._rows())
        self.close()
        written.remove(self.path.parent, [self.path.name], COMMAND)

    def _rows(self) -> Iterator[Row]:
        for _, place in sorted(self._places.items()):
            self._file.seek(place)
            with self._reading():
                rows = [dict(row) for row in parse_json(self._file.readline().partition(b"\t")[2])]
            yield from rows

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError):
            raise UserError(f"{self.path} is damaged. Delete it to start again.") from None

    def close(self) -> None:
        """Close the file, which stays."""
        with suppress(OSError):
            self._file.close()


def write_rows(file: TextIO, suffix: str, rows: Iterable[Row]) -> None:
    """Write answers as JSON, JSON Lines or CSV, one at a time."""
    if suffix == ".csv":
        # Quotes all texts: Python before 3.13 would not quote one for a carriage return, which ends a row.
        table = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        for number, row in enumerate(rows):
            if number == 0:
                table.writerow(row)
            table.writerow(_text(value) for value in row.values())
        return
    texts = (json.dumps(row, ensure_ascii=False) for row in rows)
    if suffix == ".jsonl":
        file.writelines(f"{text}\n" for text in texts)
        return
    for number, text in enumerate(texts):
        file.write(f"{',' if number else '['}\n{text}")
    file.write("\n]\n")


def _text(value: Any) -> Any:
    """A cell of a table; lists are JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
