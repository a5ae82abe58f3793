"""The gradient of the word embeddings on the CPU: ranks exchange the rows of their batches' words, not all rows.

A batch has some hundred of a vocabulary's 30,000 words; the gradient of all other rows is zero. In a small BERT most of
the gradients' bytes are such zeros. They also arrive last, when there is nothing left to compute meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def word_embedding(model: nn.Module) -> nn.Embedding | None:
    """The embedding of the words of a model of transformers, if it is trained."""
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    return embedding if isinstance(embedding, nn.Embedding) and embedding.weight.requires_grad else None


class WordRows:
    """Makes the gradient sparse, which Horovod gathers from all ranks, and dense again for the optimizer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        """From now on, the backward pass leaves a sparse gradient with one row per word of the batch."""
        embedding.sparse = True
        self._weight = embedding.weight
        self._weight.register_hook(Tensor.coalesce)  # sums the rows of equal tokens before they are sent
        self._dense = torch.zeros_like(self._weight, requires_grad=False)
        self._rows = torch.empty(0, dtype=torch.int64)

    def make_dense(self) -> None:
        """Replace the gathered gradient by a dense one. Rows of equal words are added in the order of the ranks."""
        assert self._weight.grad is not None
        if self._dense.view(-1)[0].isnan():  # the last step clipped by a norm that was NaN, so all rows may be NaN
            self._dense.zero_()
        self._dense.index_fill_(0, self._rows, 0.0)  # those of the last step; the others are still zero
        self._rows = self._weight.grad._indices()[0]
        self._dense.index_add_(0, self._rows, self._weight.grad._values())
        self._weight.grad = self._dense
