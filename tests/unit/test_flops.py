"""FLOP of the encoder families, against BERT's formula and torch's counter."""

from __future__ import annotations

import pytest
import torch
from tables import each
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForQuestionAnswering, BertConfig

from hvd_bert.config.settings import ModelArguments
from hvd_bert.data.batch_plan import window_costs
from hvd_bert.model.bert import new_model
from hvd_bert.model.cpu import kernels
from hvd_bert.model.flops import forward_flops, with_adapters
from hvd_bert.model.lora import add_adapters

TINY = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NAMES = {"intermediate_size": "hidden_dim"}  # DistilBERT's, which has aliases for the others
FAMILIES = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "albert": {"embedding_size": 16, "num_hidden_layers": 4},  # layers that share their weights
    "electra": {"embedding_size": 16},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},  # gated feed-forward, local attention
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "mpnet": {},
    "longformer": {"attention_window": 8, "sep_token_id": 2},
}


def tiny(family, **changed):
    sizes = {NAMES.get(k, k) if family == "distilbert" else k: v for k, v in TINY.items()}
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family] | changed, attn_implementation="eager")
    return AutoModelForQuestionAnswering.from_config(config)


@each("family", FAMILIES)
def test_flops_match_torchs_counter(family):
    """Forward and backward pass of padded batches."""
    model, windows, length = tiny(family), 3, 64
    tokens = torch.full((windows, length), 5)
    tokens[:, [0, 10, -1]] = 2  # Longformer takes what is before the separators as the question
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        (output.start_logits + output.end_logits).sum().backward()
    counted = forward_flops(model).training([length] * windows)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert model.training


def test_frozen_weights_have_no_gradients():
    model, length = tiny("bert", num_hidden_layers=12), 16
    flops = forward_flops(model)
    add_adapters(model, ModelArguments(lora_rank=2), seed=1)
    tokens = torch.full((3, length), 5)
    with FlopCounterMode(display=False) as counter, kernels.override(kernels.TORCHS):
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        (output.start_logits + output.end_logits).sum().backward()
    # The first layer's input needs no gradient.
    assert with_adapters(flops, model).training([length] * 3) == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(("hidden", "inner", "layers"), [(384, 1536, 1), (32, 48, 2)])
def test_bert_has_its_formula(hidden, inner, layers):
    """With the trainer's own layers and attention: 2 FLOP for each weight and token, 4 h per layer and pair."""
    config = BertConfig(
        vocab_size=10, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4
    )
    forward = forward_flops(new_model(config, None, seed=0))
    weights = layers * (4 * hidden**2 + 2 * hidden * inner)  # query, key, value, output; feed-forward
    assert (forward.per_pass, forward.per_token) == (0, 2 * weights + 4 * hidden)
    assert (forward.per_pair, forward.crossover) == (layers * 4 * hidden, 2 * hidden + inner)
    cost = int(window_costs([179], forward.crossover)[0])
    assert layers * 4 * hidden * cost == 2 * weights * 179 + forward.per_pair * 179**2
