"""Base class of tasks that train an encoder with a transformers head, on packed or padded texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForQuestionAnswering

from hvd_bert.data.batch_plan import Ids
from hvd_bert.data.collate import BUCKET, Batch, Bucket, Collator
from hvd_bert.data.window_table import WindowTable
from hvd_bert.errors import UserError, as_user_error, log
from hvd_bert.evaluation.forward import head_logits
from hvd_bert.model.bert import load_model
from hvd_bert.model.families import FAMILIES, check_precision, choose_padding, max_tokens
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.layers import compile_layers
from hvd_bert.model.loading import load_config
from hvd_bert.tasks.base import weight_copies
from hvd_bert.tasks.dataset import DatasetTask, Examples
from hvd_bert.tasks.tokenizer import load_tokenizer, tokenizer_digest

SEEN = 200  # number of steps over which the padding for CUDA graphs is reported
IGNORED = -100  # label of tokens without a loss; cross_entropy's default ignore_index
Labelled = tuple[Batch, Tensor]  # a batch of texts, and a label per text or per token


class EncoderTask(DatasetTask):
    """A task that trains an encoder with a head.

    A subclass's `load` calls `load_model`, and makes `train` and `dev` with `encode` and `examples`. Its `forward`
    calls `logits`.
    """

    unit: ClassVar[str] = "texts"
    model: Any
    classes: Sequence[str] = ()  # one class for regression; empty for spans

    def load_model(self, head: Any, classes: Sequence[str] = ()) -> None:
        """Set `tokenizer`, `model`, `classes` and `padding` from the settings. Raises UserError.

        `head`: the transformers class, such as AutoModelForSequenceClassification. `classes`: class names for
        config.json; default: the model's. If the model has the same names, regardless of case, its order is used. When
        a trained model is evaluated, `classes` is ignored in favor of its saved names.
        """
        args, train = self.config.model, self.config.train
        if self.trained:
            args = replace(args, model_name_or_path=self.trained, config_name=None, tokenizer_name=None)
        if not train.do_train and args.model_name_or_path is None:
            raise UserError("--no_do_train: name a trained model with --model_name_or_path, not only --config_name.")
        self.tokenizer = load_tokenizer(args)
        copies = weight_copies(train.do_train and not args.lora_rank, self.config.parallel.strategy, self.world)
        shape = load_config(args.configuration, args, copies, head)
        check_precision(shape, train.precision)
        padding = choose_padding(shape, self.config.data.padding, self.unit)
        self.padding = padding if padding != self.config.data.padding else None
        data = replace(self.config.data, padding=padding)
        self.config = replace(self.config, data=data)
        if head is not AutoModelForQuestionAnswering:
            self.classes = _named_classes(shape, () if self.trained else classes)
        padded, evaluates = data.pad_to is not None, not train.do_train
        model = load_model(args, self.tokenizer, data.max_seq_length, train.seed, padded, evaluates, shape, head)
        self.use_model(model)

    def use_model(self, model: Any) -> None:
        self.model = model
        if model.config.model_type in FAMILIES:
            self.forward_flops = forward_flops(model)
            self.crossover = self.forward_flops.crossover

    def encode(self, *texts: Any, **options: Any) -> Any:
        """Tokenize texts, or pairs of texts, and truncate them to --max_seq_length. Returns a BatchEncoding."""
        length = self.config.data.max_seq_length
        special = self.tokenizer.num_special_tokens_to_add(pair=len(texts) > 1)
        if length <= special:
            raise UserError(f"--max_seq_length {length}: {special} special tokens leave no room for a text. Raise it.")
        task = self.config.data.task
        with as_user_error(lambda reason: f"--task {task}: `encode` needs texts, or lists of words ({reason})."):
            return self.tokenizer(*texts, truncation=True, max_length=length, return_token_type_ids=True, **options)

    def examples(self, encoded: Any, labels: Sequence[Any]) -> Examples:
        """Make examples from the result of `encode`. `labels`: per text, a number or a list of one number per token."""
        ids, types = encoded["input_ids"], encoded["token_type_ids"]
        starts = [row.index(1) if 1 in row else len(row) for row in types]
        none = np.zeros(len(ids), dtype=np.int32)
        columns = {"input_ids": ids, "context_start": starts, "start_position": none, "end_position": none}
        table = WindowTable.from_columns(columns)
        collate = self.collator(table)

        def batch(numbers: Ids) -> Labelled:
            rows = [torch.tensor(labels[i]) for i in numbers.tolist()]
            return collate(numbers), pad_sequence(rows, True, IGNORED) if rows[0].ndim else torch.stack(rows)

        digest = hashlib.sha256(repr((ids, starts, list(labels))).encode()).hexdigest()
        return Examples(batch, table.lengths, digest)

    def collator(self, table: WindowTable) -> Collator:
        """Make a collator for a window table according to the settings."""
        data, train = self.config.data, self.config.train
        longest = min(data.max_seq_length, max_tokens(self.model.config))
        bucket = Bucket(train.per_device_train_batch_size, longest) if train.captures_graphs else None
        return Collator(table, self.world.device, data.pad_to, bucket)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute float32 logits [texts, classes] or, for a token head, [texts, tokens of longest text, classes]."""
        return head_logits(model, batch)

    def positions(self, batch: Labelled, tokens: int) -> int:
        return batch[0].num_positions

    def fingerprint(self) -> dict[str, object]:
        return {"the tokenizer": tokenizer_digest(self.tokenizer), **super().fingerprint()}

    def identity(self) -> dict[str, object]:
        return {"the tokenizer": tokenizer_digest(self.tokenizer), **super().identity()}

    def compile(self, model: nn.Module, mode: str | None) -> None:
        compile_layers(model, mode)
        plan, packed = self.plan, self.config.data.pad_to is None
        if plan and packed and self.config.train.captures_graphs:
            seen = (plan.rank_windows(step, self.world.rank) for step in range(min(SEEN, plan.steps_per_epoch)))
            tokens = np.array([plan.lengths[ids].sum() for micro_batches in seen for ids in micro_batches])
            padded = -(-tokens // BUCKET) * BUCKET
            log.info(
                "Batches are padded to a multiple of %d tokens: %.1f%% more tokens, %d size(s) in %d batches.",
                BUCKET,
                100 * (padded.sum() / tokens.sum() - 1),
                len(np.unique(padded)),
                len(padded),
            )


def _named_classes(config: Any, classes: Sequence[str]) -> list[str]:
    """Set and return the configuration's class names, as `EncoderTask.load_model` describes."""
    before = [str(config.id2label[i]) for i in range(config.num_labels)]
    order = [name.lower() for name in before]
    if not classes:
        classes = before
    elif sorted(map(str.lower, classes)) == sorted(order):  # the model's order, as in run_glue
        classes = sorted(classes, key=lambda name: order.index(name.lower()))
    config.num_labels = len(classes)
    config.problem_type = "regression" if len(classes) == 1 else None
    config.id2label, config.label2id = dict(enumerate(classes)), {name: i for i, name in enumerate(classes)}
    return list(classes)
