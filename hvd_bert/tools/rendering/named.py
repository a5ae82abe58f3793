"""Files that a user names, which a command replaces if they are its own."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from hvd_bert.storage.writing import check_folder


def check_file(path: Path, *markers: str) -> Path:
    """Raise OSError unless `path`, which a user names, can be written. Returns it; of a symbolic link, its target.

    Creates nothing. A file with content must have the `markers` near its start, by which a command recognizes its own:
    a record would be a second file next to it. A pipe would be replaced, and opening it could wait for its reader.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file")
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a pipe or a device: name a file")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    check_folder(target.parent)
    with tempfile.TemporaryFile(dir=target.parent):
        pass
    start = b""
    if target.exists():
        with target.open("rb") as file:
            start = file.read(1024)
    if start and not all(marker.encode() in start for marker in markers):
        raise FileExistsError(errno.EEXIST, "it exists, and this command did not write it: name another file")
    return target
