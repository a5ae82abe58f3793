"""The sample's questions, generated on first use into this folder or, if it is read-only, into the cache.

A path such as hvd_bert/sample/train-v1.1.json is always valid: code that opens a file of questions calls `located`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from hvd_bert.errors import UserError
from hvd_bert.storage.places import cache_root
from hvd_bert.storage.writing import write_once

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Expected:
    """Expected size and SHA-256 of a generated file."""

    size: int
    sha256: str


# `python -m hvd_bert.sample.generate --out DIR` prints these; update them together with the generator.
FILES = {
    "train-v1.1.json": Expected(2591442, "b86f91b87046865b8ed0d06f329b2167d146bae1b854bb51744c9e3fe3d92583"),
    "train-v2.0.json": Expected(2838606, "194b0f68f7a4b84d994dcf1d9974c0e26698206f3a79184129118e4e2fde5d05"),
    "dev-v1.1.json": Expected(116842, "57b22e714f1b29b4c67b398893a5d2aad3190e5894a2e414bb25a8bdcc545454"),
    "dev-v2.0.json": Expected(123579, "ba8d4be6b763e84c1f839f656097c2c7cc806379e0c84fd53bc13ef4d6b04acd"),
}


def located(path: str | os.PathLike[str]) -> Path:
    """`path` itself or, for a file of the sample, the path of the generated file. Raises UserError."""
    path = Path(path)
    if path.name in FILES and path.parent.resolve() == FOLDER:
        return generated(path.name)
    return path


def generated(name: str) -> Path:
    """The path of a file of the sample, which is generated if it is missing, damaged or from another version.

    Several processes may call this at the same time. Raises UserError.
    """
    expected = FILES[name]
    places = (FOLDER / name, cache_root() / "sample" / f"{expected.sha256[:12]}-{name}")
    for path in places:
        if _holds(path, expected):
            return path
    content = _content(name)
    reasons = []
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_once(path, content)
            return path
        except OSError as error:
            reasons.append(f"{path.parent}: {error.strerror or error}")
    raise UserError(
        f"The sample's {name} cannot be written ({'; '.join(reasons)}). Set HVD_BERT_CACHE to a writable folder with"
        " free space."
    )


def _holds(path: Path, expected: Expected) -> bool:
    try:
        if path.stat().st_size != expected.size:
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == expected.sha256
    except OSError:
        return False


def _content(name: str) -> bytes:
    from hvd_bert.sample import generate  # only the first run needs it

    content = generate.content(name)
    found = hashlib.sha256(content).hexdigest()
    if found != FILES[name].sha256:
        raise UserError(
            f"The sample's {name} has the SHA-256 {found} instead of {FILES[name].sha256}: the generator in {FOLDER}"
            " was changed. Restore it, or update the list in files.py."
        )
    return content
