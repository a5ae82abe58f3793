"""Attention over windows laid end to end, against softmax(q k / sqrt(d)) v of one window at a time."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_bert.attention import attend_within_windows


def reference(query, key, value, lengths, scaling):
    outputs, first = [], 0
    for length in lengths:
        q, k, v = (tensor[0, :, first : first + length] for tensor in (query, key, value))
        outputs.append(torch.softmax(q @ k.transpose(1, 2) * scaling, -1) @ v)
        first += length
    return torch.cat(outputs, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("lengths", [[9], [4, 5], [1, 3, 1, 4], [3, 3, 3]], ids=str)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_each_token_sees_its_own_window(lengths, scaling):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4) for _ in range(3))
    found, weights = attend_within_windows(
        torch.nn.Identity(), query, key, value, None, scaling=scaling, window_lengths=lengths
    )
    assert weights is None
    assert found.shape == (1, 9, 2, 4)
    torch.testing.assert_close(found, reference(query, key, value, lengths, scaling or 1 / math.sqrt(4)))


def test_no_lengths_mean_one_window():
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    found, _ = attend_within_windows(torch.nn.Identity(), query, key, value, None)
    torch.testing.assert_close(found, reference(query, key, value, [5], 0.5))


def test_lengths_that_do_not_add_up():
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with pytest.raises(RuntimeError):
        attend_within_windows(torch.nn.Identity(), query, key, value, None, window_lengths=[2, 2])


def test_dropout_in_training_only():
    module = torch.nn.Identity()
    query, key, value = (torch.randn(1, 2, 9, 4) for _ in range(3))
    for mode in (True, False):
        module.train(mode)
        one, other = (
            attend_within_windows(module, query, key, value, None, 0.5, window_lengths=[4, 5])[0] for _ in range(2)
        )
        assert torch.equal(one, other) is not mode
