"""Useful work of training: the matrix products that a BERT's windows need, padding and recomputation left out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BACKWARD = 2  # of a product: the gradients of both its factors, each as much work as the product


def training_flops(model: Any, lengths: ArrayLike) -> float:
    """Floating-point operations of a forward and backward pass over windows of `lengths` tokens, by a BERT's config.

    2 for each weight of the encoder and of the span head and each token, and 4 h n^2 a layer for the attention of a
    window of n tokens (h: hidden size). Embeddings are looked up, and elementwise work is not counted, as is usual
    for a model FLOP utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    hidden, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    weights = layers * (4 * hidden**2 + 2 * hidden * inner) + 2 * hidden
    forward = 2 * weights * tokens.sum() + layers * 4 * hidden * (tokens**2).sum()
    return float((1 + BACKWARD) * forward)
