"""Losses and outputs of a model, batch by batch, and its logits of windows."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from hvd_bert.config.data import DataArguments
from hvd_bert.data.batch_plan import Ids
from hvd_bert.data.collate import Batch
from hvd_bert.data.window_table import WindowTable
from hvd_bert.evaluation.forward import span_logits
from hvd_bert.evaluation.postprocess import SpanOptions, WindowLogits
from hvd_bert.model.bert import span_losses
from hvd_bert.model.precision import autocast

Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


@torch.no_grad()
def batch_outputs(
    forward: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
    collate: Callable[[Ids], Any],
    ids: Ids,
    batch_size: int,
    device: torch.device,
    precision: str,
    show_progress: bool = False,
) -> Iterator[tuple[Ids, torch.Tensor, torch.Tensor]]:
    """The examples `ids` in batches: their ids, and the losses and outputs that `forward` returns, on the CPU."""
    parts = [ids[first : first + batch_size] for first in range(0, len(ids), batch_size)]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for part in tqdm(parts, "Evaluating", unit="batch", leave=False, disable=not show_progress):
            batch = collate(part)
            with autocast(device, precision):
                losses, outputs = forward(batch)
            yield losses.float(), outputs

    for part, (losses, outputs) in zip(parts, read_late(batches()), strict=True):
        yield part, losses, outputs


# --- spans ---------------------------------------------------------------------------------------


def span_options(data: DataArguments) -> SpanOptions:
    """The settings that define what counts as an answer."""
    return SpanOptions(**{field.name: getattr(data, field.name) for field in dataclasses.fields(SpanOptions)})


def span_outputs(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each window [B], and its start and end logits, one after the other [B, 2T]."""
    starts, ends = span_logits(model, batch)
    return span_losses(starts, ends, batch.starts, batch.ends), torch.cat((starts, ends), 1)


def window_logits(windows: WindowTable, outputs: Iterable[tuple[Ids, torch.Tensor]]) -> Iterator[WindowLogits]:
    """The logits of each window, from the ids of batches and what `span_outputs` returned for them."""
    lengths = windows.lengths
    for ids, values in outputs:
        start_rows, end_rows = (side.numpy() for side in values.chunk(2, 1))
        questions, context_starts = (windows.numbers(name, ids) for name in ("question", "context_start"))
        char_starts, char_ends = (windows.lists(name, ids) for name in ("char_starts", "char_ends"))
        for i, length in enumerate(lengths[ids]):
            yield WindowLogits(
                question=int(questions[i]),
                context_start=int(context_starts[i]),
                char_starts=char_starts[i],
                char_ends=char_ends[i],
                start_logits=start_rows[i, :length],
                end_logits=end_rows[i, :length],
            )


# --- copies --------------------------------------------------------------------------------------


def read_late(batches: Iterable[Tensors]) -> Iterator[Tensors]:
    """The tensors of each batch on the host.

    A batch is read only after the next one is queued, so that a GPU also works while the caller uses the tensors.
    """
    queued = deque[tuple[Tensors, Any]]()
    for tensors in batches:
        copies: Any = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)  # into pinned memory
        copied = torch.cuda.Event() if tensors[0].is_cuda else None
        if copied:
            copied.record(torch.cuda.current_stream(tensors[0].device))
        queued.append((copies, copied))
        if len(queued) > 1:
            yield _read(*queued.popleft())
    if queued:
        yield _read(*queued.popleft())


def _read(copies: Any, copied: Any) -> Any:
    if copied is None:
        return copies
    copied.synchronize()
    # The next copies use the pinned memory again: to allocate it is slow.
    return tuple(copy.clone() for copy in copies)
