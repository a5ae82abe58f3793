"""Programs that train on two ranks, for test_programs.py: programs.py KIND STRATEGY OUT

group, thread: the program initializes a process group, and trains in the main thread or in another thread.
failing: in a process group, trains with a strategy for one process, which is refused, then with an error on one rank.
launched: trains in a thread, without a process group of its own.
submitit1, submitit2: trains on one or two tasks of submitit's LocalExecutor.
spawn: trains in two processes of torch's `spawn` that have torch's variables.
ray: runs examples/ray_train.py, then trains with Horovod in two Ray actors with torch's variables, into actors/OUT.

In group, submitit1, submitit2 and spawn, the ranks stop after step 3 and resume. group, failing, thread, submitit1,
submitit2 and spawn write their results to rankN.json in the working folder.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from hvd_bert import Callback, train

SETTINGS = {"config": "sample", "max_train_samples": 33, "max_eval_samples": 7, "num_train_epochs": 2}  # `small_run`
SETTINGS |= {"per_device_train_batch_size": 8, "logging_steps": 1, "dropout": 0}


class AtStep2(Callback):
    """After step 2, sends the signal `number` to rank size - 1. If `number` is None, raises LookupError there."""

    def __init__(self, number: signal.Signals | None = signal.SIGTERM) -> None:
        self.number = number

    def on_start(self, task: Any, world: Any) -> None:
        self.is_last = world.rank == world.size - 1

    def on_step(self, step: int) -> None:
        if self.is_last and step == 2:
            if self.number is None:
                raise LookupError("in a callback")
            os.kill(os.getpid(), self.number)


def write(rank: int, **found: Any) -> None:
    Path(f"rank{rank}.json").write_text(json.dumps(found))


def summed() -> float:
    """Return the number of ranks in the process group, computed by an allreduce."""
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    return float(ones)


def training_status(**settings: Any) -> Any:
    """Train. Returns the status of a UserError, the name of another error, or None if there was no error."""
    try:
        train(**SETTINGS | settings)
    except Exception as error:
        return getattr(error, "status", type(error).__name__)


def in_group(kind: str, **settings: Any) -> None:
    distributed.init_process_group("gloo")
    stopped = training_status(callbacks=[AtStep2()] if kind == "group" else [], **settings)
    resumed = training_status(**settings) if kind == "group" else None
    write(distributed.get_rank(), stopped=stopped, resumed=resumed, sum=summed())


def failing(**settings: Any) -> None:
    distributed.init_process_group("gloo")
    alone = training_status(**settings | {"strategy": "none"})
    write(distributed.get_rank(), alone=alone, failed=training_status(callbacks=[AtStep2(None)], **settings))


def submitted(ranks: int, **settings: Any) -> None:
    import submitit
    from submitit.helpers import TorchDistributedEnvironment

    def job(*callbacks: Callback) -> dict[str, Any]:
        if ranks > 1:
            TorchDistributedEnvironment().export(overwrite=True)
        batch = {"per_device_train_batch_size": 16 // ranks}
        return train(**SETTINGS | settings | batch, callbacks=callbacks).scores

    os.environ["MASTER_PORT"] = str(get_free_port())  # the port that submitit chooses may be in use
    executor = submitit.LocalExecutor("logs")
    executor.update_parameters(tasks_per_node=ranks, timeout_min=3)
    executor.submit(job, AtStep2(signal.SIGUSR2)).wait()  # submitit's signal for a preemption
    stopped = Path(settings["output_dir"], "latest").read_text().strip()
    write(0, stopped=stopped, resumed=[scores["total"] for scores in executor.submit(job).results()])


def by_ray(**settings: Any) -> None:
    import ray
    import ray_train

    trained = ray_train.train_on_worker

    def train_on_worker(settings: dict[str, Any]) -> None:
        trained(settings)
        (Path(settings["output_dir"]).parent / f"sum{distributed.get_rank()}").write_text(str(summed()))

    ray_train.train_on_worker = train_on_worker
    ray.init = functools.partial(ray.init, num_cpus=2)
    ray_train.main("2", *(f"{name}={value}" for name, value in (SETTINGS | settings).items()))

    class Rank:
        def train(self, rank: int, port: int) -> None:
            by_variables(rank, port, settings | {"strategy": "horovod", "output_dir": str(actors_out)})

    out = Path(settings["output_dir"])
    actors_out = out.parent / "actors" / out.name
    actors = [ray.remote(num_cpus=1)(Rank).remote() for _ in range(2)]
    port = get_free_port()
    ray.get([actor.train.remote(rank, port) for rank, actor in enumerate(actors)])


def by_variables(rank: int, port: int, settings: dict[str, Any]) -> None:
    """Train as one of two ranks that torch's environment variables describe."""
    four = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in four.items()})
    train(**SETTINGS | settings)


def by_spawn(**settings: Any) -> None:
    status = None
    try:
        spawn(by_variables, (get_free_port(), settings | {"callbacks": [AtStep2()]}), nprocs=2)
    except ProcessExitedException as error:
        status = error.exit_code
    stopped = Path(settings["output_dir"], "latest").read_text().strip()
    spawn(by_variables, (get_free_port(), settings), nprocs=2)
    write(0, status=status, stopped=stopped)


if __name__ == "__main__":
    kind, strategy, out = sys.argv[1:]
    settings = {"strategy": strategy, "output_dir": os.path.abspath(out)}
    programs = {"failing": failing, "spawn": by_spawn, "ray": by_ray}
    if kind in programs:
        programs[kind](**settings)
    elif kind == "group":
        in_group(kind, **settings)
    elif kind.startswith("submitit"):
        submitted(int(kind[-1]), **settings)
    else:
        trains = functools.partial(in_group, kind) if kind == "thread" else training_status
        thread = threading.Thread(target=trains, kwargs=settings)
        thread.start()
        thread.join()
    sys.stdout.flush()
    # Not sys.exit: torch's Gloo threads can abort the process when Python finalizes (pytorch#117762, pytorch#190489).
    os._exit(0)
