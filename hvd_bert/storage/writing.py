"""Atomic writes: if the writer is killed, either the old or the new file remains, never a partial file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvd_bert.errors import UserError, log
from hvd_bert.storage.locks import NO_LOCKS
from hvd_bert.streams import before_ending

OWN_PARTIAL = ".hvd_bert.partial"  # no other program uses this suffix


class JsonLines:
    """A JSON Lines file, open for appending. Warns about the first failed write; later writes add the missing lines."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OSError, also if `path` is a symbolic link."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._pending = b""
        self._failed = False

    def write(self, *values: Any) -> None:
        """Write one line per value."""
        self._pending += "".join(json.dumps(value, allow_nan=False) + "\n" for value in values).encode()
        try:
            while self._pending:
                written = os.write(self._file, self._pending)  # fewer bytes if the disk is nearly full
                self._pending = self._pending[written:]
        except OSError as error:
            warned, self._failed = self._failed, True  # set first: the warning may be recorded in this file
            if not warned:
                log.warning("%s cannot be written: %s. Training continues.", self._path, error.strerror or error)

    def close(self) -> None:
        """Write missing lines, if possible, and close the file."""
        self.write()
        self._pending = b""
        with suppress(OSError):  # some network file systems report a failed write only here
            os.close(self._file)


def first_existing(folder: Path) -> Path:
    """Return the folder or, if it does not exist, its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def check_folder(folder: Path) -> None:
    """Raise OSError if `folder`, or its nearest existing parent, is not a folder or is not writable."""
    existing = first_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))  # fails on a full disk
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(existing)) from None  # names the folder, not the temporary file


@contextmanager
def writing_to(flag: str, path: Path) -> Iterator[None]:
    """Context manager: convert an OSError to a UserError that names the output's flag and path."""
    try:
        yield
    except OSError as error:
        file = os.fsdecode(error.filename2 or error.filename or path)
        own = map(os.path.abspath, (path, partial_path(path)))
        other = "" if os.path.abspath(file) in own else f"{file}: "
        raise UserError(f"{flag} {path} cannot be written: {other}{error.strerror or error}.") from None


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, if missing. Raises OSError."""
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)


def partial_path(path: Path) -> Path:
    """Return the path of the temporary file that `replacing` uses."""
    return path.with_name(f".{path.name}{OWN_PARTIAL}")


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Context manager: yield the path of a temporary file next to `path`. It replaces `path` unless the block raises.

    A signal that ends the process removes the temporary file. Raises OSError if another process is writing `path`.
    `durable`: flush to disk, so that the file survives a power failure.
    """
    partial = partial_path(path)
    with _locked(partial), before_ending(lambda: partial.unlink(missing_ok=True)):
        try:
            yield partial
            if durable:
                flush(partial)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    if durable:
        flush(path.parent)


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Context manager: create and lock the temporary file, or reuse the file that a killed writer left."""
    if is_special(partial) or not os.access(partial, os.W_OK):
        partial.unlink(missing_ok=True)  # a link, whose target would be written, or a leftover of another user
    in_use = OSError(errno.EBUSY, "another process is writing it")
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        try:
            renamed = not os.path.samestat(os.fstat(file.fileno()), partial.stat())
        except FileNotFoundError:
            renamed = True
        if renamed:  # another process has finished writing it since this one opened it
            raise in_use
        yield


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON atomically."""
    write_named(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_named(path: Path, content: str | bytes) -> None:
    """Write `content` to the file `path` atomically."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def check_output(path: Path, overwrite: bool, inputs: Iterable[str | Path] = ()) -> Path:
    """Check that a user's output file can be written. Returns `path` or, if it is a link, the link's target.

    Raises OSError if it cannot be written, exists without `overwrite`, or is one of the `inputs`. Pipes and devices are
    refused, because an atomic write would replace them. Creates nothing. Check again just before writing, since another
    process may have created the file meanwhile.
    """
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise OSError(errno.EINVAL, "it is an input: name another file")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file")
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a pipe or a device: name a file")
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(errno.EEXIST, "it exists: add --overwrite to replace it, or name another file")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    check_folder(target.parent)
    target.parent.stat()  # raises if the folder is missing
    return target


def write_output(flag: str, path: Path, content: str, overwrite: bool) -> None:
    """Write an output file. `flag`: the flag that names it. Raises UserError if it cannot be written."""
    with writing_to(flag, path):
        write_named(check_output(path, overwrite), content)


def is_special(path: Path) -> bool:
    """Return whether `path` is a symbolic link, a pipe or a device, which no run creates."""
    return os.path.lexists(path) and (path.is_symlink() or not (path.is_file() or path.is_dir()))


def delete(path: Path) -> None:
    """Remove a file, a folder with its content, or a symbolic link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
