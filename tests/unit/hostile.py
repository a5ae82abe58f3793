"""Make hostile files, on which readers must not hang, end in a traceback or use gigabytes of memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Make = Callable[[Path], object]  # writes a hostile file to a path


def text(content: str | bytes) -> Make:
    return lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content)


CONTENTS: dict[str, Make] = {
    "empty": text(""),
    "NUL bytes": text(bytes(100)),
    "not UTF-8": text(b'{"a": "\xff\xfe"}\n'),
    "UTF-16": text('{"a": 1}'.encode("utf-16")),
    "cut off": text('{"step": 1, "lo'),
    "5,000 digits": text('{"step": ' + "9" * 5000 + "}\n"),
    "only digits": text("7" * 5000 + "\n"),
    "a list": text("[1]\n"),
    "null": text("null\n"),
    "a string": text('"a\\ud800\\u001b[31m"\n'),
}
NO_FILES: dict[str, Make] = {"fifo": lambda path: os.mkfifo(path), "folder": lambda path: path.mkdir()}
ALL = CONTENTS | NO_FILES


@contextmanager
def in_place_of(path: Path, name: str) -> Iterator[None]:
    """Context manager: replace the file `path` by the hostile file ALL[`name`], and restore it afterwards."""
    before = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    ALL[name](path)
    try:
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        if before is not None:
            path.write_bytes(before)


def check_message(message: str, *words: str) -> None:
    """Check that a message contains all `words` and, printed, is a single line of fewer than 1000 characters."""
    for word in words:
        assert word in message, message
    printed = message.encode(errors="backslashreplace").decode()  # commands escape lone surrogates
    assert len(printed) < 1000 and printed.isprintable(), printed


class Canary:
    """An object that creates the folder `path` when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)

    def pickled(self, path: Path) -> None:
        """Write this object's pickle to a file."""
        path.write_bytes(pickle.dumps(self))

    @property
    def ran(self) -> bool:
        """Whether this object's pickle was loaded."""
        return self.path.exists()
