"""Read files that a user named or another program may have changed: only regular files of limited size."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

MIB, GIB = 2**20, 2**30
MAX_BYTES = 256 * MIB  # limit for a file that is read as a whole; this package writes far smaller files
MAX_YAML_BYTES = MIB
BLOCK = MIB  # bytes that `sha256_of` reads at a time

# Field types for the classes that `convert` creates.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # a float represents all integers up to 2**53 exactly
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Kind = TypeVar("Kind")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for binary reading. Raises OSError, also for pipes and devices, which may block or never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device; write its content to a file")
    return open(path, "rb")


def read_text(path: str | Path, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Read the text of a regular file. Raises OSError, and ValueError if it is too large or not UTF-8.

    `errors`: how to handle bytes that are not UTF-8, as in `bytes.decode`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:  # `read(max_bytes)` would allocate that much
            raise ValueError(f"it is larger than {max_bytes // MIB} MiB")
        content = file.read()
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start})") from None


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file from its current position. Reads in blocks to save memory."""
    sha256 = hashlib.sha256()
    while block := file.read(BLOCK):
        sha256.update(block)
    return sha256.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError with the reason."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read and parse a JSON file. Raises OSError, and ValueError if it is too large or not JSON."""
    return parse_json(read_text(path, max_bytes))


def convert(value: Any, kind: type[Kind]) -> Kind:
    """Convert parsed JSON to `kind`: a dataclass, `list[Count]` or any type that msgspec supports.

    Unknown keys of an object are ignored. Raises ValueError with the path of the invalid value, like $.rows[3].seconds.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
