"""Start-up of every command: print --help once, and import large libraries late and without garbage collection."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hvd_bert.config.parser import HELP
from hvd_bert.distributed.launch import silent_status, speaks_first, speaks_for_host
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, find_user_error
from hvd_bert.streams import end_when_interrupted, end_when_lost

if TYPE_CHECKING:
    from hvd_bert.config.settings import Config
    from hvd_bert.distributed.world import World


def start_command() -> None:
    """Make SIGINT and missing packages end this process without a traceback. Call before the other imports."""
    end_when_interrupted()
    sys.excepthook = _end_without_package


def _end_without_package(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    mistake = find_user_error(error) if isinstance(error, ImportError | OSError) else None
    if mistake is None:
        sys.__excepthook__(kind, error, traceback)
        return
    if not speaks_for_host(os.environ):
        os._exit(silent_status(os.environ, EXIT_BAD_INPUT))
    print(f"hvd_bert: {mistake}", file=sys.stderr, flush=True)
    os._exit(EXIT_BAD_INPUT)


def start_rank(main: Callable[[World], None], parse: Callable[[list[str]], Config]) -> NoReturn:
    """Join the world, run `main` on this rank, and exit. `parse`: parses the command line, and prints --help."""
    from hvd_bert.config import command_line  # imported late: it needs yaml, and the doctor must start without it

    take_local_rank()
    argv = [part for word in sys.argv[1:] for part in (word.split("=") if word.startswith("--help=") else [word])]
    print_on_one_rank(argv)
    if HELP & set(argv):

        def show_help() -> None:
            parse(argv)

        end_when_lost()
        sys.exit(run_command(show_help))
    with collector_paused():
        from hvd_bert.distributed.runner import run_as_rank
    run_as_rank(main, **command_line.before_joining(argv, parse))


def run_command(command: Callable[[], int | None]) -> int:
    """Run a single-process command, and return its exit status. If it raises a UserError, one rank prints it."""
    try:
        return command() or EXIT_OK
    except Exception as error:
        mistake = find_user_error(error)
        if mistake is None:
            raise
        if not speaks_first(os.environ):
            return silent_status(os.environ, EXIT_BAD_INPUT)
        print(f"hvd_bert: {mistake}", file=sys.stderr)
        return EXIT_BAD_INPUT


def take_local_rank() -> None:
    """Remove --local_rank, which deepspeed and torch.distributed.launch add, from sys.argv.

    Exits with an error if its value differs from the variable LOCAL_RANK.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank", nargs="?", const="")
    given, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    own = os.environ.get("LOCAL_RANK", "not set")
    if given.local_rank not in (None, own):
        print(
            f"hvd_bert: --local_rank {given.local_rank[:40]}: LOCAL_RANK is {own}. Remove the flag: launchers that need"
            " it add it, and set the variable.",
            file=sys.stderr,
        )
        sys.exit(EXIT_BAD_INPUT)


def print_on_one_rank(argv: Sequence[str]) -> None:
    """If --help is given, exit on all ranks except the one that prints it."""
    if HELP & set(argv) and not speaks_first(os.environ):
        sys.exit(EXIT_OK)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager: pause garbage collection during large imports. Use it only in a command's entry point.

    At the end the imported objects are frozen, so that later collections skip them. For torch and transformers this
    saves 2 s of CPU time per process, half of it at exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
