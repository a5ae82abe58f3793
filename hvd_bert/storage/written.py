"""The record of a folder: the names of the files that this program wrote there. It replaces and removes no others.

The record is a text file with one name per line. A name is added before its file is written, so that after a crash
every file of this program is in the record. `command` separates the commands that share a folder, since each replaces
only its own files: "" for the files of a run, which trainings and evaluations share, else a word before the name.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from hvd_bert.storage.reading import read_text
from hvd_bert.storage.writing import open_to_append, partial_of, replacing

RECORD = ".written_by_hvd_bert"
_AFTER_COMMAND = "//"  # in no name


def names(folder: Path, command: str = "") -> set[str]:
    """The recorded names. Raises OSError."""
    return {name for name, writer in _writers(folder).items() if writer == command}


def _writers(folder: Path) -> dict[str, str]:
    """Each name's command, the last one that recorded it."""
    try:
        text = read_text(folder / RECORD, errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    lines = (line.rpartition(_AFTER_COMMAND) for line in text.split("\n") if line)
    return {name: command for command, _, name in lines}


def _line(name: str, command: str) -> str:
    return f"{command}{_AFTER_COMMAND if command else ''}{name}\n"


def add(folder: Path, *new: str, command: str = "") -> None:
    """Record files that are about to be written. Raises OSError."""
    missing = sorted(set(new) - names(folder, command))
    if missing:
        with open_to_append(folder / RECORD) as file:
            file.write("".join(_line(name, command) for name in missing))


def check(folder: Path, wanted: Iterable[str], command: str = "") -> None:
    """Raise FileExistsError if the folder has files of these names that this command did not write.

    Symbolic links, pipes and devices count as such files, since this program makes none.
    """
    ours = names(folder, command)
    others = [
        name
        for name in sorted(wanted)
        if os.path.lexists(path := folder / name)
        and (name not in ours or path.is_symlink() or not (path.is_file() or path.is_dir()))
    ]
    if others:
        listed = ", ".join(others)
        writer = "this command" if command else "this program"
        copied = "" if (folder / RECORD).exists() else f". If they are copies of a run's files, copy its {RECORD} too"
        raise FileExistsError(
            errno.EEXIST,
            f"it has files that would be replaced and that {writer} did not write ({listed}): move them away, or"
            f" use another folder{copied}",
        )


def claim(folder: Path, *new: str, command: str = "") -> None:
    """`check`, then `add`."""
    check(folder, new, command)
    add(folder, *new, command=command)


def remove(folder: Path, wanted: Collection[str], command: str = "") -> None:
    """Remove those of `wanted` that are recorded, of a symbolic link only the link, and forget their names.

    Whatever the record names, nothing outside the folder is removed.
    """
    writers = _writers(folder)
    removed = {name for name in wanted if writers.get(name) == command and _is_inside(name)}
    for name in sorted(removed):
        delete(folder / name)
        delete(partial_of(folder / name))
    if removed:
        with replacing(folder / RECORD) as partial:
            text = "".join(_line(name, writers[name]) for name in sorted(writers.keys() - removed))
            partial.write_text(text, encoding="utf-8", errors="surrogateescape")


def _is_inside(name: str) -> bool:
    return os.path.basename(name) == name not in ("", ".", "..")


def delete(path: Path) -> None:
    """Remove a file, a folder with its content, or a symbolic link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
