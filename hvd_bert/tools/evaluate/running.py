"""The evaluation on all ranks: load the models, evaluate one after the other, print and write the results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_bert.config.settings import Config
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import EXIT_FAILURE, UserError
from hvd_bert.output import output_dir, run_folder
from hvd_bert.rendering.page import Page
from hvd_bert.storage import written
from hvd_bert.storage.writing import replacing, write_named, writing_to
from hvd_bert.strategies.table import strategy_class
from hvd_bert.tasks.base import EvaluationResult, Task
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tasks.table import load_task
from hvd_bert.tools.evaluate.results import MARK, Scored, page_of, results_of, scored
from hvd_bert.train.start import set_up


def run(flags: argparse.Namespace, configs: Sequence[Config], world: World) -> None:
    """The whole evaluation. `configs`: one per model. Called by all ranks."""
    with world.raise_on_all_ranks():
        strategy_class(configs[0].parallel.strategy)  # raises if it is not installed
    set_up(configs[0], world)
    log.info("%s", "\n".join(world.describe()))
    with world.raise_on_all_ranks():
        if world.rank == 0:
            _check_outputs(flags, configs[0])
        tasks = [_task(config, world) for config in configs]
    for task, config in zip(tasks, configs, strict=True):
        world.check_same({f"--{name}": value for name, value in config.as_flat().items()} | task.fingerprint())

    evaluated = [_evaluate(task, config, world) for task, config in zip(tasks, configs, strict=True)]
    if configs[0].train.output_dir:
        output_dir.begin(configs[0].train, configs[0].as_flat(), None, world)
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            evaluations, scored_models = zip(*evaluated, strict=True)
            metrics = [evaluation.metrics for evaluation in evaluations]
            models = [model for model in scored_models if model is not None]
            results = results_of(configs, metrics, models, flags.mistakes)
            results |= run_folder.facts(configs[0].as_flat(), configs[0].train.precision, world)
            page = page_of(results)
            print(page.as_text(), flush=True)
            if flags.json:
                with writing_to("--json", flags.json):
                    write_named(flags.json, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            if configs[0].train.output_dir:
                _write_folder(configs[0].train.folder, evaluations[0], tasks[0], results, page)


def _evaluate(task: Task, config: Config, world: World) -> tuple[EvaluationResult, Scored | None]:
    """What the task returns and, on rank 0 and for question answering, each answer with its scores. A collective."""
    task.model.to(device=world.device)
    found = None
    if isinstance(task, QuestionAnswering):
        answered = task.answer(task.model)
        evaluation = task.described(answered)
        if world.rank == 0 and task.inputs.dev:
            found = scored(task.inputs.dev.questions, answered.answers, config)
    else:
        evaluation = task.evaluate(task.model)
    task.model.to(device="cpu")  # frees the GPU's memory for the other model
    return evaluation, found


def _write_folder(folder: Path, evaluation: EvaluationResult, task: Task, results: dict[str, Any], page: Page) -> None:
    """Write all files to --output_dir. Raises UserError."""
    with writing_to("--output_dir", folder):
        files = evaluation.files | {"evaluation.json": results}
        run_folder.write_evaluation(folder, replace(evaluation, files=files), task.describe_data(folder))
        written.add(folder, "evaluation.html")
        with replacing(folder / "evaluation.html") as partial:
            partial.write_text(page.as_html(), encoding="utf-8")
    log.info("%s", run_folder.describe(folder))


def _check_outputs(flags: argparse.Namespace, config: Config) -> None:
    """Raise UserError if a file cannot be written. Changes nothing."""
    if config.train.output_dir:
        output_dir.check(config.as_flat())
    out = Path(os.path.realpath(config.train.output_dir or ""))
    if flags.json and (out.exists() or Path(os.path.realpath(flags.json.parent)) != out):  # else it will be created
        with writing_to("--json", flags.json):
            flags.json = written.check_file(flags.json, MARK)


def _task(config: Config, world: World) -> Task:
    task = load_task(config, world)
    if not task.evaluates:
        raise UserError("There are no data to evaluate on: give --validation_file or --dataset_name.")
    return task
