"""What families of encoders need, and the adapter that gives a model its family's inputs.

`FAMILIES` has a row for each family that can be trained. To add one, add a row, and a size to
tests/unit/test_families.py, whose tests then compare it with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING

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
        attention_of_bert: Its layers have BERT's `attention.self`, so JoinedAttention can compute it.
        positions_after_padding: Its positions start at pad_token_id + 1, as RoBERTa's.
        question_attends_globally: The question's tokens attend to all others, as Longformer's.
        only_fp32: The mask of its attention overflows in half precision.
        since: The first version of transformers that has it, if it is later than the oldest that pyproject.toml takes.
    """

    packed: bool = False
    attention_of_bert: bool = False
    positions_after_padding: bool = False
    question_attends_globally: bool = False
    only_fp32: bool = False
    since: str = field(default="", compare=False)


_PACKED, _PADDED = Family(packed=True), Family()
_LIKE_BERT = Family(packed=True, attention_of_bert=True)
_LIKE_ROBERTA = Family(packed=True, attention_of_bert=True, positions_after_padding=True)

FAMILIES: dict[str, Family] = {
    "albert": _PACKED,
    "bert": _LIKE_BERT,
    "camembert": _LIKE_ROBERTA,
    "data2vec-text": _LIKE_ROBERTA,
    "deberta": Family(only_fp32=True),
    "deberta-v2": _PADDED,
    "distilbert": _PACKED,
    "electra": _LIKE_BERT,
    "ernie": _LIKE_BERT,
    "jina_embeddings_v3": _PACKED,
    "longformer": Family(positions_after_padding=True, question_attends_globally=True),
    "megatron-bert": _PADDED,
    "modernbert": _PACKED,
    "mpnet": Family(positions_after_padding=True),
    "rembert": _PADDED,
    "roberta": _LIKE_ROBERTA,
    "roberta-prelayernorm": _LIKE_ROBERTA,
    "roformer": _PADDED,
    "splinter": _PADDED,
    "ultrabert": Family(packed=True, since="5.20"),
    "xlm-roberta": _LIKE_ROBERTA,
    "xlm-roberta-xl": _LIKE_ROBERTA,
}


def lacking_family(reason: str) -> str | None:
    """The installed transformers refused a model for this `reason`. If a newer version has its family, says so."""
    for name, family in FAMILIES.items():
        if family.since and f"`{name}`" in reason:
            installed = metadata.version("transformers")
            return f"{name} models need transformers {family.since} or later, and {installed} is installed: upgrade it"
    return None


def family_of(config: Any) -> Family:
    """The family of a model's configuration, which `loading.load_config` has found in FAMILIES."""
    return FAMILIES[config.model_type]


def model_class(config: Any) -> Any:
    """transformers' class of the encoder with a span head."""
    return MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]


def max_tokens(config: Any) -> int:
    """The number of positions of a model, which limits the length of a window."""
    offset = config.pad_token_id + 1 if family_of(config).positions_after_padding else 0
    return int(config.max_position_embeddings) - offset


def fit_flags(config: Any, precision: str, data: DataArguments, unit: str = "windows") -> None:
    """Raise UserError if the model's family fails with the precision. Set --padding longest, and print so, unless its
    windows can be packed."""
    family = family_of(config)
    check_precision(config, precision)
    if data.pad_to is None and not family.packed:
        data.padding = "longest"
        log.info("%s models take no packed %s: they are padded to the longest of the batch.", config.model_type, unit)


def check_precision(config: Any, precision: str) -> None:
    """Raise UserError if the model's family fails with the precision."""
    if precision != "fp32" and family_of(config).only_fp32:
        raise UserError(
            f"--{precision} does not work with {config.model_type} models, whose attention overflows in it. Omit the"
            " flag, or name another model."
        )


def adapt(model: nn.Module, token_types: bool, family: Family) -> None:
    """Let `model` take this trainer's batches, packed or padded, whatever the inputs of its `family`.

    `token_types`: whether the model gets token types. A model that takes BERT's inputs stays as it is.
    """
    model.takes_token_types = token_types  # type: ignore[assignment]
    if family in (_PACKED, _LIKE_BERT) and token_types:
        return
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
