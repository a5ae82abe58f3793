"""Linear layers with oneDNN, compared with torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvd_bert.model.cpu import kernels, linear
from hvd_bert.model.cpu.kernels import ONEDNN, OPENBLAS, Kernels
from hvd_bert.model.cpu.linear import Linear

needs_openblas = pytest.mark.skipif(not kernels.has_openblas(), reason="numpy has no OpenBLAS with one thread")
needs_it = pytest.mark.skipif(
    kernels.without_missing(Kernels(ONEDNN)) != Kernels(ONEDNN), reason="this torch has no oneDNN"
)


def in_double_precision(layer: nn.Linear, values: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    exact = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    rows = values.detach().double().requires_grad_()
    result = exact(rows)
    return [result, *torch.autograd.grad(result, [rows, *exact.parameters()], upstream.double())]


@pytest.fixture(params=[pytest.param(ONEDNN, marks=needs_it), pytest.param(OPENBLAS, marks=needs_openblas)])
def library(request, monkeypatch):
    """The library of the products."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with kernels.override(Kernels(linear=request.param)):
        yield


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape, bias", [((1, 37, 24), True), ((37, 24), False), ((1, 1, 24), True)])
@pytest.mark.parametrize(
    "size_out", [7, 24, 40]
)  # with more rows than columns, the weight's gradient is computed transposed
def test_result_and_gradients(shape, size_out, bias, monkeypatch):
    used = []
    product = linear.product
    monkeypatch.setattr(linear, "product", lambda *given: used.append(len(given)) or product(*given))
    torch.manual_seed(0)
    layer = Linear(24, size_out, bias)
    values = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(*shape[:-1], size_out)
    result = layer(values)
    found = [result, *torch.autograd.grad(result, [values, *layer.parameters()], upstream)]
    assert used == [3, 2, 2]
    assert found[2].is_contiguous()
    for mine, exact in zip(found, in_double_precision(layer, values, upstream), strict=True):
        assert mine.shape == exact.shape
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("library")
def test_views_without_gradient_that_are_not_contiguous():
    torch.manual_seed(0)
    layer, values = Linear(8, 3), torch.randn(8, 6).t()
    found = layer(values)
    torch.testing.assert_close(found, nn.functional.linear(values, layer.weight, layer.bias))
    found.sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), 6.0))


@pytest.mark.usefixtures("library")
def test_the_storage_of_a_weight_can_still_be_resized_as_fsdp_does():
    layer = Linear(24, 40)
    layer(torch.randn(5, 24)).sum().backward()
    layer.weight.untyped_storage().resize_(0)
    assert layer.weight.untyped_storage().nbytes() == 0


@pytest.mark.usefixtures("library")
def test_unsupported_input_uses_torchs_own_layer(monkeypatch):
    def refuse(*_):
        raise AssertionError("another library was called")

    monkeypatch.setattr(linear, "product", refuse)
    layer, values = Linear(8, 3), torch.randn(4, 8)
    assert layer.double()(values.double()).dtype == torch.float64
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(values).dtype == torch.bfloat16
    assert layer(values[:0]).shape == (0, 3)
    with kernels.override(kernels.TORCH_ONLY):
        assert torch.equal(layer(values), nn.functional.linear(values, layer.weight, layer.bias))
    with pytest.raises(AssertionError, match="was called"):
        layer(values)
