"""Useful FLOP of training: the matrix products of a BERT's windows, without padding and recomputation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BACKWARD = 2  # times the forward pass: gradients of both factors, each as expensive as the product


def training_flops(model: Any, lengths: ArrayLike) -> float:
    """FLOP of a forward and backward pass over windows of `lengths` tokens, from a BERT's config.

    The forward pass takes 2 FLOP per token for each weight of the encoder and the span head, and 4 h n^2 per layer
    for the attention of a window of n tokens (h: hidden size). Embedding look-ups and elementwise operations are not
    counted, as usual for the model FLOP utilization (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    hidden, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    weights = layers * (4 * hidden**2 + 2 * hidden * inner) + 2 * hidden
    forward = 2 * weights * tokens.sum() + layers * 4 * hidden * (tokens**2).sum()
    return float((1 + BACKWARD) * forward)
