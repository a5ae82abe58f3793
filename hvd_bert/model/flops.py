"""Counts the useful FLOP of training: an encoder's matrix products, without padding and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

BACKWARD = 2  # FLOP relative to the forward pass: a product has two gradients, each as expensive as itself


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of a forward pass over windows of n tokens: per_batch + sum(n * per_token + n^2 * per_pair).

    Attributes:
        per_batch: FLOP per micro-batch that do not depend on the windows, such as for DeBERTa's relative positions.
        per_token: FLOP per token: 2 per weight of a linear layer and per use of the layer; also Longformer's attention.
        per_pair: FLOP per pair of tokens: attention's scores and weighted sums. ModernBERT's local attention counts as
            global attention.
        crossover: Window length in tokens at which attention costs as much as the rest of the encoder: 2304 for MiniLM,
            4608 for BERT-base.
        frozen: The part of `per_token` that belongs to frozen weights. Their backward pass costs as much as the forward
            pass, not twice as much.
    """

    per_batch: int
    per_token: int
    per_pair: int
    crossover: int
    frozen: int = 0

    def training(self, lengths: ArrayLike, micro_batches: int = 1) -> float:
        """Return the FLOP of forward and backward passes over windows of `lengths` tokens in `micro_batches`.

        Embedding look-ups and elementwise operations are not counted, as usual for the model FLOP utilization
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        forward = micro_batches * self.per_batch + self.per_token * tokens.sum() + self.per_pair * (tokens**2).sum()
        return float((1 + BACKWARD) * forward - self.frozen * tokens.sum())


def forward_flops(model: Any) -> ForwardFlops:
    """Count the forward FLOP of a model with a head, from a listed family. Heads count as if applied to every token."""
    config, hidden, layers = model.config, model.config.hidden_size, model.config.num_hidden_layers
    encoder, head, frozen, per_batch = 0, 0, 0, 0
    for name, layer in model.named_modules():
        # DeBERTa's position layers are counted below; Longformer's layers for the question's tokens are not counted.
        positions_or_question = ".pos_" in name or "_global" in name
        unused = "original_module" in name  # peft's copy
        if not isinstance(layer, nn.Linear | nn.Conv1d) or positions_or_question or unused:
            continue
        flops = 2 * layer.weight.numel()
        if "albert_layer_groups" in name:  # layers share the weights
            flops = flops * layers // config.num_hidden_groups
        frozen += 0 if layer.weight.requires_grad else flops
        if not name.startswith(f"{model.base_model_prefix}."):
            head += flops
        elif ".pooler" in name:
            per_batch += flops
        else:
            encoder += flops
    attended = config.num_attention_heads * getattr(config, "head_dim", hidden // config.num_attention_heads)
    per_pair = 4 * attended * layers * getattr(config, "inner_group_num", 1)
    if config.model_type == "longformer":  # chunks overlap; the factor 7 is 4 for scores and 3 for sums
        encoder += 7 * hidden * sum(config.attention_window)
        per_pair = 0
    if getattr(config, "relative_attention", False):  # DeBERTa's
        per_position = 2 * hidden * layers * len(config.pos_att_type)  # per token, or per row of positions
        if config.model_type == "deberta":  # two positions per token
            encoder += 2 * hidden * per_position
            per_pair += 2 * per_position
        else:
            positions = model.base_model.encoder.rel_embeddings.num_embeddings
            encoder += positions * per_position
            per_batch += positions * hidden * per_position
    return ForwardFlops(per_batch, encoder + head, per_pair, encoder // max(per_pair, 1), frozen)
