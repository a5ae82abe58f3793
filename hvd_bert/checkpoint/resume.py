"""Choice of the checkpoint to resume from, and the check that it fits the run. Both take place on rank 0."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hvd_bert.checkpoint import files
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.settings import FLAGS, difference, in_this_version
from hvd_bert.config.training import TrainArguments
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import UserError, log
from hvd_bert.storage.reading import MAX_YAML_BYTES, read_json, read_text

LATEST = "latest"
# Keys of config.json that do not affect a model's outputs. `problem_type` may be set by a forward pass with labels.
_NOT_COMPUTED = {"_name_or_path", "architectures", "dtype", "id2label", "initializer_range", "label2id", "problem_type"}
_NOT_COMPUTED |= {"transformers_version", "use_cache"}

# Files of folders and checkpoints that no run of this trainer wrote -> what they are.
_FOREIGN = {
    "trainer_state.json": "a checkpoint of Hugging Face's Trainer",
    "*.ckpt": "a checkpoint of Lightning",
    "random_states_*.pkl": "a checkpoint of Accelerate",
    "*.pt": "a checkpoint of another program",
    "*.pth": "a checkpoint of another program",
    "config.json": "a model without the state of its training",
    "adapter_config.json": "an adapter of PEFT without its model",
}


@dataclass(frozen=True)
class ResumePoint:
    """The state to resume from: a checkpoint that rank 0 has read, or one that rank `owner_rank` has in memory.

    `owner_rank` is None for a checkpoint on disk.
    """

    folder: Path
    contents: Contents
    owner_rank: int | None = None

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def state(self) -> dict[str, Any]:
        """Content of state.json: the state of `TrainState.snapshot` and the run's facts, such as `identity`."""
        return self.contents.state


def why_no_run(settings: Path) -> str:
    """Return why a settings file was not written by a run, or "" if it was.

    A run writes all flags, while a user's file may lack some.
    """
    try:
        whole = "\nresume_from_checkpoint: " in read_text(settings, MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "" if whole else "no run wrote it, or it is cut short"


def unfinished(folder: Path) -> bool:
    """Return whether a training started in this folder and did not finish."""
    return not why_no_run(folder / "train_config.yaml") and not (folder / "train_results.json").exists()


def find(settings: Mapping[str, Any]) -> ResumePoint | None:
    """Find the checkpoint of --resume_from_checkpoint, or the newest valid one of an unfinished run in --output_dir.

    Returns None to train from the start. Raises UserError if a checkpoint is requested or exists but none can be used.
    `settings`: all settings by flag name.
    """
    if not settings["do_train"]:
        return None
    named, output_dir = settings["resume_from_checkpoint"], settings["output_dir"]
    if named == LATEST and not output_dir:
        raise UserError("--resume_from_checkpoint latest: give the run's folder as well (--output_dir).")
    folder = Path(output_dir or "")
    resumes = bool(output_dir) and not settings["overwrite_output_dir"] and unfinished(folder)
    if named and named != LATEST:
        return _named(Path(named), folder if resumes else None)
    if not named and not resumes:
        return None
    resume_point, damage = _newest_valid(folder)
    if resume_point is None and damage:
        raise UserError(
            f"None of the checkpoints in {folder} can be used: {'; '.join(damage)}. Nothing was changed. To replace"
            " them and train from the start, add --overwrite_output_dir."
        )
    if resume_point is None and named:
        raise UserError(f"--resume_from_checkpoint latest: {folder} has no checkpoint. Leave the flag out to start.")
    for problem in damage:
        log.warning("Skipping a damaged checkpoint: %s.", problem)
    return resume_point


def _named(folder: Path, output_dir: Path | None) -> ResumePoint:
    """Return the checkpoint `folder` or, if `output_dir` is another run's folder with checkpoints, the newest of them.

    The run in `output_dir` may have resumed from `folder` before it was interrupted. Raises UserError if it is behind
    `folder`. `output_dir`: None if --output_dir has no unfinished run.
    """
    try:
        resume_point = ResumePoint(folder, _resumable(folder))
    except CorruptCheckpoint as error:
        foreign = not files.is_written(folder) and not (folder / "state.json").exists()
        reason = _describe(folder) if foreign else f"cannot be used: {error}. Name another one."
        raise UserError(f"--resume_from_checkpoint {folder} {reason}") from None
    if output_dir is None or folder.resolve().parent == output_dir.resolve():
        return resume_point
    own, damage = _newest_valid(output_dir)
    if own is None and not damage:
        return resume_point  # the unfinished run was interrupted before its first checkpoint
    if own is None or own.step < resume_point.step:
        raise UserError(
            f"--output_dir {output_dir} holds an unfinished run that is not ahead of {folder}: use another folder, or"
            " add --overwrite_output_dir to replace it."
        )
    return own  # the unfinished run resumed from `folder` before it was interrupted


def _describe(path: Path) -> str:
    """Return the end of a message about a path that is no checkpoint of a run: what it is, and what to do."""
    if path.is_dir() and (checkpoints := files.candidates(path)):
        return f"is not a checkpoint, but holds some. Name one of them, such as {checkpoints[0]}."
    inside = [file.name for file in path.iterdir()] if path.is_dir() else [path.name] * path.exists()
    kind = next((kind for pattern, kind in _FOREIGN.items() if fnmatch.filter(inside, pattern)), "")
    if not kind:
        problem = "is not a checkpoint" if path.exists() else "does not exist"
        return f"{problem}. Name a folder checkpoint-N of a run, or leave the flag out."
    folder = path if path.is_dir() else path.parent
    source = f"replace the flag by --model_name_or_path {folder}"
    if not (folder / "config.json").exists():
        source = "save its model with transformers' `save_pretrained`, and name that folder with --model_name_or_path"
    return f"is {kind}, which cannot be resumed. To start a new run from its weights, {source}."


def _newest_valid(output_dir: Path) -> tuple[ResumePoint | None, list[str]]:
    """Return the newest checkpoint that can be resumed, or None, and the problems of newer checkpoints."""
    lost = files.lost(output_dir)
    damage = [f"{output_dir / files.POINTER} names {lost}, which is missing: restore it"] if lost else []
    for folder in files.candidates(output_dir):
        try:
            return ResumePoint(folder, _resumable(folder)), damage
        except CorruptCheckpoint as error:
            damage.append(str(error))
    return None, damage


def _resumable(folder: Path) -> Contents:
    """Read a checkpoint. Raises CorruptCheckpoint if it is damaged or cannot be resumed."""
    contents = files.read(folder)
    if contents.state.get("model_only"):
        raise CorruptCheckpoint(f"{folder} holds only the model (--save_only_model) and cannot be resumed")
    return contents


def identity(
    settings: Mapping[str, Any], model: nn.Module, learned: Mapping[str, Any], plan: BatchPlan
) -> dict[str, Any]:
    """Return the properties that must not change on resume: model shape, data, and settings that affect the result.

    `learned`: `Task.identity`.
    """
    learned_by = {f"--{name}": value for name, value in settings.items() if not FLAGS[name].may_change_on_resume}
    return learned_by | {
        "the model": model_shape(model),
        **learned,
        "the number of training windows": plan.num_windows,
        **({"the windows per epoch of each file": str([n for _, n in plan.mixture])} if plan.mixture else {}),
    }


def model_shape(model: nn.Module) -> str:
    """Describe a model's parameters by their number, total size and a hash of their names and shapes.

    For a custom model, the hash includes the configurations of transformers models inside it. For a transformers model
    it does not, since `_changes` compares the configurations.
    """
    described: list[Any] = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    count, size = len(described), sum(parameter.numel() for parameter in model.parameters())
    if not _is_described(model):
        inner: list[Any] = [module.config for module in model.modules() if _is_described(module)]
        described += [_computed(json.loads(config.to_json_string())) for config in inner]  # JSON without default values
    return f"{count} tensors, {size:,} parameters, {hashlib.sha256(repr(described).encode()).hexdigest()[:12]}"


def _is_described(model: nn.Module) -> bool:
    """Return whether `model` is a transformers model, which has a configuration."""
    return hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string")


def _computed(values: Any) -> Any:
    """Return the values of a configuration, including nested ones, that affect the model's outputs."""
    if not isinstance(values, dict):
        return values
    return {key: _computed(value) for key, value in sorted(values.items()) if key not in _NOT_COMPUTED}


def _changes(folder: Path, model: Any) -> list[str]:
    """Describe the differences between the configurations of a transformers model and of the checkpoint's model."""
    if not _is_described(model) or not (folder / "config.json").exists():
        return []
    before = type(model.config).from_dict(read_json(folder / "config.json"))
    saved, now = (_computed(json.loads(each.to_json_string(use_diff=False))) for each in (before, model.config))
    compared = sorted(saved.keys() & now.keys())  # the keys depend on the version of transformers
    return [f"the model's {key} was {saved[key]} and is {now[key]}" for key in compared if saved[key] != now[key]]


def check(
    resume_point: ResumePoint,
    facts: Mapping[str, Any],
    args: TrainArguments,
    global_batch: int,
    model: nn.Module,
    settings: Mapping[str, Any],
) -> None:
    """Raise UserError if the checkpoint is from a different model, different data or different settings.

    The global batch may differ only if the per-device batch is equal and --global_batch is not given. If the checkpoint
    fits, log the resume and warn about different CPU kernels. `facts`: `Start.facts` of this run. `settings`: all its
    settings, which name its data.
    """
    saved, now = in_this_version(resume_point.state["identity"]), facts["identity"]
    changed = [name for name in dict.fromkeys((*saved, *now)) if saved.get(name) != now.get(name)]
    before: Mapping[str, Any] = {}
    if changed:
        with suppress(UserError):  # another version may have written flags that this one does not know
            before = trained_settings(str(resume_point.folder))
    differing = [difference(name, "{} was {} and is {}", (saved, now), (before, settings)) for name in changed]
    differing += _changes(resume_point.folder, model)
    batch = resume_point.state["global_batch"]
    same_flags = args.global_batch == -1 and resume_point.state["rank_batch"] == facts["rank_batch"]
    if batch != global_batch and not same_flags:
        differing.append(f"the global batch was {batch} and is {global_batch}")
    if differing:
        folder, another = resume_point.folder, "use another --output_dir"
        if (folder / "config.json").exists():
            another += f" and --model_name_or_path {folder} to start from its weights"
        raise UserError(
            f"{folder} cannot be resumed: {'; '.join(differing)}. Use the settings that it was made with, {another}, or"
            " add --overwrite_output_dir to train from the start."
        )
    log.info("Resuming from step %d: %s", resume_point.step, resume_point.folder)
    _check_cpu(resume_point, facts["cpu_kernels"])


def _check_cpu(resume_point: ResumePoint, now: Mapping[str, str] | None) -> None:
    """Warn if the checkpoint is from another CPU model or other kernels. `now`: this run's `kernels.record`."""
    saved = resume_point.state.get("cpu_kernels")
    if saved and now and saved != now:
        pairs = {name: (saved.get(name, "torch"), now.get(name, "torch")) for name in {**saved, **now}}
        changes = [f"{name} was {before} and is {after}" for name, (before, after) in pairs.items() if before != after]
        log.warning(
            "The checkpoint is from another CPU model or other kernels (%s): losses and weights may not be"
            " bit-identical to those of an uninterrupted run. To avoid this, use that CPU model and --cpu_kernels.",
            "; ".join(changes),
        )


def keep_global_batch(plan: BatchPlan, resume_point: ResumePoint | None, world: World) -> BatchPlan:
    """Return the plan with the checkpoint's global batch, so that each step has the same windows as before.

    A collective. Without a checkpoint, raises CollectiveError if the global batch exceeds the number of windows.
    """
    global_batch = world.broadcast(resume_point.state["global_batch"] if resume_point else None)
    if global_batch is None and plan.global_batch > plan.num_windows:
        raise CollectiveError(
            f"The global batch is {plan.global_batch} windows ({plan.size} rank(s), {plan.accumulation} micro-batch(es)"
            f" of {plan.global_batch // plan.total_micro_batches}), but the training data has only {plan.num_windows}."
            f" Lower --per_device_train_batch_size, give --global_batch {plan.num_windows} or less, or use more data."
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
