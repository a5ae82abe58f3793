"""Evaluation on all ranks: each rank takes its share, rank 0 collects the results and scores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from hvd_bert.config.settings import DataArguments
from hvd_bert.data.collate import Collator
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.evaluation.postprocess import SpanOptions, WindowLogits
from hvd_bert.model.bert import span_logits, span_losses
from hvd_bert.model.precision import autocast

Part = TypeVar("Part")
Whole = TypeVar("Whole")


def evaluated(
    world: World, compute: Callable[[], Part], score: Callable[[list[Part]], tuple[dict[str, float], Whole]]
) -> tuple[dict[str, float], Whole | None]:
    """The metrics that `score` makes of what all ranks `compute`, on every rank, and what else it returns, on rank 0.

    A collective. There is none inside `compute`, so ranks may have different numbers of batches, or none.
    """
    metrics: dict[str, float] = {}
    rest = None
    with world.raise_on_all_ranks(EXIT_FAILURE):  # for example of NaN weights
        mine = compute()
    parts = world.gather(mine)
    with world.raise_on_all_ranks(EXIT_FAILURE):
        if world.rank == 0:
            metrics, rest = score(parts)
    return world.broadcast(metrics), rest


def span_options(data: DataArguments) -> SpanOptions:
    """The settings that define what counts as an answer."""
    return SpanOptions(**{field.name: getattr(data, field.name) for field in dataclasses.fields(SpanOptions)})


@torch.no_grad()
def window_logits(
    model: nn.Module,
    windows: WindowTable,
    ids: NDArray[np.int64],
    device: torch.device,
    batch_size: int,
    precision: str,
    losses: list[float],
    pad_to: int | None = None,
    show_progress: bool = False,
) -> Iterator[WindowLogits]:
    """The logits of `model` for the rows `ids` of `windows`, in that order; appends each window's loss to `losses`.

    `pad_to`: see `Collator`. A batch is read only after the next one is queued, so that a GPU also works while its
    answers are extracted.
    """
    collate = Collator(windows, device, pad_to)
    queued: _Queued | None = None
    firsts = range(0, len(ids), batch_size)
    for first in tqdm(firsts, "Evaluating", unit="batch", leave=False, disable=not show_progress):
        batch_ids = ids[first : first + batch_size]
        batch = collate(batch_ids)
        with autocast(device, precision):
            starts, ends = span_logits(model, batch)
        values = torch.cat((starts, ends, span_losses(starts, ends, batch)[:, None]), 1)
        before, queued = queued, _Queued(batch_ids, batch.lengths, values)
        if before:
            yield from before.read(windows, losses)
    if queued:
        yield from queued.read(windows, losses)


class _Queued:
    """A batch of the windows `ids`, whose start logits, end logits and losses, `values` [B, 2 T + 1], are on their way
    to the host: one copy, into pinned memory."""

    def __init__(self, ids: NDArray[np.int64], lengths: list[int], values: torch.Tensor) -> None:
        self._ids, self._lengths = ids, lengths
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied:
            self._copied.record(torch.cuda.current_stream(values.device))

    def read(self, windows: WindowTable, losses: list[float]) -> Iterator[WindowLogits]:
        """Wait for the copy. See `window_logits`."""
        if self._copied:
            self._copied.synchronize()
        values = self._values.numpy()
        losses.extend(values[:, -1].tolist())
        ends_from = values.shape[1] // 2
        questions, context_starts = (windows.numbers(name, self._ids) for name in ("question", "context_start"))
        char_starts, char_ends = (windows.lists(name, self._ids) for name in ("char_starts", "char_ends"))
        for i, length in enumerate(self._lengths):
            yield WindowLogits(
                question=int(questions[i]),
                context_start=int(context_starts[i]),
                char_starts=char_starts[i],
                char_ends=char_ends[i],
                start_logits=values[i, :length],
                end_logits=values[i, ends_from : ends_from + length],
            )
