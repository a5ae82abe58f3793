"""The model card: README.md of a training, from its records, without paths and hosts of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_bert.config.strategies import HOROVOD, STRATEGIES
from hvd_bert.errors import log
from hvd_bert.output.public import Data, command, public_settings
from hvd_bert.storage.reading import read_json
from hvd_bert.storage.writing import write_named

NAME = "README.md"
Record = Mapping[str, Any]

# How the classes of transformers' models end -> the hub's name of their task.
HEADS = {
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}


def write(folder: Path, settings: Record, results: Record, scores: Record) -> None:
    """Write the card, unless the folder has a README.md. Raises OSError.

    `settings`: of the training. `results`: content of train_results.json. `scores`: the evaluation's metrics, if any.
    """
    path = folder / NAME
    if os.path.lexists(path):
        log.info("%s exists and is kept: update its scores and settings.", path)
    else:
        write_named(path, text(folder, settings, results, scores) + "\n")


def text(folder: Path, settings: Record, results: Record, scores: Record) -> str:
    """The card's content. See `write`."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # slow to import

    hub, title = results["from_hub"], folder.resolve().name
    settings = public_settings(settings, hub)
    model = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "model_type" not in model:  # not a transformers model
        model = {}
    head = next((head for head in HEADS if str(model.get("architectures")).endswith(f"{head}']")), "")
    scores = {name: score for name, score in scores.items() if math.isfinite(score)}
    validation_set = Data.of(settings, "validation")
    eval_results = [
        EvalResult(
            task_type=HEADS.get(head, "other"),
            dataset_type=validation_set.name,
            dataset_name=validation_set.name,
            dataset_config=validation_set.config,
            dataset_split=validation_set.split,
            metric_type=name,
            metric_name=name.replace("_", " ").capitalize(),
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
        model_type=model.get("model_type"),
        auto_class=f"AutoModel{head}" if model else None,
        settings=settings,
        results=results,
        scores=scores,
        train=Data.of(settings, "train"),
        validation=validation_set,
        command=command(settings),
    )
    return str(card)
