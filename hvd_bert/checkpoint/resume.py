"""The checkpoint to resume from, and whether it fits the run. Rank 0 decides, before any training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_bert.checkpoint import files, schema
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.checkpoint.fit import configuration_changes, misfit, shape_of
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, World, log
from hvd_bert.errors import UserError
from hvd_bert.storage import written
from hvd_bert.tasks.base import Task

LATEST = "latest"
TAKEN_OVER: set[str | None] = set()  # output folders in which this process has begun a run (output_dir.begin)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from."""

    folder: Path
    contents: Contents

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def state(self) -> dict[str, Any]:
        """The JSON of `TrainState.snapshot`, with the run's `identity`."""
        state: dict[str, Any] = self.contents.documents["state"]
        return state


def check_evaluation(config: Config, task: Task) -> None:
    """Raise UserError if nothing is to be done, or the best model is requested without evaluations during training."""
    if task.plan is None and not task.evaluates:
        raise UserError(
            "The run would neither train nor evaluate. Remove --no_do_train, or give data to evaluate on"
            " (--validation_file) without --no_do_eval."
        )
    args = config.checkpoint
    asked = args.load_best_model_at_end or args.early_stopping_patience
    if asked and (not task.evaluates or config.train.eval_strategy == "no"):
        raise UserError(
            "--load_best_model_at_end and --early_stopping_patience need evaluations during training: give data to"
            " evaluate on (--validation_file), and --eval_strategy epoch or steps."
        )


def check_elastic(config: Config, world: World) -> None:
    """Raise UserError if the settings do not fit Horovod elastic. Make a new world resume the run."""
    if world.elastic and config.parallel.strategy != "horovod":
        raise UserError(f"Horovod elastic needs --strategy horovod, not {config.parallel.strategy}.")
    if config.checkpoint.elastic and not world.elastic:
        raise UserError(
            "--elastic needs Horovod's elastic launcher: horovodrun -np N --min-np M --host-discovery-script"
            " scripts/discover_hosts.sh python -m hvd_bert.train --elastic ..."
        )
    if world.elastic and config.train.do_train and not (config.train.output_dir and config.checkpoint.save_steps):
        raise UserError(
            "Under Horovod elastic a new world resumes from the last checkpoint: give --output_dir, on a file system"
            " that all hosts share, and a --save_steps above 0."
        )
    if world.generation and config.train.output_dir in TAKEN_OVER:  # by the previous world: resume where it was
        config.train.overwrite_output_dir = False
        if config.train.output_dir and files.candidates(Path(config.train.output_dir)):
            config.checkpoint.resume_from_checkpoint = LATEST


def unfinished(folder: Path) -> bool:
    """Whether a training started in this folder and did not finish."""
    settings = "train_config.yaml"  # recorded: another program's file of that name is no run
    started = settings in written.names(folder) and (folder / settings).is_file()
    return started and not (folder / "train_results.json").exists()


def find(config: Config, task: Task | None = None) -> ResumePoint | None:
    """The checkpoint of --resume_from_checkpoint, or the newest valid one of an unfinished run in output_dir.

    None: train from the start. Raises UserError if a checkpoint is requested or exists, but none can be used.
    `task`: its model's tensors must fit, too, if the checkpoint says that it is of this model.
    """
    named, folder = config.checkpoint.resume_from_checkpoint, Path(config.train.output_dir or "")
    if not config.train.do_train:
        return None
    if named == LATEST and not config.train.output_dir:
        raise UserError("--resume_from_checkpoint latest: give the run's folder as well (--output_dir).")
    resumes = bool(config.train.output_dir) and not config.train.overwrite_output_dir and unfinished(folder)
    if named and named != LATEST:
        return _named(Path(named), folder if resumes else None, task)
    if not named and not resumes:
        return None
    try:
        resume_point, damage = _newest_valid(folder, task)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be read: {error.strerror or error}.") from None
    if resume_point is None and damage:
        raise UserError(
            f"None of the checkpoints in {folder} can be used: {'; '.join(damage)}. Nothing was changed. To replace"
            " them and train from the start, add --overwrite_output_dir."
        )
    if resume_point is None and named:
        raise UserError(f"--resume_from_checkpoint latest: there is no checkpoint in {folder}.")
    for problem in damage:
        log.warning("Skipping a damaged checkpoint: %s.", problem)
    return resume_point


def _named(folder: Path, output_dir: Path | None, task: Task | None) -> ResumePoint:
    """The checkpoint that the flag names. `output_dir`: an unfinished run, which the same command may have started."""
    try:
        resume_point = ResumePoint(folder, _resumable(folder, task))
    except CorruptCheckpoint as error:
        raise UserError(f"--resume_from_checkpoint {folder} cannot be used: {error}.") from None
    if output_dir is None or folder.resolve().parent == output_dir.resolve():
        return resume_point
    own, damage = _newest_valid(output_dir, task)
    if own is None and not damage:
        return resume_point  # it was stopped before its own first checkpoint
    if own is None or own.step < resume_point.step:
        raise UserError(
            f"--output_dir {output_dir} holds an unfinished run that is not ahead of {folder}: use another folder, or"
            " add --overwrite_output_dir to replace it."
        )
    return own  # of a run that resumed from `folder` and was stopped


def _newest_valid(output_dir: Path, task: Task | None) -> tuple[ResumePoint | None, list[str]]:
    lost = files.lost(output_dir)
    damage = [f"{output_dir / files.POINTER} names {lost}, which is missing: restore it"] if lost else []
    for folder in files.candidates(output_dir):
        try:
            return ResumePoint(folder, _resumable(folder, task)), damage
        except CorruptCheckpoint as error:
            damage.append(str(error))
    return None, damage


def _resumable(folder: Path, task: Task | None) -> Contents:
    contents = files.read(folder)
    try:
        schema.check_state(contents.documents["state"])
    except schema.Wrong as error:
        raise CorruptCheckpoint(f"{folder / 'state.json'} does not hold a training's state ({error})") from None
    if contents.documents["state"].get("model_only"):
        raise CorruptCheckpoint(f"{folder} holds only the model (--save_only_model) and cannot be resumed")
    problem = misfit(contents, task.model) if task else ""
    if problem:
        raise CorruptCheckpoint(f"{folder}: {problem}")
    return contents


def fitting(resume_point: ResumePoint | None, config: Config, task: Task) -> ResumePoint | None:
    """`resume_point`, or an older one if its tensors are not those of its model. Raises UserError if none is left."""
    if resume_point is None or not misfit(resume_point.contents, task.model):
        return resume_point
    return find(config, task)


def identity(config: Config, task: Task) -> dict[str, Any]:
    """Properties that must not change on resume: the model's shape, the data, settings that affect learning."""
    assert task.plan is not None
    settings = {f"--{name}": value for name, value in config.as_flat().items() if not FLAGS[name].may_change_on_resume}
    return settings | {
        "the model": shape_of(task.model),
        **task.identity(),
        "the number of training windows": task.plan.num_windows,
    }


def rank_batch(config: Config) -> int:
    """Windows per rank and step, by the flags."""
    return config.train.per_device_train_batch_size * config.train.gradient_accumulation_steps


def check(resume_point: ResumePoint, config: Config, task: Task) -> None:
    """Raise UserError if the checkpoint is from another model, other data or other settings.

    Either the global batch must be the same, or the flags for the batch per rank.
    """
    assert task.plan is not None
    # A checkpoint older than a flag was made with the flag's default.
    defaults = {f"--{name}": flag.default for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    now, saved, plan = identity(config, task), defaults | resume_point.state["identity"], task.plan
    differing = [
        f"{name} was {saved.get(name)} and is {now.get(name)}"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]
    if saved.get("the model") == now.get("the model"):
        differing += configuration_changes(resume_point.folder, task.model)
    global_batch = resume_point.state["global_batch"]
    same_flags = config.train.global_batch == -1 and resume_point.state["rank_batch"] == rank_batch(config)
    if global_batch != plan.global_batch and not same_flags:
        differing.append(f"the global batch was {global_batch} and is {plan.global_batch}")
    if differing:
        raise UserError(
            f"{resume_point.folder} cannot be resumed: {'; '.join(differing)}. Use the settings that it was made with,"
            " use another --output_dir, or add --overwrite_output_dir to train from the start."
        )
    log.info("Resuming from step %d: %s", resume_point.step, resume_point.folder)


def keep_global_batch(plan: BatchPlan, resume_point: ResumePoint | None, world: World) -> BatchPlan:
    """The plan with the checkpoint's global batch, so that each step has the same windows as before.

    Raises CollectiveError if the batch of a new run is larger than an epoch.
    """
    global_batch = world.broadcast(resume_point.state["global_batch"] if resume_point else None)
    if global_batch is None and plan.global_batch > plan.num_windows:
        raise CollectiveError(
            f"The global batch is {plan.global_batch} windows ({plan.size} rank(s), {plan.accumulation} pass(es) of"
            f" {plan.global_batch // plan.passes}), but the training data has only {plan.num_windows}. Lower"
            f" --per_device_train_batch_size, give --global_batch {plan.num_windows} or less, or use more data."
        )
    if global_batch in (None, plan.global_batch):
        return plan
    changed = plan.with_global_batch(global_batch)
    log.info(
        "The global batch stays %d: %d micro-batch(es) per step on %d rank(s).",
        global_batch,
        changed.accumulation,
        plan.size,
    )
    return changed
