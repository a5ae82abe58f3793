"""Train with delays of HELD_S: rank 1 loads the model, rank 0 writes the first checkpoint and evaluates that late."""

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

HELD_S = 6.0  # in the test, the stall inspector warns within 4 s, and the watchdog ends a step after 4 s


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    """Delay the first call of a function by HELD_S."""
    calls: list[int] = []

    def holds(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            time.sleep(HELD_S)
            print(f"held in {function.__name__}", flush=True)
        return function(*arguments, **options)

    return holds


if __name__ == "__main__":
    if find_launcher(os.environ).rank == 1:  # rank 0 would end the job first, since it reports without delay
        encoder.load_model = held(encoder.load_model)
    else:
        files.write = held(files.write)
        question_answering.score = held(question_answering.score)
    run_as_rank(main, **command_line.before_joining(sys.argv[1:]))
