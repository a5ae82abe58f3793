"""Attention over packed windows, compared with softmax(q k / sqrt(d)) v computed window by window."""

from __future__ import annotations

import math

import gpu_kernels
import pytest
import torch

from hvd_bert.model import attention
from hvd_bert.model.attention import (
    attend_within_windows,
    by_efficient,
    by_flash,
    by_jagged,
    by_probabilities,
    by_window,
    choose,
    make_windows,
)
from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.attention import keep_mask, kept_scale

CPU = torch.device("cpu")
LENGTHS = [[9], [1, 3, 1, 4], [3, 3, 3]]


def reference(query, key, value, lengths, scaling, window_size=99):
    outputs, first = [], 0
    for length in lengths:
        q, k, v = (tensor[0, :, first : first + length] for tensor in (query, key, value))
        positions = torch.arange(length, device=q.device)
        far = (positions[:, None] - positions).abs() > window_size
        outputs.append(torch.softmax((q @ k.transpose(1, 2) * scaling).masked_fill(far, -torch.inf), -1) @ v)
        first += length
    return torch.cat(outputs, 1).transpose(0, 1)[None]


@pytest.fixture(
    params=[by_flash, by_efficient, by_jagged, by_window, by_probabilities], ids=lambda kernel: kernel.__name__
)
def kernel(request, monkeypatch):
    """Run a test with each kernel. tests/gpu_kernels.py emulates the GPU kernels, here for any dtype and head size."""
    gpu_kernels.register()
    monkeypatch.setattr(gpu_kernels, "LIMITS", False)
    monkeypatch.setattr(attention, "choose", lambda *_: request.param)
    return request.param


def same_with_gradients(found: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_each_token_attends_to_its_own_window(kernel, lengths, scaling):
    torch.manual_seed(0)
    # transformers, too, passes transposed views: [1, heads, N, head_size].
    query, key, value = (torch.randn(1, 9, 2, 4).transpose(1, 2).requires_grad_() for _ in range(3))
    windows = make_windows(lengths, CPU)
    found, weights = attend_within_windows(torch.nn.Identity(), query, key, value, None, 0.0, scaling, windows)
    assert weights is None
    assert found.shape == (1, 9, 2, 4)
    expected = reference(query, key, value, lengths, scaling or 1 / math.sqrt(4))
    same_with_gradients(found, expected, query, key, value)


@pytest.mark.parametrize("kernel", [by_flash, by_window, by_probabilities], indirect=True)
@pytest.mark.parametrize("sliding_window", [1, 3, 4, 9])
def test_local_attention_is_narrower_than_the_sliding_window(kernel, sliding_window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    found, _ = attend_within_windows(
        torch.nn.Identity(), query, key, value, None, windows=make_windows([3, 6], CPU), sliding_window=sliding_window
    )
    expected = reference(query, key, value, [3, 6], 0.5, window_size=sliding_window - 1)
    same_with_gradients(found, expected, query, key, value)


def test_grouped_heads_and_a_batch_without_lengths(kernel):
    query, key, value = (torch.randn(1, heads, 9, 4) for heads in (4, 2, 2))
    shared = [tensor[:, [0, 0, 1, 1]] for tensor in (key, value)]
    for windows, lengths in ((make_windows([4, 5], CPU), [4, 5]), (None, [9])):
        found, _ = attend_within_windows(torch.nn.Identity(), query, key, value, None, windows=windows)
        torch.testing.assert_close(found, reference(query, *shared, lengths, 0.5))


def test_dropout_in_training_only_and_equal_in_forward_and_backward_pass(kernel):
    """The output is linear in the values, so with equal masks <output, upstream> = <values, their gradient>."""
    module, windows = torch.nn.Identity(), make_windows([4, 5], CPU)
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    for mode in (False, True):
        one, other = (
            attend_within_windows(module.train(mode), query, key, value, None, 0.5, windows=windows)[0] for _ in "ab"
        )
        assert torch.equal(one, other) is not mode
    upstream = torch.randn(one.shape)
    (gradient,) = torch.autograd.grad(one, [value], upstream)
    torch.testing.assert_close((one * upstream).sum(), (value * gradient).sum(), rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_probabilities_and_their_gradient():
    torch.manual_seed(0)
    query, key, value = (torch.randn(7, 2, 4, requires_grad=True) for _ in range(3))
    torch.manual_seed(1)
    found = by_probabilities(query, key, value, make_windows([7], CPU), 0.4, 0.5)
    torch.manual_seed(1)
    factors = -keep_mask(torch.Size([2, 7, 7]), 0.4) * kept_scale(0.4)
    assert 0 < (factors == 0).sum() < factors.numel()
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    expected = (torch.softmax(q @ k.transpose(1, 2) * 0.5, -1) * factors @ v).transpose(0, 1)
    same_with_gradients(found, expected, query, key, value)


def test_bf16_is_near_fp32_with_the_same_dropout():
    torch.manual_seed(0)
    lengths = [40, 25]
    exact = [torch.randn(65, 3, 8).bfloat16().float().requires_grad_() for _ in range(3)]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    upstream = torch.randn(65, 3, 8).bfloat16()

    def output_and_gradients(tensors):
        torch.manual_seed(1)
        output = by_probabilities(*tensors, make_windows(lengths, CPU), 0.1, 8**-0.5)
        return [output, *torch.autograd.grad(output, tensors, upstream.to(output.dtype))]

    for found, expected in zip(output_and_gradients(rounded), output_and_gradients(exact), strict=True):
        assert found.dtype == torch.bfloat16
        # The bound is the sum of four successive rounding errors.
        bound = 4 * torch.finfo(torch.bfloat16).eps * expected.norm() / 2
        assert (found.float() - expected).norm() < bound


NONE, EFFICIENT, BOTH = frozenset(), frozenset({by_efficient}), frozenset({by_efficient, by_flash})


@pytest.mark.parametrize(
    ("device", "dtype", "dropout", "head_size", "found", "expected"),
    [
        ("cuda", torch.bfloat16, 0.0, 64, BOTH, by_flash),
        ("cuda", torch.float16, 0.1, 32, BOTH, by_flash),
        ("cuda", torch.float16, 0.1, 64, EFFICIENT, by_efficient),  # a V100 has no flash attention
        ("cuda", torch.bfloat16, 0.0, 20, BOTH, by_jagged),
        ("cuda", torch.float16, 0.0, 256, BOTH, by_efficient),
        ("cuda", torch.float32, 0.0, 64, BOTH, by_efficient),
        ("cuda", torch.float32, 0.1, 64, NONE, by_jagged),  # a torch version with other signatures
        ("cpu", torch.float32, 0.1, 64, NONE, by_probabilities),
        ("cpu", torch.float32, 0.0, 64, NONE, by_window),
        ("cpu", torch.bfloat16, 0.1, 64, NONE, by_probabilities),
        ("cpu", torch.float64, 0.1, 64, NONE, by_window),
        ("mps", torch.float32, 0.1, 64, NONE, by_window),
    ],
)
def test_chosen_kernel(device, dtype, dropout, head_size, found, expected, monkeypatch):
    monkeypatch.setattr(attention, "gpu_kernels", lambda _: found)
    local = by_window if expected in (by_jagged, by_efficient) else expected
    with kernels.override(kernels.Kernels(attention=kernels.OWN)):
        assert choose(torch.device(device), dtype, dropout, head_size) is expected
        assert choose(torch.device(device), dtype, dropout, head_size, local=True) is local


@pytest.mark.parametrize(
    ("capability", "arguments", "expected"),
    [
        ((7, 0), {}, EFFICIENT),
        ((8, 0), {}, BOTH),
        ((9, 0), {"FLASH": "query, other"}, EFFICIENT),  # a torch version with another signature
        ((9, 0), {"EFFICIENT": "query, other", "FLASH": "other"}, NONE),
    ],
)
def test_kernels_of_a_gpu(capability, arguments, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    for name, value in arguments.items():
        monkeypatch.setattr(attention, name, value)
    assert attention.gpu_kernels.__wrapped__(torch.device("cuda", 0)) == expected
