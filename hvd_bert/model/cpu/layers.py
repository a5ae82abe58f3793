"""Dropout, residual and layer norm in one pass, by a compiled operation of fused.cpp."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput

from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.dropout import dropped_of
from hvd_bert.model.cpu.fused import MULTIPLE, AddNorm


class AddAndNorm:
    """What `with_fused_norm` adds to a layer."""

    dense: nn.Module
    dropout: nn.Dropout
    LayerNorm: nn.LayerNorm
    training: bool

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., size of dense], input_tensor [..., size] -> [..., size]."""
        norm, size = self.LayerNorm, input_tensor.shape[-1]
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input_tensor.dtype
        chosen = input_tensor.device.type == "cpu" and kernels.chosen(precision).norm == kernels.FUSED
        in_fp32 = isinstance(norm, nn.LayerNorm) and norm.weight.dtype == input_tensor.dtype == torch.float32
        fits = in_fp32 and size % MULTIPLE == 0
        if not (self.training and chosen and fits and input_tensor.numel()):
            return super().forward(hidden_states, input_tensor)  # type: ignore[misc, no-any-return]
        rows = self.dense(hidden_states).reshape(-1, size)
        inputs = (rows, input_tensor.reshape(-1, size), norm.weight, norm.bias, norm.eps, dropped_of(self.dropout.p))
        return AddNorm.apply(*inputs).view(input_tensor.shape)  # type: ignore[no-any-return, no-untyped-call]


@cache
def with_fused_norm(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a layer whose forward pass is that of BERT's output layers: dense, dropout, residual, layer norm.

    Many families have a copy of it. Any other class is returned as it is.
    """
    own, bert = (getattr(kind.forward, "__code__", None), BertOutput.forward.__code__)
    if not own or (own.co_code, own.co_names, own.co_consts) != (bert.co_code, bert.co_names, bert.co_consts):
        return kind
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (AddAndNorm, kind), members)
