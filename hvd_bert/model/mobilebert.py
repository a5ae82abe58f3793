"""MobileBERT's embeddings for packed windows: a token is embedded with its neighbors in its own window only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.mobilebert.modeling_mobilebert import MobileBertEmbeddings


def separate_windows(model: nn.Module) -> None:
    """Let the model's embeddings treat each window of a packed row as a row of its own."""
    embeddings: Any = model.base_model.embeddings  # type: ignore[union-attr]
    if embeddings.trigram_input:
        embeddings.__class__ = TrigramEmbeddings
        embeddings.trigram_input, embeddings.embedding_size = False, 0  # transformers' part starts after the trigrams


class TrigramEmbeddings(MobileBertEmbeddings):
    """Embeds each token with the previous and the next of its window.

    Before a window comes nothing, and after it a padding token, as in transformers' padded rows.
    """

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in transformers; positions start from 0 in each window."""
        assert input_ids is not None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        words: nn.Embedding = self.word_embeddings
        tokens = words(input_ids)
        first = (position_ids == 0)[..., None]
        last = first.roll(-1, 1)  # the row's first token is a window's first
        padding = words.weight[words.padding_idx].detach()
        before = tokens.roll(1, 1).masked_fill(first, 0.0)
        after = torch.where(last, padding, tokens.roll(-1, 1))
        trigrams = torch.cat([after, tokens, before], 2)
        rest: Any = super().forward
        result: torch.Tensor = rest(None, token_type_ids, position_ids, trigrams)
        return result
