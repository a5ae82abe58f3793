"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$HVD_BERT_CACHE`, else `$XDG_CACHE_HOME/hvd_bert`, else `~/.cache/hvd_bert`."""
    own = os.environ.get("HVD_BERT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert"
