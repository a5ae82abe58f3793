"""Weights whose gradients are ready only at the end of the backward pass, so that nothing hides their communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from hvd_bert.model.flops import try_once


def late_weights(model: Any) -> int:
    """The number of weights that a forward pass uses before the first layer, or again in each of several layers.

    A gradient is final after the backward pass through the weight's first use.
    """
    encoder = model.base_model
    layers = {part for stack in encoder.modules() if isinstance(stack, nn.ModuleList) for part in stack.modules()}
    calls: list[nn.Module] = []
    owners = [module for module in encoder.modules() if list(module.parameters(recurse=False))]
    hooks = [module.register_forward_pre_hook(lambda module, _: calls.append(module)) for module in owners]
    try:
        try_once(model)
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(calls)
    first_layer = next((place for place, module in enumerate(calls) if module in layers), len(calls))
    late = set(calls[:first_layer]) | {module for module in owners if times[module] > 1}
    # DeBERTa's layers take the weight of its relative positions without a call.
    late |= {module for module in owners if not times[module] and module not in layers}
    weights = [weight for module in late for weight in module.parameters(recurse=False)]
    return sum(weight.numel() for weight in weights if weight.requires_grad)
