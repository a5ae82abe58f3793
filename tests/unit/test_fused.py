"""The compiled operations next to torch's: attention with dropout, and linear layers in bf16."""

from __future__ import annotations

import pytest
import torch
from transformers import ElectraConfig
from transformers.models.electra.modeling_electra import ElectraSelfOutput

from hvd_bert.model import attention
from hvd_bert.model.cpu import fused, kernels
from hvd_bert.model.cpu.kernels import FUSED, OWN, Kernels
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.layers import AddAndNorm
from hvd_bert.model.precision import autocast

HEADS, DROPPED = 3, 6554
needs_fused = pytest.mark.skipif(not fused.available(), reason="not compiled, or a CPU without the instructions")


def kept(bits: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """float64 [heads, T, T] of each window: 0 or the scale of what is kept, from the operation's bits."""
    masks, bits = [], bits.view(torch.int32)
    for length in lengths:
        words = -(-length // 32)
        own, bits = bits.split([HEADS * length * words, len(bits) - HEADS * length * words])
        single = own.view(HEADS, length, words, 1) >> torch.arange(32) & 1
        masks.append(single.flatten(2)[..., :length].double() * 65536 / (65536 - DROPPED))
    return masks


def by_hand(q, k, v, masks, scaling):
    outputs, start = [], 0
    for mask in masks:
        length = mask.shape[1]
        query, key, value = (tensor[start : start + length].transpose(0, 1) for tensor in (q, k, v))
        scores = query @ key.transpose(1, 2) * scaling
        outputs.append((scores.softmax(-1) * mask @ value).transpose(0, 1))
        start += length
    return torch.cat(outputs)


@needs_fused
@pytest.mark.parametrize(
    ("dtype", "size", "lengths", "tolerance"),
    [
        (torch.float32, 32, [179, 33, 1, 384, 64], 1e-6),
        (torch.bfloat16, 32, [179, 33, 1, 384, 64], 1e-2),
        (torch.bfloat16, 64, [101, 17], 1e-2),
    ],
)
def test_attention_equals_its_formula_for_the_kept_probabilities(dtype, size, lengths, tolerance):
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, k, v, gradient = (torch.randn(tokens, HEADS, size).to(dtype) for _ in range(4))
    options = (lengths, DROPPED, size**-0.5)
    output, sums, bits = torch.ops.hvd_bert.attention(q, k, v, *options, 2**40 + 1)
    found = torch.ops.hvd_bert.attention_backward(gradient, q, k, v, output, sums, bits, *options)
    masks = kept(bits, lengths)
    share = sum(mask.count_nonzero() for mask in masks) / sum(mask.numel() for mask in masks)
    assert share == pytest.approx(0.9, abs=0.01)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = by_hand(*exact, masks, size**-0.5)
    gradients = torch.autograd.grad(expected, exact, gradient.double())
    for one, other in zip((output, *found), (expected, *gradients), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@needs_fused
def test_attention_repeats_with_the_generator_and_threads_do_not_change_it():
    query, windows = torch.randn(90, HEADS, 32), attention.make_windows([50, 40], torch.device("cpu"))
    outputs = []
    for seed, threads in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        outputs.append(attention.by_fused(query, query, query, windows, 0.1, 0.2))
    torch.set_num_threads(1)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@needs_fused
@pytest.mark.parametrize(
    ("tokens", "size_in", "size_out", "bias"), [(67, 64, 96, True), (5, 96, 32, False), (64, 32, 1536, True)]
)
def test_linear_layer_in_bf16(tokens, size_in, size_out, bias):
    torch.manual_seed(0)
    layer, rows = Linear(size_in, size_out, bias=bias), torch.randn(2, tokens, size_in, requires_grad=True)
    upstream = torch.randn(2, tokens, size_out).bfloat16()
    found = []
    torch.set_num_threads(1)  # with more, the layer is torch's
    for chosen in (Kernels(linear=FUSED), kernels.TORCH_ONLY):
        with kernels.override(chosen), torch.autocast("cpu", torch.bfloat16):
            output = layer(rows)
        found.append([output, *torch.autograd.grad(output, [rows, *layer.parameters()], upstream)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= 1e-2 * other.abs().max()


@needs_fused
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_dropout_residual_and_layer_norm_equal_their_formula(dtype, tolerance):
    torch.manual_seed(0)
    rows, residual, gradient = torch.randn(137, 64).to(dtype), torch.randn(137, 64) * 2 + 1, torch.randn(137, 64)
    weight, bias = torch.randn(64) + 1, torch.randn(64)
    output, normalized, factors, bits = torch.ops.hvd_bert.add_norm(rows, residual, weight, bias, 1e-12, DROPPED, 5)
    mask = (bits.view(torch.int32)[..., None] >> torch.arange(32) & 1).flatten(1).double() * 65536 / (65536 - DROPPED)
    assert mask.count_nonzero() / mask.numel() == pytest.approx(0.9, abs=0.01)
    exact = [tensor.double().requires_grad_() for tensor in (rows, residual, weight, bias)]
    expected = torch.nn.functional.layer_norm(exact[0] * mask + exact[1], (64,), *exact[2:], 1e-12)
    gradients = torch.autograd.grad(expected, exact, gradient.double())
    found = torch.ops.hvd_bert.add_norm_backward(gradient, normalized, factors, bits, weight, DROPPED, dtype)
    assert found[0].dtype == dtype
    for one, other in zip((output, *found), (expected, *gradients), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@needs_fused
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_layer_with_the_fused_norm(precision, tolerance):
    layer = AddAndNorm.of(ElectraSelfOutput(ElectraConfig(hidden_size=64, hidden_dropout_prob=0.0)))
    inputs, results = (torch.randn(1, 9, 64, requires_grad=True), torch.randn(1, 9, 64, requires_grad=True)), []
    for chosen in (Kernels(norm=FUSED), kernels.TORCH_ONLY):
        with kernels.override(chosen), autocast(torch.device("cpu"), precision):
            output = layer(*inputs)
        results.append([output, *torch.autograd.grad(output.square().sum(), [*inputs, *layer.parameters()])])
    assert "AddNorm" in results[0][0].grad_fn.name() and not results[0][0]._is_view()
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_kernels_without_the_compiled_operations(monkeypatch):
    wanted = Kernels(FUSED, attention=FUSED, norm=FUSED)
    monkeypatch.setattr(fused, "available", lambda: False)
    assert kernels.without_missing(wanted) == Kernels(attention=OWN)
    heads = torch.device("cpu").type, torch.float32, 0.1
    with kernels.override(wanted):
        assert attention.choose(*heads, 32, frozenset()) is attention.by_probabilities
    monkeypatch.setattr(fused, "available", lambda: True)
    with kernels.override(wanted):
        assert attention.choose(*heads, 32, frozenset()) is attention.by_fused
        assert attention.choose(*heads, 40, frozenset()) is attention.by_probabilities
        assert attention.choose(*heads, 32, frozenset(), local=True) is attention.by_probabilities
