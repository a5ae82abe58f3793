"""File locks with the library filelock: the kernel frees a lock when its holder ends, for whatever reason.

A symbolic link in place of a lock file is an error. Lock files are never removed: two processes could hold the lock.
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

# Errors of file systems that are mounted without locks (some Lustre, some NFS).
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}

LOCK = ".lock"  # the name of a folder's lock file
BRIEFLY_S = 0.2  # `is_held` of another process acquires the lock for a moment


class InUse(UserError):
    """Another process, named in the lock file, holds the lock."""


class Lock(filelock.UnixFileLock):
    """A lock held by this process."""

    def __enter__(self) -> Lock:
        return self  # the function `acquire` has locked it, which must not count twice


def acquire(path: Path, *, wait: bool) -> Lock:
    """Lock `path`, which is created if missing. Raises OSError; without `wait`, also InUse.

    If the file system has no locks, a file in the host's temporary folder is locked instead, without `wait` with a
    warning: a cache, for which processes wait, may be written on several hosts.
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
    """Whether a process holds the lock now. Raises OSError if the lock file is missing or cannot be locked."""
    with open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def names_another_host(path: Path) -> bool:
    """Whether the last holder ran on another host: some network file systems do not show its lock here."""
    _, on, host = _holder(path).rpartition(" on ")
    return bool(on) and host != socket.gethostname()


def _acquire(path: Path, wait: bool, **options: Any) -> Lock:
    # One thread may release a lock that another acquired. A soft lock would remain after its holder is killed.
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
        os.fsync(descriptor)  # NFS would keep it on this host, and show other hosts an empty file


def _holder(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip() or "an unknown process"
    except (OSError, ValueError):
        return "an unknown process"
