"""Weights whose gradients are ready only at the end of the backward pass, so that nothing hides their communication."""

from __future__ import annotations

import torch
from made_runs import make_run
from tables import each
from test_families import FIRST_TOKEN, PACKED, SEP, TRAINED, small
from torch import nn

from hvd_bert.model.families import model_class
from hvd_bert.model.flops import late_weights
from hvd_bert.tools.runs import reading


@each("name", TRAINED)
def test_weights_that_come_last_in_a_backward_pass(name, tmp_path):
    """They come after those of the last layer. ALBERT's first layer uses the weights of all layers."""
    config = small(name)
    config.num_labels, config.num_hidden_groups = 2, 1
    model = model_class(config)(config)
    ready = []
    for parameter in filter(lambda weight: weight.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(ready.append)
    tokens = torch.full((1, 8), FIRST_TOKEN)
    tokens[0, [3, 4, 7]] = SEP  # Longformer takes what is before them as the question
    model(input_ids=tokens).start_logits.sum().backward()
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    in_layers = {id(weight) for stack in stacks for weight in stack.parameters()}
    places = [place for place, weight in enumerate(ready) if id(weight) in in_layers]
    first_late = places[0] if name == "albert" else places[-1] + 1
    sizes = [weight.numel() for weight in ready]
    assert late_weights(model) == sum(sizes[first_late:])
    if name in PACKED:  # an older version's run, by the names of the saved model's weights
        model.save_pretrained(tmp_path)
        assert reading._parameters(tmp_path, {}) == (sum(sizes), sum(sizes[first_late:]))


def test_recorded_number_is_read(tmp_path):
    make_run(tmp_path / "run", late_parameters=7)
    assert reading.read(tmp_path / "run").late_parameters == 7
