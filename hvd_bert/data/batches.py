"""Windows to tensors: the batches that the model is given, laid end to end without padding."""

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
    """B windows of `lengths` tokens, N in all, in one row.

    `input_ids`, `token_type_ids`, `position_ids`: int64 [1, N], positions starting anew in each window; `starts`,
    `ends`: int64 [B], the answer's first and last token counted from the window's start (0, 0: no answer in it);
    `num_windows`: how many count: B, or 0 for a rank that has none left (then B is 1, and its loss must count 0).
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: list[int]
    starts: torch.Tensor
    ends: torch.Tensor
    num_windows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the windows that count."""
        return sum(self.lengths) if self.num_windows else 0


class Collator:
    """Makes batches of a windows table (its columns: `hvd_bert.data.windows`) on a device."""

    def __init__(self, windows: Dataset, device: torch.device) -> None:
        self.rows = windows.select_columns(["input_ids", "context_start", "start_position", "end_position"])
        self.device = device

    def __call__(self, ids: Sequence[int] | np.ndarray) -> Batch:
        """The windows `ids` as one batch; no ids at all give one window that does not count."""
        rows = self.rows[[int(i) for i in ids] or [0]]
        lengths = [len(tokens) for tokens in rows["input_ids"]]
        positions = np.concatenate([np.arange(length) for length in lengths])
        types = positions >= np.repeat(rows["context_start"], lengths)
        return Batch(
            input_ids=self._to_device(np.concatenate(rows["input_ids"]))[None],
            token_type_ids=self._to_device(types)[None],
            position_ids=self._to_device(positions)[None],
            lengths=lengths,
            starts=self._to_device(rows["start_position"]),
            ends=self._to_device(rows["end_position"]),
            num_windows=len(ids),
        )

    def _to_device(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device, non_blocking=True)
