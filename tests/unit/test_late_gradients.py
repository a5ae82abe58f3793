"""Weights whose gradients are ready only at the end of the backward pass, so that nothing hides their communication."""

from __future__ import annotations

import pytest
import torch
from test_families import FIRST_TOKEN, PACKED, small
from torch import nn

from hvd_bert.model.families import model_class
from hvd_bert.runs import reading


@pytest.mark.parametrize("name", PACKED)
def test_late_weights_of_a_saved_model(name, tmp_path):
    """They come after those of the last layer. ALBERT's first layer uses the weights of all layers."""
    config = small(name)
    config.num_labels, config.num_hidden_groups = 2, 1
    model = model_class(config)(config)
    model.save_pretrained(tmp_path)
    ready = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    model(input_ids=torch.full((1, 8), FIRST_TOKEN)).start_logits.sum().backward()
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    in_layers = {id(weight) for stack in stacks for weight in stack.parameters()}
    places = [place for place, weight in enumerate(ready) if id(weight) in in_layers]
    first_late = places[0] if name == "albert" else places[-1] + 1
    sizes = [weight.numel() for weight in ready]
    assert reading._parameters(tmp_path, {}) == (sum(sizes), sum(sizes[first_late:]))
