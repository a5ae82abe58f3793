"""From which checkpoint a run goes on, and whether it may: rank 0 decides, before any training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvd_bert.checkpoint import files
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.training.inputs import Inputs
from hvd_bert.training.state import TrainState

LATEST = "latest"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to go on from."""

    folder: Path
    contents: Contents

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def state(self) -> dict[str, Any]:
        """What `TrainState.snapshot` wrote, and the run's `identity`."""
        state: dict[str, Any] = self.contents.documents["state"]
        return state


def check_evaluation(config: Config, inputs: Inputs) -> None:
    """Raise UserError if the best model is asked for, or an early end, and nothing is scored on the way."""
    args = config.checkpoint
    asked = args.load_best_model_at_end or args.early_stopping_patience
    if asked and (inputs.dev is None or config.train.eval_strategy == "no"):
        raise UserError(
            "--load_best_model_at_end and --early_stopping_patience need scores: name a --validation_file, and give"
            " --eval_strategy epoch or steps."
        )


def check_elastic(config: Config, world: World) -> None:
    """Raise UserError if Horovod elastic and the settings do not go together; keep a new world from starting anew."""
    if world.elastic and config.parallel.strategy != "horovod":
        raise UserError(f"Only Horovod is elastic: not with --strategy {config.parallel.strategy}.")
    if config.checkpoint.elastic and not world.elastic:
        raise UserError(
            "--elastic needs Horovod's elastic launcher: horovodrun -np N --min-np M --host-discovery-script"
            " scripts/discover_hosts.sh python -m hvd_bert.train --elastic ..."
        )
    if world.elastic and config.train.do_train and not (config.train.output_dir and config.checkpoint.save_steps):
        raise UserError(
            "Under Horovod elastic a new world goes on from the last checkpoint: name --output_dir, on a file system"
            " that all hosts see, and leave --save_steps above 0."
        )
    if world.generation:  # go on from where the world before was, whatever the command says of where to begin
        config.train.overwrite_output_dir = False
        if config.train.output_dir and files.candidates(Path(config.train.output_dir)):
            config.checkpoint.resume_from_checkpoint = LATEST


def unfinished(folder: Path) -> bool:
    """Whether a training began in this folder and did not end."""
    return (folder / "train_config.yaml").is_file() and not (folder / "train_results.json").exists()


def find(config: Config) -> ResumePoint | None:
    """The checkpoint that --resume_from_checkpoint names, or the newest whole one of an unfinished run in output_dir.

    None: the run begins anew. Raises UserError where a checkpoint is asked for, or there, and none can be used.
    """
    named, folder = config.checkpoint.resume_from_checkpoint, Path(config.train.output_dir or "")
    if not config.train.do_train:
        return None
    if named == LATEST and not config.train.output_dir:
        raise UserError("--resume_from_checkpoint latest: name the run's folder as well (--output_dir).")
    resumes = bool(config.train.output_dir) and not config.train.overwrite_output_dir and unfinished(folder)
    if named and named != LATEST:
        return _named(Path(named), folder if resumes else None)
    if not named and not resumes:
        return None
    try:
        resume_point, damage = _newest_whole(folder)
    except OSError as error:
        raise UserError(f"--output_dir {folder} cannot be looked into: {error.strerror or error}.") from None
    if resume_point is None and damage:
        raise UserError(
            f"None of the checkpoints in {folder} can be used: {'; '.join(damage)}. Nothing was changed. To train anew"
            " and replace them, add --overwrite_output_dir."
        )
    if resume_point is None and named:
        raise UserError(f"--resume_from_checkpoint latest: there is no checkpoint in {folder}.")
    for said in damage:
        log.warning("A damaged checkpoint is passed over: %s.", said)
    return resume_point


def _named(folder: Path, output_dir: Path | None) -> ResumePoint:
    """The checkpoint that the flag names; `output_dir`: an unfinished run, which the same command may have begun."""
    try:
        resume_point = ResumePoint(folder, _resumable(folder))
    except CorruptCheckpoint as error:
        raise UserError(f"--resume_from_checkpoint {folder} cannot be used: {error}.") from None
    if output_dir is None or folder.resolve().parent == output_dir.resolve():
        return resume_point
    own, damage = _newest_whole(output_dir)
    if own is None and not damage:
        return resume_point  # it was stopped before it had made one of its own
    if own is None or own.step < resume_point.step:
        raise UserError(
            f"--output_dir {output_dir} holds an unfinished run that is not ahead of {folder}: name another folder, or"
            " add --overwrite_output_dir to replace it."
        )
    return own  # which went on from `folder`, and was stopped


def _newest_whole(output_dir: Path) -> tuple[ResumePoint | None, list[str]]:
    damage: list[str] = []
    for folder in files.candidates(output_dir):
        try:
            return ResumePoint(folder, _resumable(folder)), damage
        except CorruptCheckpoint as error:
            damage.append(str(error))
    return None, damage


def _resumable(folder: Path) -> Contents:
    contents = files.read(folder)
    if contents.documents["state"].get("model_only"):
        raise CorruptCheckpoint(f"{folder} holds the model only (--save_only_model), which is not enough to go on from")
    return contents


def identity(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What must be the same for a run to go on: the model's shape, the data, what is learned from them and how."""
    assert inputs.train is not None
    settings = {f"--{name}": value for name, value in config.as_flat().items() if not FLAGS[name].may_change_on_resume}
    return settings | {
        "the model": _shape_of(inputs.model),
        "the tokenizer": inputs.tokenizer_digest,
        "the training data": inputs.train.source.digest[:12],
        "the number of training windows": inputs.train.plan.num_windows,
    }


def rank_batch(config: Config) -> int:
    """Windows of one rank in one step, by the flags."""
    return config.train.per_device_train_batch_size * config.train.gradient_accumulation_steps


def _shape_of(model: nn.Module) -> str:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{len(shapes)} tensors, {size:,} parameters, {hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}"


def check(resume_point: ResumePoint, config: Config, inputs: Inputs) -> None:
    """Raise UserError if the checkpoint is of another model, other data, another plan or other settings.

    The global batch must be what it was; or the flags that it came of, which give another on other numbers of ranks.
    """
    assert inputs.train is not None
    # A checkpoint that is older than a flag was made with what is now the flag's default.
    defaults = {f"--{name}": flag.default for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    now, saved, plan = identity(config, inputs), defaults | resume_point.state["identity"], inputs.train.plan
    differing = [
        f"{name} was {saved.get(name)} and is {now.get(name)}"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]
    global_batch = resume_point.state["global_batch"]
    if global_batch != plan.global_batch and resume_point.state["rank_batch"] != rank_batch(config):
        differing.append(f"the global batch was {global_batch} and is {plan.global_batch}")
    if differing:
        raise UserError(
            f"{resume_point.folder} cannot be gone on from: {'; '.join(differing)}. Give the settings that it was made"
            " with, name another --output_dir, or add --overwrite_output_dir to train anew."
        )
    log.info("Going on from step %d: %s", resume_point.step, resume_point.folder)


def with_its_batch(plan: BatchPlan, resume_point: ResumePoint | None, world: World) -> BatchPlan:
    """The plan with the checkpoint's global batch, so that each step has the windows that it would have had."""
    global_batch = world.broadcast(resume_point.state["global_batch"] if resume_point else plan.global_batch)
    if global_batch == plan.global_batch:
        return plan
    changed = plan.with_global_batch(global_batch)
    log.info(
        "The global batch stays %d: %d pass(es) per step on %d rank(s).", global_batch, changed.accumulation, plan.size
    )
    return changed


def restore(state: TrainState, resume_point: ResumePoint | None, seed: int) -> None:
    """Put `state` where the checkpoint was, if there is one. Called by all ranks; rank 0 has read it."""
    if not state.world.broadcast(resume_point is not None):
        return
    tensors, rest = (resume_point.contents.tensors, resume_point.state) if resume_point else ({}, {})
    state.restore(tensors, rest, seed)
    tensors.clear()  # gigabytes, for a large model
