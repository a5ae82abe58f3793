"""The output folder and its files."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_bert import __version__
from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import EXIT_FAILURE, UserError
from hvd_bert.evaluation.evaluator import Evaluation
from hvd_bert.machine import PACKAGES, cpu_name, version_of
from hvd_bert.storage import locks
from hvd_bert.storage.writing import PARTIAL, replacing, write_json
from hvd_bert.training.optim import warmup_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# All files that a run writes. --overwrite_output_dir removes these, and no others.
RUN_FILES = {
    "train_results.json": "time, throughput, loss, world, versions",
    "eval_results.json": "EM, F1 and validation loss",
    "eval_predictions.json": "the answer to each question",
    "eval_nbest_predictions.json": "the best answers to each question, with probabilities",
    "eval_null_odds.json": "v2.0: the odds that a question has no answer",
    "metrics.jsonl": "one line per logged step and evaluation",
    "gpu_usage.jsonl": "the same steps: utilization, memory and power of each GPU",
    "timeline.json": "Horovod's timeline of some steps (python -m hvd_bert.timeline)",
    "trace.json.gz": "trace of all ranks in these steps, for ui.perfetto.dev",
    "tb": "metrics for TensorBoard (tensorboard --logdir)",
    "checkpoint-*": "the model at a step, and all state needed to resume",
    "latest": "the name of the newest checkpoint",
    "train_config.yaml": "all settings of this run; --config reads it",
    "eval_config.yaml": "all settings of a run that only evaluated",
    "model.safetensors": "the weights; from_pretrained loads this folder",
    "config.json": "the model's configuration",
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "the tokenizer's settings",
}
LOCK = ".lock"
_HELD: dict[Path, locks.Lock] = {}  # by this process, until it ends


def check(config: Config) -> None:
    """Raise UserError if the output folder cannot be written, is in use, or has files that the run would replace.

    Changes nothing, except that it locks an existing folder. A run that only evaluates adds to a folder. A training
    resumes an unfinished run; in any other folder that is not empty it needs --overwrite_output_dir.
    """
    folder = Path(config.train.output_dir or "runs").absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    named = config.train.output_dir is not None
    try:
        held = sorted(path.name for path in folder.iterdir() if path.name != LOCK) if named and above == folder else []
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None
    source = config.model.model_name_or_path
    if config.train.do_train and source and named and folder.resolve() == Path(source).resolve():
        raise UserError(f"--output_dir {folder} is the folder of the model that training starts from: use another one.")
    resumes = config.checkpoint.resume_from_checkpoint == resume.LATEST or resume.unfinished(folder)
    if held and config.train.do_train and not config.train.overwrite_output_dir and not resumes:
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise UserError(
            f"--output_dir {folder} is not empty ({shown}): use another one, or add --overwrite_output_dir to replace"
            " an earlier run's files."
        )
    if held and config.train.do_train:
        try:
            lock(folder)  # before reading files that another run may be writing
        except OSError as error:
            raise _unwritable(folder, error) from None


def make_ready(config: Config, resume_point: ResumePoint | None) -> None:
    """Create the folder (and set its name in `config`), remove files that will be written again, save the settings.

    The default is a new folder runs/DATE-TIME, a different one for each of several jobs that start in the same second.
    If `resume_point` is a checkpoint of this folder, the run's files up to that step stay.
    """
    try:
        if config.train.output_dir is None:
            config.train.output_dir = str(_new_dated_folder())
        folder = config.train.folder
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        if resume_point and resume_point.folder.resolve().parent == folder.resolve():
            forget_after(folder, resume_point.step)
        else:
            clear(folder, config.train.do_train)
        config.save(folder / ("train_config.yaml" if config.train.do_train else "eval_config.yaml"))
    except OSError as error:
        raise _unwritable(Path(config.train.output_dir or "runs"), error) from None


def _new_dated_folder() -> Path:
    stamp = time.strftime("runs/%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = Path(stamp if number == 1 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError("count() does not end")


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"--output_dir {folder} cannot be written: {error.strerror or error}.")


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
    for path in (folder / "train_results.json", *folder.glob("eval_*.json")):
        path.unlink(missing_ok=True)
    for name in ("metrics.jsonl", "gpu_usage.jsonl"):
        path = folder / name
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            with replacing(path) as partial:
                partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    files.remove_leftovers(folder)
    aside = files.set_aside_after(folder, step)
    if aside:
        log.warning("Set aside the checkpoints after step %d, from which training resumes: %s.", step, ", ".join(aside))


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut short by a crash
        return math.inf


def clear(folder: Path, train: bool) -> None:
    """Remove a run's files or, with `train` false, those of its evaluation; no other files."""
    if train:
        files.clear(folder)
    names = [name for name in RUN_FILES if train or name.startswith("eval_")]
    for name in [*names, *(f"{name}{PARTIAL}" for name in names)]:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def writing(folder: Path, world: World) -> Iterator[bool]:
    """Around rank 0's writes (yields True there). An OSError, such as a full disk, ends the run on all ranks."""
    with world.raise_on_all_ranks(EXIT_FAILURE):
        try:
            yield world.rank == 0
        except OSError as error:
            raise _unwritable(folder, error) from None


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """run_qa's files: metrics, predictions, n best answers per question and, for v2.0, the odds of "no answer"."""
    answers = evaluation.answers
    write_json(folder / "eval_results.json", evaluation.metrics)
    write_json(folder / "eval_predictions.json", {answer.id: answer.text for answer in answers})
    write_json(folder / "eval_nbest_predictions.json", {answer.id: answer.nbest for answer in answers})
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    if odds:
        write_json(folder / "eval_null_odds.json", odds)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Write files that `AutoModelForQuestionAnswering.from_pretrained(folder)` and `AutoTokenizer` load."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # config.json makes the folder a model and comes last: a crash leaves no partial model.
        for file in Path(partial).glob("*.safetensors"):
            shutil.copymode(Path(partial) / "config.json", file)  # safetensors gives nobody else access
        for file in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, folder / file.name)


def effective_settings(config: Config, plan: BatchPlan, learning_rate: float, world: World) -> dict[str, float]:
    """Settings that depend on the world size. `learning_rate`: the peak."""
    total_steps = config.train.total_steps(plan.steps_per_epoch)
    return {
        "world_size": world.size,
        "global_batch": plan.global_batch,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps(config.train, total_steps),
        "train_steps": total_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "train_windows": plan.num_windows,
    }


def facts(config: Config, world: World) -> dict[str, Any]:
    """The run's environment: ranks with host and device, threads, precision, versions."""
    return {
        "strategy": config.parallel.strategy,
        "devices_per_rank": world.devices,
        "controller": world.controller,
        "hosts": world.hosts,
        "job": world.job,
        "ranks": [
            {"rank": info.rank, "host": info.host, "local_rank": info.local_rank, "device": info.device}
            for info in world.rank_infos
        ],
        "device_name": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu_name(),
        "threads_per_rank": torch.get_num_threads(),
        "precision": config.train.precision,
        "seed": config.train.seed,
        "versions": {"python": platform.python_version(), "hvd_bert": __version__}
        | {package: version_of(package) for package in PACKAGES}
        | {"cuda": torch.version.cuda, "nccl": _nccl_version()},
    }


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def describe(folder: Path) -> str:
    """The run's output files, one per line with its content."""
    lines = [f"  {name:<28} {what}" for name, what in RUN_FILES.items() if any(folder.glob(name))]
    return "\n".join([f"In {folder}:", *lines])
