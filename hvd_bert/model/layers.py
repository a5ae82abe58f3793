"""Layers that replace transformers' layers: faster layers for CPUs, and joined query, key and value products for GPUs.

A new layer has the parameters of the replaced layer under the same names, so state_dict and saved models keep
transformers' format. The table in `families.py` names the replaced classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from hvd_bert.config.training import REDUCE_OVERHEAD
from hvd_bert.errors import UserError
from hvd_bert.model import attention
from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.attention import drop_threshold
from hvd_bert.model.cpu.fused import MULTIPLE, AddNorm
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.families import FAMILIES

Replace = Callable[[Any], nn.Module]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def place(model: nn.Module, device: torch.device, compiled: bool = False) -> None:
    """Move a model to its device, and replace layers of listed families by the fastest layers for this device.

    `compiled`: whether the model will be compiled. torch.compile does not support this package's CPU layers.
    """
    config: Any = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family and device.type != "cuda" and not compiled:
        layers: dict[type | str, Replace] = dict.fromkeys(family.add_and_norm, AddAndNorm)
        replace_layers(model, layers | {nn.Linear: Linear.of})
    elif family and family.attention and config._attn_implementation == attention.NAME:
        replace_layers(model, {family.attention: JoinedAttention.of})
    model.to(device=device)


def replace_layers(module: nn.Module, layers: Mapping[type | str, Replace]) -> None:
    """Replace layers in a module in place, innermost first. Skips layers with hooks, such as pruned layers.

    `layers`: class, or name of a transformers class -> function that makes the new layer from the old layer.
    """
    for name, layer in module.named_children():
        replace_layers(layer, layers)
        kind = type(layer)
        replace = layers.get(kind.__name__ if kind.__module__.startswith("transformers.") else kind)
        if replace and not any(getattr(layer, hooks) for hooks in HOOKS):
            setattr(module, name, replace(layer).train(layer.training))


class AddAndNorm(nn.Module):
    """BERT's output layers: dense, dropout, residual and layer norm. A compiled kernel can fuse the last three."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = replaced.dense, replaced.dropout, replaced.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Map `hidden_states` [..., dense.in_features] and the residual `input_tensor` [..., size] to [..., size]."""
        rows, norm, size = self.dense(hidden_states), self.LayerNorm, input_tensor.shape[-1]
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input_tensor.dtype
        chosen = input_tensor.device.type == "cpu" and kernels.active(precision).norm == kernels.FUSED
        in_fp32 = isinstance(norm, nn.LayerNorm) and norm.weight.dtype == input_tensor.dtype == torch.float32
        fits = in_fp32 and size % MULTIPLE == 0
        if not (self.training and chosen and fits and input_tensor.numel()):
            result: torch.Tensor = norm(self.dropout(rows) + input_tensor)
            return result
        options = (norm.eps, drop_threshold(self.dropout.p))
        result = AddNorm.apply(rows, input_tensor, norm.weight, norm.bias, *options)  # type: ignore[no-untyped-call]
        return result


class JoinedAttention(nn.Module):
    """BERT's self-attention over packed windows. Under autocast, one matrix product computes query, key and value.

    As in MLPerf's entries, a large product uses a GPU better, and the hidden states are cast only once. In fp32,
    joining would only add a copy of the weights.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dropout = replaced.query, replaced.key, replaced.value, replaced.dropout
        self.head_size = replaced.attention_head_size

    @staticmethod
    def of(layer: Any) -> nn.Module:
        """Make the layer from transformers' `layer`, or return `layer` unchanged if it has adapters."""
        has_adapters = any(type(part) is not nn.Linear for part in (layer.query, layer.key, layer.value))
        return layer if has_adapters else JoinedAttention(layer)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Map `hidden_states`, [1, N, hidden size], to the same shape. Returns None in place of attention weights."""
        layers = (self.query, self.key, self.value)
        if torch.is_autocast_enabled(hidden_states.device.type):
            weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
            products = linear(hidden_states, weight, bias).chunk(3, -1)
        else:
            products = tuple(layer(hidden_states) for layer in layers)
        query, key, value = (rows.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for rows in products)
        output, _ = attention.attend_within_windows(self, query, key, value, attention_mask, self.dropout.p, **kwargs)
        return output.flatten(2), None


def compile_layers(model: nn.Module, mode: str | None) -> None:
    """Compile each layer for any number of tokens. Names in state_dict do not change. Call `place` before.

    `mode`: torch.compile's mode. With "reduce-overhead", a CUDA graph is captured per number of tokens, and the model's
    next forward pass overwrites its outputs. Raises UserError if the layers lack BERT's structure.
    """
    network: Any = model
    try:
        layers = network.base_model.encoder.layer
        assert all(layer.attention.output and layer.intermediate and layer.output for layer in layers)
    except AttributeError:
        family = network.config.model_type
        raise UserError(f"--torch_compile does not support {family} models. Remove the flag.") from None
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # all layers share their code
    torch._dynamo.config.specialize_float = True  # the dropout probability selects the attention kernel
    for layer in layers:
        layer.compile(dynamic=True, mode=mode)
    if mode == REDUCE_OVERHEAD:  # otherwise torch may take each layer's call for a new step
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin(), prepend=True)
