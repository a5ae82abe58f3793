"""The evaluation on all ranks: load the models, evaluate one after the other, print and write what was found."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_bert.config.settings import Config
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, log
from hvd_bert.model.layers import place
from hvd_bert.output import output_dir, run_folder
from hvd_bert.storage.writing import check_output, write_named, writing_to
from hvd_bert.strategies.base import strategy_class
from hvd_bert.tasks.base import EvaluationResult, Task, load_task
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.evaluate.page import make_page
from hvd_bert.tools.evaluate.slices import Scored, mistakes, score_slices, scored
from hvd_bert.tools.rendering.page import Page
from hvd_bert.training.start import set_up


def run(flags: argparse.Namespace, configs: Sequence[Config], world: World) -> None:
    """The whole evaluation. `configs`: one per model. Called by all ranks."""
    with world.raise_on_all_ranks():
        strategy_class(configs[0].parallel.strategy)  # raises if it is not installed
    set_up(configs[0], world)
    log.info("%s", "\n".join(world.describe()))
    with world.raise_on_all_ranks():
        if world.rank == 0:
            _check_outputs(flags, configs[0], world)
        tasks = [load_task(config, world) for config in configs]
        if not all(task.evaluates for task in tasks):
            raise UserError("There are no data to evaluate on: give --validation_file or --dataset_name.")
    for task, config in zip(tasks, configs, strict=True):
        world.check_same({f"--{name}": value for name, value in config.as_flat().items()} | task.fingerprint())

    found = [_evaluate(task, config, world) for task, config in zip(tasks, configs, strict=True)]
    folder = output_dir.take_over(configs[0].as_flat(), None, world) if configs[0].train.output_dir else None
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            evaluations, scored_models = zip(*found, strict=True)
            metrics = [evaluation.metrics for evaluation in evaluations]
            models = [model for model in scored_models if model is not None]
            results = _results(configs, metrics, models, flags.mistakes)
            results |= run_folder.environment_facts(configs[0], world)
            page = make_page(results)
            print(page.as_text(), flush=True)
            if folder:
                _write_folder(folder, evaluations[0], results, page)
            if flags.json:
                with writing_to("--json", flags.json):
                    path = check_output(flags.json, flags.overwrite)
                    write_named(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _evaluate(task: Task, config: Config, world: World) -> tuple[EvaluationResult, Scored | None]:
    """What the task returns and, on rank 0 and for question answering, each answer with its scores. A collective."""
    place(task.model, world.device)
    evaluation, found = task.evaluate(task.model), None
    if isinstance(task, QuestionAnswering) and task.dev and world.rank == 0:
        found = scored(task.dev.questions, evaluation.outputs, task.dev.sets, config.data)
    task.model.to(device="cpu")  # frees the GPU's memory for the other model
    return evaluation, found


def _write_folder(folder: Path, evaluation: EvaluationResult, results: dict[str, Any], page: Page) -> None:
    """Write all files to --output_dir. Raises UserError."""
    with writing_to("--output_dir", folder):
        files = evaluation.files | {"evaluation.json": results}
        run_folder.write_evaluation(folder, replace(evaluation, files=files))
        write_named(folder / "evaluation.html", page.as_html())
    log.info("%s", run_folder.describe(folder))


def _check_outputs(flags: argparse.Namespace, config: Config, world: World) -> None:
    """Raise UserError if a file cannot be written. Changes nothing."""
    if flags.json:
        output_dir.check_apart("--json", flags.json, config.as_flat())
    if config.train.output_dir:
        output_dir.check(config.as_flat(), world.process.locks)
    out = Path(os.path.realpath(config.train.output_dir or ""))
    if flags.json and (out.exists() or Path(os.path.realpath(flags.json.parent)) != out):  # else it will be created
        with writing_to("--json", flags.json):
            check_output(flags.json, flags.overwrite)


def _results(
    configs: Sequence[Config], metrics: Sequence[dict[str, float]], models: Sequence[Scored], num_mistakes: int
) -> dict[str, Any]:
    """All results: of the evaluated model, and of the one that it is compared with if there is one.

    `models`: empty for another task than question answering.
    """
    data, compared = configs[0].data, len(configs) == 2
    files = ", ".join(file.path for file in data.files("validation_file"))
    return {
        "generator": "hvd_bert.evaluate",
        "model": configs[0].model.model_name_or_path,
        "compared_with": configs[1].model.model_name_or_path if compared else None,
        "data": files or data.dataset_name or data.task,
        "metrics": metrics[0],
        "compared_metrics": metrics[1] if compared else None,
        "slices": score_slices(models) if models else {},
        "mistakes": mistakes(models[0], num_mistakes) if models else [],
        "settings": configs[0].as_flat(),
        "compared_settings": configs[1].as_flat() if compared else None,
    }
