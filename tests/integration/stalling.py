"""Train with delays of HELD_S seconds: rank 1 loads the model late; rank 0 writes a checkpoint late and scores late."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hvd_bert.checkpoint import files
from hvd_bert.config import command_line
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.tasks import encoder, question_answering
from hvd_bert.training.api import main

HELD_S = 6.0  # the test sets limits of 2 s for the stall inspector's warning and of 4 s for a step


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose first call is delayed by HELD_S."""
    calls: list[int] = []

    def holds(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            time.sleep(HELD_S)
            print(f"held in {function.__name__}", flush=True)
        return function(*arguments, **options)

    return holds


if __name__ == "__main__":
    if find_launcher(os.environ).rank == 1:  # rank 0 then waits, and its watchdog would be the first to end the job
        encoder.load_model = held(encoder.load_model)
    else:
        files.write = held(files.write)
        question_answering.score = held(question_answering.score)
    run_as_rank(main, **command_line.before_joining(sys.argv[1:]))
