"""Classification of sentences and pairs of sentences, and regression, with run_glue's flags and data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hvd_bert.config.data import GLUE, GLUE_DATASET, GLUE_ENDINGS
from hvd_bert.config.settings import Config, DataArguments
from hvd_bert.data.batch_plan import Ids, mixture
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.sources import hub, texts
from hvd_bert.data.sources.texts import Columns, Texts, number_of
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import log
from hvd_bert.errors import UserError
from hvd_bert.evaluation.classification import classification_scores, regression_scores
from hvd_bert.model.bert import compile_layers, load_tokenizer, tokenizer_digest
from hvd_bert.model.classifier import class_logits, load_classifier
from hvd_bert.model.flops import forward_flops
from hvd_bert.tasks.base import encoder_config, members, metric_of
from hvd_bert.tasks.dataset import DatasetTask, Examples

_TEXTS_AT_ONCE = 1000
Labelled = tuple[Batch, Tensor]  # packed or padded texts, and the class or number of each


def metrics_of(is_regression: bool, task_name: str | None, sets: Iterable[str]) -> dict[str, Literal["max", "min"]]:
    """The metrics of validation sets, those of the task of GLUE first. As in run_glue, several have a mean."""
    glue = GLUE[task_name].metrics if task_name else ()
    all_names = ("pearson", "spearmanr", "mse") if is_regression else ("accuracy", "f1", "matthews_correlation")
    names = dict.fromkeys([*(["combined_score"] if len(glue) > 1 else []), *glue, *all_names, "eval_loss"])
    endings = GLUE[task_name].validation.values() if task_name else [""]
    return {
        metric_of(name, data): "min" if name in ("mse", "eval_loss") else "max"
        for data in dict.fromkeys([*endings, *sets])
        for name in names
        if name != "eval_loss" or data in GLUE_ENDINGS  # files have one loss together
    }


class TextClassification(DatasetTask):
    """The classes are the data set's, or the labels of the training file. Without training they are the model's."""

    unit: ClassVar[str] = "texts"
    metrics = metrics_of(False, None, ())
    limits: ClassVar[bool] = True

    def load(self, config: Config) -> None:
        data, args, world = config.data, config.train, self.world
        train, dev = open_texts(data, config.model.cache_dir, args.do_train, args.do_eval)
        self.tokenizer = load_tokenizer(config.model)
        shape = encoder_config(config.model, data, args, config.parallel.strategy, world, self.unit)
        self.model = load_classifier(
            config.model,
            shape,
            self.tokenizer,
            _class_names(joined(train)) if train else None,
            data.max_seq_length,
            args.seed,
            data.pad_to is not None,
        )
        self.names: list[str] = [shape.id2label[i] for i in range(shape.num_labels)]
        known = next((source.classes for source in dev.values()), None)
        unnamed = [f"LABEL_{number}" for number in range(len(self.names))]  # transformers' names of unnamed classes
        self.unnamed = self.names == unnamed
        if known and self.unnamed and len(known) == len(unnamed):
            self.names = known
        self.regression = shape.problem_type == "regression"
        if data.do_regression and not self.regression:
            raise UserError(
                f"--do_regression: {config.model.configuration} gives classes, not a number. Remove the flag."
            )
        self.metrics = metrics_of(self.regression, data.task_name, dev)
        self.forward_flops = forward_flops(self.model)
        self.crossover = self.forward_flops.crossover
        self.train = None
        if train:
            train = [source.head(data.max_train_samples) for source in train]
            weights = [file.weight for file in data.files("train_file")] or [1.0]
            self.train = replace(self._examples(joined(train), data), parts=mixture([*map(len, train)], weights))
        parts = {ending: source.head(data.max_eval_samples) for ending, source in dev.items()}
        self.dev_sizes = {ending: len(source) for ending, source in parts.items()}
        self.dev, self.dev_labels = None, np.empty(0)
        if parts:
            source = joined(list(parts.values()))
            self.dev_labels = self._targets(source)
            self.dev = self._examples(source, data)

    def _targets(self, source: Texts) -> NDArray[Any]:
        """The number to predict, or the class, of each text. Raises UserError for an unknown label."""
        if self.regression:
            for place, label in zip(source.places, source.labels, strict=True):
                if number_of(label) is None:
                    raise UserError(f"{source.name}: {place}: the label {label!r} is not a number. Fix the file.")
            return np.array([float(label) for label in source.labels], dtype=np.float32)
        numbers = {name.lower(): number for number, name in enumerate(self.names)}
        numbers |= {name: number for number, name in enumerate(self.names)}
        if self.unnamed:
            numbers |= {str(number): number for number in range(len(self.names))}
        found = [numbers.get(str(label), numbers.get(str(label).lower())) for label in source.labels]
        if None in found:
            row = found.index(None)
            raise UserError(
                f"{source.name}: {source.places[row]}: the label {source.labels[row]!r} is not one of"
                f" {', '.join(self.names)}. Fix the file, or train on a file with all labels."
            )
        return np.array(found)

    def _examples(self, source: Texts, data: DataArguments) -> Examples:
        targets = torch.from_numpy(self._targets(source))
        table = tokenized(source, self.tokenizer, data.max_seq_length)
        collate = Collator(table, self.world.device, data.pad_to)
        kind = "regression" if self.regression else f"{len(self.names)} classes"
        log.info("%s: %d texts, %s", source.name, len(source), kind)

        def batch(ids: Ids) -> Labelled:
            return collate(ids), targets[torch.from_numpy(ids)]

        settings = f"{source.digest} {data.max_seq_length} {len(source)} {self.names}"
        return Examples(batch, table.lengths, hashlib.sha256(settings.encode()).hexdigest())

    def forward(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
        packed, targets = batch
        logits = class_logits(model, packed)
        if self.regression:
            values = logits[:, 0]
            return mse_loss(values, targets, reduction="none"), values
        return cross_entropy(logits, targets, reduction="none"), torch.softmax(logits, -1)

    def _of_each_set(self, values: Tensor) -> dict[str, Tensor]:
        """The values for the examples of each validation set."""
        return {name: values[part.start : part.stop] for name, part in members(self.dev_sizes).items()}

    def score(self, outputs: Tensor) -> dict[str, float]:
        labels = self._of_each_set(torch.from_numpy(self.dev_labels))
        found: dict[str, float] = {}
        for data, part in self._of_each_set(outputs).items():
            if self.regression:
                scores = regression_scores(part.double().numpy(), labels[data].double().numpy())
            else:
                scores = classification_scores(part.argmax(-1).numpy(), labels[data].numpy(), len(self.names))
            if "combined_score" in self.metrics:
                scores["combined_score"] = fmean(scores[name] for name in GLUE[str(self.config.data.task_name)].metrics)
            found |= {metric_of(name, data): value for name, value in scores.items()}
        return found

    def mean_losses(self, losses: Tensor) -> dict[str, float]:
        of_sets = {name: part for name, part in self._of_each_set(losses).items() if name in GLUE_ENDINGS}
        return {f"eval_loss{ending}": float(part.mean(dtype=torch.float64)) for ending, part in of_sets.items()}

    def predictions(self, outputs: Tensor) -> dict[str, Any]:
        """The label of each example, by its number from 0."""
        found = outputs.tolist() if self.regression else [self.names[number] for number in outputs.argmax(-1).tolist()]
        keys = [metric_of(str(row), name) for name, size in self.dev_sizes.items() for row in range(size)]
        return dict(zip(keys, found, strict=True))

    def positions(self, batch: Labelled, tokens: int) -> int:
        return batch[0].num_positions

    def identity(self) -> dict[str, object]:
        return {"the tokenizer": tokenizer_digest(self.tokenizer), **super().identity()}

    def compile(self, model: nn.Module) -> None:
        compile_layers(model)


def _class_names(train: Texts) -> list[str]:
    """The names of the classes; for a regression, transformers' name of the only output. Raises UserError."""
    if train.is_regression:
        return ["LABEL_0"]
    names = train.classes or [str(label) for label in sorted(set(train.labels))]
    if len(names) < 2:
        raise UserError(f"{train.name}: all labels are {names[0]}. Classification needs two or more classes.")
    return names


def tokenized(source: Texts, tokenizer: Any, max_seq_length: int) -> WindowTable:
    """The tokens of each text or pair, cut off as by run_glue, as a table that `Collator` takes.

    Raises UserError if `max_seq_length` leaves no room.
    """
    special = tokenizer.num_special_tokens_to_add(pair=source.second is not None)
    if max_seq_length <= special:
        raise UserError(
            f"--max_seq_length {max_seq_length}: {special} special tokens leave no room for a text. Raise it."
        )
    ids: list[list[int]] = []
    second_starts: list[int] = []
    for first in range(0, len(source), _TEXTS_AT_ONCE):
        part = slice(first, first + _TEXTS_AT_ONCE)
        pair = None if source.second is None else source.second[part]
        limit = {"truncation": True, "max_length": max_seq_length}
        encoded = tokenizer(source.first[part], pair, return_token_type_ids=True, **limit)
        ids += encoded["input_ids"]
        second_starts += [types.index(1) if 1 in types else len(types) for types in encoded["token_type_ids"]]
    zeros = np.zeros(len(ids), dtype=np.int32)
    columns = {"input_ids": ids, "context_start": second_starts, "start_position": zeros, "end_position": zeros}
    return WindowTable.from_columns({name: pa.array(values) for name, values in columns.items()})


_WAYS_OUT = (
    "Give local files with --train_file and --validation_file, or name another split with --train_split_name or"
    " --validation_split_name."
)


def open_texts(
    data: DataArguments, cache_dir: str | None, do_train: bool, do_eval: bool
) -> tuple[list[Texts], dict[str, Texts]]:
    """The training texts of each file, and validation sets by name (`metric_of`). Raises UserError."""
    glue = GLUE.get(data.task_name or "")
    named = tuple(data.text_column_names.split(",")) if data.text_column_names else ()
    columns = Columns(glue.texts if glue else named, data.label_column_name, data.do_regression)
    train = _open(data, data.train_split_name, "train_file", cache_dir, columns) if do_train else []
    if train:
        columns = replace(train[0].columns, numbers=joined(train).is_regression)
    elif do_train:
        raise UserError(
            "--task text-classification needs --task_name, --dataset_name or --train_file to train on. Give one."
        )
    validation = glue.validation if glue else {data.validation_split_name: ""}
    dev: dict[str, Texts] = {}
    for split, ending in validation.items() if do_eval else ():
        sources = _open(data, split, "validation_file", cache_dir, columns)
        names = [file.name for file in data.files("validation_file")] or [ending] * len(sources)
        dev |= zip(names, sources, strict=True)
    if do_train and do_eval and not dev:
        log.info("No --validation_file is given: the model is not evaluated.")
    return train, dev


def _open(data: DataArguments, split: str, file_flag: str, cache_dir: str | None, columns: Columns) -> list[Texts]:
    """A split of the hub's data set, or the files of a flag, which have the columns of the first."""
    dataset, config_name = (
        (GLUE_DATASET, data.task_name) if data.task_name else (data.dataset_name, data.dataset_config_name)
    )
    if dataset:
        flag = f"--task_name {data.task_name}" if data.task_name else ""
        rows = hub.load(dataset, split, config_name, cache_dir, _WAYS_OUT, flag)
        return [texts.open_hub(rows, f"{'/'.join(filter(None, (dataset, config_name)))}[{split}]", columns)]
    found: list[Texts] = []
    for file in data.files(file_flag):
        found.append(texts.open_file(file.path, f"--{file_flag}", columns))
        columns = replace(columns, texts=found[0].columns.texts)
    return found


def joined(sources: list[Texts]) -> Texts:
    """The texts of all sources, as one."""
    first, *others = sources
    for other in others:
        if isinstance(first.labels[0], str) != isinstance(other.labels[0], str):
            raise UserError(f"{first.name} and {other.name}: one has numbers as labels, the other texts. Fix one.")
        second = None if first.second is None or other.second is None else first.second + other.second
        first = replace(
            first,
            name=f"{first.name} and {other.name}",
            digest=first.digest + other.digest,
            columns=replace(first.columns, numbers=first.is_regression or other.is_regression),
            first=first.first + other.first,
            second=second,
            labels=first.labels + other.labels,
            places=first.places + other.places,
        )
    return first
