"""The user's cache folder, and which paths can be used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hvd_bert.errors import UserError


def cache_root() -> Path:
    """`$HVD_BERT_CACHE`, else `$XDG_CACHE_HOME/hvd_bert`, else `~/.cache/hvd_bert`."""
    own = os.environ.get("HVD_BERT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert"


def check_working_directory() -> None:
    """Raise UserError if the working directory was removed: no path could be looked up from it."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"The working directory cannot be used ({error.strerror}). Change to another (cd).") from None


NAME_MAX, PATH_MAX = 255, 4096  # bytes, of Linux


def path_problem(path: str) -> str:
    """Why no file can have this path, with a remedy; "" if it can.

    Python encodes paths by the locale, but libraries such as pyarrow and tokenizers always as UTF-8. If the two differ,
    they would not mean the same file.
    """
    if not path:
        return "is empty: give a value, or leave the flag out for its default"
    if "\0" in path:
        return "contains a NUL character: remove it"
    encoding = sys.getfilesystemencoding()
    try:
        same = os.fsencode(path) == path.encode()
    except UnicodeEncodeError:
        same = False
    if not same and encoding == "utf-8":
        return "is not valid UTF-8: rename the file or folder"
    if not same:
        return f"is not ASCII, and Python's encoding of paths is {encoding} here: set PYTHONUTF8=1"
    if len(path.encode()) >= PATH_MAX or any(len(name) > NAME_MAX for name in path.encode().split(b"/")):
        return f"is too long for a file: a name has at most {NAME_MAX} bytes, a path {PATH_MAX - 1}"
    return ""


TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
)
