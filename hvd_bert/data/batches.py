"""Windows to tensors: the batches that the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Batch:
    """B windows padded to T tokens.

    `input_ids`, `token_type_ids`, `attention_mask`: int64 [B, T]; `starts`, `ends`: int64 [B], the answer's first and
    last token (0, 0: none in this window); `num_windows`: how many of the B count (0 for a rank that has none left:
    then B is 1, and its loss must be weighed by 0); `num_tokens`: tokens that are no padding.
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    attention_mask: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    num_windows: int
    num_tokens: int


class Collator:
    """Makes padded batches of a windows table (columns: see `hvd_bert.data.windows`).

    `pad_to`: pad to this many tokens, or None: to the longest window of the batch.
    """

    def __init__(self, windows: Dataset, pad_id: int, device: torch.device, pad_to: int | None = None) -> None:
        columns = ["input_ids", "context_start", "start_position", "end_position"]
        self.rows = windows.select_columns(columns)
        self.pad_id = pad_id
        self.device = device
        self.pad_to = pad_to

    def __call__(self, ids: Sequence[int] | np.ndarray) -> Batch:
        """Windows `ids` as one batch on the device; no ids at all give one window that does not count."""
        num_windows = len(ids)
        rows = self.rows[[int(i) for i in ids] or [0]]
        lengths = np.fromiter(map(len, rows["input_ids"]), dtype=np.int64)
        width = self.pad_to or int(lengths.max())
        input_ids = np.full((len(lengths), width), self.pad_id, dtype=np.int64)
        for line, tokens in zip(input_ids, rows["input_ids"], strict=True):
            line[: len(tokens)] = tokens
        column = np.arange(width)
        mask = column < lengths[:, None]
        types = mask & (column >= np.asarray(rows["context_start"])[:, None])
        return Batch(
            input_ids=self._to_device(input_ids),
            token_type_ids=self._to_device(types.astype(np.int64)),
            attention_mask=self._to_device(mask.astype(np.int64)),
            starts=self._to_device(np.asarray(rows["start_position"], dtype=np.int64)),
            ends=self._to_device(np.asarray(rows["end_position"], dtype=np.int64)),
            num_windows=num_windows,
            num_tokens=int(lengths.sum()) if num_windows else 0,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
