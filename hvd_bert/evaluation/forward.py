"""Runs the forward pass on a batch: model inputs, logits, and the loss per window."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvd_bert.data.collate import Batch
from hvd_bert.model.attention import Windows
from hvd_bert.model.bert import span_losses


def window_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute the loss per window, float32 [B]: the mean of the cross-entropies of start and end."""
    starts, ends = span_logits(model, batch)
    return span_losses(starts, ends, batch.starts, batch.ends)


def span_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute start and end logits, float32 [B, T], -inf after a window's end. T: tokens of the longest window."""
    output = model(**model_inputs(batch))
    logits = output.start_logits.float(), output.end_logits.float()
    if batch.attention_mask is not None:
        padding, longest = ~batch.attention_mask, batch.longest
        starts, ends = (rows.masked_fill(padding, float("-inf"))[:, :longest] for rows in logits)
    else:
        starts, ends = (_window_rows(row.flatten(), batch) for row in logits)
    return starts, ends


def head_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Compute float32 logits: [B, classes] for a text head, [B, T, classes] for a token head.

    `model`: the model as wrapped by the strategy. T: tokens of the longest text. Logits after a text's end are
    arbitrary.
    """
    logits: torch.Tensor = model(**model_inputs(batch)).logits.float()
    count = len(batch.starts)
    longest = max(batch.lengths[:count])
    if logits.ndim == 2:
        return logits[:count]
    if batch.cells is None:
        return logits[:, :longest]
    rows = logits.new_zeros(len(batch.lengths) * max(batch.lengths), logits.shape[-1])
    return rows.index_copy(0, batch.cells, logits[0]).view(len(batch.lengths), -1, logits.shape[-1])[:count, :longest]


def _window_rows(row: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Arrange a packed batch's per-token values [N] in rows [B, T], padded with -inf.

    One operation for all windows, since a kernel per window is slow on a GPU.
    """
    assert batch.cells is not None
    shape, count = (len(batch.lengths), max(batch.lengths)), len(batch.starts)
    rows = row.new_full((shape[0] * shape[1],), float("-inf")).scatter_(0, batch.cells, row).view(shape)
    return rows[:count, : max(batch.lengths[:count])]


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Make the keyword arguments of the model's forward pass from a batch."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.token_type_ids,
        "position_ids": batch.position_ids,
    }
    if batch.cu_seqlens is None:
        return inputs | {"attention_mask": batch.attention_mask}
    return inputs | {"windows": Windows(batch.lengths, batch.cu_seqlens, batch.longest)}
