"""The folder of a sweep or a tuning: its lock, and the JSON file with the settings that must not change on resume."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hvd_bert.errors import UserError, short_reason
from hvd_bert.storage import locks
from hvd_bert.storage.locks import LOCK
from hvd_bert.storage.reading import Kind, convert, read_json
from hvd_bert.storage.writing import is_special, make_folder, write_json, writing_to
from hvd_bert.tools.runs.finding import SweepFile

OTHER_OUT = "choose another --out."


def _previous(path: Path, same: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if not path.exists():
        return {}
    previous = read_record(path, dict[str, Any])
    read_record(path, SweepFile)
    before = previous["same"]
    differing = [
        f"{name} was {_as_text(before[name])} and is {_as_text(value)}"
        for name, value in same.items()
        if name in before and before[name] != value
    ]
    if differing:
        raise UserError(
            f"--out {path.parent} holds a {kind} with other settings: {'; '.join(differing)}. Use the same settings, or"
            f" {OTHER_OUT}"
        )
    return previous


def read_record(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file as a value of type `kind`, see `convert`. Raises UserError if this fails."""
    try:
        return convert(read_json(path), kind)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or short_reason(error)
        raise UserError(f"{path} cannot be read ({reason}): {OTHER_OUT}") from None


@contextmanager
def opened(record: Path, same: Mapping[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Create and lock the folder of the file `record`. Yields the file's content; {} if there is no file yet.

    `same`: settings that must be equal to those in the file. `kind`: "sweep" or "tuning", for messages.
    Raises UserError if a setting differs, if the folder cannot be written or is in use, or if it has other content.
    """
    folder = record.parent
    with ExitStack() as stack:
        with writing_to("--out", folder):
            paths = list(folder.iterdir()) if folder.is_dir() else []
            if not record.exists() and {path.name for path in paths} - {LOCK}:
                raise UserError(f"--out {folder} is not empty and has no {record.name}: choose another folder.")
            for path in paths:  # except links NAME.lock: a killed optuna leaves one, and nothing is written to it
                if is_special(path) and not path.is_dir() and path.suffix != ".lock":
                    raise UserError(f"--out {folder}: {path.name} is a link or a pipe. Remove it, or {OTHER_OUT}")
            make_folder(folder)
            stack.enter_context(locked(folder, wait=False))
        yield _previous(record, same, kind)


def replace(record: Path, content: Any) -> None:
    """Write the file `record` atomically. Raises UserError if it cannot be written."""
    with writing_to("--out", record.parent):
        write_json(record, content)


def _as_text(value: Any) -> str:
    if value is None:
        return "not set"
    return (shlex.join(value) or "(none)") if isinstance(value, list) else str(value)


@contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Context manager: hold the lock of a folder, as a run does.

    If another process holds the lock: waits if `wait`, else raises InUse.
    """
    try:
        lock = locks.acquire(folder / LOCK, wait=False)
    except locks.InUse as error:
        if not wait:
            raise
        print(f"{error} This command waits.", flush=True)
        lock = locks.acquire(folder / LOCK, wait=True)
    with lock:
        yield
