"""Evaluation mode of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and computes no gradients."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)
