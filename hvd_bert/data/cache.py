"""A folder cache: one folder per key, built by the first process that needs it and used by all others.

An entry is built in a temporary folder in the cache, flushed to disk and renamed, so it is always complete. To detect
later damage, one process per host verifies the SHA-256 checksums of the entry's files.

Processes that need a missing entry at the same time wait for a file lock, which the kernel frees if its holder dies.
They do not wait in a collective, since tokenization may exceed a collective's timeout. If two hosts share a file system
whose locks do not reach across hosts, each builds its own copy and the first rename wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from hvd_bert.config.parser import checked_path
from hvd_bert.errors import UserError, as_user_error
from hvd_bert.storage import locks
from hvd_bert.storage.reading import open_regular, read_json, sha256_of
from hvd_bert.storage.writing import flush
from hvd_bert.streams import before_ending

SUMS = "sha256.json"  # in each entry: file name -> checksum, for its other files
_LEFTOVER_AGE_S = 24 * 3600.0


def default_cache_dir() -> Path:
    """Return the folder "windows" in $HVD_BERT_CACHE, $XDG_CACHE_HOME/hvd_bert or ~/.cache/hvd_bert.

    Raises UserError if the variable is not a path.
    """
    for name, subfolder in (("HVD_BERT_CACHE", ""), ("XDG_CACHE_HOME", "hvd_bert")):
        if folder := os.environ.get(name):
            return Path(checked_path(name, folder), subfolder, "windows")
    return Path.home() / ".cache" / "hvd_bert" / "windows"


def entry(cache_dir: Path, key: str, build: Callable[[Path], None], verify: bool = True) -> Path:
    """Return the folder of `key`. If it does not exist, create it by calling `build(empty_folder)`.

    `verify`: verify the files' checksums. One process per host is enough.

    Raises UserError if the folder is damaged, or `cache_dir` cannot be written. Other errors of `build` propagate, and
    its partial output is removed.
    """
    folder = cache_dir / key
    if not folder.exists():  # no lock otherwise, so that a filled cache may be read-only
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with locks.acquire(cache_dir / f"{key}.lock", wait=True):
                if not folder.exists():
                    _remove_leftovers(cache_dir)
                    _build(folder, build)
        except OSError as error:
            raise UserError(
                f"{cache_dir}: the cache of tokenized questions cannot be written: {error.strerror or error}. "
                "Set HVD_BERT_CACHE to a writable folder with free space."
            ) from error
    if verify:
        with reading(folder):
            if read_json(folder / SUMS) != _sums(folder):
                raise ValueError("its checksums differ")
    return folder


def reading(folder: Path) -> AbstractContextManager[None]:
    """Context manager: turn errors while reading the cache entry `folder` into a UserError."""
    return as_user_error(
        lambda reason: (
            f"{folder} is damaged or cannot be read ({reason}). Remove this folder: the next run makes it again."
        )
    )


def _sums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in folder.iterdir():
        if path.name != SUMS:
            with open_regular(path) as file:
                sums[path.name] = sha256_of(file)
    return sums


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    building = entry.parent / f"tmp-{uuid.uuid4().hex}"
    remove = partial(shutil.rmtree, building, ignore_errors=True)
    with before_ending(remove), ExitStack() as stack:
        stack.callback(remove)
        building.mkdir()
        build(building)
        (building / SUMS).write_text(json.dumps(_sums(building)))
        for file in building.iterdir():
            flush(file)
        flush(building)
        try:
            building.rename(entry)
        except OSError:
            if not entry.exists():  # if it exists, another host was first, with the same content
                raise
        flush(entry.parent)


def _remove_leftovers(cache_dir: Path) -> None:
    """Remove temporary folders older than a day, which dead processes have left."""
    for leftover in cache_dir.glob("tmp-*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it at the same time
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
                shutil.rmtree(leftover, ignore_errors=True)
