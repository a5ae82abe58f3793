"""Runs a model batch by batch, and splits its outputs into the logits of each window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hvd_bert.config.data import ANSWERING, DataArguments
from hvd_bert.data.batch_plan import Ids
from hvd_bert.data.collate import Batch
from hvd_bert.data.window_table import WindowTable
from hvd_bert.evaluation.forward import span_logits
from hvd_bert.evaluation.postprocess import SpanOptions, WindowLogits
from hvd_bert.model.bert import span_losses
from hvd_bert.model.precision import autocast

Outputs = tuple[Ids, torch.Tensor, torch.Tensor]  # ids, losses and outputs of a batch


@torch.no_grad()
def batch_outputs(
    forward: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
    collate: Callable[[Ids], Any],
    ids: Ids,
    batch_size: int,
    device: torch.device,
    precision: str,
    show_progress: bool = False,
) -> Iterator[Outputs]:
    """Run `forward` on batches of `ids`. Yields each batch's ids, float32 losses and outputs, on the CPU.

    Each batch is yielded only after the next batch is queued, so that a GPU computes while the caller uses the outputs.
    """
    parts = [ids[first : first + batch_size] for first in range(0, len(ids), batch_size)]
    previous = None
    for part in tqdm(parts, "Evaluating", unit="batch", leave=False, disable=not show_progress):
        batch = collate(part)
        with autocast(device, precision):
            losses, outputs = forward(batch)
        copies, copied = _queue_copies(losses.float(), outputs)
        if previous:
            yield _read(*previous)
        previous = part, copies, copied
    if previous:
        yield _read(*previous)


def _queue_copies(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Start copies to the CPU. Returns them, and the CUDA event of their completion; None for CPU tensors."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
    if not tensors[0].is_cuda:
        return copies, None
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensors[0].device))
    return copies, copied


def _read(ids: Ids, copies: list[torch.Tensor], copied: torch.cuda.Event | None) -> Outputs:
    if copied:
        copied.synchronize()
        copies = [copy.clone() for copy in copies]  # frees the pinned memory for later copies
    losses, outputs = copies
    return ids, losses, outputs


# --- spans ---------------------------------------------------------------------------------------


def span_options(data: DataArguments) -> SpanOptions:
    """Return the settings for extracting answers, a subset of the data arguments."""
    names = {field.name for field in dataclasses.fields(SpanOptions)}
    return SpanOptions(**{name: getattr(data, name) for name in ANSWERING if name in names})


def span_outputs(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss per window [B], and the start logits followed by the end logits [B, 2T]."""
    starts, ends = span_logits(model, batch)
    return span_losses(starts, ends, batch.starts, batch.ends), torch.cat((starts, ends), 1)


def window_logits(windows: WindowTable, outputs: Iterable[tuple[Ids, torch.Tensor]]) -> Iterator[WindowLogits]:
    """Yield the logits of each window. `outputs`: for each batch, its ids and the logits from `span_outputs`."""
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
