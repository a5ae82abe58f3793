"""The output folder: what a run leaves, and the names of its files."""

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

# All that a run writes; with --overwrite_output_dir these, and nothing else, make room for the new run's.
RUN_FILES = {
    "train_results.json": "time, throughput, loss, world, versions",
    "eval_results.json": "EM, F1 and validation loss",
    "eval_predictions.json": "the answer to each question",
    "eval_nbest_predictions.json": "the best answers to each question, with probabilities",
    "eval_null_odds.json": "v2.0: the odds that a question has no answer",
    "metrics.jsonl": "one line per logged step and evaluation",
    "gpu_usage.jsonl": "the same steps: how busy each GPU was",
    "timeline.json": "Horovod's timeline of some steps (python -m hvd_bert.timeline)",
    "trace.json.gz": "what every rank did in these steps, for ui.perfetto.dev",
    "tb": "the same for TensorBoard (tensorboard --logdir)",
    "checkpoint-*": "the model at a step, and all that training needs to go on from there",
    "latest": "the name of the newest of them",
    "train_config.yaml": "every setting of this run; --config reads it back",
    "eval_config.yaml": "every setting of a run that only scored",
    "model.safetensors": "the weights; from_pretrained loads this folder",
    "config.json": "the model's configuration",
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "the tokenizer's settings",
}
LOCK = ".lock"
_HELD: dict[Path, locks.Lock] = {}  # by this process, until it ends


def check(config: Config) -> None:
    """Raise UserError if the output folder cannot be written, is in use, or holds what the run would have to replace.

    Changes nothing (but locks a folder that is there). A run that only scores adds to a folder; one that trains goes
    on with what it left unfinished there, and wants --overwrite_output_dir for any other that is not empty.
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
        raise UserError(
            f"--output_dir {folder} is the folder of the model that training starts from: name another one."
        )
    resumes = config.checkpoint.resume_from_checkpoint == resume.LATEST or resume.unfinished(folder)
    if held and config.train.do_train and not config.train.overwrite_output_dir and not resumes:
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise UserError(
            f"--output_dir {folder} is not empty ({shown}): name another one, or add --overwrite_output_dir to replace"
            " an earlier run's files."
        )
    if held and config.train.do_train:
        try:
            lock(folder)  # before what a living run is writing is looked at
        except OSError as error:
            raise _unwritable(folder, error) from None


def make_ready(config: Config, resume_point: ResumePoint | None) -> None:
    """Make the folder (settling its name in `config`), remove what will be written anew, keep the settings.

    By default a new runs/<date>-<time>; of several jobs that start in the same second each gets its own.
    `resume_point`: the checkpoint that training goes on from; if it is this folder's, what the run left before it
    stays.
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
    """Lock the folder until this process ends, however it ends. Raises OSError, and UserError if another run has it."""
    if folder.resolve() in _HELD:
        return
    try:
        held = locks.take(folder / LOCK, wait=False)
    except locks.InUse as error:
        raise UserError(f"--output_dir {folder} is in use by another run ({error.holder}): wait for its end.") from None
    if held.missing:
        log.warning("%s has no file locks (%s): do not start a run in it on another host.", folder, held.missing)
    _HELD[folder.resolve()] = held


def unlock() -> None:
    """Let other processes use the folders that were locked."""
    while _HELD:
        _HELD.popitem()[1].release()


def forget_after(folder: Path, step: int) -> None:
    """Remove what a run left of the steps after `step`, which it makes anew: lines of its records, checkpoints."""
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
        log.warning("Set aside, since training goes on from step %d: %s.", step, ", ".join(aside))


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut short by a crash
        return math.inf


def clear(folder: Path, train: bool) -> None:
    """Remove what a run writes: all of it, or with `train` false its evaluation; no other files."""
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
    """Rank 0 (yields True there) writes what a run leaves; a full disk ends the run on all ranks, in one message."""
    with world.raise_on_all_ranks(EXIT_FAILURE):
        try:
            yield world.rank == 0
        except OSError as error:
            raise _unwritable(folder, error) from None


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """run_qa's files: scores, predictions, the n best of each question and, for v2.0, the odds of "no answer"."""
    answers = evaluation.answers
    write_json(folder / "eval_results.json", evaluation.metrics)
    write_json(folder / "eval_predictions.json", {answer.id: answer.text for answer in answers})
    write_json(folder / "eval_nbest_predictions.json", {answer.id: answer.nbest for answer in answers})
    odds = {answer.id: answer.null_odds for answer in answers if answer.null_odds is not None}
    if odds:
        write_json(folder / "eval_null_odds.json", odds)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Leave what `AutoModelForQuestionAnswering.from_pretrained(folder)` and `AutoTokenizer` load."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        # config.json, by which a folder counts as a model, comes last: a crash leaves no half of one.
        for file in Path(partial).glob("*.safetensors"):
            shutil.copymode(Path(partial) / "config.json", file)  # safetensors lets nobody else read what it writes
        for file in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, folder / file.name)


def effective_settings(config: Config, plan: BatchPlan, learning_rate: float, world: World) -> dict[str, float]:
    """What the settings come to in this world; `learning_rate`: the peak."""
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
    """What the run ran on: the ranks and their places, threads, precision, versions."""
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
    """The files that a run left, one a line, with what each holds."""
    lines = [f"  {name:<28} {what}" for name, what in RUN_FILES.items() if any(folder.glob(name))]
    return "\n".join([f"In {folder}:", *lines])
