"""The random bits of attention's dropout on the CPU: their rate, their independence and their source."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_bert.model.cpu.attention import LEVELS, keep_mask, kept_scale

MANY = 4_000_000  # so many that 1 / 512, what 8 bits would be wrong by, is 7 standard deviations or more


# 8 bits do not decide on some.
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.003, 1 / 512, 0.5 + 1 / 512, 1 - 1 / 512])
def test_rate_and_scale(p):
    torch.manual_seed(0)
    dropped = (keep_mask(torch.Size([MANY]), p) == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / MANY))
    assert 1 / kept_scale(p) == pytest.approx(1 - p, abs=0.5 / LEVELS)


def test_random_bits_come_from_torchs_generator():
    torch.manual_seed(3)
    first, second = (keep_mask(torch.Size([1000]), 0.5) for _ in range(2))
    torch.manual_seed(3)
    assert all(torch.equal(keep_mask(torch.Size([1000]), 0.5), found) for found in (first, second))
    assert not torch.equal(first, second)
