"""Mistakes that users can fix, the exit statuses of all commands, and the logger."""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("hvd_bert")  # one logger for all modules
MAX_REASON = 400
# Terminals act on control characters, HTML forbids them, and lone surrogates cannot be encoded as UTF-8.
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in a shell
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: a command that only prints has lost its reader
EXIT_TERMINATED = 143  # 128 + SIGTERM, as in a shell; used for a second SIGTERM
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h
STATUSES = {
    EXIT_OK: "Done",
    EXIT_FAILURE: "Failure. All ranks are terminated",
    EXIT_BAD_INPUT: "Bad input: a flag, a file, a model, a launcher or a device that cannot be used. One message"
    " (one per host for its environment), before any training",
    EXIT_STOPPED: "Stopped by a signal or the loss of the output folder, and everything is saved. Rerun the command to"
    " resume",
    EXIT_INTERRUPTED: "Interrupted by Ctrl-C, where that does not stop and save: any command before it trains, a"
    " fast dev run, and a second Ctrl-C in a run",
    EXIT_BROKEN_PIPE: "The reader of the output ended before a command that only prints",
    EXIT_TERMINATED: "A second SIGTERM ended a run. It lost the steps since its last checkpoint",
}


def visible(text: str) -> str:
    """Replace control characters, except tab and newline, and lone surrogates with Python's escape sequences."""
    return _INVISIBLE.sub(lambda character: repr(character[0])[1:-1], text)


class UserError(ValueError):
    """A mistake that the user can fix.

    The message states what is wrong, where it is and what to do. The entry point prints it once, without a traceback,
    and exits with `status`.
    """

    status = EXIT_BAD_INPUT

    def __init__(self, message: str) -> None:
        super().__init__(visible(message))  # the message may quote a file's content


# Errors that a wrong path causes, not a failing disk. ELOOP, ENAMETOOLONG and EROFS have no subclass of OSError.
_PATH_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_PATH_CODES = {errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}
_CLONE = Path(__file__).parents[1]


def find_user_error(error: BaseException) -> UserError | None:
    """Convert an exception to a UserError if the user can fix its cause, such as a wrong path or a missing package.

    Returns None for other exceptions.
    """
    if isinstance(error, UserError):
        return error
    while isinstance(error.__cause__, ImportError):  # transformers and numpy wrap the error that names the module
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("hvd_bert"):
        return UserError(f"{error} in the environment of {sys.executable}. {_environment_remedy()}")
    # The text of ctypes's OSError begins with the path.
    library = getattr(error, "path", None) or str(error).partition(":")[0]
    if isinstance(error, ImportError | OSError) and library.endswith(".so"):
        remedy = "Load the modules that were loaded at set-up, or reinstall this package."
        return UserError(f"{library} cannot be loaded ({error}). {remedy}")
    is_of_path = isinstance(error, _PATH_ERRORS) or (isinstance(error, OSError) and error.errno in _PATH_CODES)
    if isinstance(error, OSError) and is_of_path and error.filename is not None:
        return UserError(f"{str(error.filename)[:MAX_REASON]}: {error.strerror}. Check this path.")
    return None


def _environment_remedy() -> str:
    activate = _CLONE / ".venv" / "bin" / "activate"
    if activate.exists() and Path(sys.prefix) != activate.parents[1]:
        return f"Use the trainer's: source {activate}"
    if (_CLONE / "env" / "setup.sh").exists():
        return f"Install it, or complete the trainer's: bash {_CLONE / 'env' / 'setup.sh'}"
    return "Install it there."


def short_reason(error: BaseException) -> str:
    """Return a library's error as one line.

    More than MAX_REASON characters are cut after the last complete sentence, or end in "..." if there is none.
    """
    text = " ".join(str(error).split()).removesuffix(".")
    if len(text) > MAX_REASON:
        text = text[:MAX_REASON].rpartition(". ")[0] or text[:MAX_REASON] + "..."
    if text and isinstance(error, (OSError, ValueError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__  # a KeyError's text is only the key


@contextmanager
def as_user_error(message: Callable[[str], str]) -> Iterator[None]:
    """Context manager: convert a library's exception to a UserError with the text `message(reason)`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # tokenizers, which is written in Rust, raises PanicException, a direct subclass of BaseException.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(message(short_reason(error))) from None
        raise
