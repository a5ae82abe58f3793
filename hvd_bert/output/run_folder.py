"""The files of a run in its output folder."""

from __future__ import annotations

import fnmatch
import os
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hvd_bert.config.settings import Config
from hvd_bert.distributed.mpi import library_name
from hvd_bert.distributed.world import World
from hvd_bert.machine import PACKAGES, cpu_name, host_facts, package_version
from hvd_bert.model.cpu import kernels
from hvd_bert.output import card
from hvd_bert.output.public import from_hub
from hvd_bert.storage.writing import delete, partial_path, write_json
from hvd_bert.tasks.base import EvaluationResult, Task
from hvd_bert.version import __version__

# All files that a run may write. --overwrite_output_dir removes them.
RUN_FILES = {
    "train_results.json": "time, throughput, loss, world, versions",
    "eval_results.json": "scores and validation loss",
    "eval_predictions.json": "the prediction for each question or example",
    "eval_nbest_predictions.json": "the best answers to each question, with probabilities",
    "eval_null_odds.json": "v2.0: the odds that a question has no answer",
    "eval_samples.json": "some right and some wrong answers, with their questions",
    "evaluation.json": "scores by kind of question, and mistakes (hvd-bert evaluate)",
    "evaluation.html": "the same as a page",
    "metrics.jsonl": "one line per logged step and evaluation",
    "events.jsonl": "starts of the run with their environment, warnings, reasons of failures",
    "gpu_usage.jsonl": "the same steps: utilization, memory and power of each GPU",
    "trace.json.gz": "trace of all ranks in some steps, for ui.perfetto.dev",
    "tb": "metrics for TensorBoard (tensorboard --logdir)",
    "wandb": "metrics of --report_to wandb",
    "tracking.json": "the run's id at wandb, where a resumed run continues",
    "checkpoint-*": "the model at a step, and all state needed to resume",
    "latest": "the name of the newest checkpoint",
    "train_config.yaml": "all settings of this run; --config reads it",
    "eval_config.yaml": "all settings of a run that only evaluated",
    "model.safetensors": "the weights",
    "adapter": "the adapters of --lora_rank, as peft loads them",
    "config.json": "the model's configuration, with which from_pretrained loads this folder",
    "tokenizer.json": "the tokenizer",
    "tokenizer_config.json": "the tokenizer's settings",
    card.NAME: "the model card: data, settings, scores, how to use the model",
}
SAMPLES = "eval_samples.json"
# Those that a later evaluation, or a model that was trained further, makes outdated.
OF_EVALUATION = {*fnmatch.filter(RUN_FILES, "eval*.json"), "evaluation.html"}


def write_evaluation(folder: Path, evaluation: EvaluationResult) -> None:
    """Write the metrics and the task's files. Those of an earlier evaluation that it does not replace are removed."""
    contents = {"eval_results.json": evaluation.metrics, **evaluation.files}
    assert contents.keys() <= RUN_FILES.keys(), "the next run would not replace them"
    for name, content in contents.items():
        write_json(folder / name, content)
    for name in OF_EVALUATION - contents.keys():
        delete(folder / name)


def save_model(folder: Path, task: Task) -> None:
    """Write the task's trained model."""
    partial = partial_path(folder / "model.safetensors")
    delete(partial)
    try:
        partial.mkdir()
        task.save(partial)
        for file in partial.rglob("*.safetensors"):
            file.chmod(partial.stat().st_mode & 0o666)  # safetensors gives nobody else access
        delete(folder / "adapter")  # a folder cannot replace another one
        # config.json makes the folder a model and comes last: a crash leaves no partial model.
        for file in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, folder / file.name)
        partial.rmdir()
    except SafetensorError as error:  # a full disk, for example
        delete(partial)
        raise OSError(str(error)) from None


def task_facts(task: Task) -> dict[str, Any]:
    """What tools need of a task: what a step takes, its scores, the metrics of which less is better."""
    return {
        "unit": task.unit,
        "scores": sorted(name for name in task.metrics if not name.startswith("eval_loss")),
        "lower_is_better": [name for name, best in task.metrics.items() if best == "min"],
    }


def environment_facts(config: Config, world: World) -> dict[str, Any]:
    """The run's environment: ranks with host and device, threads, precision, versions."""
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
        "from_hub": from_hub(config.as_flat()),
        "versions": {"python": platform.python_version(), "hvd_bert": __version__}
        | {package: package_version(package) for package in PACKAGES}
        | {"cuda": torch.version.cuda}
        | {"nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None},
    }


def describe(folder: Path) -> str:
    """The run's output files, one per line with its content."""
    lines = [f"  {name:<28} {what}" for name, what in RUN_FILES.items() if any(folder.glob(name))]
    return "\n".join([f"In {folder}:", *lines])
