"""The last step's numbers, copied to the host alongside the next step, so that nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class LastStep:
    """Holds a step's numbers until the host takes them, a step later."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.float64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._filled = False

    def put(self, *numbers: Tensor) -> None:
        """Start to copy the numbers, 0-dim tensors. Earlier ones must have been taken."""
        for place, number in zip(self._host, numbers, strict=True):
            place.copy_(number.detach(), non_blocking=True)
        if self._copied:
            self._copied.record()
        self._filled = True

    def take(self) -> list[float]:
        """The numbers, once; empty if there are none. Waits for work of the device that came before `put` only."""
        if not self._filled:
            return []
        if self._copied:
            self._copied.synchronize()
        self._filled = False
        found: list[float] = self._host.numpy().tolist()
        return found
