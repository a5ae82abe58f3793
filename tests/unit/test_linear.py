"""Linear layers with oneDNN, compared with torch's own in double precision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hvd_bert.model.cpu import kernels, linear
from hvd_bert.model.cpu.kernels import ONEDNN, OPENBLAS, Kernels
from hvd_bert.model.cpu.linear import Linear

needs_openblas = pytest.mark.skipif(not kernels.has_openblas(), reason="numpy has no OpenBLAS with one thread")
needs_it = pytest.mark.skipif(kernels.usable(Kernels(ONEDNN)) != Kernels(ONEDNN), reason="this torch has no oneDNN")


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
    with kernels.using(Kernels(linear=request.param)):
        yield


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(1, 37, 24), (37, 24), (2, 5, 24), (1, 1, 24)], ids=str)
@pytest.mark.parametrize(
    "size_out", [7, 24, 40]
)  # with more rows than columns, the weight's gradient is computed transposed
@pytest.mark.parametrize("bias", [True, False])
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
def test_input_without_gradient():
    layer = Linear(8, 3)
    layer(torch.randn(4, 8)).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), 4.0))


@pytest.mark.usefixtures("library")
def test_views_that_are_not_contiguous():
    torch.manual_seed(0)
    layer, values = Linear(8, 3), torch.randn(8, 6).t()
    torch.testing.assert_close(layer(values), nn.functional.linear(values, layer.weight, layer.bias))


KEEPS_FEW_KERNELS = """
import torch
from pathlib import Path
from hvd_bert.model.cpu import kernels, linear

def resident():  # MB
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

linear.keep_few_kernels()
torch.set_num_threads(1)
rows, weight = torch.randn(1200, 384), torch.randn(384, 384)
before = None
using = kernels.using(kernels.Kernels(linear=kernels.ONEDNN))
using.__enter__()
for count in range(300, 900):
    some = rows[:count]
    linear.product(some, weight), linear.product(some, weight.t()), linear.product(some.t(), some.t())
    if count == 400:
        before = resident()
print(resident() - before)
linear.product(rows, weight), linear.product(rows, weight)
"""


@pytest.mark.slow
@needs_it
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is read from Linux's /proc")
def test_products_of_many_shapes_leave_little_memory_behind_and_the_last_one_is_kept():
    environ = {key: v for key, v in os.environ.items() if "CACHE_CAPACITY" not in key}
    environ["ONEDNN_VERBOSE"] = "profile_create"
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_FEW_KERNELS], capture_output=True, text=True, check=True, timeout=120, env=environ
    )
    lines = done.stdout.splitlines()
    (grown,) = [line for line in lines if not line.startswith("onednn_verbose")]
    assert float(grown) < 50
    last, again = [line for line in lines[lines.index(grown) :] if ",matmul," in line or ",inner_product," in line]
    assert "cache_miss" in last and "cache_hit" in again


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
    with kernels.using(kernels.TORCHS):
        assert torch.equal(layer(values), nn.functional.linear(values, layer.weight, layer.bias))
    with pytest.raises(AssertionError, match="was called"):
        layer(values)
