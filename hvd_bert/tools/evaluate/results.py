"""What an evaluation found, as the content of evaluation.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.config.settings import Config
from hvd_bert.data.sources.questions import Question
from hvd_bert.evaluation import slices
from hvd_bert.evaluation.bootstrap import paired_difference
from hvd_bert.evaluation.normalization import ANSWER_RULES
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.evaluation.samples import sample
from hvd_bert.evaluation.squad_metric import question_scores

GENERATOR = "hvd_bert.evaluate"
MARK = f'"generator": "{GENERATOR}"'  # the beginning of the JSON file, by which it is recognized as this program's
SCORES = ("exact_match", "f1")


@dataclass(frozen=True)
class Scored:
    """The questions and a model's answers. `scores`: of each question in percent, by the names in SCORES."""

    questions: Sequence[Question]
    answers: Sequence[Answer]
    scores: dict[str, NDArray[np.float64]]


def scored(questions: Sequence[Question], answers: Sequence[Answer], config: Config) -> Scored:
    """The answers with their scores, whose means are the metrics of the evaluation."""
    data, rules = config.data, ANSWER_RULES[config.data.answer_normalization]
    found = []
    for question, answer in zip(questions, answers, strict=True):
        if answer.null_odds is not None and answer.null_odds > data.null_score_diff_threshold:
            found.append((float(not question.answer_texts),) * 2)  # the official script does not look at the texts
        else:
            found.append(question_scores(question, answer.text, rules, data.version_2_with_negative))
    columns = 100 * np.array(found).T
    return Scored(questions, answers, dict(zip(SCORES, columns, strict=True)))


def results_of(
    configs: Sequence[Config], metrics: Sequence[dict[str, float]], models: Sequence[Scored], num_mistakes: int
) -> dict[str, Any]:
    """All results: of the evaluated model, and of the one that it is compared with if there is one.

    `models`: empty for another task than question answering.
    """
    data, compared = configs[0].data, len(configs) == 2
    return {
        "generator": GENERATOR,
        "model": configs[0].model.model_name_or_path,
        "compared_with": configs[1].model.model_name_or_path if compared else None,
        "data": data.validation_file or data.dataset_name or data.task,
        "metrics": metrics[0],
        "compared_metrics": metrics[1] if compared else None,
        "slices": slices_of(models, data.answer_normalization) if models else {},
        "mistakes": mistakes(models[0], num_mistakes) if models else [],
        "settings": configs[0].as_flat(),
        "compared_settings": configs[1].as_flat() if compared else None,
    }


def slices_of(models: Sequence[Scored], answer_normalization: str) -> dict[str, list[dict[str, Any]]]:
    """Scores of all questions, and of groups of similar questions."""
    questions, rules = models[0].questions, ANSWER_RULES[answer_normalization]
    unit = "words" if answer_normalization == "squad" else "characters"
    groups = {
        "questions": slices.by_answer(questions),
        "question word": slices.by_question_word(questions),
        f"answer length in {unit}": slices.by_answer_length(questions, rules.units),
        f"context length in {unit}": slices.by_context_length(questions, rules.units),
    }
    return {
        title: [{"slice": name} | _row(models, members) for name, members in of_title.items()]
        for title, of_title in groups.items()
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
        "difference": {name: asdict(paired_difference(found[0][name], found[1][name])) for name in SCORES},
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
