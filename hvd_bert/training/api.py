"""Training from a Python program: `from hvd_bert import train`. The command calls the same `run`."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.distributed.signals import SIGNALS
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
    with _process_restored():
        from hvd_bert.distributed.runner import run_in_program
        from hvd_bert.tasks.base import task_name
        from hvd_bert.training import loop  # noqa: F401  here, or `run` would freeze the program's objects

        own = task if isinstance(task, type) else None
        given = {"config": config, "task": task_name(own) if own else task, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        words = [word for name, value in given.items() for word in command_line.to_argv(name, value)]
        run_in_program(
            lambda world: results.append(run(words, world, callbacks, own)), **command_line.before_joining(words)
        )
    return results[-1]


def main(world: World) -> None:
    """The command, on one rank. Called by all ranks."""
    run(None, world)


def run(
    words: list[str] | None, world: World, callbacks: Sequence[Callback] = (), own: type[Task] | None = None
) -> RunResult:
    """A whole run on one rank, from a command line (None: this process's) to the output files. Called by all ranks.

    `own`: the task's class, if a program gives it.
    """
    with world.raise_on_all_ranks():
        config = command_line.parse(words)
        # Inside, so that warnings of the imports are shown once. In a later world of Horovod elastic, freezing again
        # would keep the previous world's memory.
        with nullcontext() if "hvd_bert.training.loop" in sys.modules else collector_paused():
            from hvd_bert.training import loop
    return loop.run(config, world, callbacks, own)


@contextmanager
def _process_restored() -> Iterator[None]:
    """Restore afterwards what a run changes in its process."""
    numbers = random.getstate()  # imports draw some
    import numpy as np
    import torch

    from hvd_bert.distributed import events

    stdout, stderr, environ = sys.stdout, sys.stderr, dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS if in_main_thread()}
    loggers = [logging.getLogger(name) for name in (None, "hvd_bert", "transformers")]
    logged = [(logger.level, {"handlers": logger.handlers, "propagate": logger.propagate}) for logger in loggers]
    for logger in loggers:
        logger.handlers = []  # the run would close them
    numpy_numbers = np.random.get_state()
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    gpu = torch.cuda.current_device() if gpus else None
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        events.end()
        with suppress(OSError, ValueError):  # the program's own stream may be closed
            sys.stdout.flush()
        sys.stdout, sys.stderr = stdout, stderr
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for logger, (level, attributes) in zip(loggers, logged, strict=True):
            logger.setLevel(level)
            vars(logger).update(attributes)
        logging.captureWarnings(False)
        random.setstate(numbers)
        np.random.set_state(numpy_numbers)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        gc.collect()  # the model and its hooks refer to each other
