"""The model card: README.md in the output folder of a training, with metadata for the hub in its YAML header.

It states what the run's records hold, and nothing of this machine but its processor or GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib import resources
from numbers import Real
from pathlib import Path
from typing import Any

from hvd_bert.config.data import QUESTION_ANSWERING, TASKS
from hvd_bert.output.public import Data, changed, command, public_settings
from hvd_bert.storage import written
from hvd_bert.storage.reading import read_json, read_text
from hvd_bert.storage.writing import replacing

log = logging.getLogger("hvd_bert")
NAME = "README.md"
Record = Mapping[str, Any]

# How the classes of transformers' models end -> the hub's name of the task, and transformers' class that loads them.
HEADS = {
    "ForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
}
# Settings that other rows of the table show, or the text.
SHOWN = {
    "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "global_batch", "num_train_epochs", "max_steps", "strategy", "bf16", "fp16", "seed",
    "max_seq_length", "task", "model_name_or_path", "dataset_name", "train_file", "validation_file",
    "max_train_samples", "max_eval_samples", "metric_for_best_model",
}  # fmt: skip


def write(folder: Path, settings: Record, results: Record, scores: Record) -> None:
    """Write the card, unless the folder has a README.md that this program did not write or that was edited since.

    `settings`: of the training. `results`: what train_results.json holds. `scores`: the evaluation's metrics; empty
    without one. Raises OSError.
    """
    path = folder / NAME
    if os.path.lexists(path) and not is_ours(path):
        log.warning("%s was edited, or is not this program's, and is kept: update or delete it.", path)
        return
    written.add(folder, NAME)
    with replacing(path) as partial:
        partial.write_text(_signed(text(folder, settings, results, scores)), encoding="utf-8")


def _signed(content: str) -> str:
    """The card with a last line by which `is_ours` recognizes it."""
    return f"{content}\n\n<!-- Written by hvd_bert; an edited card is not replaced. SHA-256: {_digest(content)} -->\n"


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def is_ours(path: Path) -> bool:
    """Whether this program wrote the file, and nobody has changed it."""
    if path.name not in written.names(path.parent) or path.is_symlink() or not path.is_file():
        return False
    found = read_text(path, errors="replace")
    return found == _signed(found.rpartition("\n\n<!-- ")[0])


def text(folder: Path, settings: Record, results: Record, scores: Record) -> str:
    """The card's content. See `write`."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    hub = results["from_hub"]
    settings = public_settings(settings, hub)
    config_file = folder / "config.json"  # of a model of transformers
    found = read_json(config_file) if config_file.is_file() else {}
    model: Record = found if isinstance(found, dict) else {}
    tag, auto_class = _head(model)
    title = folder.resolve().name
    numbers = {name: float(scores[name]) for name in results["scores"] if _is_number(scores.get(name))}
    train, dev = Data.of(settings, "train"), Data.of(settings, "validation")
    card_data = ModelCardData(
        library_name="transformers" if auto_class else None,
        base_model=hub.get("model_name_or_path"),
        datasets=hub.get("dataset_name"),
        pipeline_tag=tag,
        tags=["hvd_bert", *([results["strategy"]] if results["strategy"] == "horovod" else [])],
        metrics=list(numbers) or None,
        model_name=title,
        eval_results=[
            EvalResult(
                task_type=tag or "other", dataset_type=dev.name, dataset_name=dev.name, dataset_config=dev.config,
                dataset_split=dev.split, metric_type=name, metric_value=value,
                metric_name=name.replace("_", " ").capitalize(),
            )
            for name, value in numbers.items()
        ] or None,
    )  # fmt: skip
    card = ModelCard.from_template(
        card_data,
        template_str=resources.files("hvd_bert.output").joinpath("card.md").read_text(encoding="utf-8"),
        title=title,
        name=json.dumps(title),
        summary=_summary(model, settings, hub),
        scores=_scores(scores, settings, dev),
        auto_class=auto_class,
        max_length=settings["max_seq_length"],
        # A BERT always gets them; other families, only if their tokenizer returns them by itself.
        token_types="return_token_type_ids=True, " if model.get("model_type") == "bert" else "",
        data=_data(settings, results, train),
        settings=_table([("Setting", "Value"), *_settings(settings, results)]),
        command=command(settings),
        ranks=results["world_size"],
        hardware=_table([("Record", "Value"), *_hardware(results)]),
        evaluated=bool(scores),
        without_answers=settings["version_2_with_negative"],
    )
    return str(card)


def _head(model: Record) -> tuple[str | None, str | None]:
    """The hub's name of the model's task, and the class that loads it; None: unknown, or not transformers'."""
    names = model.get("architectures") or [None]
    known = [HEADS[end] for end in HEADS if str(names[0]).endswith(end)]
    return known[0] if known else (None, "AutoModel" if model else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def code(value: object) -> str:
    """A value as Markdown's code, also in a table."""
    return "`" + " ".join(str(value).split()).replace("`", "'").replace("|", "\\|") + "`"


def _table(rows: Iterable[tuple[str, object]]) -> str:
    head, *others = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([head, "| --- | --- |", *others])


def _summary(model: Record, settings: Record, hub: Record) -> str:
    kind = f"A model of the family {code(model['model_type'])}" if "model_type" in model else "A model"
    does = f" of the task {code(settings['task'])}"
    if settings["task"] == QUESTION_ANSWERING:
        does = " for question answering: it marks the answer to a question in a passage"
    base = hub.get("model_name_or_path")
    origin = "trained from new weights"
    if base:
        origin = f"fine-tuned from [{base}](https://huggingface.co/{base})"
    elif settings["model_name_or_path"]:
        origin = f"fine-tuned from a local model named {code(settings['model_name_or_path'])}"
    return f"{kind}{does}. It was {origin} with hvd_bert."


def _named(data: Data) -> str:
    config = f", configuration {code(data.config)}" if data.config else ""
    return f"{code(data.name)}{config}{f', split {code(data.split)}' if data.split else ''}"


def _scores(scores: Record, settings: Record, data: Data) -> str:
    shown = [(code(name), f"{value:.4g}") for name, value in scores.items() if _is_number(value) and name != "total"]
    if not shown:
        return "The model was not evaluated."
    count = f": {scores['total']:,.0f} examples" if _is_number(scores.get("total")) else ""
    limit = ", the first of the data" if settings["max_eval_samples"] else ""
    percent = " Exact match and F1 are in percent." if settings["task"] == QUESTION_ANSWERING else ""
    return f"{_table([('Metric', 'Value'), *shown])}\n\nEvaluated on {_named(data)}{count}{limit}.{percent}"


def _data(settings: Record, results: Record, data: Data) -> str:
    made = f"{results['train_windows']:,} {results['unit']}"
    count, each = settings["max_train_samples"], " of each file" * isinstance(settings["train_file"], list)
    limit = f", made of the first {count:,} examples{each}" if count else ""
    return f"Trained on {_named(data)}: {made}{limit}."


def _settings(settings: Record, results: Record) -> list[tuple[str, object]]:
    unit, batch, devices = results["unit"], results["global_batch"], results["devices_per_rank"]
    steps, per_epoch = results["train_steps"], results["steps_per_epoch"]
    at_most = "at most " if settings["early_stopping_patience"] else ""
    return [
        ("Peak learning rate", f"{results['learning_rate']:g}"),
        ("Schedule", settings["lr_scheduler_type"]),
        ("Warm-up steps", f"{results['warmup_steps']:g}"),
        ("Batch", f"{batch} {unit} per step, at most {settings['per_device_train_batch_size']} per device at a time"),
        ("Epochs", f"{at_most}{steps / per_epoch:.3g} ({steps} steps)"),
        ("Ranks", f"{results['world_size']}, each with {devices} device{'s' if devices > 1 else ''}"),
        ("Strategy", results["strategy"]),
        ("Precision", results["precision"]),
        ("Seed", results["seed"]),
        *([("Maximum length", f"{settings['max_seq_length']} tokens")] if settings["task"] in TASKS else []),
        *((code(f"--{name}"), code(value)) for name, value in changed(settings).items() if name not in SHOWN),
    ]


def _hardware(results: Record) -> list[tuple[str, object]]:
    seconds = results["train_runtime"]
    time = f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
    speed = f"{results['train_samples_per_second']:.4g} {results['unit']}/s"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    return [
        ("Device of rank 0", code(results["device_name"])),
        ("Hosts", len(set(results["hosts"]))),
        ("Training time", f"{time}, without evaluations ({speed})"),
        ("Versions", versions),
    ]
