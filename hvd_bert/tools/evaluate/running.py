"""Evaluate on all ranks: load the models, evaluate one after the other, print and write the results."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_bert.config.command_line import trained_file
from hvd_bert.config.settings import Config
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, log
from hvd_bert.evaluation.evaluator import span_options
from hvd_bert.model.layers import place
from hvd_bert.output import output_dir, run_folder
from hvd_bert.predict.answerer import describe_threshold
from hvd_bert.storage.reading import MAX_YAML_BYTES, read_text
from hvd_bert.storage.writing import check_folder, check_output, write_named, write_output, writing_to
from hvd_bert.strategies.base import strategy_class
from hvd_bert.tasks.base import EvaluationResult, Task, load_task
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.evaluate.evaluation_page import make_page
from hvd_bert.tools.evaluate.slices import mistakes, score_slices, scored
from hvd_bert.training.start import set_up


def run(flags: argparse.Namespace, configs: Sequence[Config], world: World) -> None:
    """Evaluate each model; rank 0 prints the page and writes the files. Called by all ranks.

    `configs`: the settings for each model.
    """
    with world.raise_on_all_ranks():
        strategy_class(configs[0].parallel.strategy)  # raises if the strategy is not installed
    set_up(configs[0], world)
    log.info("%s", "\n".join(world.describe()))
    for config in configs:
        if threshold := describe_threshold(str(config.model.model_name_or_path), span_options(config.data)):
            log.info("%s", threshold)
    with world.raise_on_all_ranks():
        if world.rank == 0:
            _check_outputs(flags, configs[0], world)
        tasks = [load_task(config, world) for config in configs]
        if not all(task.evaluates for task in tasks):
            raise UserError("There are no data to evaluate on: give --validation_file or --dataset_name.")
    for task, config in zip(tasks, configs, strict=True):
        world.check_same({f"--{name}": value for name, value in config.as_flat().items()} | task.fingerprint())

    evaluations = []
    for task in tasks:
        place(task.model, world.device)
        evaluations.append(task.evaluate(task.model))
        task.model.to(device="cpu")  # frees the GPU's memory for the other model
    folder = output_dir.acquire(configs[0].as_flat(), None, world) if configs[0].train.output_dir else None
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            results = _results(configs, tasks, evaluations, flags.mistakes)
            results |= run_folder.environment_facts(configs[0], world)
            page = make_page(results)
            print(page.as_text(), flush=True)
            if folder:
                with writing_to("--output_dir", folder):
                    files = evaluations[0].files | {"evaluation.json": results}
                    language = configs[0].data.answer_language
                    run_folder.write_evaluation(folder, replace(evaluations[0], files=files), language)
                    write_named(folder / "evaluation.html", page.as_html())
                log.info("%s", run_folder.describe(folder))
            if flags.json:
                text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
                write_output("--json", flags.json, text, flags.overwrite)
            if flags.keep_threshold:
                _keep_threshold(flags.model, evaluations[0].metrics["best_f1_thresh"])


def _keep_threshold(model: str, threshold: float) -> None:
    """Record the threshold in the model's train_config.yaml. A checkpoint gets a file of its own."""
    file = _model_file(model)
    text = read_text(trained_file(model) or file, MAX_YAML_BYTES)
    line = f"null_score_diff_threshold: {threshold!r}"
    text, found = re.subn(r"(?m)^null_score_diff_threshold:.*$", line, text)
    with writing_to("--keep_threshold", file):
        write_named(file, text if found else f"{text.rstrip()}\n{line}\n")
    log.info("%s: %s. The commands predict and evaluate and QuestionAnswerer use it by default.", file, line)


def _model_file(model: str) -> Path:
    return (Path(model) / "train_config.yaml").resolve()


def _check_outputs(flags: argparse.Namespace, config: Config, world: World) -> None:
    """Raise UserError if an output file cannot be written. Creates no files."""
    if flags.json:
        output_dir.check_apart("--json", flags.json, config.as_flat())
    if flags.keep_threshold:
        with writing_to("--keep_threshold", _model_file(flags.model)):
            check_folder(_model_file(flags.model).parent)
    if config.train.output_dir:
        output_dir.check(config.as_flat(), world.process.locks)
    out = Path(os.path.realpath(config.train.output_dir or ""))
    # Skip the check if the file's folder is the output folder, which does not exist yet: the run creates it.
    if flags.json and (out.exists() or Path(os.path.realpath(flags.json.parent)) != out):
        with writing_to("--json", flags.json):
            check_output(flags.json, flags.overwrite)


def _results(
    configs: Sequence[Config], tasks: Sequence[Task], evaluations: Sequence[EvaluationResult], num_mistakes: int
) -> dict[str, Any]:
    """Collect the content of evaluation.json for one model or two, without the environment."""
    data, compared, task = configs[0].data, len(configs) == 2, tasks[0]
    results: dict[str, Any] = {
        "generator": "hvd_bert.evaluate",
        "model": configs[0].model.model_name_or_path,
        "compared_with": configs[1].model.model_name_or_path if compared else None,
        "data": ", ".join(file.path for file in data.files("validation_file")) or data.dataset_name or data.task,
        "metrics": evaluations[0].metrics,
        "compared_metrics": evaluations[1].metrics if compared else None,
        "slices": {},
        "mistakes": [],
        "settings": configs[0].as_flat(),
        "compared_settings": configs[1].as_flat() if compared else None,
    }
    if isinstance(task, QuestionAnswering) and task.dev:
        questions, answers = task.dev.questions, [evaluation.outputs for evaluation in evaluations]
        models = [scored(questions, *of_model) for of_model in zip(answers, configs, strict=True)]
        results["slices"] = score_slices(task.dev, models, data.answer_language)
        results["mistakes"] = mistakes(questions, answers[0], models[0], num_mistakes)
    return results
