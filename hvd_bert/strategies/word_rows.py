"""Sparse gradients of the word embedding: a few thousand rows of the batch's words in place of the vocabulary's."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def word_embedding(model: nn.Module) -> nn.Embedding | None:
    """The word embedding of a model of transformers, if it is trained and no other layer shares its weight."""
    try:
        embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:  # transformers does not find it
        return None
    if type(embedding) is not nn.Embedding or not embedding.weight.requires_grad:
        return None
    weights = (weight for module in model.modules() for weight in module.parameters(recurse=False))
    return embedding if sum(weight is embedding.weight for weight in weights) == 1 else None


class WordRows:
    """Makes the gradient sparse in the backward pass, and dense again for the optimizer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """Let the backward pass make sparse gradients with one row per word of the batch."""
        embedding.sparse = True
        self._weight = embedding.weight
        # Add up the rows of equal words before they are sent.
        self._weight.register_hook(lambda gradient: gradient.coalesce() if gradient.is_sparse else gradient)
        self._dense = torch.zeros_like(self._weight, requires_grad=False)
        self._rows = torch.empty(0, dtype=torch.int64)

    def make_dense(self) -> None:
        """Replace the gathered gradient by a dense one. Adds the rows of equal words in the order of the ranks."""
        gradient = self._weight.grad
        if gradient is None or not gradient.is_sparse:  # the model also uses the weight in another way
            return
        self._dense.index_fill_(0, self._rows, 0.0)  # clears the rows of the last step; all others are still zero
        self._rows = gradient._indices()[0]
        self._dense.index_add_(0, self._rows, gradient._values())
        self._weight.grad = self._dense
