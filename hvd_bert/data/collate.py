"""Windows to tensors: the model's batches, packed without padding, or padded. They are prefetched."""

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
BUCKET = 512  # tokens


@dataclass(frozen=True)
class Bucket:
    """Limits the shapes of packed batches, since a CUDA graph has a fixed one: tokens are a multiple of BUCKET.

    `windows`: maximum windows per batch. `longest`: maximum tokens per window.
    """

    windows: int
    longest: int

    def padding(self, tokens: int) -> list[int]:
        """Lengths of the padding windows that follow a batch's own windows."""
        whole, rest = divmod(-tokens % BUCKET, self.longest)
        return [self.longest] * whole + [rest] * (rest > 0)

    @property
    def borders(self) -> int:
        """Size of cu_seqlens, with room for all windows and padding windows."""
        return self.windows + -(-(BUCKET - 1) // self.longest) + 1


@dataclass(frozen=True)
class Batch:
    """B windows, N tokens in total: packed into one row, or padded to T tokens with one row each.

    Attributes:
        lengths: Tokens per window, then per padding window of a bucket.
        input_ids, token_type_ids, position_ids: int64, [1, N] packed or [B, T] padded; positions restart in each
            window.
        attention_mask: bool [B, T], false at padding; None if packed.
        cu_seqlens: int32 [B + 1], 0 and the end of each window in the row; None if padded. With a bucket, [borders],
            filled up with N.
        cells: int64 [N], each token's index in a matrix of len(lengths) rows and max(lengths) columns; None if padded.
        longest: At least the tokens of the longest window; with a bucket, equal in all batches.
        starts, ends: int64 [B], first and last token of the answer, counted from the window's start; 0, 0 if the
            window has no answer.
        num_windows: Windows that count: B, or 0 for an empty share. Then B is 1 and its loss must count as 0.
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
        """Token positions of the windows that count, padding included."""
        return self.input_ids.numel() if self.num_windows else 0


@dataclass(frozen=True, eq=False)
class Collator:
    """Makes batches on a device from a table of windows (columns: see `hvd_bert.data.window_table`).

    `pad_to`: None for packed windows, else the minimum length of padded ones. `bucket`: limits the shapes of packed
    batches.
    """

    windows: WindowTable
    device: torch.device
    pad_to: int | None = None
    bucket: Bucket | None = None

    def __call__(self, ids: Sequence[int] | np.ndarray) -> Batch:
        """Make a batch of the windows `ids`. Without ids, it has one window that does not count."""
        rows = ids if len(ids) else [0]
        input_ids = self.windows.lists("input_ids", rows)
        context_start = self.windows.numbers("context_start", rows)
        lengths = [len(tokens) for tokens in input_ids]
        longest = max(lengths)
        numbers: dict[str, np.ndarray] = {}  # sent as int64
        narrow: dict[str, np.ndarray]
        if self.pad_to is None:
            if self.bucket:
                padding, longest = self.bucket.padding(sum(lengths)), self.bucket.longest
                input_ids += [np.zeros(length, np.int32) for length in padding]
                context_start = np.append(context_start, padding)
                lengths += padding
            borders = np.cumsum([0, *lengths], dtype=np.int32)
            if self.bucket:
                borders = np.append(borders, [borders[-1]] * (self.bucket.borders - len(borders))).astype(np.int32)
            narrow = {"cu_seqlens": borders}
            tokens = np.concatenate(input_ids)[None]
            positions = np.concatenate([np.arange(length) for length in lengths])[None]
            numbers["cells"] = np.repeat(np.arange(len(lengths)) * max(lengths), lengths) + positions[0]
            context_starts = np.repeat(context_start, lengths)
        else:
            columns = np.arange(max(self.pad_to, *lengths))
            mask = columns < np.array(lengths)[:, None]
            tokens = np.zeros(mask.shape, dtype=np.int64)
            tokens[mask] = np.concatenate(input_ids)
            narrow = {"attention_mask": mask}
            positions = np.tile(columns, (len(lengths), 1))
            context_starts = context_start[:, None]
        numbers |= {
            "input_ids": tokens,
            "token_type_ids": positions >= context_starts,
            "position_ids": positions,
            "starts": self.windows.numbers("start_position", rows),
            "ends": self.windows.numbers("end_position", rows),
        }
        sent = self._send({name: np.asarray(values, np.int64) for name, values in numbers.items()} | narrow)
        return Batch(**sent, lengths=lengths, longest=longest, num_windows=len(ids))

    def _send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Copy all arrays to the device at once. Each is aligned to 16 bytes, as compiled kernels need it."""
        tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
        parts = [pad(tensor.flatten().view(torch.uint8), (0, -tensor.nbytes % 16)) for tensor in tensors.values()]
        buffer = torch.cat(parts)
        if self.device.type == "cuda":
            buffer = buffer.pin_memory()  # otherwise this thread would wait for the copy
        sent = buffer.to(self.device, non_blocking=True).split([len(part) for part in parts])
        return {
            name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), part in zip(tensors.items(), sent, strict=True)
        }


class Prefetcher:
    """A rank's batches in the plan's order, starting at optimizer step `first`.

    A thread makes the next batches and copies them to the device during the training on the current one.
    """

    def __init__(self, plan: BatchPlan, collate: Callable[[Ids], Any], rank: int, first: int) -> None:
        self.plan = plan
        self.rank = rank
        self._collate = collate
        self._ids = (ids for step in itertools.count(first) for ids in plan.rank_windows(step, rank))
        self._next = first
        self._ahead: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._fill()  # a step that cannot be shared out fails here, before training starts

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
        """Discard the prefetched batches."""
        self._pool.shutdown(cancel_futures=True)
