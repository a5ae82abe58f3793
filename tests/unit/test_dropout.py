"""Dropout on the CPU: its rate, its scale, its gradient, and the source of its random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from tables import each

from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.dropout import LEVELS, Dropout, keep_mask

MANY = 400_000


@pytest.fixture(autouse=True)
def own_dropout():
    with kernels.override(kernels.Kernels(dropout=kernels.OWN)):
        yield


@each("p", [0.1, 0.5, 0.9, 0.003])
def test_rate_and_scale(p):
    torch.manual_seed(0)
    kept = Dropout(p)(torch.ones(MANY))
    rounded = round(p * LEVELS) / LEVELS
    share = (kept == 0).float().mean().item()
    assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / MANY))
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / (1 - rounded)]))
    assert rounded == pytest.approx(p, abs=0.5 / LEVELS)


def test_each_eighth_of_a_word_has_the_rate_and_neighbors_are_independent():
    torch.manual_seed(0)
    p, bound = 0.3, 5 * math.sqrt(0.3 * 0.7 / (MANY / 8))
    dropped = (keep_mask(torch.Size([MANY // 8, 8]), p) == 0).float()
    assert ((dropped.mean(0) - p).abs() < bound).all()
    for distance in (1, 2, 3, 4, 8):
        both = (dropped.flatten()[distance:] * dropped.flatten()[:-distance]).mean().item()
        assert both == pytest.approx(p * p, abs=5 * math.sqrt(p * p * (1 - p * p) / MANY))


def test_gradient_of_the_kept_elements():
    torch.manual_seed(1)
    for values in (torch.randn(1), torch.randn(2, 3, 11), torch.randn(6, 5).t()):
        values.requires_grad_()
        result, upstream = Dropout(0.5)(values), torch.randn(values.shape)
        (gradient,) = torch.autograd.grad(result, values, upstream)
        torch.testing.assert_close(gradient, upstream * (result / values).detach(), rtol=1e-6, atol=0)
        assert result.shape == values.shape


def test_random_bits_come_from_torchs_generator():
    module, values = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(3)
    first, second = module(values), module(values)
    torch.manual_seed(3)
    assert torch.equal(first, module(values)) and torch.equal(second, module(values))
    assert not torch.equal(first, second)


def test_nothing_is_dropped_outside_training_or_at_0():
    values = torch.randn(100)
    state = torch.get_rng_state()
    assert Dropout(0.5).eval()(values) is values
    assert torch.equal(Dropout(0.0)(values), values)
    assert torch.equal(torch.get_rng_state(), state)


@each("p", [1 / 512, 0.5 + 1 / 512, 1 - 1 / 512])
def test_elements_that_8_bits_do_not_decide_get_8_more(p):
    torch.manual_seed(0)
    dropped = (keep_mask(torch.Size([MANY]), p) == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=1 / 800)  # p to 8 bits is wrong by 1 / 512


def test_bf16_drops_the_same_elements_as_fp32():
    values = torch.randn(1000)
    found = []
    for kind in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        rows = values.to(kind).requires_grad_()
        result = Dropout(0.25)(rows)
        found.append((result, *torch.autograd.grad(result.sum(), rows)))
    (exact, gradient), (rounded, rounded_gradient) = found
    assert torch.equal(rounded == 0, exact == 0)
    torch.testing.assert_close(rounded, exact.bfloat16())
    torch.testing.assert_close(rounded_gradient, gradient.bfloat16())
    assert Dropout(0.5)(values.double()).dtype == torch.float64  # by torch's own
