"""Start of a run: check the settings, load the model, data and checkpoint, and prepare the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.checkpoint.schedule import Best
from hvd_bert.config.settings import FLAGS, Config, from_values
from hvd_bert.config.strategies import HOROVOD, STRATEGIES
from hvd_bert.data.batch_plan import HeaviestFirst
from hvd_bert.data.collate import Prefetcher
from hvd_bert.distributed import events
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError, log
from hvd_bert.model.cpu import kernels
from hvd_bert.model.layers import place
from hvd_bert.model.precision import set_precision
from hvd_bert.monitoring.recording import Recording
from hvd_bert.output import output_dir
from hvd_bert.output.output_dir import FOLDERS_BEGUN
from hvd_bert.output.reporters.base import check_reporters
from hvd_bert.strategies.base import strategy_class
from hvd_bert.tasks.base import Task, load_task
from hvd_bert.training import batch_size, elastic
from hvd_bert.training.optim import check_optimizer
from hvd_bert.training.saving import restore
from hvd_bert.training.state import TrainState


@dataclass(frozen=True)
class Start:
    """The inputs of a run.

    Attributes:
        config: The final settings: those of the command, overridden by `decided`.
        task: The model with its data.
        decided: The settings that were decided while loading, by flag.
        resume_point: The state to resume from. A checkpoint on disk is set on rank 0 only; a state that a rank has in
            memory is set on all ranks. If no rank has one, the run trains from the start.
        facts: Properties of the run that its checkpoints record in state.json.
        names_folder: Whether --output_dir was given.
    """

    config: Config
    task: Task
    decided: dict[str, Any] = field(default_factory=dict)
    resume_point: ResumePoint | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    names_folder: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by flag name."""
        return self.config.as_flat()

    @property
    def folder(self) -> Path:
        """The output folder. Valid only after `in_folder`."""
        return Path(str(self.config.train.output_dir))

    def in_folder(self, folder: Path) -> Start:
        """Return a copy whose settings have `folder`, the final output folder."""
        decided = self.decided | {"output_dir": str(folder)}
        return replace(self, decided=decided, config=from_values(self.settings | decided))


def load(config: Config, world: World, own: type[Task] | None = None) -> Start:
    """Set up this process, load the task and the checkpoint, and check that they fit the settings. A collective.

    `own`: the class of a custom task, if a program gives it to `train`.
    """
    in_memory, names_folder = elastic.newest(world), config.train.output_dir is not None
    set_up(config, world)
    log.info("%s", "\n".join(world.describe()))
    with world.raise_on_all_ranks():
        check_requirements(config, world)
    decided = world.broadcast(decide_folder(config, in_memory, world) if world.rank == 0 else {})
    settings = config.as_flat() | decided
    with world.raise_on_all_ranks():
        resume_point = in_memory
        if world.rank == 0:
            output_dir.check(settings, world.process.locks)
            resume_point = in_memory or resume.find(settings)
    with world.raise_on_all_ranks():  # ranks read the data only after rank 0 has found its folders in order
        task = load_task(config, world, own)
        check_task(config, task)
    compared = {f"--{name}": value for name, value in settings.items() if not FLAGS[name].chooses_start}
    world.check_same(compared | task.fingerprint())  # flags first: a different path explains different data
    place(task.model, world.device, config.train.torch_compile)
    decided |= decide_by_task(task, config, resume_point, world)
    config = from_values(config.as_flat() | decided)
    facts = checkpoint_facts(task, config, world)
    with world.raise_on_all_ranks():
        if resume_point and task.plan and not in_memory:
            resume.check(resume_point, facts, config.train, task.plan.global_batch, task.model, config.as_flat())
    return Start(config, task, decided, resume_point, facts, names_folder)


def decide_by_task(task: Task, config: Config, resume_point: ResumePoint | None, world: World) -> dict[str, Any]:
    """Return the settings that depend on the task: an `auto` batch size, padding, best-model metric. A collective.

    An `auto` batch size also replaces `task.plan`.
    """
    given = config.checkpoint.metric_for_best_model
    decided = {
        "per_device_train_batch_size": batch_size.choose(task, config.train, resume_point, world),
        "padding": task.padding,
        "metric_for_best_model": None if given else next(iter(task.metrics)),
    }
    return {name: value for name, value in decided.items() if value is not None}


def checkpoint_facts(task: Task, config: Config, world: World) -> dict[str, Any]:
    """Return the properties of the run that its checkpoints record in state.json. Empty without training."""
    if task.plan is None:
        return {}
    return {
        "identity": resume.identity(config.as_flat(), task.model, task.identity(), task.plan),
        "rank_batch": config.train.rank_batch,
        "cpu_kernels": kernels.record(config.train.precision, world.device),
    }


@dataclass(frozen=True)
class Prepared:
    """State, batches and recording of a training that has passed all checks and is ready for its first step.

    `effective`: `TrainState.effective_settings`.
    """

    state: TrainState
    batches: Prefetcher
    recording: Recording
    effective: dict[str, float]


def prepare(start: Start, world: World) -> Prepared:
    """Prepare the training state, the first batches and the recording, and run the last checks. A collective.

    Writes no files.
    """
    config, task, resume_point = start.config, start.task, start.resume_point
    assert task.plan
    plan = resume.keep_global_batch(task.plan, resume_point, world)
    if config.train.fast_dev_run:
        plan = HeaviestFirst(**vars(plan))
    metric = config.checkpoint.metric_for_best_model or next(iter(task.metrics))
    best = Best(metric, task.metrics[metric])
    state = TrainState.fresh(task.model, plan, best, config.train, config.parallel, world)
    if config.train.torch_compile:
        with world.raise_on_all_ranks():
            task.compile(state.strategy.trained, config.train.torch_compile_mode)
    restore(state, resume_point, config.train)
    state.strategy.mark_gradients(state.meter.gradients_computed)
    batches = Prefetcher(plan, task.batch, world.rank, state.step)
    folder = config.train.output_dir
    continues = resume_point is not None or (folder is not None and resume.unfinished(Path(folder)))
    replaces = continues or config.train.overwrite_output_dir
    total_steps = config.train.total_steps(plan.steps_per_epoch)
    recording = Recording(config.profiling, total_steps, state.meter, world, replaces)
    return Prepared(state, batches, recording, state.effective_settings(config.train))


def check_task(config: Config, task: Task) -> None:
    """Raise UserError if the run would do nothing, or if a flag needs evaluations during training that do not run."""
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


def check_requirements(config: Config, world: World) -> None:
    """Raise UserError if the strategy or --elastic does not fit the launcher, or if a required package is missing."""
    strategy = config.parallel.strategy
    if (world.elastic or config.checkpoint.elastic) and STRATEGIES[strategy].world != HOROVOD:
        raise UserError(f"--strategy {strategy} is not elastic. Use --strategy horovod.")
    if config.checkpoint.elastic and not world.elastic:
        raise UserError(
            "--elastic needs Horovod's elastic launcher. Start horovodrun -np N --min-np M --host-discovery-script"
            " scripts/discover_hosts.sh python -m hvd_bert.train --elastic ..."
        )
    check_optimizer(config.train.optim)
    if world.rank == 0:
        check_reporters(config.train.reporters)
    strategy_class(strategy)  # raises if it is not installed


def decide_folder(config: Config, in_memory: ResumePoint | None, world: World) -> dict[str, Any]:
    """Return {flag: value} with which this start continues an earlier run; {} if it does not. Called on rank 0.

    A later world of Horovod elastic continues the previous world's run, and a requeued Slurm job continues its own run.
    The values override the command line. `in_memory`: the state that a rank has in memory.
    """
    folder = str(in_memory.folder.parent) if in_memory else config.train.output_dir
    if world.process.generation == 0 or folder is None or Path(folder) not in FOLDERS_BEGUN:
        folder = earlier_attempt(folder, world)
        if folder is None:
            return {}
        log.info("The Slurm job was requeued: continuing its run in %s.", folder)
    decided = {"output_dir": folder, "overwrite_output_dir": False}
    has_state = in_memory is not None or files.candidates(Path(folder))
    return decided | ({"resume_from_checkpoint": resume.LATEST} if has_state else {})


def earlier_attempt(output_dir: str | None, world: World) -> str | None:
    """Return the output folder that this Slurm job used before it was requeued; None if there is none.

    `output_dir`: --output_dir; without it, the folders in runs/ are searched for this command.
    """
    job = world.job or {}
    if "restarts" not in job:
        return None
    # A program may train several times. After a requeue it does so in the same order, so skip runs already continued.
    new = (folder for folder in sorted(Path("runs").glob("*/")) if folder not in FOLDERS_BEGUN)
    for folder in [Path(output_dir)] if output_dir else new:
        commands = events.job_commands(folder, job["id"])
        if commands and (output_dir or events.command() in commands):
            return str(folder)
    return None


def set_up(config: Config, world: World) -> None:
    """Set this process's precision, threads, CPU kernels and logging before it allocates much memory. A collective."""
    set_precision(config.train)
    world.set_threads(config.parallel.num_threads)
    with world.raise_on_all_ranks():  # also merges equal warnings of several ranks
        kernels.start(config.train.cpu_kernels, config.train.precision, world.device)
    if world.device.type == "cpu":
        # transformers imports DeepSpeed if installed. Without this, DeepSpeed logs its choice of the CPU on every rank.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.disable_default_handler()  # hvd_bert's handler shows the warnings of transformers
    transformers_logging.enable_propagation()
