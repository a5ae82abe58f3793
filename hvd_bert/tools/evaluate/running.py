"""The evaluation on all ranks: load the models, evaluate one after the other, print and write what was found."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.config.settings import Config
from hvd_bert.data.sources.questions import Question
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE, UserError, log
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import sample
from hvd_bert.evaluation.squad_metric import question_scores
from hvd_bert.model.layers import place
from hvd_bert.output import output_dir, run_folder
from hvd_bert.storage.writing import check_output, write_named, writing_to
from hvd_bert.strategies.base import strategy_class
from hvd_bert.tasks.base import EvaluationResult, Task, load_task
from hvd_bert.tasks.question_answering import SCORES, QuestionAnswering
from hvd_bert.tools.evaluate import slices
from hvd_bert.tools.rendering.page import Grid, Listing, Page, Text
from hvd_bert.tools.report.content import SHORT
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
            results = results_of(configs, metrics, models, flags.mistakes)
            results |= run_folder.environment_facts(configs[0], world)
            page = page_of(results)
            print(page.as_text(), flush=True)
            if flags.json:
                with writing_to("--json", flags.json):
                    write_named(flags.json, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            if folder:
                _write_folder(folder, evaluations[0], results, page)


def _evaluate(task: Task, config: Config, world: World) -> tuple[EvaluationResult, Scored | None]:
    """What the task returns and, on rank 0 and for question answering, each answer with its scores. A collective."""
    place(task.model, world.device)
    evaluation, found = task.evaluate(task.model), None
    if isinstance(task, QuestionAnswering) and task.dev and world.rank == 0:
        questions = task.dev
        found = replace(scored(questions.questions, evaluation.outputs, config), sets=questions.sets)
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
    if config.train.output_dir:
        output_dir.check(config.as_flat(), world.process.locks)
    out = Path(os.path.realpath(config.train.output_dir or ""))
    if flags.json and (out.exists() or Path(os.path.realpath(flags.json.parent)) != out):  # else it will be created
        with writing_to("--json", flags.json):
            flags.json = check_output(flags.json, flags.overwrite)


@dataclass(frozen=True)
class Scored:
    """The questions and a model's answers. `scores`: of each question in percent, by the names in SCORES.
    `sets`: of several files, the questions of each by its name."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    scores: dict[str, NDArray[np.float64]]
    sets: Mapping[str, range] = field(default_factory=dict)


def scored(questions: Sequence[Question], answers: Sequence[Answer], config: Config) -> Scored:
    """The answers with their scores, whose means are the metrics of the evaluation."""
    data = config.data
    found = []
    for question, answer in zip(questions, answers, strict=True):
        if answer.null_odds is not None and answer.null_odds > data.null_score_diff_threshold:
            found.append((float(not question.answer_texts),) * 2)  # the official script does not look at the texts
        else:
            found.append(question_scores(question, answer.text, data.version_2_with_negative))
    columns = 100 * np.array(found).T
    return Scored(questions, answers, dict(zip(SCORES, columns, strict=True)))


def results_of(
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
        "slices": slices_of(models) if models else {},
        "mistakes": mistakes(models[0], num_mistakes) if models else [],
        "settings": configs[0].as_flat(),
        "compared_settings": configs[1].as_flat() if compared else None,
    }


def slices_of(models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Scores of all questions, and of groups of similar questions."""
    questions = models[0].questions
    groups = {
        "questions": slices.by_answer(questions),
        "file": {name: np.array(part) for name, part in models[0].sets.items() if name},
        "question word": slices.by_question_word(questions),
        "answer length in words": slices.by_answer_length(questions),
        "context length in words": slices.by_context_length(questions),
    }
    return {
        title: [{"slice": name} | _row(models, members) for name, members in of_title.items()]
        for title, of_title in groups.items()
        if of_title
    }


def _row(models: Sequence[Scored], members: NDArray[np.int64]) -> dict[str, Any]:
    """Scores of some questions."""
    found = [{name: model.scores[name][members] for name in SCORES} for model in models]
    row: dict[str, Any] = {"questions": len(members)} | {name: float(found[0][name].mean()) for name in SCORES}
    if len(found) == 1:
        return row
    first, second = (scores["exact_match"] == 100 for scores in found)
    return row | {
        "compared": {name: float(found[1][name].mean()) for name in SCORES},
        "only_right": int((first & ~second).sum()),
        "only_compared_right": int((second & ~first).sum()),
    }


def mistakes(model: Scored, count: int) -> list[dict[str, Any]]:
    """The `count` worst wrong answers: the lowest F1 first, and of equal ones the highest probability."""
    wrong = np.flatnonzero(model.scores["exact_match"] < 100).tolist()
    found = [
        sample(model.questions[i], model.answers[i]) | {name: float(model.scores[name][i]) for name in SCORES}
        for i in wrong
    ]
    return sorted(found, key=lambda mistake: (mistake["f1"], -mistake["probability"]))[:count]


COMPARISON = "Only A, only B: questions that only this model answers exactly."
THRESHOLDS = (
    "The best scores that another --null_score_diff_threshold would give on these questions. Choose it on other"
    " questions than those whose scores you report."
)


def page_of(results: dict[str, Any]) -> Page:
    """The results as a page."""
    other = results["compared_with"]
    page = Page(f"Evaluation of {results['model']}" + (f" (A) and {other} (B)" if other else ""))
    losses = [metrics["eval_loss"] for metrics in (results["metrics"], results["compared_metrics"]) if metrics]
    shown_losses = " and ".join(f"{loss:.4f}" for loss in losses)
    unit = " EM and F1 are in percent." if results["slices"] else ""
    page.add(Text(f"Data: {results['data']}. Validation loss: {shown_losses}.{unit}"), Text("Scores", 2))
    if not results["slices"]:  # another task than question answering
        page.add(_metrics(results))
    else:
        overall, *slices = results["slices"].items()
        page.add(*([_all_scores(overall[1]), Text(COMPARISON)] if other else [_grid(*overall)]))
        page.add(Text("Scores by kind of question", 2), *(_grid(title, rows) for title, rows in slices))
    if "best_f1" in results["metrics"]:
        page.add(Text("Thresholds for no answer", 2), Text(THRESHOLDS), _thresholds(results))
    if results["mistakes"]:
        page.add(Text("Worst mistakes" + (" of A" if other else ""), 2), *_mistakes(results["mistakes"]))
    return page


def _metrics(results: dict[str, Any]) -> Grid:
    """The metrics of any task."""
    columns = [results["metrics"], *([results["compared_metrics"]] if results["compared_with"] else [])]
    head = ["Metric", *(("A", "B") if len(columns) == 2 else ("value",))]
    return Grid(head, [[name, *(f"{column[name]:.4f}" for column in columns)] for name in columns[0]])


def _grid(title: str, rows: Sequence[dict[str, Any]]) -> Grid:
    """One slicing: EM and F1 of one model, or the F1 of two."""
    first = title[0].upper() + title[1:]
    if "compared" not in rows[0]:
        cells = [[row["slice"], f"{row['questions']:,}", *(f"{row[name]:.2f}" for name in SHORT)] for row in rows]
        return Grid([first, "count", *SHORT.values()], cells)
    head = [first, "count", "F1 of A", "F1 of B", "A - B", "only A", "only B"]
    return Grid(head, [[row["slice"], *_compared(row, "f1")] for row in rows])


def _all_scores(rows: Sequence[dict[str, Any]]) -> Grid:
    """EM and F1 of two models on all questions."""
    head = ["Questions", "score", "count", "A", "B", "A - B", "only A", "only B"]
    cells = [[row["slice"], short, *_compared(row, name)] for row in rows for name, short in SHORT.items()]
    return Grid(head, cells, words=2)


def _compared(row: dict[str, Any], name: str) -> list[str]:
    score, other = row[name], row["compared"][name]
    scores = [f"{score:.2f}", f"{other:.2f}", f"{score - other:+.2f}"]
    questions, *only = (f"{row[name]:,}" for name in ("questions", "only_right", "only_compared_right"))
    return [questions, *scores, *only]


def _thresholds(results: dict[str, Any]) -> Grid:
    """The best thresholds, with as many digits as it takes to reproduce the best scores."""
    rows = []
    for key, name in (("metrics", "A"), ("compared_metrics", "B")):
        metrics = results[key] or {}
        for best, now, short in (("best_exact", "exact_match", "EM"), ("best_f1", "f1", "F1")):
            if metrics:
                model = [name] if results["compared_with"] else []
                rows.append(
                    [*model, short, f"{metrics[now]:.2f}", f"{metrics[best]:.2f}", repr(metrics[f"{best}_thresh"])]
                )
    head = [*(["Model"] if results["compared_with"] else []), "Score", "now", "best", "threshold of the best"]
    return Grid(head, rows, words=len(head) - 3)


def _mistakes(mistakes: Sequence[dict[str, Any]]) -> Iterator[Text | Listing]:
    for number, mistake in enumerate(mistakes, start=1):
        yield Text(f"{number}. {mistake['question']}")
        yield Listing(
            [
                f"expected: {' | '.join(mistake['answers']) or '(no answer)'}",
                f"predicted: {mistake['prediction'] or '(no answer)'} (probability {mistake['probability']:.2f},"
                f" F1 {mistake['f1']:.0f})",
                f"context: {mistake['context']}",
            ]
        )
