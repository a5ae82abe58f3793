"""Names and contents of the files that a run writes into its output folder."""

from __future__ import annotations

import fnmatch
import os
import shlex
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hvd_bert.config.data import other_rules
from hvd_bert.config.settings import Config
from hvd_bert.config.training import REPORTERS
from hvd_bert.distributed.mpi import library_name
from hvd_bert.distributed.world import World
from hvd_bert.machine import cpu_name, host_facts, versions
from hvd_bert.model.cpu import kernels
from hvd_bert.output import card
from hvd_bert.storage.writing import delete, partial_path, write_json
from hvd_bert.tasks.base import EvaluationResult, Task

REPORTED = [file for _, files in REPORTERS.values() for file in files]
# All files that a run may write (docs/reference/output-files.md). --overwrite_output_dir removes them first.
RUN_FILES = (
    "train_results.json",
    "eval_results.json",
    "eval_predictions.json",
    "eval_nbest_predictions.json",
    "eval_null_odds.json",
    "eval_samples.json",
    "evaluation.json",
    "evaluation.html",
    "metrics.jsonl",
    "events.jsonl",
    "gpu_usage.jsonl",
    "trace",
    *REPORTED,
    "checkpoint-*",
    "latest",
    "train_config.yaml",
    "eval_config.yaml",
    "model.safetensors",
    "adapter",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    card.NAME,
)
SAMPLES = "eval_samples.json"
# Files of an evaluation. They are outdated after another evaluation, or once the model is trained further.
OF_EVALUATION = {*fnmatch.filter(RUN_FILES, "eval*.json"), "evaluation.html"}


def write_evaluation(folder: Path, evaluation: EvaluationResult, answer_language: str) -> None:
    """Write the evaluation's metrics and the task's files, and remove other files of an earlier evaluation."""
    rules = other_rules(answer_language)
    results = evaluation.metrics | ({"answer_language": rules} if rules else {})
    contents = {"eval_results.json": results, **evaluation.files}
    assert contents.keys() <= {*RUN_FILES}, "the next run would not replace them"
    for name, content in contents.items():
        write_json(folder / name, content)
    for name in OF_EVALUATION - contents.keys():
        delete(folder / name)


def save_model(folder: Path, task: Task) -> None:
    """Write the task's trained model into the output folder, by way of a temporary folder. Raises OSError."""
    partial = partial_path(folder / "model.safetensors")
    delete(partial)
    try:
        partial.mkdir()
        task.save(partial)
        for file in partial.rglob("*.safetensors"):
            file.chmod(partial.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
        delete(folder / "adapter")  # os.replace cannot replace a folder that is not empty
        # config.json comes last: a folder without it does not load as a model, so a crash leaves no partial model.
        for file in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, folder / file.name)
        partial.rmdir()
    except SafetensorError as error:  # for example a full disk
        delete(partial)
        raise OSError(str(error)) from None


def task_facts(task: Task) -> dict[str, Any]:
    """Return the task's keys of train_results.json: unit of the data, names of scores, metrics to be minimized."""
    return {
        "unit": task.unit,
        "scores": sorted(name for name in task.metrics if not name.startswith("eval_loss")),
        "lower_is_better": [name for name, best in task.metrics.items() if best == "min"],
    }


def environment_facts(config: Config, world: World) -> dict[str, Any]:
    """Return the environment's keys of train_results.json: ranks with host and device, threads, precision, versions."""
    precision = config.train.precision
    gpu = torch.cuda.get_device_properties(world.device) if world.device.type == "cuda" else None
    return {
        "strategy": config.parallel.strategy,
        "devices_per_rank": world.devices,
        "controller": world.controller,
        "mpi": library_name() if world.controller == "mpi" else None,
        "hosts": world.hosts,
        "job": world.job,
        "ranks": [
            {"rank": info.rank, "host": info.host, "local_rank": info.local_rank, "device": info.device}
            for info in world.rank_infos
        ],
        "device_name": torch.cuda.get_device_name(world.device) if gpu else cpu_name(),
        "machine": host_facts()
        | {"gpus": torch.cuda.device_count() or None, "gpu_memory_bytes": gpu and gpu.total_memory},
        "cpu_kernels": kernels.record(precision, world.device),
        "threads_per_rank": torch.get_num_threads(),
        "precision": precision,
        "seed": config.train.seed,
        "from_hub": card.from_hub(config.as_flat()),
        "versions": versions()
        | {"cuda": torch.version.cuda}
        | {"nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None},
    }


def describe(folder: Path) -> str:
    """Return a log line with the run's output folder and the command that shows its report."""
    return f"The output is in {folder}. To show it: hvd-bert report {shlex.quote(str(folder))}"
