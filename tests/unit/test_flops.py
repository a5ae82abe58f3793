"""FLOP of the encoder families, against torch's counter and BERT's formula."""

from __future__ import annotations

import pytest
import torch
from test_families import QUESTION, SEP, TRAINED, small
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.batch_plan import window_costs
from hvd_bert.model.bert import new_model
from hvd_bert.model.families import model_class
from hvd_bert.model.flops import forward_flops
from hvd_bert.model.lora import add_adapters

RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
PUBLISHED = {"deberta": RELATIVE, "deberta-v2": RELATIVE | {"position_buckets": 8, "conv_kernel_size": 3}}
WINDOWS, LENGTH = 3, 48


def counted(model) -> int:
    """FLOP of a forward and backward pass over padded windows, by torch's counter."""
    tokens = torch.full((WINDOWS, LENGTH), 5)
    tokens[:, [0, 3, 10, -1]] = torch.tensor([SEP, QUESTION, SEP, SEP])  # Longformer's question ends at the first SEP
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        (output.start_logits + output.end_logits).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", TRAINED)
def test_formula_gives_what_torchs_counter_counts(name):
    config = small(name)
    for key, value in PUBLISHED.get(name, {}).items():
        setattr(config, key, value)
    model = model_class(config)._from_config(config, attn_implementation="eager")
    # Most of Splinter's head takes one token per window, and a pass projects DeBERTa's positions once.
    limit = {"splinter": 0.1, "deberta": 0.11}.get(name, 0.01)
    assert forward_flops(model).training([LENGTH] * WINDOWS) == pytest.approx(counted(model), rel=limit)


def test_frozen_weights_have_no_gradients():
    config = small("bert")
    config.num_hidden_layers = 12
    model = model_class(config)._from_config(config, attn_implementation="eager")
    add_adapters(model, ModelArguments(lora_rank=2), seed=1)
    # The first layer's input needs no gradient.
    assert forward_flops(model).training([LENGTH] * WINDOWS) == pytest.approx(counted(model), rel=0.03)


def test_bert_has_its_formula():
    """With the trainer's own layers and attention: 2 FLOP for each weight and token, 4 h per layer and pair."""
    hidden, inner, layers = 32, 48, 2
    config = BertConfig(
        vocab_size=10, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4
    )
    forward = forward_flops(new_model(config, None, seed=0))
    weights = layers * (4 * hidden**2 + 2 * hidden * inner)  # query, key, value, output; feed-forward
    assert (forward.per_pass, forward.per_token) == (0, 2 * weights + 4 * hidden)
    assert (forward.per_pair, forward.crossover) == (layers * 4 * hidden, 2 * hidden + inner)
    cost = int(window_costs([179], forward.crossover)[0])
    assert layers * 4 * hidden * cost == 2 * weights * 179 + forward.per_pair * 179**2
