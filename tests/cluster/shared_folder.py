"""A file system in user space that hands everything on to another folder, until it is told to fail.

    python shared_folder.py BELOW WHERE MODE_FILE

MODE_FILE holds `works`, `slow` (2 s per write), `full` (no space left), `full 3` (for three calls) or `readonly`.
Prints "ready" once WHERE shows the folder BELOW, and ends when that is unmounted. Needs mfusepy and libfuse.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import mfusepy

SLOW_S = 2.0
CHANGES = ["chmod", "create", "link", "mkdir", "rename", "rmdir", "symlink", "truncate", "unlink", "utimens", "write"]
NEED_SPACE = {"create", "link", "mkdir", "symlink", "write"}


def failing(call: Callable[..., Any], mode_file: Path) -> Callable[..., Any]:
    """A call that changes something, which fails as the mode says."""
    name = call.__name__

    @wraps(call)
    def checked(*arguments: Any, **options: Any) -> Any:
        mode = mode_file.read_text()
        if mode == "readonly":
            raise mfusepy.FuseOSError(errno.EROFS)
        if mode.startswith("full") and name in NEED_SPACE:
            if calls := int(mode.removeprefix("full") or 0):
                mode_file.write_text(f"full {calls - 1}" if calls > 1 else "works")
            raise mfusepy.FuseOSError(errno.ENOSPC)
        if mode == "slow" and name == "write":
            time.sleep(SLOW_S)
        return call(*arguments, **options)

    return checked


class SharedFolder(mfusepy.Operations):  # type: ignore[misc]
    """Hands all calls on to the same path below another folder."""

    use_ns = True

    def __init__(self, below: str, mode_file: Path) -> None:
        self._below = below
        for name in CHANGES:
            setattr(self, name, failing(getattr(self, name), mode_file))

    def _path(self, path: str) -> str:
        return self._below + path

    def init(self, path: str) -> None:
        print("ready", flush=True)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._path(path))
        names = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid")
        times = {name: getattr(found, f"{name}_ns") for name in ("st_atime", "st_ctime", "st_mtime")}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._path(path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags & ~os.O_APPEND)  # each write comes with its place

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._path(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._path(path), mode)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._path(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._path(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._path(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._path(old), self._path(new))

    def link(self, target: str, source: str) -> None:
        os.link(self._path(source), self._path(target))

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._path(target))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._path(path), ns=times)


def main() -> None:
    below, where, mode_file = sys.argv[1:]
    # Without the kernel's page cache each write arrives as it was made. In one thread, a write delays what follows.
    mfusepy.FUSE(SharedFolder(below, Path(mode_file)), where, foreground=True, nothreads=True, direct_io=True)


if __name__ == "__main__":
    main()
