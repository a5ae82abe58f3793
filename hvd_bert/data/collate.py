"""Converts windows to batches for the model, either packed into one row or padded, and prefetches them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from hvd_bert.data.batch_plan import BatchPlan, Ids
from hvd_bert.data.window_table import WindowTable

AHEAD = 2  # batches to prefetch
BUCKET = 512  # a packed batch's tokens are padded to a multiple of this for CUDA graphs
Arrays = dict[str, np.ndarray]
DTYPES = {"cu_seqlens": np.int32, "attention_mask": np.bool_}  # all other tensors are int64


@dataclass(frozen=True)
class Bucket:
    """Limits packed batches to a few shapes, since a CUDA graph has a fixed shape.

    Padding windows fill each batch up to a multiple of BUCKET tokens, and cu_seqlens has the same size in all batches.

    `windows`: maximum windows per batch. `longest`: maximum tokens per window.
    """

    windows: int
    longest: int

    def padding(self, tokens: int) -> list[int]:
        """Return the lengths of the padding windows that fill a batch of `tokens` tokens up to a multiple of BUCKET."""
        whole, rest = divmod(-tokens % BUCKET, self.longest)
        return [self.longest] * whole + [rest] * (rest > 0)

    @property
    def borders(self) -> int:
        """Size of cu_seqlens: the maximum number of windows and padding windows, plus 1."""
        return self.windows + -(-(BUCKET - 1) // self.longest) + 1


@dataclass(frozen=True)
class Batch:
    """B windows, either packed into one row of N tokens or padded to T tokens with one row per window.

    With a bucket, the row also has padding windows. They count in N, but not in B.

    Attributes:
        lengths: Tokens per window, followed by tokens per padding window.
        input_ids, token_type_ids, position_ids: int64, [1, N] packed or [B, T] padded. Positions restart at 0 in
            each window.
        attention_mask: bool [B, T], false at padding; None if packed.
        cu_seqlens: int32 [B + 1]: 0, then the end of each window in the row; None if padded. With a bucket, it has
            the fixed size [borders]: the ends of the padding windows follow, and the remaining entries are N.
        cells: int64 [N], each token's index in a flattened matrix of len(lengths) rows and max(lengths) columns; None
            if padded.
        longest: Tokens of the longest window; with a bucket, the upper bound `Bucket.longest`.
        starts, ends: int64 [B], indices of the answer's first and last token, counted from the window's start; 0, 0
            without an answer or if the window lacks part of it.
        num_windows: Number of windows that count toward the loss: B, or 0 if the rank's share is empty. An empty
            share's batch still holds one window, whose loss must be multiplied by 0.
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    longest: int
    starts: torch.Tensor
    ends: torch.Tensor
    num_windows: int
    attention_mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    cells: torch.Tensor | None = None

    @property
    def num_positions(self) -> int:
        """Number of token positions, including padding; 0 for an empty share."""
        return self.input_ids.numel() if self.num_windows else 0


@dataclass(frozen=True, eq=False)
class Collator:
    """Makes batches on a device from a window table (columns: see `hvd_bert.data.window_table`).

    `pad_to`: windows are padded to this length, or to the batch's longest window if that is longer; None packs them.
    `bucket`: see `Bucket`; None if batches may have any shape.
    """

    windows: WindowTable
    device: torch.device
    pad_to: int | None = None
    bucket: Bucket | None = None

    def __call__(self, ids: Sequence[int] | np.ndarray) -> Batch:
        """Make a batch of the windows `ids`. If `ids` is empty, the batch has one window and `num_windows` 0."""
        rows = ids if len(ids) else [0]
        windows = self.windows.lists("input_ids", rows)
        context_starts = self.windows.numbers("context_start", rows)
        longest = max(map(len, windows))
        if self.pad_to is not None:
            arrays = _padded(windows, context_starts, max(self.pad_to, longest))
        elif self.bucket:
            padding, longest = self.bucket.padding(sum(map(len, windows))), self.bucket.longest
            windows += [np.zeros(length, np.int32) for length in padding]
            arrays = _packed(windows, np.append(context_starts, padding), self.bucket.borders)
        else:
            arrays = _packed(windows, context_starts, len(windows) + 1)
        arrays["starts"] = self.windows.numbers("start_position", rows)
        arrays["ends"] = self.windows.numbers("end_position", rows)
        sent = self._send({name: np.asarray(values, DTYPES.get(name, np.int64)) for name, values in arrays.items()})
        return Batch(**sent, lengths=[*map(len, windows)], longest=longest, num_windows=len(ids))

    def _send(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Copy all arrays to the device in one transfer. Each is aligned to 16 bytes, as compiled kernels require."""
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        parts = [pad(tensor.flatten().view(torch.uint8), (0, -tensor.nbytes % 16)) for tensor in tensors.values()]
        buffer = torch.cat(parts)
        if self.device.type == "cuda":
            buffer = buffer.pin_memory()  # a copy from unpinned memory would block this thread
        sent = buffer.to(self.device, non_blocking=True).split([len(part) for part in parts])
        return {
            name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(tensors.items(), sent, strict=True)
        }


def _packed(windows: list[np.ndarray], context_starts: np.ndarray, borders: int) -> Arrays:
    """Put all windows into one row. `borders`: size of cu_seqlens."""
    lengths = [len(tokens) for tokens in windows]
    ends = np.cumsum(lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {
        "input_ids": np.concatenate(windows)[None],
        "token_type_ids": (positions >= np.repeat(context_starts, lengths))[None],
        "position_ids": positions[None],
        "cells": np.repeat(np.arange(len(lengths)) * max(lengths), lengths) + positions,
        "cu_seqlens": np.array([0, *ends] + [ends[-1]] * (borders - 1 - len(ends))),
    }


def _padded(windows: list[np.ndarray], context_starts: np.ndarray, length: int) -> Arrays:
    """Put each window into its own row of `length` positions."""
    columns = np.arange(length)
    mask = columns < np.array([len(tokens) for tokens in windows])[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.concatenate(windows)
    positions = np.tile(columns, (len(windows), 1))
    return {
        "input_ids": tokens,
        "token_type_ids": positions >= context_starts[:, None],
        "position_ids": positions,
        "attention_mask": mask,
    }


class Prefetcher:
    """Iterates over a rank's batches in the plan's order, starting at optimizer step `first`.

    A background thread makes the next batches and copies them to the device during training on the current one.
    """

    def __init__(self, plan: BatchPlan, collate: Callable[[Ids], Any], rank: int, first: int) -> None:
        self.plan = plan
        self.rank = rank
        self._collate = collate
        self._ids = (ids for step in itertools.count(first) for ids in plan.rank_windows(step, rank))
        self._next = first
        self._ahead: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._fill()  # an error of the batch plan is raised here, before training starts

    def micro_batches(self, step: int) -> Iterator[Any]:
        """Yield the micro-batches of a step. Steps must be requested in order."""
        assert step == self._next, f"step {step} instead of {self._next}"
        self._next += 1
        for _ in range(self.plan.accumulation):
            self._fill()
            yield self._ahead.popleft().result()

    def _fill(self) -> None:
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._pool.submit(self._collate, next(self._ids)))

    def close(self) -> None:
        """Cancel the queued batches, and stop the background thread once its current batch is made."""
        self._pool.shutdown(cancel_futures=True)
