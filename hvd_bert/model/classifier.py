"""An encoder with a classification head: transformers' model, which also takes packed texts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import Batch
from hvd_bert.errors import UserError
from hvd_bert.model import families
from hvd_bert.model.bert import check_fit, configure, model_inputs, takes_token_types, with_own_layers
from hvd_bert.model.flops import try_once
from hvd_bert.model.loading import load_encoder, reported


def load_classifier(
    args: ModelArguments,
    config: Any,
    tokenizer: Any,
    labels: list[str] | None,
    max_seq_length: int,
    seed: int,
    padded: bool,
) -> Any:
    """The model of `config` on the CPU, in fp32. New weights (the head, or all) are a function of `seed`.

    `labels`: names of the classes, in the model's own order if it has the same; a single one for a regression; None:
    those of the model, whose head must be trained. `padded`: see `load_model`.
    """
    source = args.configuration
    if type(config) not in CLASSES:
        raise UserError(
            f"{source} is a {config.model_type} model: transformers has no classification head for it. Name another"
            " encoder."
        )
    check_fit(config, source, tokenizer, args.tokenizer, max_seq_length)
    token_types = takes_token_types(config, source, tokenizer)
    own = [str(config.id2label[i]) for i in range(config.num_labels)]
    # The rows of a saved head have the model's own order. As in run_glue, upper and lower case are the same.
    names = own if labels is None or sorted(map(str.lower, labels)) == sorted(map(str.lower, own)) else labels
    config.num_labels = len(names)
    config.problem_type = "regression" if len(names) == 1 else None
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    if args.model_name_or_path is None:
        if labels is None:
            raise UserError("--no_do_train: name a trained model with --model_name_or_path, not only --config_name.")
        with reported(source):
            return new_classifier(config, args.dropout, seed, padded, token_types, args.attention_dropout)
    configure(config, args.dropout, padded, args.attention_dropout)
    torch.default_generator.manual_seed(seed)  # the GPUs' are the caller's
    model, new = load_encoder(CLASSES[type(config)], args, config, other_head=True)
    if labels is None and new:
        raise UserError(
            f"--no_do_train: {args.model_name_or_path} has no trained classification head ({', '.join(new[:3])}"
            " would be random). Name a model that was trained with --task text-classification."
        )
    with reported(source):
        return _prepared(model, token_types)


def new_classifier(
    config: Any,
    dropout: float | None,
    seed: int,
    padded: bool,
    token_types: bool,
    attention_dropout: float | None = None,
) -> Any:
    """A model with new weights, a function of `seed`, for the classes in `config`, which is modified."""
    kind: Any = CLASSES[type(config)]
    configure(config, dropout, padded, attention_dropout)
    torch.default_generator.manual_seed(seed)  # the GPUs' are the caller's
    return _prepared(kind(config), token_types)


def _prepared(model: Any, token_types: bool) -> Any:
    """The same model with its family's inputs, packed texts, and this package's layers, after a first pass."""
    # Longformer's classifier lets only the first token attend globally, and does so itself.
    family = replace(families.family_of(model.config), question_attends_globally=False)
    families.adapt(model, token_types, family)
    encoder = model.base_model
    last = getattr(encoder, "encoder", encoder)  # the layers, which come before a pooler
    mean = getattr(model.config, "classifier_pooling", "cls") == "mean"  # ModernBERT's
    last.register_forward_hook(partial(_one_token_per_text, mean=mean), with_kwargs=True)
    try_once(model)
    return with_own_layers(model)


def _one_token_per_text(_: nn.Module, __: Any, inputs: dict[str, Any], output: Any, mean: bool) -> Any:
    """Turn packed texts into rows of one token, which is all that a head takes: the first one, or the mean."""
    windows = inputs.get("windows")
    if windows:
        texts = output.last_hidden_state[0].split(windows.lengths)
        output.last_hidden_state = torch.stack([text.mean(0) if mean else text[0] for text in texts])[:, None]
    return output


def class_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of the classes for each text of a batch, float32 [B, classes]. `model`: as wrapped by the strategy."""
    logits: Tensor = model(**model_inputs(batch)).logits
    return logits.float()
