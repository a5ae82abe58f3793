"""Atomic writes: if the writer is killed, either the old or the new file remains, never a partial one."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file next to `path`; it replaces `path` unless the block raises.

    For one writer at a time: the temporary name is fixed, so that a writer replaces the leftover of a killed one.
    `durable`: the file also survives a power failure.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
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


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_once(path: Path, content: bytes) -> None:
    """Write a file that processes on several hosts may write at the same time, all with the same content.

    The first file is kept, since replacing a file over NFS breaks its readers. A file of other content is replaced.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(content)
        flush(partial)
        try:
            os.link(partial, path)
        except FileExistsError:
            if path.read_bytes() != content:
                os.replace(partial, path)
        except OSError:  # a file system without hard links
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
