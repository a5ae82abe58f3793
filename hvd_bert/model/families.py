"""What families of encoders need, and the adapter that gives a model its family's inputs.

`FAMILIES` has a row for each family that is not run as transformers' default: padded, with positions from 0. To add a
family, add a row, and a size to tests/unit/test_families.py, whose tests then compare it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
)

from hvd_bert.config.settings import DataArguments
from hvd_bert.distributed.logs import log
from hvd_bert.errors import UserError
from hvd_bert.model.attention import Windows


@dataclass(frozen=True)
class Family:
    """A family of models with the same `model_type`.

    Attributes:
        packed: Its attention goes through transformers' AttentionInterface, it takes position_ids, and no other part
            mixes the tokens of a row. So windows can be packed; otherwise they are padded to the longest of the batch.
        positions_after_padding: Its positions start at pad_token_id + 1, as RoBERTa's.
        prepare: What else a model needs for packed windows.
        question_attends_globally: The question's tokens attend to all others, as Longformer's.
        unsupported: Flags that it fails with -> the reason.
        refused: Why it cannot be trained; empty if it can.
    """

    packed: bool = False
    positions_after_padding: bool = False
    prepare: Callable[[nn.Module], None] | None = None
    question_attends_globally: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""


def _separate_trigrams(model: nn.Module) -> None:
    from hvd_bert.model.mobilebert import separate_windows  # imports the family's code

    separate_windows(model)


_PACKED = Family(packed=True)
_LIKE_ROBERTA = Family(packed=True, positions_after_padding=True)
_PADDED_LIKE_ROBERTA = Family(positions_after_padding=True)
_BOXES = Family(refused="it needs the place of each word on a page")
_MIXES_PADDING = Family(refused="padding changes its results, so they would depend on the other windows of a batch")
_OVERFLOWS = "the mask of its attention overflows in half precision"
_PAST_FSDP = "it calls its layers in a way that FSDP does not see, so their shards are not gathered"
_UNKNOWN = "only families that have a question-answering head in transformers are supported, for any task"
_SLOW_TOKENIZER = Family(refused="it has no fast tokenizer, which reports the positions of tokens in the text")

FAMILIES: dict[str, Family] = {
    "albert": _PACKED,
    "bert": _PACKED,
    "big_bird": Family(refused="its attention draws random blocks, which differ between runs and ranks"),
    "camembert": _LIKE_ROBERTA,
    "canine": _SLOW_TOKENIZER,
    "convbert": _MIXES_PADDING,
    "data2vec-text": _LIKE_ROBERTA,
    "deberta": Family(unsupported={"--bf16": _OVERFLOWS, "--fp16": _OVERFLOWS}),
    "distilbert": _PACKED,
    "electra": _PACKED,
    "ernie": _PACKED,
    "flaubert": _SLOW_TOKENIZER,
    "fnet": _MIXES_PADDING,
    "funnel": _MIXES_PADDING,
    "ibert": _PADDED_LIKE_ROBERTA,
    "jina_embeddings_v3": _PACKED,
    "layoutlmv2": _BOXES,
    "layoutlmv3": _BOXES,
    "lilt": _BOXES,
    "longformer": Family(positions_after_padding=True, question_attends_globally=True),
    "luke": Family(refused="without entities, a part of its weights is not trained"),
    "lxmert": Family(refused="it needs images"),
    "markuplm": Family(refused="it needs the place of each word in a web page"),
    "mobilebert": Family(packed=True, prepare=_separate_trigrams),
    "modernbert": _PACKED,
    "mpnet": _PADDED_LIKE_ROBERTA,
    "mra": Family(refused="it needs a CUDA kernel of its own"),
    "nystromformer": _MIXES_PADDING,
    "reformer": Family(refused="it has a causal attention with random hashes"),
    "roberta": _LIKE_ROBERTA,
    "roberta-prelayernorm": _LIKE_ROBERTA,
    "roc_bert": Family(refused="it needs the shape and the pronunciation of each token"),
    "squeezebert": Family(unsupported={"--strategy fsdp": _PAST_FSDP}),
    "ultrabert": _PACKED,
    "xlm": _SLOW_TOKENIZER,
    "xlm-roberta": _LIKE_ROBERTA,
    "xlm-roberta-xl": _LIKE_ROBERTA,
    "xlnet": Family(refused="its tokenizer pads on the left and puts the context before the question"),
    "xmod": Family(refused="it needs the language of each window"),
    "yoso": _MIXES_PADDING,
}
_DEFAULT = Family()


def family_of(config: Any) -> Family:
    """The family of a model's configuration; `refused` is set if it cannot be trained."""
    name = config.model_type
    if name not in MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES:
        return Family(refused=_UNKNOWN)
    if config.is_encoder_decoder:
        return Family(refused="it has a decoder, and this trainer fine-tunes encoders")
    if name not in FAMILIES and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return Family(refused="it is a decoder, and this trainer fine-tunes encoders")
    return FAMILIES.get(name, _DEFAULT)


def model_class(config: Any) -> Any:
    """transformers' class of the encoder with a span head."""
    return MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]


def max_tokens(config: Any) -> int:
    """The number of positions of a model, which limits the length of a window."""
    offset = config.pad_token_id + 1 if family_of(config).positions_after_padding else 0
    return int(config.max_position_embeddings) - offset


def fit_flags(config: Any, precision: str, strategy: str, data: DataArguments, unit: str = "windows") -> None:
    """Raise UserError if the model's family fails with the precision or the strategy. Set --padding longest, and print
    so, unless its windows can be packed."""
    family = family_of(config)
    for flag, reason in family.unsupported.items():
        if flag in (f"--{precision}", f"--strategy {strategy}"):
            raise UserError(
                f"{flag} does not work with {config.model_type} models: {reason}. Omit the flag, or name another model."
            )
    if data.pad_to is None and not family.packed:
        data.padding = "longest"
        log.info("%s models take no packed %s: they are padded to the longest of the batch.", config.model_type, unit)


def adapt(model: nn.Module, token_types: bool, family: Family) -> None:
    """Let `model` take this trainer's batches, packed or padded, whatever the inputs of its `family`.

    `token_types`: whether the model gets token types. A model that takes BERT's inputs stays as it is.
    """
    model.takes_token_types = token_types  # type: ignore[assignment]
    if family == _PACKED and token_types:
        return
    if family.prepare:
        family.prepare(model)
    model.family = family  # type: ignore[assignment]
    kind = type(model)
    # A subclass, so that copies and wrappers of the model keep it. transformers saves the class's name.
    model.__class__ = type(kind.__name__, (_Adapted, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Adapted:
    """The forward pass of an adapted model: the batch's inputs -> its family's -> the output, packed if they were."""

    family: Family
    takes_token_types: bool
    config: Any

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        windows: Windows | None = None,
        **others: Any,
    ) -> Any:
        forward: Any = super().forward  # type: ignore[misc]
        if self.takes_token_types and token_type_ids is not None:
            others["token_type_ids"] = token_type_ids
        if self.family.question_attends_globally and token_type_ids is not None:
            # transformers takes what is before the first separator, and fails if a text contains another separator.
            question = (token_type_ids == 0) & (input_ids != self.config.sep_token_id)
            others["global_attention_mask"] = question.long()
        if windows and self.family.packed:
            assert position_ids is not None
            if self.family.positions_after_padding:
                position_ids = _positions_after_padding(input_ids, position_ids, self.config.pad_token_id)
            return forward(input_ids=input_ids, position_ids=position_ids, windows=windows, **others)
        if windows:
            others = {name: _padded(row, windows.lengths, 0) for name, row in others.items()}
            input_ids = _padded(input_ids, windows.lengths, 0)
            lengths = torch.tensor(windows.lengths, device=input_ids.device)
            attention_mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(~attention_mask, self.config.pad_token_id or 0)
            attention_mask = attention_mask.long()  # as tokenizers give it
        # Without position_ids, the family counts its positions itself.
        output = forward(input_ids=input_ids, attention_mask=attention_mask, **others)
        if windows:
            for name in ("start_logits", "end_logits"):
                rows = zip(output[name], windows.lengths, strict=True)
                output[name] = torch.cat([row[:length] for row, length in rows])[None]
        return output


def _padded(row: torch.Tensor, lengths: list[int], value: int) -> torch.Tensor:
    """Packed windows [1, N] as a row each, [B, T]."""
    return pad_sequence(row[0].split(lengths), batch_first=True, padding_value=value)


def _positions_after_padding(ids: torch.Tensor, positions: torch.Tensor, padding: int) -> torch.Tensor:
    """RoBERTa's positions of packed windows: from padding + 1 in each window, and padding at a padding token.

    `positions`: from 0 in each window.
    """
    is_token = (ids != padding).long()
    before = is_token.cumsum(1) - is_token
    starts = torch.arange(ids.shape[1], device=ids.device) - positions  # index of each token's window
    return (before - before.gather(1, starts) + 1) * is_token + padding
