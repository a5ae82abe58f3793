"""Damaged configurations of other families than BERT: one UserError that names the folder, without a long wait."""

from __future__ import annotations

import pytest
from tables import each, refused
from test_families import small

from hvd_bert.config.settings import ModelArguments
from hvd_bert.errors import UserError
from hvd_bert.model.bert import load_model

pytestmark = pytest.mark.timeout(300)  # a model with a billion layers

HUGE = 10**9


def load_small(name, settings, tokenizer, folder):
    config = small(name)
    config.vocab_size = len(tokenizer)
    for key, value in settings.items():
        setattr(config, key, value)
    config.save_pretrained(folder)
    return load_model(ModelArguments(config_name=str(folder)), tokenizer, 32, seed=1)


@each(
    ("name", "settings", "words"),
    [
        *(
            (name, {"type_vocab_size": 0}, "cannot be loaded")
            for name in ("albert", "roberta", "electra", "ernie", "megatron-bert")
        ),
        ("albert", {"num_hidden_groups": 0}, "cannot be loaded"),
        ("albert", {"num_hidden_groups": -1}, "cannot be loaded"),
        ("albert", {"num_hidden_groups": HUGE}, "num_hidden_groups 1000000000 is more than 1000"),
        ("albert", {"inner_group_num": HUGE}, "inner_group_num 1000000000 is more than 1000"),
        ("mobilebert", {"intra_bottleneck_size": 0}, "cannot be loaded"),
        ("mobilebert", {"num_feedforward_networks": 0}, "cannot be loaded"),
        ("mobilebert", {"num_feedforward_networks": -1}, "cannot be loaded"),
        ("mobilebert", {"num_feedforward_networks": HUGE}, "num_feedforward_networks 1000000000 is more than 1000"),
        ("mobilebert", {"pad_token_id": None}, "cannot be loaded"),
        ("mpnet", {"relative_attention_num_buckets": 0}, "cannot be loaded"),
        ("longformer", {"attention_window": 0}, "cannot be loaded"),
        ("longformer", {"attention_window": HUGE}, "attention_window 1000000000 is more than 4096"),
        ("longformer", {"attention_window": [4, 4, HUGE]}, r"attention_window \[4, 4, 1000000000\] is more than 4096"),
    ],
)
def test_damage_is_one_message(name, settings, words, tokenizer, tmp_path):
    with pytest.raises(UserError, match=words) as raised:
        load_small(name, settings, tokenizer, tmp_path)
    message = str(raised.value)
    assert message.startswith(f"'{tmp_path}' cannot be loaded (") and "\n" not in message


def test_rotary_positions_of_the_hubs_jina_models(tokenizer, tmp_path):
    load_small("jina_embeddings_v3", {"position_embedding_type": "rotary"}, tokenizer, tmp_path)
    with refused("position_embedding_type"):
        load_small("roberta", {"position_embedding_type": "rotary"}, tokenizer, tmp_path)


def test_longformer_with_fewer_positions_than_its_window(tokenizer, tmp_path):
    load_small("longformer", {"attention_window": 128}, tokenizer, tmp_path)
