"""BERT with a span head and without a pooler: loaded from a folder or the hub, or created from a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.models.bert.modeling_bert import BertForQuestionAnswering

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import Batch
from hvd_bert.errors import UserError
from hvd_bert.model import attention
from hvd_bert.model.cpu import linear
from hvd_bert.model.cpu.dropout import Dropout
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.loading import load, load_config, reported

# For speed, vocabularies are padded to a multiple of at most this; a larger surplus means another vocabulary.
VOCAB_PADDING = 128


def load_tokenizer(args: ModelArguments) -> Any:
    """The model's fast tokenizer. Raises UserError if there is none."""
    tokenizer = load(AutoTokenizer, args.tokenizer, args, use_fast=True)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers' result for a folder without a vocabulary
        raise UserError(f"'{args.tokenizer}' has no vocabulary. Name a tokenizer's folder (--tokenizer_name FOLDER).")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(
            f"'{args.tokenizer}': tokenizer_config.json: model_max_length must be a number, not"
            f" {tokenizer.model_max_length!r:.80}."
        )
    return tokenizer


def load_model(
    args: ModelArguments, tokenizer: Any, max_seq_length: int, seed: int, padded: bool = False, copies: int = 1
) -> BertForQuestionAnswering:
    """The model on the CPU, in fp32. New weights (the span head, or all from scratch) are a function of `seed`.

    `padded`: whether batches are padded, for transformers' own attention, or packed. `copies`: how many copies of the
    weights must fit into memory.
    Raises UserError if the checkpoint is not a BERT, or does not fit the tokenizer or `max_seq_length`.
    """
    source = args.config_name or str(args.model_name_or_path)
    config = load_config(source, args, copies)
    _check_fit(config, source, tokenizer, args.tokenizer, max_seq_length)
    if args.model_name_or_path is None:
        with reported(source):
            return new_model(config, args.dropout, seed, padded)
    _configure(config, args.dropout, padded)
    torch.manual_seed(seed)
    model, info = load(
        BertForQuestionAnswering,
        args.model_name_or_path,
        args,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below with a better message
    )
    lost = {name for name in info["missing_keys"] if not name.startswith("qa_outputs.")}
    lost |= {name for name, *_ in info["mismatched_keys"]}
    if lost:
        names = ", ".join(sorted(lost)[:3])
        raise UserError(
            f"{args.model_name_or_path} lacks weights that its configuration needs ({names}, ...). Name another model."
        )
    assert isinstance(model, BertForQuestionAnswering)
    return _with_own_layers(model)


def new_model(config: Any, dropout: float | None, seed: int, padded: bool = False) -> BertForQuestionAnswering:
    """A model with new weights, a function of `seed`, from a BERT's configuration, which is modified."""
    _configure(config, dropout, padded)
    torch.manual_seed(seed)
    return _with_own_layers(BertForQuestionAnswering(config))


def _configure(config: Any, dropout: float | None, padded: bool) -> None:
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    config.num_labels = 2  # start and end, whatever head the checkpoint has
    attention.register()
    linear.keep_no_kernels()
    config._attn_implementation = "sdpa" if padded else attention.NAME


def _with_own_layers(model: BertForQuestionAnswering) -> BertForQuestionAnswering:
    """The same model with torch's layers replaced by their subclasses that are faster on the CPU."""
    own: dict[type, type] = {nn.Dropout: Dropout, nn.Linear: Linear}
    for module in model.modules():
        module.__class__ = own.get(type(module), type(module))
    return model


def compile_layers(model: nn.Module) -> None:
    """Compile each layer except its attention, for any number of tokens; names in state_dict do not change."""
    for module in model.modules():  # back to torch's own layers, which the compiler supports
        module.__class__ = {Dropout: nn.Dropout, Linear: nn.Linear}.get(type(module), type(module))
    # All parts share one code object, whose cache has an entry per kind of part, for training and for evaluation.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    bert: Any = model.bert
    for layer in bert.encoder.layer:
        for part in (layer.attention.output, layer.intermediate, layer.output):
            part.compile(dynamic=True)


def window_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Loss per window of the batch, float32 [B]: the mean of the cross-entropies of start and end."""
    starts, ends = span_logits(model, batch)
    return span_losses(starts, ends, batch)


def span_losses(starts: torch.Tensor, ends: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The same, from the logits [B, T]."""
    return (
        cross_entropy(starts, batch.starts, reduction="none") + cross_entropy(ends, batch.ends, reduction="none")
    ) / 2


def span_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Start and end logits of the B windows, float32 [B, T]; T: tokens of the longest; -inf after a window's end."""
    tokens = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.token_type_ids,
        "position_ids": batch.position_ids,
    }
    if batch.attention_mask is not None:
        output = model(**tokens, attention_mask=batch.attention_mask)
        padding, longest = ~batch.attention_mask, max(batch.lengths)
        starts, ends = (
            logits.float().masked_fill(padding, float("-inf"))[:, :longest]
            for logits in (output.start_logits, output.end_logits)
        )
    else:
        output = model(**tokens, window_lengths=batch.lengths, cu_seqlens=batch.cu_seqlens)
        starts, ends = (
            pad_sequence(logits[0].float().split(batch.lengths), batch_first=True, padding_value=float("-inf"))
            for logits in (output.start_logits, output.end_logits)
        )
    return starts, ends


def _check_fit(config: Any, model_name: str, tokenizer: Any, tokenizer_name: str, max_seq_length: int) -> None:
    surplus = config.vocab_size - len(tokenizer)
    if not 0 <= surplus < VOCAB_PADDING:
        raise UserError(
            f"Model and vocabulary differ: {model_name} has {config.vocab_size} embeddings, but the tokenizer"
            f" {tokenizer_name} has {len(tokenizer)} tokens. Give the model's own tokenizer (--tokenizer_name)."
        )
    largest = max(tokenizer.get_vocab().values())  # not the length: ids may have gaps
    if largest >= config.vocab_size:
        raise UserError(
            f"The tokenizer {tokenizer_name} has the token id {largest}, but {model_name} has only {config.vocab_size}"
            " embeddings. Give the model's own tokenizer (--tokenizer_name)."
        )
    if max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"--max_seq_length {max_seq_length}: {model_name} has only {config.max_position_embeddings} positions."
        )
