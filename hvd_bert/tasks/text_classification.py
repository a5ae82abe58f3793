"""Classification of sentences and pairs of sentences, with run_glue's flags and data files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvd_bert.config.settings import Config
from hvd_bert.data import texts
from hvd_bert.data.batch_plan import Ids, Lengths
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.texts import Texts
from hvd_bert.data.windows import WindowTable
from hvd_bert.distributed.world import log
from hvd_bert.errors import UserError
from hvd_bert.evaluation.classification import scores
from hvd_bert.model.bert import compile_layers, load_tokenizer, takes_token_types
from hvd_bert.model.classifier import class_logits, load_classifier, packs
from hvd_bert.model.families import check_flags, pad_if_needed
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.loading import load_config
from hvd_bert.tasks.dataset import DatasetTask, Examples
from hvd_bert.training.inputs import digest_of, weight_copies

_TEXTS_AT_ONCE = 1000
Labelled = tuple[Batch, Tensor]  # packed or padded texts, and the class of each


class TextClassification(DatasetTask):
    """The classes are the labels of the training file or, without training, those of the model."""

    unit: ClassVar[str] = "texts"
    metrics: ClassVar[Mapping[str, Literal["max", "min"]]] = {
        "accuracy": "max",
        "f1": "max",
        "matthews_correlation": "max",
        "eval_loss": "min",
    }

    def load(self, config: Config) -> None:
        data, args, world = config.data, config.train, self.world
        if data.dataset_name:
            raise UserError("--dataset_name: --task text-classification reads files only. Give --train_file.")
        if args.do_train and not data.train_file:
            raise UserError(
                "--train_file is missing: --task text-classification trains on a JSON Lines, CSV or Parquet file."
            )
        train = texts.read(str(data.train_file), "--train_file") if args.do_train else None
        path, columns = data.validation_file, train.columns if train else None
        dev = texts.read(path, "--validation_file", columns) if path and args.do_eval else None
        self.tokenizer = load_tokenizer(config.model)
        shape: Any = load_config(config.model.configuration, config.model, weight_copies(config, world))
        check_flags(config, shape)
        pad_if_needed(data, shape, packs(shape), self.unit)
        self.model = load_classifier(
            config.model,
            shape,
            self.tokenizer,
            [str(label) for label in sorted(set(train.labels))] if train else None,
            data.max_seq_length,
            args.seed,
            data.pad_to is not None,
        )
        self.names: list[str] = [shape.id2label[i] for i in range(shape.num_labels)]
        if len(self.names) < 2:
            where = data.train_file if train else config.model.configuration
            raise UserError(f"{where}: all labels are {self.names[0]}. Classification needs two or more classes.")
        self.token_types = takes_token_types(shape, config.model.configuration, self.tokenizer)
        self._forward = forward_flops(self.model)
        self.crossover = self._forward.crossover
        self.train = self._examples(train.head(data.max_train_samples), config) if train else None
        self.dev, self.dev_labels = None, np.empty(0, np.int64)
        if dev:
            dev = dev.head(data.max_eval_samples)
            self.dev_labels = self._classes(dev)
            self.dev = self._examples(dev, config)
        if args.do_train and args.do_eval and dev is None:
            log.info("No --validation_file is given: the model is not evaluated.")

    def _classes(self, source: Texts) -> NDArray[np.int64]:
        """The class of each text. Raises UserError for an unknown label."""
        numbers = {name: number for number, name in enumerate(self.names)}
        unknown = next((row for row, label in enumerate(source.labels) if str(label) not in numbers), None)
        if unknown is not None:
            raise UserError(
                f"{source.name}: the label {source.labels[unknown]!r} of example {unknown + 1} is not one of"
                f" {', '.join(self.names)}. Fix the file, or train on a file with all labels."
            )
        return np.array([numbers[str(label)] for label in source.labels])

    def _examples(self, source: Texts, config: Config) -> Examples:
        labels = torch.from_numpy(self._classes(source))
        table = tokenized(source, self.tokenizer, config.data.max_seq_length)
        collate = Collator(table, self.world.device, config.data.pad_to)
        log.info("%s: %d texts, %d classes", source.name, len(source), len(self.names))

        def batch(ids: Ids) -> Labelled:
            return collate(ids), labels[torch.from_numpy(ids)]

        settings = f"{source.digest} {config.data.max_seq_length} {len(source)} {self.names}"
        return Examples(batch, table.lengths, hashlib.sha256(settings.encode()).hexdigest())

    def forward(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
        packed, labels = batch
        logits = class_logits(model, packed, self.token_types)
        return cross_entropy(logits, labels, reduction="none"), torch.softmax(logits, -1)

    def score(self, outputs: Tensor) -> dict[str, float]:
        return scores(outputs.argmax(-1).numpy(), self.dev_labels, len(self.names))

    def predictions(self, outputs: Tensor) -> dict[str, str]:
        """The label of each example, by its number from 0."""
        return {str(row): self.names[number] for row, number in enumerate(outputs.argmax(-1).tolist())}

    def positions(self, batch: Labelled, tokens: int) -> int:
        return batch[0].num_positions

    def identity(self) -> dict[str, object]:
        return {"the tokenizer": digest_of(self.tokenizer), **super().identity()}

    def flops(self, lengths: Lengths, passes: int) -> float:
        return self._forward.training(lengths, passes)

    def compile(self, model: nn.Module) -> None:
        compile_layers(model)


def tokenized(source: Texts, tokenizer: Any, max_seq_length: int) -> WindowTable:
    """The tokens of each text or pair, cut off as by run_glue, as a table that `Collator` takes.

    Raises UserError if `max_seq_length` leaves no room.
    """
    special = tokenizer.num_special_tokens_to_add(pair=source.second is not None)
    if max_seq_length <= special:
        raise UserError(f"--max_seq_length {max_seq_length}: {special} special tokens leave no room for a text.")
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
