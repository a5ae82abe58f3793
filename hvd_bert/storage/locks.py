"""File locks based on the library filelock. The kernel releases a lock when its process ends, even if it is killed.

A symbolic link in place of a lock file is an error. Lock files are never removed: a process could then lock a new file
while another still holds the lock on the removed file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

from hvd_bert.errors import UserError, log
from hvd_bert.storage.reading import open_regular, read_text

# Error numbers on file systems that are mounted without lock support (some Lustre, some NFS).
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}

LOCK = ".lock"  # the name of a folder's lock file
BRIEFLY_S = 0.2  # seconds to retry without `wait`: `is_held` in another process may briefly hold the lock


class InUse(UserError):
    """Another process, named in the lock file, holds the lock."""


class Lock(filelock.UnixFileLock):
    """A lock held by this process."""

    def __enter__(self) -> Lock:
        return self  # already locked by the function `acquire`; filelock would count a second time


def acquire(path: Path, *, wait: bool) -> Lock:
    """Lock the file `path`, which is created if missing. Raises OSError.

    If another process holds the lock, wait for it or, without `wait`, raise InUse. If the file system does not support
    locks, lock a file in this host's temporary folder instead and, without `wait`, warn that other hosts do not see it.
    """
    try:
        return _acquire(path, wait)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        name = f"hvd_bert-{os.getuid()}-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.lock"
        on_this_host = Path(tempfile.gettempdir()) / name
        lock = _acquire(on_this_host, wait, mode=0o600)
        if not wait:
            reason = error.strerror or error
            log.warning(
                "%s cannot be locked (%s): do not use it on another host at the same time.", path.parent, reason
            )
        return lock


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock now. Raises OSError if the lock file is missing or cannot be locked."""
    with open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def names_another_host(path: Path) -> bool:
    """Return whether the lock's last holder ran on another host, whose locks some network file systems do not show."""
    _, on, host = _holder(path).rpartition(" on ")
    return bool(on) and host != socket.gethostname()


def _acquire(path: Path, wait: bool, **options: Any) -> Lock:
    # Not thread-local: any thread may release the lock. Not a soft lock, which remains if its process is killed.
    lock = Lock(path, thread_local=False, fallback_to_soft=False, on_acquired=_sign, **options)
    try:
        lock.acquire(timeout=-1 if wait else BRIEFLY_S)
    except filelock.Timeout:
        raise InUse(f"{path.parent} is in use by another run ({_holder(path)}): wait for it to end.") from None
    return lock


def _sign(descriptor: int) -> None:
    """Name this process in the lock file, for the messages of other processes. Leaves a user's own file unchanged."""
    with suppress(OSError):  # a full disk must not prevent the lock
        if os.pread(descriptor, 8, 0) not in (b"", b"process "):
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        os.fsync(descriptor)  # otherwise NFS may show other hosts an empty file


def _holder(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip() or "an unknown process"
    except (OSError, ValueError):
        return "an unknown process"
