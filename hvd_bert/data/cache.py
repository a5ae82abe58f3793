"""A folder per key, built once by whichever process comes first, found by all the others.

An entry is built in a temporary folder beside it, flushed to disk and renamed, so whatever stands
under an entry's name is whole. Processes that miss at the same time queue at a file lock, which the
kernel frees when its holder dies, and not at a collective: tokenising may take longer than a
collective may wait. Should two nodes share a file system whose locks do not reach across nodes, each
builds its own copy and the first to rename wins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from hvd_bert.errors import UserError
from hvd_bert.storage import locks
from hvd_bert.storage.places import cache_root
from hvd_bert.storage.writing import flush

_LEFTOVER_AGE_S = 24 * 3600.0


def default_cache_dir() -> Path:
    """The window cache in this user's cache folder."""
    return cache_root() / "windows"


def folder(
    cache_dir: Path,
    key: str,
    build: Callable[[Path], None],
    is_whole: Callable[[Path], bool],
    *,
    overwrite: bool = False,
) -> Path:
    """The folder of `key`, filled by `build(empty_folder)` if it is absent, not whole, or to be overwritten.

    Raises `UserError` if `cache_dir` cannot be written. Other errors of `build` go through, and what it
    wrote is removed.
    """
    entry = cache_dir / key
    if not overwrite and is_whole(entry):  # needs no lock, so a read-only cache that is filled will do
        return entry
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locks.take(cache_dir / f"{key}.lock", wait=True):
            if overwrite or not is_whole(entry):
                _remove_leftovers(cache_dir, key)
                _build(entry, build, is_whole)
    except OSError as error:
        raise UserError(
            f"{cache_dir}: the cache of tokenised questions cannot be written: {error.strerror or error}. "
            "Set HVD_BERT_CACHE to a folder with room that you may write to."
        ) from error
    return entry


def _build(entry: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> None:
    building = entry.parent / f"{_temporary(entry.name)}{uuid.uuid4().hex}"
    building.mkdir()
    try:
        build(building)
        for file in building.iterdir():
            flush(file)
        flush(building)
        if entry.exists():
            # Moved aside, not removed: another node may have it mapped, and over NFS its pages would go.
            aside = entry.parent / f"old-{uuid.uuid4().hex}"
            entry.rename(aside)
            os.utime(aside)  # its age counts from now on
        try:
            building.rename(entry)
        except OSError:
            if not is_whole(entry):  # else another node was first, with the same content
                raise
        flush(entry.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _temporary(key: str) -> str:
    return f"tmp-{key}-{socket.gethostname()}-"


def _remove_leftovers(cache_dir: Path, key: str) -> None:
    """Removes what dead builders left. Call it with the key's lock held."""
    for left in (*cache_dir.glob("tmp-*"), *cache_dir.glob("old-*")):
        # This host's folders for this key are dead, since their builder would hold the lock.
        dead = left.name.startswith(_temporary(key))
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if dead or time.time() - left.stat().st_mtime > _LEFTOVER_AGE_S:
                shutil.rmtree(left, ignore_errors=True)
