"""An encoder with a span head and without a pooler: loaded from a folder or the hub, or created from a configuration.

BERT is the default. `families.py` lists the other families and adapts them to the same batches.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForQuestionAnswering

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.collate import Batch
from hvd_bert.data.window_cutting import Layout
from hvd_bert.errors import UserError
from hvd_bert.model import attention, families
from hvd_bert.model.cpu import linear
from hvd_bert.model.cpu.dropout import ADD_AND_NORM, AddAndNorm, Dropout
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.loading import (
    LFS_POINTER,
    lacks_model_type,
    lfs_pointers,
    load_config,
    load_encoder,
    load_tokenizer_files,
    reported,
)

# For speed, vocabularies are padded: by fewer tokens than this, or than this share if they are large. A larger surplus
# means another vocabulary.
VOCAB_PADDING, VOCAB_PADDING_SHARE = 128, 0.005


def load_tokenizer(args: ModelArguments) -> Any:
    """The model's fast tokenizer. Raises UserError if there is none."""
    extra: dict[str, Any] = {"use_fast": True}
    if args.config_name and lacks_model_type(args.tokenizer):  # the configuration tells which tokenizer it is
        extra["config"] = load_config(args.config_name, args)
    tokenizer = load_tokenizer_files(args, **extra)
    # transformers returns a tokenizer for a folder without a vocabulary, too.
    if len(tokenizer) <= len(tokenizer.all_special_tokens) or LFS_POINTER in tokenizer.get_vocab():
        found = lfs_pointers(args.tokenizer) or "Name a tokenizer's folder (--tokenizer_name FOLDER)"
        raise UserError(f"'{args.tokenizer}' has no vocabulary. {found}.")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(
            f"'{args.tokenizer}': tokenizer_config.json: model_max_length must be a number, not"
            f" {tokenizer.model_max_length!r:.80}."
        )
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary and rules."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]


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
    """The model on the CPU, in fp32. New weights (the head, or all from scratch) are a function of `seed`.

    `padded`: whether batches are padded, for transformers' own attention, or packed. `needs_head`: whether saved
    weights must include the head. `config`: the configuration, if `load_config` has loaded it before. `head`: see
    `families.class_with_head`.
    Raises UserError if the model's family is not supported, or it does not fit the tokenizer or `max_seq_length`.
    """
    source = args.configuration
    config = config or load_config(source, args)
    kind = families.class_with_head(head, config, source)
    check_fit(config, source, tokenizer, args.tokenizer, max_seq_length)
    token_types = takes_token_types(config, tokenizer)
    if head is AutoModelForQuestionAnswering:
        config.num_labels = 2  # start and end, whatever head the checkpoint has
    configure(config, args.dropout, padded, args.attention_dropout)
    torch.default_generator.manual_seed(seed)  # the GPUs' are the caller's
    model = load_encoder(kind, args, config, needs_head) if args.model_name_or_path else None
    with reported(source):
        return families.try_once(families.adapt(model or kind(config), token_types))


def new_model(
    config: Any,
    dropout: float | None,
    seed: int,
    padded: bool = False,
    attention_dropout: float | None = None,
) -> Any:
    """A model with new weights, a function of `seed`, from an encoder's configuration, which is modified."""
    config.num_labels = 2  # start and end
    configure(config, dropout, padded, attention_dropout)
    torch.default_generator.manual_seed(seed)  # the GPUs' are the caller's
    return families.adapt(families.model_class(config)(config), getattr(config, "type_vocab_size", 0) >= 2)


def configure(config: Any, dropout: float | None, padded: bool, attention_dropout: float | None = None) -> None:
    """Give a configuration its dropout probabilities, where None keeps its own, and its attention."""
    for name in _dropout_settings(config):
        given = (attention_dropout if name.startswith("attention") else None, dropout, getattr(config, name))
        setattr(config, name, next(value for value in given if value is not None))
    linear.keep_few_kernels()
    packed = families.family_of(config).packed
    own = "sdpa" if families.model_class(config)._supports_sdpa else "eager"
    config._attn_implementation = attention.NAME if packed and not padded else own


def _dropout_settings(config: Any) -> list[str]:
    """The dropout probabilities in a configuration: hidden_dropout_prob in BERT, mlp_dropout in ModernBERT, ..."""
    return [
        name
        for name, value in config.to_dict().items()
        if name.endswith(("dropout", "dropout_prob")) and isinstance(value, int | float)
    ]


def takes_token_types(config: Any, tokenizer: Any) -> bool:
    """Whether the model gets token types 0 and 1: if it has both, and its tokenizer lays out a pair of texts with them.

    A tokenizer that does so may still not list them among its inputs (`model_input_names`): since transformers 5 those
    of ALBERT, RemBERT and others do not, though these models were pretrained with both types. A RoBERTa with BERT's
    tokenizer has type 0 only.
    """
    taken = "token_type_ids" in inspect.signature(families.model_class(config).forward).parameters
    types, listed = getattr(config, "type_vocab_size", 0), "token_type_ids" in tokenizer.model_input_names
    return taken and Layout.of(tokenizer).token_types and (types >= 2 or (listed and types != 1))


def place(model: nn.Module, device: torch.device, compiled: bool = False) -> None:
    """Move a model to the device that it is trained or evaluated on, with the layers that are fastest there.

    `compiled`: torch.compile will compile it, which does not support this package's layers for CPUs. Models of other
    families keep their layers. Names and shapes in state_dict stay the same.
    """
    family = families.FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    if family and (device.type == "cuda" or compiled):
        join_products(model, family)
    elif family:
        with_own_layers(model)
    model.to(device=device)


def with_own_layers(module: Any) -> Any:
    """The same model, with layers that are faster on the CPU in place of torch's and transformers'."""
    for name, part in module.named_children():
        setattr(module, name, with_own_layers(part))
    kind = type(module)
    if kind.__module__.startswith("transformers.") and kind.__name__ in ADD_AND_NORM:
        return _as(AddAndNorm, module)
    own: dict[type, type[nn.Module]] = {nn.Dropout: Dropout, nn.Linear: Linear}
    return _as(own[kind], module) if kind in own else module


def _as(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """A module of another class with the weights, settings and hooks of this one."""
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    return made


def compile_layers(model: nn.Module) -> None:
    """Compile each layer of a model that `place` has prepared for it, for any number of tokens; names in state_dict do
    not change.

    Raises UserError if the layers are not built as BERT's.
    """
    network: Any = model
    try:
        layers = network.base_model.encoder.layer
        assert all(layer.attention.output and layer.intermediate and layer.output for layer in layers)
    except AttributeError:
        raise UserError(
            f"--torch_compile does not support {network.config.model_type} models. Remove the flag."
        ) from None
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # all layers share their code
    torch._dynamo.config.specialize_float = True  # dropout's probability, by which the attention is chosen
    for layer in layers:
        layer.compile(dynamic=True)


class JoinedAttention(nn.Module):
    """BERT's self-attention over packed windows; under autocast, query, key and value are one product of all weights.

    MLPerf's entries do so, too: a large product fills a GPU better, and the hidden states are cast once. In fp32,
    joining would only add a copy of the weights.
    """

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """`hidden_states`: [1, N, hidden size]. Returns the same shape, and no attention weights."""
        parts = (self.query, self.key, self.value)
        if torch.is_autocast_enabled(hidden_states.device.type):
            weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
            products = torch.nn.functional.linear(hidden_states, weight, bias).chunk(3, -1)
        else:
            products = tuple(part(hidden_states) for part in parts)
        query, key, value = (rows.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2) for rows in products)
        output, _ = attention.attend_within_windows(
            *(self, query, key, value, attention_mask, self.dropout.p, self.scaling), **kwargs
        )
        return output.flatten(2), None


def join_products(model: Any, family: families.Family) -> None:
    """Make the attentions of a model of torch's layers, over packed windows, JoinedAttention, except with adapters."""
    if family.attention_of_bert and model.config._attn_implementation == attention.NAME:
        for layer in model.base_model.encoder.layer:
            own = layer.attention.self
            if all(type(part) is nn.Linear for part in (own.query, own.key, own.value)):
                layer.attention.self = _as(JoinedAttention, own)


def window_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Loss per window of the batch, float32 [B]: the mean of the cross-entropies of start and end."""
    starts, ends = span_logits(model, batch)
    return span_losses(starts, ends, batch)


def span_losses(starts: torch.Tensor, ends: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Per-window loss from start and end logits [B, T]."""
    return (
        cross_entropy(starts, batch.starts, reduction="none") + cross_entropy(ends, batch.ends, reduction="none")
    ) / 2


def span_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Start and end logits of the B windows, float32 [B, T]; T: tokens of the longest; -inf after a window's end."""
    output = model(**model_inputs(batch))
    logits = output.start_logits.float(), output.end_logits.float()
    if batch.attention_mask is not None:
        padding, longest = ~batch.attention_mask, max(batch.lengths)
        starts, ends = (rows.masked_fill(padding, float("-inf"))[:, :longest] for rows in logits)
    else:
        starts, ends = (_window_rows(row.flatten(), batch) for row in logits)
    return starts, ends


def head_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The logits of a batch in float32: [B, classes], or of a head for tokens [B, T, classes].

    `model`: as wrapped by the strategy. T: tokens of the longest text.
    """
    logits: torch.Tensor = model(**model_inputs(batch)).logits.float()
    if logits.ndim == 2:
        return logits
    longest = max(batch.lengths)
    if batch.cells is None:
        return logits[:, :longest]
    rows = logits.new_zeros(len(batch.lengths) * longest, logits.shape[-1])
    return rows.index_copy(0, batch.cells, logits[0]).view(len(batch.lengths), longest, -1)


def _window_rows(row: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The values [N] of a packed batch's tokens as [B, T]. One operation: a kernel per window is slow on a GPU."""
    assert batch.cells is not None
    shape = len(batch.lengths), max(batch.lengths)
    return row.new_full((shape[0] * shape[1],), float("-inf")).scatter_(0, batch.cells, row).view(shape)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A batch as arguments of the model's forward pass, packed or padded."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.token_type_ids,
        "position_ids": batch.position_ids,
    }
    if batch.cu_seqlens is None:
        return inputs | {"attention_mask": batch.attention_mask}
    return inputs | {"windows": attention.Windows(batch.lengths, batch.cu_seqlens, max(batch.lengths))}


def check_fit(config: Any, model_name: str, tokenizer: Any, tokenizer_name: str, max_seq_length: int) -> None:
    surplus = config.vocab_size - len(tokenizer)
    if not 0 <= surplus < max(VOCAB_PADDING, VOCAB_PADDING_SHARE * config.vocab_size):
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
    positions = families.max_tokens(config)
    if max_seq_length > positions:
        raise UserError(
            f"--max_seq_length {max_seq_length}: {model_name} has only {positions} positions. Use at most that many."
        )
