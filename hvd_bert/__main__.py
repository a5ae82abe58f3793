"""All commands under one name: `hvd-bert COMMAND ...`.

    hvd-bert train --config sample
    horovodrun -np 4 hvd-bert train --config sample
    hvd-bert --help                                     lists the commands

A command is a folder with a `__main__.py`, or train.py. Its docstring begins with the line that `--help` shows.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from pathlib import Path

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK
from hvd_bert.streams import end_when_interrupted, end_when_lost
from hvd_bert.version import __version__

PACKAGE = Path(__file__).parent
HELP = ("-h", "--help")


def main() -> int:
    """The console script. Returns the exit status, unless it becomes the command."""
    end_when_interrupted()
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in commands():
        os.execv(sys.executable, [sys.executable, "-m", commands()[word], *sys.argv[2:]])

    from hvd_bert.distributed.launch import speaks_first

    if not speaks_first(os.environ):
        return EXIT_OK  # rank 0 prints, and its status counts
    end_when_lost()
    if word in (*HELP, "--version"):
        print(f"hvd-bert {__version__}" if word == "--version" else description())
        return EXIT_OK
    close = difflib.get_close_matches(word, commands(), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    print(f"hvd_bert: unknown command {word!a}.{hint} `hvd-bert --help` lists the commands.", file=sys.stderr)
    return EXIT_BAD_INPUT


def commands() -> dict[str, str]:
    """All commands by name, with their modules."""
    files = [*PACKAGE.glob("*/__main__.py"), *PACKAGE.glob("tools/*/__main__.py")]
    places = [PACKAGE / "train", *(file.parent for file in files)]
    return {
        place.name: ".".join(("hvd_bert", *place.relative_to(PACKAGE).parts))
        for place in sorted(places, key=lambda place: place.name)
    }


def description() -> str:
    """What `--help` prints."""
    lines = ["usage: hvd-bert [-h] [--version] COMMAND ...", "", "commands:"]
    lines += [f"  {name:<8}  {_purpose(module)}" for name, module in commands().items()]
    return "\n".join([*lines, "", "`hvd-bert COMMAND --help` lists the flags of a command."])


def _purpose(module: str) -> str:
    """The first line of a command's docstring."""
    place = PACKAGE.joinpath(*module.split(".")[1:])
    file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
