"""Sparse gradients of the word embedding, with rows only for the batch's words instead of the whole vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def word_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return a transformers model's word embedding if it is trained and no other layer shares its weight, or None."""
    try:
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:  # transformers cannot determine it
        return None
    if type(embedding) is not nn.Embedding or not embedding.weight.requires_grad:
        return None
    weights = (weight for module in model.modules() for weight in module.parameters(recurse=False))
    return embedding if sum(weight is embedding.weight for weight in weights) == 1 else None


class WordRows:
    """Makes an embedding's gradient sparse in the backward pass, and dense again for the optimizer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """Make the backward pass return sparse gradients with one row per distinct word of the batch."""
        embedding.sparse = True
        self._weight = embedding.weight
        # Add up rows of equal words, so that fewer rows are sent.
        self._weight.register_hook(lambda gradient: gradient.coalesce() if gradient.is_sparse else gradient)
        self._dense = torch.zeros_like(self._weight, requires_grad=False)
        self._rows = torch.empty(0, dtype=torch.int64)

    def make_dense(self) -> None:
        """Replace the gathered sparse gradient by a dense gradient. Rows of equal words are added in rank order."""
        gradient = self._weight.grad
        if gradient is None or not gradient.is_sparse:  # the model also uses the weight in another way
            return
        self._dense.index_fill_(0, self._rows, 0.0)  # clears the previous step's rows; all other rows are zero
        self._rows = gradient._indices()[0]
        self._dense.index_add_(0, self._rows, gradient._values())
        self._weight.grad = self._dense
