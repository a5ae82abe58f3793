"""An encoder with a head of transformers for texts or for tokens, which also takes packed texts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import Batch
from hvd_bert.errors import UserError
from hvd_bert.model import families
from hvd_bert.model.bert import check_fit, configure, model_inputs, takes_token_types
from hvd_bert.model.flops import try_once
from hvd_bert.model.loading import load_encoder, reported


def load_with_head(
    head: Any,
    args: ModelArguments,
    config: Any,
    tokenizer: Any,
    max_seq_length: int,
    seed: int,
    padded: bool,
    needs_head: bool,
) -> Any:
    """The model of `config` on the CPU, in fp32. New weights are a function of `seed`. Raises UserError.

    `head`: AutoModelForSequenceClassification or AutoModelForTokenClassification. `padded`, `needs_head`: see
    `load_model`.
    """
    source = args.configuration
    if type(config) not in head._model_mapping:
        raise UserError(
            f"{source} is a {config.model_type} model: transformers has no {head.__name__} for it. Name another"
            " encoder."
        )
    check_fit(config, source, tokenizer, args.tokenizer, max_seq_length)
    kind, token_types = head._model_mapping[type(config)], takes_token_types(config, tokenizer)
    configure(config, args.dropout, padded, args.attention_dropout)
    torch.default_generator.manual_seed(seed)  # the GPUs' are the caller's
    model = load_encoder(kind, args, config, needs_head) if args.model_name_or_path else None
    with reported(source):
        return try_once(with_inputs(model or kind(config), token_types))


def with_inputs(model: Any, token_types: bool) -> Any:
    """The same model with its family's inputs, and packed texts."""
    # Longformer's heads choose the tokens that attend globally themselves.
    family = replace(families.family_of(model.config), question_attends_globally=False)
    families.adapt(model, token_types, family)
    if type(model).__name__.endswith("ForSequenceClassification"):
        encoder = model.base_model
        last = getattr(encoder, "encoder", encoder)  # the layers, which come before a pooler
        mean = getattr(model.config, "classifier_pooling", "cls") == "mean"  # ModernBERT's
        last.register_forward_hook(partial(_one_token_per_text, mean=mean), with_kwargs=True)
    return model


def _one_token_per_text(_: nn.Module, __: Any, inputs: dict[str, Any], output: Any, mean: bool) -> Any:
    """Turn packed texts into rows of one token, which is all that a head takes: the first one, or the mean."""
    windows = inputs.get("windows")
    if windows:
        texts = output.last_hidden_state[0].split(windows.lengths)
        output.last_hidden_state = torch.stack([text.mean(0) if mean else text[0] for text in texts])[:, None]
    return output


def head_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of a batch in float32: [B, classes], or of a head for tokens [B, T, classes].

    `model`: as wrapped by the strategy. T: tokens of the longest text.
    """
    logits: Tensor = model(**model_inputs(batch)).logits.float()
    if logits.ndim == 2:
        return logits
    longest = max(batch.lengths)
    if batch.cells is None:
        return logits[:, :longest]
    rows = logits.new_zeros(len(batch.lengths) * longest, logits.shape[-1])
    return rows.index_copy(0, batch.cells, logits[0]).view(len(batch.lengths), longest, -1)
