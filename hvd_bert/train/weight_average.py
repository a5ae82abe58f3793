"""The exponential moving average of the trained weights (--ema_decay), evaluated and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """After each step: average = decay x average + (1 - decay) x weights. It begins with the weights of the start."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._averages: list[Tensor] = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """Take in the weights after a step; nothing if the norm of its gradient is not finite, since it was skipped."""
        share = (1 - self._decay) * torch.isfinite(grad_norm)  # on the device, which the host need not wait for
        shares: Any = [share] * len(self._weights)
        torch._foreach_lerp_(self._averages, self._weights, shares)

    def swap(self) -> None:
        """Exchange the model's weights and their averages."""
        for i, weight in enumerate(self._weights):
            weight.data, self._averages[i] = self._averages[i], weight.data

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
