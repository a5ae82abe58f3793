"""Encoders with a head and without a pooler: loaded from a folder or the hub, or created from a configuration.

BERT is the default; `families.py` lists the other families and adapts them to the same batches.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForQuestionAnswering

from hvd_bert import hub
from hvd_bert.config.data import ModelArguments
from hvd_bert.errors import UserError
from hvd_bert.model import attention, families
from hvd_bert.model.cpu import linear
from hvd_bert.model.loading import load_config, load_encoder
from hvd_bert.model.unlisted import check_unlisted

# Models may have more embeddings than tokens, since padded sizes are faster. If the surplus reaches both of these
# limits (tokens, share of the embeddings), the vocabulary is another model's.
VOCAB_PADDING, VOCAB_PADDING_SHARE = 128, 0.005


def load_model(
    args: ModelArguments,
    tokenizer: Any,
    max_seq_length: int,
    seed: int,
    padded: bool = False,
    needs_head: bool = False,
    config: Any = None,
    head: Any = AutoModelForQuestionAnswering,
) -> Any:
    """Load or create a model on the CPU, in fp32. New weights (the head, or all from scratch) depend only on `seed`.

    `padded`: true for padded batches, which use transformers' own attention; false for packed batches. `needs_head`:
    whether saved weights must include the head. `config`: the result of `load_config`, if already loaded; it is
    modified. `head`: see `families.class_with_head`.

    Raises UserError if the model is not supported, or if it does not fit the tokenizer or `max_seq_length`.
    """
    source = args.configuration
    config = config or load_config(source, args, head=head)
    kind = families.class_with_head(head, config, source)
    check_fit(config, args, tokenizer, max_seq_length)
    token_types = takes_token_types(config, tokenizer, kind)
    if head is AutoModelForQuestionAnswering:
        config.num_labels = 2  # start and end, even if the checkpoint has a classifier
    configure(config, kind, args.dropout, padded, args.attention_dropout)
    torch.default_generator.manual_seed(seed)  # the CPU's generator only; the caller seeds the GPUs
    model = load_encoder(kind, args, config, needs_head) if args.model_name_or_path else None
    with hub.reported(source):
        model = families.adapt(model or kind(config), token_types)
        if config.model_type in families.FAMILIES:
            families.try_once(model)
        else:
            check_unlisted(model, max_seq_length)
    return model


def new_model(
    config: Any, dropout: float | None, seed: int, padded: bool = False, attention_dropout: float | None = None
) -> Any:
    """Create a model with a span head from a configuration. Its weights depend only on `seed`. Modifies `config`."""
    config.num_labels = 2  # start and end
    kind = families.model_class(config)
    configure(config, kind, dropout, padded, attention_dropout)
    torch.default_generator.manual_seed(seed)  # the CPU's generator only; the caller seeds the GPUs
    model = families.adapt(kind(config), getattr(config, "type_vocab_size", 0) >= 2)
    if config.model_type not in families.FAMILIES:
        check_unlisted(model, 1)
    return model


def configure(
    config: Any, kind: Any, dropout: float | None, padded: bool, attention_dropout: float | None = None
) -> None:
    """Set a configuration's attention for class `kind`, and its dropout probabilities unless they are None.

    Also limits oneDNN's kernel caches for this process.
    """
    for name in _dropout_settings(config):
        given = (attention_dropout if name.startswith("attention") else None, dropout, getattr(config, name))
        setattr(config, name, next(value for value in given if value is not None))
    linear.keep_few_kernels()
    packed = families.find_family(config).packed and not padded
    config._attn_implementation = attention.NAME if packed else "sdpa" if kind._supports_sdpa else "eager"


def _dropout_settings(config: Any) -> list[str]:
    """Return the names of a configuration's dropout settings, such as hidden_dropout_prob or mlp_dropout."""
    return [
        name
        for name, value in config.to_dict().items()
        if name.endswith(("dropout", "dropout_prob", "dropout_rate", "pdrop")) and type(value) in (int, float)
    ]


def takes_token_types(config: Any, tokenizer: Any, kind: Any) -> bool:
    """Return whether batches for a model of class `kind` include token types.

    They do if the model has types 0 and 1, and the tokenizer assigns them to the two texts of a pair. The tokenizer
    need not list token types among its inputs (`model_input_names`): since transformers 5, the tokenizers of ALBERT,
    RemBERT and others do not, though these models were pretrained with both types. RoBERTa has type 0 only.
    """
    taken = "token_type_ids" in inspect.signature(kind.forward).parameters
    types, listed = getattr(config, "type_vocab_size", 0), "token_type_ids" in tokenizer.model_input_names
    assigned = any(tokenizer.backend_tokenizer.encode("a", "b").type_ids)
    return taken and assigned and (types >= 2 or (listed and types != 1))


def span_losses(start_logits: Tensor, end_logits: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Compute the loss per window, float32 [B]: the mean of the cross-entropies of start and end.

    `start_logits`, `end_logits`: float32 [B, T], -inf after a window's end. `starts`, `ends`: indices of the answers'
    first and last token, int64 [B].
    """
    first = cross_entropy(start_logits, starts, reduction="none")
    return (first + cross_entropy(end_logits, ends, reduction="none")) / 2


def check_fit(config: Any, args: ModelArguments, tokenizer: Any, max_seq_length: int) -> None:
    """Raise UserError if model and tokenizer have different vocabularies, or the model has too few positions."""
    embeddings = getattr(config, "vocab_size", 0)  # CANINE has no vocabulary
    surplus = embeddings - len(tokenizer)
    largest = max(tokenizer.get_vocab().values())  # may exceed the number of tokens, since ids may have gaps
    if not 0 <= surplus < max(VOCAB_PADDING, VOCAB_PADDING_SHARE * embeddings) or largest >= embeddings:
        remedy = "Give the model's own tokenizer (--tokenizer_name)."
        if not args.model_name_or_path:
            remedy = f"Give the configuration's own tokenizer, or set vocab_size to {len(tokenizer)} in it."
        elif tokenizer.vocab_size <= embeddings < len(tokenizer):
            remedy = "Tokens were added: call `model.resize_token_embeddings(len(tokenizer))`, and save both."
        raise UserError(
            f"Model and vocabulary differ: {args.configuration} has {embeddings} embeddings, but the tokenizer"
            f" {args.tokenizer} has {len(tokenizer)} tokens with ids up to {largest}. {remedy}"
        )
    positions = families.max_tokens(config)
    if max_seq_length > positions:
        raise UserError(
            f"--max_seq_length {max_seq_length}: {args.configuration} has only {positions} positions. Use at most that"
            " many."
        )
