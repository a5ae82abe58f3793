"""Useful FLOP of training: the matrix products that an encoder's windows need, without padding and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

BACKWARD = 2  # times the forward pass: gradients of both factors, each as expensive as the product


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of a forward pass over windows of n tokens: per_batch + the sum of n * per_token + n^2 * per_pair.

    Attributes:
        per_batch: Work that does not depend on the windows, for example on DeBERTa's relative positions.
        per_token: Linear layers: 2 FLOP per weight and use of it; Longformer's attention.
        per_pair: Scores and weighted sums of attention. ModernBERT's local attention counts as if it were global.
        crossover: The window length in tokens at which attention costs as much as the rest of the encoder: 2304 tokens
            for MiniLM, 4608 for BERT-base.
        frozen: Share of `per_token` of weights without a gradient: their backward pass costs as much as the forward
            pass, in place of twice as much.
    """

    per_batch: int
    per_token: int
    per_pair: int
    crossover: int
    frozen: int = 0

    def training(self, lengths: ArrayLike, micro_batches: int = 1) -> float:
        """FLOP of forward and backward passes over windows of `lengths` tokens, in `micro_batches`.

        Embedding look-ups and elementwise operations are not counted, as usual for the model FLOP utilization
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        forward = micro_batches * self.per_batch + self.per_token * tokens.sum() + self.per_pair * (tokens**2).sum()
        return float((1 + BACKWARD) * forward - self.frozen * tokens.sum())


def forward_flops(model: Any) -> ForwardFlops:
    """The FLOP of a model of one of FAMILIES with a head. Each head counts as if it took every token."""
    config, hidden, layers = model.config, model.config.hidden_size, model.config.num_hidden_layers
    encoder, head, frozen, per_batch = 0, 0, 0, 0
    for name, layer in model.named_modules():
        positions_or_question = ".pos_" in name or "_global" in name  # DeBERTa's, see below; Longformer's, not counted
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
    if config.model_type == "longformer":  # its chunks overlap: 4 for scores, 3 for weighted sums
        encoder += 7 * hidden * sum(config.attention_window)
        per_pair = 0
    if getattr(config, "relative_attention", False):  # DeBERTa's
        per_position = 2 * hidden * layers * len(config.pos_att_type)  # and token, or row of the positions' weights
        if config.model_type == "deberta":  # two positions per token
            encoder += 2 * hidden * per_position
            per_pair += 2 * per_position
        else:
            positions = model.base_model.encoder.rel_embeddings.num_embeddings
            encoder += positions * per_position
            per_batch += positions * hidden * per_position
    return ForwardFlops(per_batch, encoder + head, per_pair, encoder // max(per_pair, 1), frozen)
