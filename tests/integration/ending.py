"""An entry that leaves work to the end of its process.

python ending.py FOLDER STRATEGY [STATUS]

Each rank appends the stages of its process's end to its own file in FOLDER.
"""

from __future__ import annotations

import atexit
import sys
import threading
from functools import partial
from pathlib import Path

from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import CollectiveError, World


def say(path: Path, words: str) -> None:
    with path.open("a") as file:
        file.write(words + "\n")


class Remains:
    """An object that lives until Python is finalized."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def __del__(self) -> None:
        self.file.write("taken apart\n")
        self.file.close()


def entry(world: World) -> None:
    global remains
    path = Path(sys.argv[1]) / f"rank{world.rank}"
    remains = Remains(path)
    atexit.register(partial(say, path, "atexit"))

    def write() -> None:  # like a checkpoint's writer that has not finished
        threading.main_thread().join()
        say(path, "thread")

    threading.Thread(target=write).start()
    if sys.argv[3:]:
        raise CollectiveError("all know it", status=int(sys.argv[3]))


if __name__ == "__main__":
    run_as_rank(entry, sys.argv[2])
