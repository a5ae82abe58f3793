"""The model card: README.md of a training, made from its results. It does not contain paths, host or user names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_bert.config.data import QUESTION_ANSWERING, other_rules
from hvd_bert.config.strategies import HOROVOD, STRATEGIES
from hvd_bert.errors import log
from hvd_bert.hub import DEFAULT_MODEL
from hvd_bert.storage.reading import read_json
from hvd_bert.storage.writing import write_named

NAME = "README.md"
Record = Mapping[str, Any]

# Suffix of a transformers class -> name of its task on the hub.
HEADS = {
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}


def from_hub(settings: Record) -> dict[str, str]:
    """Return {flag: value} for values that are names on the hub, because no such path exists.

    Call this in the run's working directory, to which paths are relative.
    """
    names = ("config_name", "tokenizer_name", "dataset_name")
    given = {"model_name_or_path": _base_model(settings)} | {name: settings[name] for name in names}
    return {name: value for name, value in given.items() if value and not Path(value).exists()}


def _base_model(settings: Record) -> str | None:
    """Return the pretrained model. None for a custom task with the default model, which the task may not use."""
    model: str | None = settings["model_name_or_path"]
    return None if settings["task"] != QUESTION_ANSWERING and model == DEFAULT_MODEL else model


def _without_folders(path: str) -> str:
    """Return the last component of a path. For NAME=PATH, NAME= stays in front of it."""
    return re.sub(r"^([^/=]+=)?.*/", r"\1", path.rstrip("/"))


def _data(settings: Record, hub: Mapping[str, str], split: str) -> dict[str, Any]:
    """Return the arguments of `EvalResult` that describe a run's data. `split`: "train" or "validation"."""
    given = settings[f"{split}_file"]
    files = map(_without_folders, [given] if isinstance(given, str) else given or ())
    data = dict.fromkeys(("dataset_name", "dataset_type"), ", ".join(files) or settings["task"])
    if settings["dataset_name"]:
        data = dict.fromkeys(data, hub.get("dataset_name") or _without_folders(settings["dataset_name"]))
        data["dataset_config"] = settings["dataset_config_name"]
        if settings["task"] == QUESTION_ANSWERING:  # a custom task chooses the split
            data["dataset_split"] = split
    return data


def write(folder: Path, settings: Record, results: Record, scores: Record) -> None:
    """Write the card, unless the folder already has a README.md. Raises OSError.

    `settings`: the training's settings by flag name. `results`: content of train_results.json. `scores`: the final
    evaluation's metrics; empty without an evaluation.
    """
    path = folder / NAME
    if os.path.lexists(path):
        log.info("%s exists and is not replaced: update its scores.", path)
    else:
        write_named(path, text(folder, settings, results, scores) + "\n")


def text(folder: Path, settings: Record, results: Record, scores: Record) -> str:
    """Return the card's content. See `write` for the parameters."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # slow to import

    hub, title = results["from_hub"], folder.resolve().name
    model = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "model_type" not in model:  # not a transformers model
        model = {}
    head = next((head for head in HEADS if str(model.get("architectures")).endswith(f"{head}']")), "")
    scores = {name: score for name, score in scores.items() if math.isfinite(score)}
    validation = _data(settings, hub, "validation")
    rules = other_rules(settings["answer_language"])
    eval_results = [
        EvalResult(
            task_type=HEADS.get(head, "other"),
            **validation,
            metric_type=name,
            metric_name=name.replace("_", " ").capitalize() + (f" (--answer_language {rules})" if rules else ""),
            metric_value=scores[name],
        )
        for name in results["scores"]
        if name in scores
    ]
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers" if model else None,
            base_model=hub.get("model_name_or_path"),
            datasets=hub.get("dataset_name"),
            pipeline_tag=HEADS.get(head),
            tags=["hvd_bert", HOROVOD] if STRATEGIES[results["strategy"]].world == HOROVOD else ["hvd_bert"],
            metrics=[result.metric_type for result in eval_results] or None,
            model_name=title,
            eval_results=eval_results or None,
        ),
        template_path=str(Path(__file__).with_name("card.md")),
        title=title,
        auto_class=f"AutoModel{head}" if model else None,
        local_model=_without_folders(_base_model(settings) or ""),
        task=settings["task"],
        results=results,
        scores=scores,
        rules=rules,
        part_of_data=settings["max_eval_samples"],
        train=_data(settings, hub, "train"),
        validation=validation,
    )
    return str(card)
