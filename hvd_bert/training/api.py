"""Training from a Python program: `from hvd_bert import train`. The command calls the same `run`."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.distributed.signals import SIGNALS, watch_launcher
from hvd_bert.errors import UserError
from hvd_bert.startup import collector_paused
from hvd_bert.streams import in_main_thread

if TYPE_CHECKING:  # large libraries
    from hvd_bert.distributed.world import World
    from hvd_bert.output.callback import Callback, RunResult
    from hvd_bert.tasks.base import Task


def train(
    *,
    config: str | None = None,
    task: str | type[Task] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> RunResult:
    """Train and evaluate as the command does, on all ranks. The process may train again afterwards.

    The ranks are those of the process group of torch.distributed that the program has initialized, which stays, or else
    the launcher's. `settings`: the command's flags; None stands for the default. `task`: a name, or your own class.

    Raises UserError, which is a ValueError, and what a callback raises. A launcher's ranks end instead, after a report.
    """
    results: list[RunResult] = []
    with _process_given_back():
        from hvd_bert.distributed.runner import run_in_program
        from hvd_bert.tasks.base import name_of
        from hvd_bert.training import loop  # noqa: F401  here, or `run` would freeze the program's objects

        given = {"config": config, "task": name_of(task) if isinstance(task, type) else task, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        words = [word for name, value in given.items() for word in command_line.words_of(name, value)]
        with suppress(UserError):  # reported when joining
            watch_launcher(find_launcher(os.environ).name)
        run_in_program(lambda world: results.append(run(words, world, callbacks)), **command_line.before_joining(words))
    return results[-1]


def main(world: World) -> None:
    """The command, on one rank. Called by all ranks."""
    run(None, world)


def run(words: list[str] | None, world: World, callbacks: Sequence[Callback] = ()) -> RunResult:
    """A whole run on one rank, from a command line (None: this process's) to the output files. Called by all ranks."""
    with world.raise_on_all_ranks():
        config = command_line.parse(words)
        # Inside, so that warnings of the imports are shown once. In a later world of Horovod elastic, freezing again
        # would keep the previous world's memory.
        with nullcontext() if "hvd_bert.training.loop" in sys.modules else collector_paused():
            from hvd_bert.training import loop
    return loop.run(config, world, callbacks)


@contextmanager
def _process_given_back() -> Iterator[None]:
    """Give back what a run changes in its process."""
    numbers = random.getstate()  # imports draw some
    import numpy as np
    import torch

    from hvd_bert.distributed import events
    from hvd_bert.output import output_dir

    with ExitStack() as afterwards:
        then = afterwards.callback
        then(gc.collect)  # the model and its hooks refer to each other
        then(_restore, sys.stdout, sys.stderr, dict(os.environ))
        for number in SIGNALS if in_main_thread() else ():
            then(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        for logger in (logging.getLogger(name) for name in (None, "hvd_bert", "transformers")):
            then(vars(logger).update, handlers=logger.handlers, propagate=logger.propagate)
            then(logger.setLevel, logger.level)
            logger.handlers = []  # the run would close them
        then(logging.captureWarnings, False)
        then(random.setstate, numbers)
        then(np.random.set_state, np.random.get_state())
        then(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            then(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
            then(torch.cuda.set_device, torch.cuda.current_device())
        then(torch.set_num_threads, torch.get_num_threads())
        then(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        then(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        then(output_dir.unlock)
        then(events.end)
        yield


def _restore(stdout: Any, stderr: Any, environ: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stdout, sys.stderr = stdout, stderr
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
