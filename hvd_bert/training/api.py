"""Training from a Python program: `from hvd_bert import train`. The command line uses `run` of this module, too."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.config.arguments import check_types
from hvd_bert.distributed.signals import SIGNALS
from hvd_bert.errors import UserError
from hvd_bert.output.callback import Callback, RunResult
from hvd_bert.startup import collector_paused
from hvd_bert.streams import in_main_thread

if TYPE_CHECKING:  # these modules import torch, which takes seconds
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import Task

Setting = str | int | float | bool | Sequence[str] | None  # type of a flag's value in Python
_TRAINING = threading.Lock()  # held while `train` runs
_TRAINED: set[int] = set()  # ids of processes in which `train` ran; a forked process inherits its parent's


def train(
    *,
    config: str | None = None,
    task: str | type[Task] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> RunResult:
    """Train and evaluate as the command does. Call this on all ranks. It can be called again afterwards.

    The ranks are those of the launcher or, if the program has initialized torch.distributed, of its process group,
    which remains usable. `settings`: the command's flags, without dashes; None means the default. `task`: the name or
    the class of a task.

    Raises UserError, which is a ValueError, and the errors of callbacks. Under a launcher, the ranks instead report the
    error and exit.
    """
    if _TRAINING.locked():  # a thread or a callback of the running training may have called this
        raise UserError("train() runs already in this process: wait for its end, or start another process.")
    if _TRAINED - {os.getpid()}:
        raise UserError(
            "train() has run in the process from which this one was forked, and its threads are missing here: start"
            ' this process with multiprocessing.get_context("spawn").'
        )
    results: list[RunResult] = []
    with _TRAINING, _process_restored():
        from hvd_bert.distributed.runner import run_in_program
        from hvd_bert.tasks.base import task_name
        from hvd_bert.training import loop  # noqa: F401  else `run` would import it and freeze the program's objects

        own = task if isinstance(task, type) else None
        given = {"config": config, "task": task_name(own) if own else task, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        words = [word for name, value in given.items() for word in command_line.to_argv(name, value)]

        def run_checked(world: World) -> None:
            with world.raise_on_all_ranks():
                kinds = {**dict.fromkeys(settings, Setting), "config": Setting, "callbacks": Sequence[Callback]}
                check_types({**settings, "config": config, "callbacks": callbacks}, kinds)
            results.append(run(words, world, callbacks, own))

        strategy = command_line.before_joining(words)
        _TRAINED.add(os.getpid())
        run_in_program(run_checked, **strategy)
    return results[-1]


def main(world: World) -> None:
    """Run the command line of this process on its rank. Called by all ranks."""
    run(None, world)


def run(
    words: list[str] | None, world: World, callbacks: Sequence[Callback] = (), own: type[Task] | None = None
) -> RunResult:
    """Run a command line, from parsing it to the output files. Called by all ranks.

    `words`: the command line; None: this process's. `own`: the class of a custom task, if a program gives it.
    """
    with world.raise_on_all_ranks():
        config = command_line.parse(words, prefix="--" if words is None else "")
        # Import inside raise_on_all_ranks, which merges the ranks' equal warnings. In a later world of Horovod elastic
        # nothing is left to import, and gc.freeze in collector_paused would keep the previous world's memory.
        with nullcontext() if "hvd_bert.training.loop" in sys.modules else collector_paused():
            from hvd_bert.training import fast_dev_run, loop
    entry = fast_dev_run.run if config.train.fast_dev_run else loop.run
    return entry(config, world, callbacks, own)


@contextmanager
def _process_restored() -> Iterator[None]:
    """Context manager: restore the process-wide state that a run changes."""
    with ExitStack() as restored:
        restored.callback(gc.collect)  # frees the model, which is in reference cycles with its hooks
        restored.callback(random.setstate, random.getstate())  # before imports draw random numbers
        import numpy as np
        import torch

        from hvd_bert.distributed import events

        restored.callback(np.random.set_state, np.random.get_state())
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        restored.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        fills: Any = torch.utils.deterministic
        restored.callback(setattr, fills, "fill_uninitialized_memory", fills.fill_uninitialized_memory)
        restored.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        if gpus:
            restored.callback(torch.cuda.set_device, torch.cuda.current_device())
        for logger in (logging.getLogger(name) for name in (None, "hvd_bert", "transformers")):
            restored.callback(logger.setLevel, logger.level)
            restored.callback(vars(logger).update, handlers=logger.handlers, propagate=logger.propagate)
            logger.handlers = []  # the run would close them
        restored.callback(logging.captureWarnings, False)
        for number in SIGNALS if in_main_thread() else ():
            restored.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        environ = dict(os.environ)
        restored.callback(os.environ.update, environ)
        restored.callback(lambda: [os.environ.pop(name) for name in os.environ.keys() - environ.keys()])
        restored.callback(vars(sys).update, stdout=sys.stdout, stderr=sys.stderr)
        try:
            with torch.random.fork_rng(gpus):
                yield
        finally:
            events.end()
            with suppress(OSError, ValueError):  # the program may have closed its own stream
                sys.stdout.flush()
