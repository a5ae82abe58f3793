"""Evaluation on all ranks: each rank takes its share, rank 0 collects the results and scores them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

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
Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


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

    `pad_to`: see `Collator`.
    """
    collate, lengths = Collator(windows, device, pad_to), windows.lengths
    parts = [ids[first : first + batch_size] for first in range(0, len(ids), batch_size)]

    def batches() -> Iterator[tuple[torch.Tensor]]:
        for part in tqdm(parts, "Evaluating", unit="batch", leave=False, disable=not show_progress):
            batch = collate(part)
            with autocast(device, precision):
                starts, ends = span_logits(model, batch)
            # One tensor, so one copy to the host.
            yield (torch.cat((starts, ends, span_losses(starts, ends, batch)[:, None]), 1),)

    for number, (values,) in enumerate(read_late(batches())):
        batch_ids = parts[number]
        losses.extend(values[:, -1].tolist())
        start_rows, end_rows = (side.numpy() for side in values[:, :-1].chunk(2, 1))
        questions, context_starts = (windows.numbers(name, batch_ids) for name in ("question", "context_start"))
        char_starts, char_ends = (windows.lists(name, batch_ids) for name in ("char_starts", "char_ends"))
        for i, length in enumerate(lengths[batch_ids]):
            yield WindowLogits(
                question=int(questions[i]),
                context_start=int(context_starts[i]),
                char_starts=char_starts[i],
                char_ends=char_ends[i],
                start_logits=start_rows[i, :length],
                end_logits=end_rows[i, :length],
            )


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
