"""What a run does before its first step: it checks the settings and loads the model, the data and the checkpoint."""

from __future__ import annotations

import os

from transformers.utils import logging as transformers_logging

from hvd_bert.checkpoint import resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.distributed.world import World, log
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.model.precision import set_precision
from hvd_bert.output import output_dir
from hvd_bert.output.reporters import base as reporters
from hvd_bert.strategies.table import strategy_class
from hvd_bert.tasks.base import Task
from hvd_bert.tasks.table import load_task


def load(config: Config, world: World) -> tuple[Task, ResumePoint | None]:
    """Load and check all that needs no training: the task, on this rank's device, and on rank 0 what to resume from."""
    with world.raise_on_all_ranks():
        resume.check_elastic(config, world)
        strategy_class(config.parallel.strategy)  # raises if it is not installed
        output_dir.unlock()  # locks from an earlier world of Horovod elastic
    set_up(config, world)
    log.info("%s", "\n".join(world.describe()))
    resume_point = None
    with world.raise_on_all_ranks():
        if world.rank == 0:
            reporters.check(config.train.reporters)
            output_dir.check(config)
            resume_point = resume.find(config)
        task = load_task(config, world)
        resume.check_evaluation(config, task)
    settings = {f"--{name}": value for name, value in config.as_flat().items() if not FLAGS[name].chooses_start}
    world.check_same(settings | task.fingerprint())  # a path that differs is a better hint than what it leads to
    with world.raise_on_all_ranks():
        resume_point = resume.fitting(resume_point, config, task)
        if resume_point:  # on rank 0
            resume.check(resume_point, config, task)
    task.model.to(device=world.device)
    return task, resume_point


def set_up(config: Config, world: World) -> None:
    """Threads, precision, memory and logs of this process, before large allocations."""
    world.set_threads(config.parallel.num_threads)
    set_precision(config.train)
    if world.device.type == "cpu":
        keep_memory()
        # transformers imports DeepSpeed if it is installed, which would log its choice of the CPU on every rank.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.disable_default_handler()  # its warnings go through our handler instead
    transformers_logging.enable_propagation()
