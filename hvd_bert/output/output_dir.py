"""Whether a run may use its output folder, and the moment when it takes it over.

`check` comes first and changes nothing. `begin` comes after all other checks: until then an earlier run's files stay.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.data_files import data_files
from hvd_bert.config.settings import TrainArguments, save
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError
from hvd_bert.output import card
from hvd_bert.output.run_folder import OF_EVALUATION, RUN_FILES
from hvd_bert.storage import locks, written
from hvd_bert.storage.locks import LOCK
from hvd_bert.storage.reading import open_regular, parse_json
from hvd_bert.storage.writing import OWN_PARTIAL, check_folder, make_folder, replacing, writing_to

Settings = dict[str, Any]  # all of them, by the flags' names
# Flags that name a file or a folder that the run reads.
INPUTS = ("model_name_or_path", "config_name", "tokenizer_name", "train_file", "validation_file")
TAKEN_OVER: set[str | None] = set()  # folders in which this process has begun a run, for Horovod elastic
_HELD: dict[Path, locks.Lock] = {}  # by this process, until it ends


def check(settings: Settings) -> None:
    """Raise UserError if the output folder cannot be written, is in use, or has files that the run must not replace.

    Changes nothing, except that it locks a folder with files and restores a checkpoint that a kill left aside.
    A run that only evaluates adds to a folder. A training resumes an unfinished run; in any other folder that is not
    empty it needs --overwrite_output_dir.
    """
    folder = Path(settings["output_dir"] or "runs").absolute()
    with writing_to("--output_dir", folder):
        above = next(path for path in (folder, *folder.parents) if path.exists())
        check_folder(folder)
        with tempfile.TemporaryFile(dir=above):
            pass
        if settings["output_dir"] is not None:
            _check_inputs(settings, folder)
            _check_content(settings, folder)
            if above == folder and _entries(folder):
                lock(folder)  # before reading files that another run may be writing
                _check_content(settings, folder)  # again: another run may have ended since
                files.restore_replaced(folder)


def _check_inputs(settings: Settings, folder: Path) -> None:
    """Raise UserError if the run would replace files that it reads."""
    folder, trains = folder.resolve(), settings["do_train"]
    inputs = [(name, file.path) for name in INPUTS for file in data_files(name, settings[name])]
    for name, given in inputs:
        path = Path(os.path.realpath(given))
        if not path.is_relative_to(folder):
            continue
        if path == folder and trains:
            raise UserError(f"--output_dir {folder}: training reads it (--{name}). Use another folder.")
        if path != folder and _replaces(trains, path.relative_to(folder).parts[0]):
            raise UserError(f"--{name} {given}: the run would replace this input. Use another --output_dir.")


def _replaces(trains: bool, name: str) -> bool:
    """Whether the run may replace or remove a file of this name in its folder."""
    if trains:
        return name in RUN_FILES.keys() - {card.NAME} or files.is_checkpoint(name)  # a user's own card stays
    records = ("metrics.jsonl", "events.jsonl", "tb", "wandb", "tracking.json")
    return name in (*fnmatch.filter(RUN_FILES, "eval*"), *records)


def _entries(folder: Path) -> list[str]:
    """The names in an output folder, without the lock, the record and temporary files of a killed run."""
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return sorted(name for name in names - {LOCK, written.RECORD} if not name.endswith(OWN_PARTIAL))


def _check_content(settings: Settings, folder: Path) -> None:
    """Raise UserError if the folder is not empty and is not to be resumed; OSError if the run would replace files that
    no run wrote."""
    held, trains = _entries(folder), settings["do_train"]
    written.check(folder, [name for name in held if _replaces(trains, name)])  # --overwrite_output_dir keeps these
    resumes = settings["resume_from_checkpoint"] == resume.LATEST or resume.unfinished(folder)
    if held and trains and not settings["overwrite_output_dir"] and not resumes:
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise UserError(
            f"--output_dir {folder} is not empty ({shown}): use another one, or add --overwrite_output_dir to replace"
            " an earlier run's files."
        )


def begin(args: TrainArguments, settings: Settings, resume_point: ResumePoint | None, world: World) -> None:
    """Take over the output folder, at the last moment before the first step, or before the scores are written.

    Creates the folder, whose name all ranks get in `args`, removes files that will be written again, and saves the
    settings. If `resume_point` is a checkpoint of this folder, the run's files up to that step stay. A collective.
    """
    with world.raise_on_all_ranks():
        if world.rank == 0:
            with writing_to("--output_dir", Path(args.output_dir or "runs")):
                _begin(args, settings, resume_point)
    args.output_dir = world.broadcast(args.output_dir)
    if not _entries(args.folder) or resume.unfinished(args.folder):  # a host without rank 0 may have another run there
        TAKEN_OVER.add(args.output_dir)


def _begin(args: TrainArguments, settings: Settings, resume_point: ResumePoint | None) -> None:
    args.output_dir = args.output_dir or str(_new_dated_folder())
    folder = args.folder
    make_folder(folder)
    if folder.resolve() not in _HELD:  # it was empty or missing
        lock(folder)
        if args.do_train and _entries(folder):
            raise UserError(f"--output_dir {folder}: another run has written there meanwhile. Rerun the same command.")
        _check_content(settings, folder)
    replaces = resume_point and resume_point.kept_by is not None and args.overwrite_output_dir  # another run's files
    if resume_point and not replaces and resume_point.folder.resolve().parent == folder.resolve():
        forget_after(folder, resume_point.step)
    elif args.do_train:
        clear(folder)
    _save_settings(settings, folder)


def _save_settings(settings: Settings, folder: Path) -> None:
    name = "train_config.yaml" if settings["do_train"] else "eval_config.yaml"
    written.add(folder, name)
    with replacing(folder / name) as partial:
        save(settings | {"output_dir": str(folder)}, partial)


def make_again(folder: Path, settings: Settings) -> None:
    """Create the folder of a running training, with its settings, after it was moved or removed.

    Not the folders above it, in which a file system may be missing. Their absence fails the next write.
    """
    with suppress(OSError):
        folder.mkdir()
        _save_settings(settings, folder)


def _new_dated_folder() -> Path:
    """Create runs/DATE-TIME, a different folder for each of several jobs that start in the same second."""
    stamp = time.strftime("runs/%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError("count() does not end")


def lock(folder: Path) -> None:
    """Lock the folder until this process ends, however it ends. Raises OSError, or UserError if another run has it."""
    if folder.resolve() in _HELD:
        return
    try:
        held = locks.take(folder / LOCK, wait=False)
    except locks.InUse as error:
        raise UserError(
            f"--output_dir {folder} is in use by another run ({error.holder}): wait for it to end."
        ) from None
    if held.missing:
        log.warning(
            "%s does not support file locks (%s): do not start a run in it on another host.", folder, held.missing
        )
    _HELD[folder.resolve()] = held


def unlock() -> None:
    """Release all locked folders."""
    while _HELD:
        _HELD.popitem()[1].release()


def forget_after(folder: Path, step: int) -> None:
    """Remove the lines of records, and set aside the checkpoints, of steps after `step`, which will be taken again."""
    written.remove(folder, {"train_results.json", *OF_EVALUATION})
    for name in ("metrics.jsonl", "gpu_usage.jsonl"):
        path = folder / name
        if path.exists():
            with open_regular(path) as lines, replacing(path) as partial, partial.open("wb") as kept:
                kept.writelines(line.rstrip(b"\r\n") + b"\n" for line in lines if _step_of(line) <= step)
    files.remove_leftovers(folder)
    aside = files.set_aside_after(folder, step)
    if aside:
        log.warning("Set aside the checkpoints after step %d, from which training resumes: %s.", step, ", ".join(aside))


def _step_of(line: bytes) -> float:
    try:
        return int(parse_json(line.decode("utf-8", "replace"))["step"])
    except (ValueError, LookupError, TypeError, OverflowError):  # cut short by a crash
        return math.inf


def clear(folder: Path) -> None:
    """Remove the files that earlier runs wrote in the folder; no other files, and no model card that was edited."""
    files.clear(folder)
    kept = set() if card.is_ours(folder / card.NAME) else {card.NAME}
    written.remove(folder, RUN_FILES.keys() - kept)
