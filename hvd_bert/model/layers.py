"""Layers in place of transformers': faster ones for CPUs, and query, key and value as one product for GPUs.

A new layer has the parameters of the one that it replaces under the same names, so state_dict and saved models stay
transformers' own. The table in `families.py` says which classes are replaced.
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
    """Move a model to the device that it is trained or evaluated on, with the layers that are fastest there.

    `compiled`: torch.compile will compile it, which does not support this package's layers for CPUs. Models of families
    that the table lacks keep their layers.
    """
    config: Any = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family and device.type != "cuda" and not compiled:
        layers: dict[type | str, Replace] = {name: AddAndNorm.of for name in family.add_and_norm}
        replace_layers(model, layers | {nn.Linear: Linear.of})
    elif family and family.attention and config._attn_implementation == attention.NAME:
        replace_layers(model, {family.attention: JoinedAttention.of})
    model.to(device=device)


def replace_layers(module: nn.Module, layers: Mapping[type | str, Replace]) -> None:
    """Replace the layers in a module, innermost first, except those with hooks, such as pruned ones.

    `layers`: by class, those of transformers by its name.
    """
    for name, part in module.named_children():
        replace_layers(part, layers)
        kind = type(part)
        replace = layers.get(kind.__name__ if kind.__module__.startswith("transformers.") else kind)
        if replace and not any(getattr(part, hooks) for hooks in HOOKS):
            setattr(module, name, replace(part).train(part.training))


class AddAndNorm(nn.Module):
    """BERT's output layers: dense, dropout, residual, layer norm; the last three in one pass where it is compiled."""

    def __init__(self, dense: nn.Module, dropout: nn.Dropout, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = dense, dropout, norm

    @staticmethod
    def of(layer: Any) -> AddAndNorm:
        """In place of transformers' `layer`."""
        return AddAndNorm(layer.dense, layer.dropout, layer.LayerNorm)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., size of dense], input_tensor [..., size] -> [..., size]."""
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
    """BERT's self-attention over packed windows; under autocast, query, key and value are one product of all weights.

    MLPerf's entries do so, too: a large product fills a GPU better, and the hidden states are cast once. In fp32,
    joining would only add a copy of the weights.
    """

    def __init__(self, query: nn.Linear, key: nn.Linear, value: nn.Linear, dropout: nn.Dropout, head_size: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dropout = query, key, value, dropout
        self.head_size = head_size

    @staticmethod
    def of(layer: Any) -> nn.Module:
        """In place of transformers' `layer`, unless it has adapters."""
        parts = (layer.query, layer.key, layer.value)
        if any(type(part) is not nn.Linear for part in parts):
            return layer  # type: ignore[no-any-return]
        return JoinedAttention(*parts, layer.dropout, layer.attention_head_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """`hidden_states`: [1, N, hidden size]. Returns the same shape, and no attention weights."""
        parts = (self.query, self.key, self.value)
        if torch.is_autocast_enabled(hidden_states.device.type):
            weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
            products = linear(hidden_states, weight, bias).chunk(3, -1)
        else:
            products = tuple(part(hidden_states) for part in parts)
        query, key, value = (rows.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for rows in products)
        output, _ = attention.attend_within_windows(self, query, key, value, attention_mask, self.dropout.p, **kwargs)
        return output.flatten(2), None


def compile_layers(model: nn.Module, mode: str | None) -> None:
    """Compile each layer of a model that `place` has prepared for it, for any number of tokens; names in state_dict do
    not change.

    `mode`: torch.compile's. With "reduce-overhead" CUDA graphs of a layer's passes are captured for each number of
    tokens; what they return is overwritten from the model's next forward pass on.

    Raises UserError if the layers are not built as BERT's.
    """
    network: Any = model
    try:
        layers = network.base_model.encoder.layer
        assert all(layer.attention.output and layer.intermediate and layer.output for layer in layers)
    except AttributeError:
        raise UserError(
            f"--torch_compile does not support {network.config.model_type} models. Remove the flag."
        ) from None
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # all layers share their code
    torch._dynamo.config.specialize_float = True  # dropout's probability, by which the attention is chosen
    for layer in layers:
        layer.compile(dynamic=True, mode=mode)
    if mode == REDUCE_OVERHEAD:  # torch could take each layer's call for a new pass
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin(), prepend=True)
