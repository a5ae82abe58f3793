"""All commands under one name: `hvd-bert COMMAND ...`.

    hvd-bert train --config sample
    horovodrun -np 4 hvd-bert train --config sample
    hvd-bert --help                                     lists the commands

`--help` prints the table COMMANDS and the exit statuses.
"""

from __future__ import annotations

import difflib
import os
import sys

from hvd_bert.config.parser import HELP
from hvd_bert.distributed.launch import speaks_first
from hvd_bert.errors import STATUSES, UserError
from hvd_bert.startup import run_command, start_command
from hvd_bert.streams import end_when_lost
from hvd_bert.version import __version__

COMMANDS = {
    "bench": "Measure the trainer's throughput, or run a sweep.",
    "doctor": "Preflight check: find problems of hosts, ranks and network before a training starts.",
    "evaluate": "Evaluate a trained model: scores, where it fails, and whether it is better than another model.",
    "predict": "Answer questions with a trained model, or predict with a custom task.",
    "report": "Show one run, or compare several: what differs, and the speed-up of those that did the same work.",
    "timeline": "Analyze a Horovod timeline: phases, messages, bandwidth, exposed communication, stragglers, advice.",
    "train": "Train a task on all ranks of the world; by default, fine-tune BERT on SQuAD.",
    "tune": "Search for a better learning rate, batch, length or other flags, by trainings.",
}


def main() -> int:
    """Replace this process with the command that sys.argv names, or print help. Returns the exit status."""
    start_command()
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in COMMANDS:
        folder = "" if word in ("predict", "train") else "tools."
        os.execv(sys.executable, [sys.executable, "-m", f"hvd_bert.{folder}{word}", *sys.argv[2:]])

    end_when_lost()
    return run_command(lambda: _show(word))


def _show(word: str) -> None:
    """Print the help or the version on one rank. Raises UserError for an unknown command."""
    if word not in (*HELP, "--version"):
        raise UserError(f"unknown command {word!a}.{_hint(word)} `hvd-bert --help` lists the commands.")
    if speaks_first(os.environ):
        print(f"hvd-bert {__version__}" if word == "--version" else description())


def _hint(word: str) -> str:
    """Suggest the command that `word` abbreviates ("eval"), extends ("benchmark") or misspells; "" if there is none."""
    close = [name for name in COMMANDS if len(word) > 2 and (name.startswith(word) or word.startswith(name))]
    close += difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.8)  # 0.8 accepts typing errors, not other words
    return f" Did you mean {close[0]}?" if close else ""


def description() -> str:
    """Return the text that `hvd-bert --help` prints."""
    lines = ["usage: hvd-bert [-h] [--version] COMMAND ...", "", "commands:"]
    lines += [f"  {name:<8}  {purpose}" for name, purpose in COMMANDS.items()]
    lines += ["", "exit status:", *(f"{status:5}  {meaning}." for status, meaning in STATUSES.items())]
    return "\n".join([*lines, "", "`hvd-bert COMMAND --help` lists the flags of a command."])


if __name__ == "__main__":
    sys.exit(main())
