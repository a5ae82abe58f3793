"""Atomic writes: whatever kills the writer leaves the old file or the new one, never half of one."""

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

    For one writer at a time: the temporary name is fixed, so that the next writer replaces what a killed one left.
    `durable`: the file survives a power failure, too.
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
    """Write a file that processes of several hosts may write at once, all with the same content.

    The first one stays: over NFS, replacing a file breaks those who are reading it. One of another size is replaced.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(content)
        flush(partial)
        try:
            os.link(partial, path)
        except FileExistsError:
            if path.stat().st_size != len(content):
                os.replace(partial, path)
        except OSError:  # a file system without hard links
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def flush(path: Path) -> None:
    """Write a file or a folder to disk before what follows."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
