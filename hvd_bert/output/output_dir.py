"""The output folder: the checks whether a run may use it, and its preparation for the run.

`check` is called first. `acquire` is called after all other checks have passed: only then are the files of an earlier
run removed.
"""

from __future__ import annotations

import fnmatch
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.data_files import data_files
from hvd_bert.config.settings import save
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError, log
from hvd_bert.output import card
from hvd_bert.output.run_folder import OF_EVALUATION, REPORTED, RUN_FILES
from hvd_bert.storage import locks, writing
from hvd_bert.storage.locks import LOCK
from hvd_bert.storage.reading import open_regular, parse_json
from hvd_bert.storage.writing import OWN_PARTIAL, delete, is_special, partial_path, replacing, writing_to

Settings = dict[str, Any]  # all settings by flag name
Locks = dict[Path, locks.Lock]  # the locks that this process holds, by folder
# Flags whose files and folders a run reads.
INPUTS = ("model_name_or_path", "config_name", "tokenizer_name", "train_file", "validation_file")
SETTINGS = ("train_config.yaml", "eval_config.yaml")  # a folder with one of these files holds a run
LOGS = (".out", ".err", ".log")  # extensions of files that a scheduler may write into the folder before the run starts
FOLDERS_BEGUN: set[Path] = set()  # the output folders in which this process has begun a training


@dataclass(frozen=True)
class Empty:
    """A folder that is missing, or holds only a scheduler's logs, a lock, and temporary files of a killed run."""


@dataclass(frozen=True)
class OwnRun:
    """The folder of a run. `finished`: whether it holds a finished training or only an evaluation."""

    finished: bool


@dataclass(frozen=True)
class Foreign:
    """A folder that has files but does not hold a run. `reason`: why a run wrote neither of its SETTINGS files."""

    reason: str


def _content(folder: Path) -> Empty | OwnRun | Foreign:
    """Return what an output folder holds."""
    if not _entries(folder):
        return Empty()
    reasons = {name: resume.why_no_run(folder / name) for name in SETTINGS}
    if all(reasons.values()):
        return Foreign("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return OwnRun(finished=not resume.unfinished(folder))


def check(settings: Settings, held: Locks) -> None:
    """Raise UserError if the output folder cannot be written, is in use, or has files that the run may not replace.

    Changes nothing, except that it locks a run's folder and calls `files.restore_replaced`. An evaluation may add files
    to any run's folder. A training may resume an unfinished run, or replace any run with --overwrite_output_dir.
    `held`: the locks that this process holds.
    """
    folder = Path(settings["output_dir"] or "runs").absolute()
    if settings["timeline"]:
        check_apart("--timeline_file", Path(settings["timeline"]), settings)
    with writing_to("--output_dir", folder):
        writing.check_folder(folder)
        if settings["output_dir"] is not None:
            _check_inputs(settings, folder)
            if isinstance(_content(folder), OwnRun):  # do not create a lock file in a folder that will be refused
                lock(folder, held)  # before reading files that another run may be writing
            _check_content(settings, folder)
            files.restore_replaced(folder)


def _check_inputs(settings: Settings, folder: Path) -> None:
    """Raise UserError if the run would replace its own input files."""
    folder, trains = folder.resolve(), settings["do_train"]
    for name, file in _paths(settings, INPUTS):
        path = Path(os.path.realpath(file))
        if _is_replaced(path, folder, trains) or (trains and path == folder):
            raise UserError(f"--{name} {file}: the run would replace this input. Use another --output_dir.")


def check_apart(flag: str, path: Path, settings: Settings) -> None:
    """Raise UserError if the file to write would replace an input, another output, or a file of a run or model.

    `flag`: the flag that names the file `path`. `settings`: the flags of the inputs and of other outputs.
    """
    output = Path(os.path.realpath(path))
    for name, file in _paths(settings, (*INPUTS, "output_dir", "timeline")):
        other = Path(os.path.realpath(file))
        of_run = output == other / LOCK or _is_replaced(output, other, trains=True)
        if name != "output_dir" and output.name in OF_EVALUATION:  # an evaluation may write these into a model's folder
            of_run = False
        if of_run or (output == other and flag != f"--{name}_file"):
            replaced = file if output == other else f"a file of {file}"
            raise UserError(f"{flag} {path} would replace {replaced}, which is used as well: name another file.")


def _paths(settings: Settings, flags: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, file.path) for name in flags for file in data_files(name, settings.get(name))]


def _is_replaced(path: Path, folder: Path, trains: bool) -> bool:
    """Return whether a run in `folder` may replace or remove the file `path`. `trains`: whether the run trains."""
    return folder in path.parents and _replaces(trains, path.relative_to(folder).parts[0])


def _replaces(trains: bool, name: str) -> bool:
    """Return whether a run may replace or remove the file `name` in its folder. `trains`: whether the run trains."""
    if trains:
        return name in RUN_FILES or files.is_checkpoint(name)
    return name in (*fnmatch.filter(RUN_FILES, "eval*"), "metrics.jsonl", "events.jsonl", *REPORTED)


def _entries(folder: Path) -> list[str]:
    """List the names in an output folder, without the lock file, logs and a killed run's temporary files."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return sorted(name for name in names - {LOCK} if not name.endswith((OWN_PARTIAL, *LOGS)))


def _check_content(settings: Settings, folder: Path) -> None:
    """Raise UserError unless the run may write into the folder with its current content."""
    names, trains = _entries(folder), settings["do_train"]
    special = [name for name in names if _replaces(trains, name) and is_special(folder / name)]
    if special:
        raise UserError(
            f"--output_dir {folder} has links, pipes or devices named like a run's files ({', '.join(special)}):"
            " move them away, or use another folder."
        )
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    confirmed = settings["overwrite_output_dir"] or settings["resume_from_checkpoint"] == resume.LATEST
    match _content(folder):
        case Foreign(reason):
            raise UserError(
                f"--output_dir {folder} is not empty ({shown}) and holds no run ({reason}): use another one."
            )
        case OwnRun(finished=True) if trains and not confirmed:
            if {"train_results.json", "config.json"} <= {*names}:
                raise UserError(
                    f"--output_dir {folder} holds a finished run, which `hvd-bert report {folder}` shows. To train its"
                    f" model longer, use another --output_dir and --model_name_or_path {folder}. To replace the run,"
                    " add --overwrite_output_dir."
                )
            raise UserError(
                f"--output_dir {folder} is not empty ({shown}): use another one, or add --overwrite_output_dir to"
                " replace an earlier run's files."
            )


def acquire(settings: Settings, resume_point: ResumePoint | None, world: World) -> Path:
    """Create and lock the output folder, and save the settings. A training removes an earlier run's files.

    A collective; returns the folder on all ranks. Call this right before the first step or, without training, before
    the scores are written. If `resume_point` is in the folder, calls `forget_after` instead of removing all files.
    """
    folder = Path(settings["output_dir"] or "runs")
    with world.writing("--output_dir", folder, EXIT_BAD_INPUT) as writes:
        if writes:
            folder = Path(settings["output_dir"] or _new_dated_folder())
            _acquire(folder, settings, resume_point, world.process.locks)
    folder = Path(world.broadcast(folder))
    if _content(folder) in (Empty(), OwnRun(finished=False)):  # another host's folder may hold another run
        FOLDERS_BEGUN.add(folder)
    return folder


def _acquire(folder: Path, settings: Settings, resume_point: ResumePoint | None, held: Locks) -> None:
    trains, overwrites = settings["do_train"], settings["overwrite_output_dir"]
    writing.make_folder(folder)
    if folder.resolve() not in held:  # `check` locks only folders that hold a run
        lock(folder, held)
        if trains and _content(folder) != Empty():
            raise UserError(f"--output_dir {folder}: another run has written there meanwhile. Rerun the same command.")
        _check_content(settings, folder)
    resumes = resume_point is not None and resume_point.folder.resolve().parent == folder.resolve()
    if resume_point and resume_point.owner_rank is not None and overwrites:  # the folder holds a different run
        resumes = False
    if resume_point and resumes:
        forget_after(folder, resume_point.step)
    elif trains:
        clear(folder, keeps_card=not overwrites)
    _save_settings(settings, folder)
    if trains and not resumes:
        # Delete this last: a process killed without any settings file would leave a folder that is refused as foreign.
        delete(folder / SETTINGS[1])


def _save_settings(settings: Settings, folder: Path) -> None:
    name = SETTINGS[0] if settings["do_train"] else SETTINGS[1]
    with replacing(folder / name) as partial:
        save(settings | {"output_dir": str(folder)}, partial)


def make_again(folder: Path, settings: Settings) -> None:
    """Create the output folder of a running training again, with its settings, after it was moved or removed.

    Parent folders are not created, since their file system may be unmounted. The next write then fails.
    """
    with suppress(OSError):
        folder.mkdir()
        _save_settings(settings, folder)


def _new_dated_folder() -> Path:
    """Create the folder runs/DATE-TIME, or runs/DATE-TIME-N if another job started in the same second."""
    folder = named = Path(time.strftime("runs/%Y%m%d-%H%M%S"))
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = named.with_name(f"{named.name}-{number}")


def lock(folder: Path, held: Locks) -> None:
    """Lock the folder until the process leaves its world. Raises OSError, or InUse if another run holds the lock."""
    resolved = folder.resolve()
    if resolved not in held:
        held[resolved] = locks.acquire(folder / LOCK, wait=False)


def forget_after(folder: Path, step: int) -> None:
    """Prepare the folder for resuming from `step`: remove log lines and set aside checkpoints of later steps.

    Also removes the results and the files of an evaluation.
    """
    for name in {"train_results.json", *OF_EVALUATION}:
        delete(folder / name)
    for name in ("metrics.jsonl", "gpu_usage.jsonl"):
        path = folder / name
        if path.exists():
            with open_regular(path) as lines, replacing(path) as partial, partial.open("wb") as remaining:
                remaining.writelines(line.rstrip(b"\r\n") + b"\n" for line in lines if _logged_step(line) <= step)
    files.remove_leftovers(folder)
    aside = files.set_aside_after(folder, step)
    if aside:
        log.warning("Set aside the checkpoints after step %d, from which training resumes: %s.", step, ", ".join(aside))


def _logged_step(line: bytes) -> float:
    try:
        return int(parse_json(line.decode("utf-8", "replace"))["step"])
    except (ValueError, LookupError, TypeError, OverflowError):  # a crash cut the line short
        return math.inf


def clear(folder: Path, keeps_card: bool = False) -> None:
    """Remove an earlier run's files except its settings, which mark the folder as a run's if the process is killed now.

    `keeps_card`: whether to keep README.md.
    """
    files.clear(folder)
    for name in {*RUN_FILES} - {*SETTINGS, *([card.NAME] if keeps_card else [])}:
        delete(folder / name)
        delete(partial_path(folder / name))
