"""The user's cache folder, and which paths can be used."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$HVD_BERT_CACHE`, else `$XDG_CACHE_HOME/hvd_bert`, else `~/.cache/hvd_bert`."""
    own = os.environ.get("HVD_BERT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert"


def path_problem(path: str) -> str:
    """Why no file can have this path, with a remedy; "" if it can. Libraries always encode paths as UTF-8."""
    if not path:
        return "is empty: give a value, or leave the flag out for its default"
    if path.encode(errors="replace").decode() != path:
        return "is not valid UTF-8: rename the file or folder"
    return ""
