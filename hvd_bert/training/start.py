"""What a run does before its first step: it checks the settings and loads the model, the data and the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from transformers.utils import logging as transformers_logging

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.distributed import events
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.model.bert import place
from hvd_bert.model.cpu import kernels
from hvd_bert.model.precision import set_precision
from hvd_bert.output import output_dir
from hvd_bert.output.output_dir import TAKEN_OVER
from hvd_bert.output.reporters import base as reporters
from hvd_bert.strategies.base import strategy_class
from hvd_bert.tasks.base import Task, load_task
from hvd_bert.training import batch_size, elastic
from hvd_bert.training.optim import check_optimizer, layer_depths


def load(config: Config, world: World) -> tuple[Task, ResumePoint | None]:
    """Load and check all that needs no training: the task, on this rank's device, and what to resume from, on rank 0
    or, if a rank has it in memory, on all of them."""
    args = config.train
    resume_point = elastic.newest(world)
    with world.raise_on_all_ranks():
        check_elastic(config, world, resume_point)
        strategy_class(config.parallel.strategy)  # raises if it is not installed
        check_optimizer(args.optim, config.parallel.strategy)
        output_dir.unlock()  # locks from an earlier world of Horovod elastic
    set_up(config, world)
    log.info("%s", "\n".join(world.describe()))
    earlier = world.broadcast(earlier_attempt(args.output_dir, world) if world.rank == 0 else None)
    if earlier:
        log.info("The Slurm job was requeued: continuing its run in %s.", earlier)
        args.output_dir = earlier
        resume_own_run(config)
    with world.raise_on_all_ranks():
        if world.rank == 0:
            reporters.check(args.reporters)
            output_dir.check(config.as_flat())
        task = load_task(config, world)
        check_evaluation(config, task)
        if task.plan and args.layerwise_lr_decay < 1:
            layer_depths(task.model)  # raises if it has none
    settings = {f"--{name}": value for name, value in config.as_flat().items() if not FLAGS[name].chooses_start}
    world.check_same(settings | task.fingerprint())  # a path that differs is a better hint than what it leads to
    with world.raise_on_all_ranks():
        if world.rank == 0 and not resume_point:
            resume_point = resume.find(config.checkpoint.resume_from_checkpoint, args)
    place(task.model, world.device, args.torch_compile)
    batch_size.choose(task, config, resume_point, world)
    with world.raise_on_all_ranks():
        if resume_point and resume_point.kept_by is None:
            resume.check(resume_point, resume.identity(config.as_flat(), task), args, task)
            resume.check_cpu(resume_point, kernels.record(args.precision, world.device))
    return task, resume_point


def check_evaluation(config: Config, task: Task) -> None:
    """Raise UserError if nothing is to be done, or the best model is requested without evaluations during training."""
    if task.plan is None and not task.evaluates:
        raise UserError(
            "The run would neither train nor evaluate. Give data to train on (--train_file) without --no_do_train, or"
            " data to evaluate on (--validation_file) without --no_do_eval."
        )
    asked = config.checkpoint.load_best_model_at_end or config.checkpoint.early_stopping_patience
    if asked and (not task.evaluates or config.train.eval_strategy == "no"):
        raise UserError(
            "--load_best_model_at_end and --early_stopping_patience need evaluations during training: give data to"
            " evaluate on (--validation_file) without --no_do_eval, and --eval_strategy epoch or steps."
        )


def check_elastic(config: Config, world: World, kept: ResumePoint | None) -> None:
    """Raise UserError if the settings do not fit Horovod elastic. Make a new world resume the run."""
    args, checkpoint = config.train, config.checkpoint
    if world.elastic and config.parallel.strategy != "horovod":
        raise UserError(f"--strategy {config.parallel.strategy} is not elastic. Use --strategy horovod.")
    if checkpoint.elastic and not world.elastic:
        raise UserError(
            "--elastic needs Horovod's elastic launcher. Start horovodrun -np N --min-np M --host-discovery-script"
            " scripts/discover_hosts.sh python -m hvd_bert.train --elastic ..."
        )
    if kept:
        args.output_dir = str(kept.folder.parent)
    if world.generation and args.output_dir in TAKEN_OVER:  # by the previous world: resume where it was
        resume_own_run(config, kept is not None)


def resume_own_run(config: Config, kept: bool = False) -> None:
    """Resume the run in the output folder, whatever the command line says. `kept`: a rank has its state in memory."""
    config.train.overwrite_output_dir = False
    if kept or files.candidates(config.train.folder):
        config.checkpoint.resume_from_checkpoint = resume.LATEST


def earlier_attempt(output_dir: str | None, world: World) -> str | None:
    """The folder of the run that this command has started before its Slurm job was requeued; None without one."""
    job = world.job or {}
    if "restarts" not in job:
        return None
    # A program that trains several times has begun their folders in this order, and does so again.
    new = (folder for folder in sorted(Path("runs").glob("*/")) if str(folder) not in TAKEN_OVER)
    for folder in [Path(output_dir)] if output_dir else new:
        commands = events.commands_of_job(folder, job["id"])
        if commands and (output_dir or events.command() in commands):
            return str(folder)
    return None


def set_up(config: Config, world: World) -> None:
    """Threads, precision, memory and logs of this process, before large allocations."""
    world.set_threads(config.parallel.num_threads)
    set_precision(config.train)
    with world.raise_on_all_ranks():  # for its warning
        kernels.start(config.train.cpu_kernels, config.train.precision, world.device)
    if world.device.type == "cpu":
        # transformers imports DeepSpeed if it is installed, which would log its choice of the CPU on every rank.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.disable_default_handler()  # its warnings go through our handler instead
    transformers_logging.enable_propagation()
