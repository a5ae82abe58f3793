"""Copies of the training's state on the CPU, for checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes
SLACK = 4 * ALIGNMENT  # bytes per parameter, at most: AdamW's step counter, and the alignment of the other three


class Copies:
    """Copies tensors into memory that is kept for the next copies: to use new memory takes longer than to copy."""

    def __init__(self, expected: int = 0, pinned: bool = False) -> None:
        """`expected`: bytes that `reserve` allocates. `pinned`: for copies from a GPU."""
        self._expected, self._pinned = expected, pinned
        self._free = torch.empty(0, dtype=torch.uint8)
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._reserving: threading.Thread | None = None

    @staticmethod
    def of_training(model: nn.Module, device: torch.device) -> Copies:
        """For the model's weights and AdamW's two moments."""
        return Copies(sum(3 * weights.nbytes + SLACK for weights in model.parameters()), device.type == "cuda")

    def reserve(self) -> None:
        """Start to allocate the memory in the background, so that the first copies need not wait for it."""
        self._reserving = threading.Thread(target=self._reserve, name="memory for checkpoints")
        self._reserving.start()

    def _reserve(self) -> None:
        free = torch.empty(self._expected, dtype=torch.uint8, pin_memory=self._pinned)
        free.numpy().fill(0)  # so that the system provides the memory; torch would use all threads
        self._free = free

    def copy(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by name. They replace the group's earlier copies."""
        if self._reserving:
            self._reserving.join()
        # Non-blocking copies into pinned memory, with one wait at the end, use the whole bandwidth of the bus.
        copies = {
            name: self._memory(group, name, tensor).copy_(tensor.detach(), non_blocking=True)
            for name, tensor in tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def _memory(self, group: str, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get((group, name))
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[group, name] = self._take(tensor)
        return kept

    def _take(self, tensor: Tensor) -> Tensor:
        aligned = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if aligned > len(self._free):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        taken, self._free = self._free[: tensor.nbytes], self._free[aligned:]
        return taken.view(tensor.dtype).view(tensor.shape)
