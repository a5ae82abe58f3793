"""`UserError` and the exit statuses of all commands."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75  # stopped and saved: rerun the same command to resume (EX_TEMPFAIL of sysexits.h)


class UserError(ValueError):
    """A mistake that the user can fix.

    The message states what is wrong, where it is and what to do. The entry point prints it once,
    on one rank and without a traceback, and exits with `EXIT_BAD_INPUT`.
    """
