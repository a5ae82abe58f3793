"""The record of a folder: the names of the files that this program wrote there. It replaces and removes no others.

The record is a text file with one name per line. A name is added before its file is written, so that after a crash
every file of this program is in the record.
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


def names(folder: Path) -> set[str]:
    """The recorded names. A file in another folder has its path relative to this one."""
    try:
        text = read_text(folder / RECORD, errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return set(text.split("\n")) - {""}


def add(folder: Path, *new: str) -> None:
    """Record files that are about to be written."""
    missing = sorted(set(new) - names(folder))
    if missing:
        with open_to_append(folder / RECORD) as file:
            file.write("".join(f"{name}\n" for name in missing))


def check(folder: Path, wanted: Iterable[str]) -> None:
    """Raise FileExistsError if the folder has files of these names that this program did not write.

    A symbolic link counts as such a file, since this program makes none.
    """
    ours = names(folder)
    others = [
        name
        for name in sorted(wanted)
        if os.path.lexists(folder / name) and (name not in ours or (folder / name).is_symlink())
    ]
    if others:
        listed = ", ".join(others)
        raise FileExistsError(
            errno.EEXIST,
            f"it has files that would be replaced and that this program did not write ({listed}): move them away, or"
            " use another folder",
        )


def claim(folder: Path, *new: str) -> None:
    """`check`, then `add`."""
    check(folder, new)
    add(folder, *new)


def remove(folder: Path, wanted: Collection[str]) -> None:
    """Remove those of `wanted` that are recorded, of a symbolic link only the link, and forget their names.

    Whatever the record names, nothing outside the folder is removed.
    """
    ours = names(folder)
    removed = {name for name in ours.intersection(wanted) if _is_inside(name)}
    for name in sorted(removed):
        delete(folder / name)
        delete(partial_of(folder / name))
    if removed:
        with replacing(folder / RECORD) as partial:
            text = "".join(f"{name}\n" for name in sorted(ours - removed))
            partial.write_text(text, encoding="utf-8", errors="surrogateescape")


def remove_partials(folder: Path) -> None:
    """Remove temporary files of recorded names: those of a killed program."""
    for name in filter(_is_inside, names(folder)):
        delete(partial_of(folder / name))


def _is_inside(name: str) -> bool:
    return os.path.basename(name) == name not in ("", ".", "..")


def delete(path: Path) -> None:
    """Remove a file, a folder with its content, or a symbolic link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_marked(path: Path, marker: str) -> None:
    """Raise FileExistsError if `path` is a file with content that does not have `marker` near its start.

    For a single file that a user names: a record would be a second file next to it.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(1024)
    if start and marker.encode() not in start:
        raise FileExistsError(errno.EEXIST, "it exists, and this program did not write it: name another file")
