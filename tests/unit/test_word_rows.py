"""The sparse gradient of the word embeddings: dense for the optimizer, and that of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from hvd_bert.strategies.word_rows import WordRows, word_embedding

WORDS, SIZE = 11, 3


def made(seed: int = 0) -> nn.Embedding:
    torch.manual_seed(seed)
    return nn.Embedding(WORDS, SIZE, padding_idx=0)


def backward(embedding: nn.Embedding, tokens: list[int], factor: float = 1.0) -> None:
    places = torch.arange(1.0, len(tokens) + 1)[:, None]
    (embedding(torch.tensor(tokens)).square() * places).sum().mul(factor).backward()


def dense_gradient(*passes: list[int]) -> torch.Tensor:
    embedding = made()
    for tokens in passes:
        backward(embedding, tokens)
    return embedding.weight.grad


def test_the_gradient_is_torchs_and_has_no_rows_of_earlier_steps():
    embedding = made()
    rows = WordRows(embedding)
    for passes in ([[4, 7, 4, 0]], [[1, 2], [2, 10, 2]], [[4]]):
        for tokens in passes:
            backward(embedding, tokens)
        assert embedding.weight.grad.is_sparse
        rows.make_dense()
        torch.testing.assert_close(embedding.weight.grad, dense_gradient(*passes))
        embedding.zero_grad()


def test_rows_of_equal_words_of_several_ranks_are_added():
    embedding = made()
    rows = WordRows(embedding)
    indices, values = torch.tensor([[4, 7, 1, 4]]), torch.arange(12.0).view(4, 3)
    embedding.weight.grad = torch.sparse_coo_tensor(indices, values, (WORDS, SIZE), check_invariants=True)
    rows.make_dense()
    assert embedding.weight.grad[4].tolist() == [9, 11, 13]
    assert embedding.weight.grad.sum() == values.sum()


def test_a_step_after_one_of_nan_is_clean():
    embedding = made()
    rows = WordRows(embedding)
    backward(embedding, [4, 7], factor=float("nan"))
    rows.make_dense()
    optimizer: Any = torch.optim.AdamW(embedding.parameters(), fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(float("nan")), torch.ones(())  # as `Strategy.clip` does
    optimizer.step()
    assert embedding.weight.isfinite().all()
    embedding.zero_grad()
    backward(embedding, [3, 4])
    rows.make_dense()
    torch.testing.assert_close(embedding.weight.grad, dense_gradient([3, 4]))


SHAPE = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}


def test_models_without_trained_words_have_none():
    model = BertModel(BertConfig(vocab_size=WORDS, **SHAPE))
    assert word_embedding(model) is model.embeddings.word_embeddings
    model.embeddings.word_embeddings.weight.requires_grad = False
    assert word_embedding(model) is word_embedding(nn.Linear(2, 2)) is None
    assert word_embedding(BertForMaskedLM(BertConfig(vocab_size=WORDS, **SHAPE))) is None  # tied to its last layer


def test_words_whose_weight_has_another_use_stay_dense():
    embedding = made()
    rows = WordRows(embedding)
    (embedding(torch.tensor([1, 2])).sum() + embedding.weight.sum()).backward()
    rows.make_dense()
    assert embedding.weight.grad.sum(1).tolist() == [3, 6, 6, *[3] * 8]
