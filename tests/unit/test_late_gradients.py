"""Weights whose gradients are ready only at the end of the backward pass, so that nothing hides their communication."""

from __future__ import annotations

import pytest
from transformers import AlbertConfig, AlbertForQuestionAnswering, BertConfig, BertForQuestionAnswering

from hvd_bert.runs import reading

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
HEAD = {"qa_outputs.weight", "qa_outputs.bias"}


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_late_weights_of_a_saved_model(family, tmp_path):
    if family == "bert":
        model, late = BertForQuestionAnswering(BertConfig(**SIZES, num_hidden_layers=3)), 5  # embeddings
    else:
        model = AlbertForQuestionAnswering(AlbertConfig(**SIZES))
        late = len(set(dict(model.named_parameters())) - HEAD)  # the first layer uses the weights of all
    model.save_pretrained(tmp_path)
    ready = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    model(**model.dummy_inputs).start_logits.sum().backward()
    sizes = [parameter.numel() for parameter in ready]
    assert reading._parameters(tmp_path, {}) == (sum(sizes), sum(sizes[-late:]))
