"""tests/graph_stand_in.py: replays compute what eager passes do, and what would go wrong on a GPU fails."""

from __future__ import annotations

from typing import Any

import gpu_kernels
import graph_stand_in
import pytest
import torch
from graph_stand_in import counted_launches, multi_tensor_launches
from torch import Tensor, nn
from torch.nn.functional import dropout

SHAPES = ((4, 8), (6, 8))


class Layer(nn.Module):
    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), drop

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.linear(x).relu(), self.drop, self.training)


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graph_stand_in.install(monkeypatch.setattr)


def capture(function: Any, *samples: Tensor, **options: Any) -> Any:
    return torch.cuda.make_graphed_callables(function, samples, allow_unused_input=True, **options)


def row(*shape: int) -> Tensor:
    return torch.randn(*(shape or SHAPES[0])).requires_grad_()


def train(model: nn.Sequential, layers: dict[torch.Size, Any]) -> list[Tensor]:
    """Five steps; returns the losses and the weights."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.AdamW(model.parameters(), fused=True), []
    for step in range(5):
        x = torch.randn(SHAPES[step % 2])
        head, first, second, tail = (model[0], *layers[x.shape], model[3])
        loss = tail(second(first(head(x)))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(weights.detach().clone() for weights in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_eager(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Layer(), Layer(), nn.Linear(8, 1))
    first = {name: weights.clone() for name, weights in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=False):
        eager = train(model, dict.fromkeys(map(torch.Size, SHAPES), model[1:3]))
        model.load_state_dict(first)
        pool = torch.cuda.graph_pool_handle()
        graphed = {}
        for shape in SHAPES:
            wrappers = tuple(map(Wrapper, model[1:3]))
            samples = tuple((torch.randn(shape, dtype=dtype).requires_grad_(),) for _ in wrappers)
            made = torch.cuda.make_graphed_callables(wrappers, samples, allow_unused_input=True, pool=pool)
            graphed[torch.Size(shape)] = made
        before = graph_stand_in.replayed.replays
        found = train(model, graphed)
    assert graph_stand_in.replayed.replays == before + 5 * 4
    assert all(map(torch.equal, found, eager)) and not torch.equal(found[0], found[2])


def test_attention_reads_the_windows_at_each_replay() -> None:
    gpu_kernels.register()

    def attend(x: Tensor, cu: Tensor) -> Tensor:
        operation, heads = torch.ops.aten._flash_attention_forward, x.unflatten(1, (1, 8))
        return operation(heads, heads, heads, cu, cu, 6, 6, 0.1, False, False)[0].flatten(1)

    sample, x, x_eager = (torch.linspace(-1, 1, 48).view(6, 8).bfloat16().requires_grad_() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        graphed = capture(attend, sample, torch.tensor([0, 6, 6, 6], dtype=torch.int32))
        for offsets in ([0, 2, 5, 6], [0, 1, 6, 6]):
            cu, upstream, found = torch.tensor(offsets, dtype=torch.int32), torch.randn(6, 8).bfloat16(), []
            for function, tensor in ((graphed, x), (attend, x_eager)):
                tensor.grad = None
                torch.manual_seed(2)
                output = function(tensor, cu)
                output.backward(upstream)
                found.append((output.detach().clone(), tensor.grad))
            assert all(map(torch.equal, *found)) and found[0][0].any() and found[0][1].any()


def test_memory_that_is_not_static() -> None:
    other, layer = torch.ones(8), Layer()
    with pytest.raises(AssertionError, match=r"aten.mul.Tensor reads .*float32 \[8\]"):
        capture(lambda x: x * other, row())
    with pytest.raises(AssertionError, match=r"aten.t?addmm.default reads .*float32 \[8"):
        capture(lambda x: layer(x), row())  # of no module that is captured
    capture(lambda x: x * 2 + torch.tensor(0.5) + torch.zeros(8), row())

    class Half(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):  # the outer one keeps the weights
                return super().forward(x)

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match=r"addmm.default .*bfloat16 \[8"):
        capture(Half(), row())


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put((x > 0,), x.sum()),
        lambda x: x.detach().tolist(),
        lambda x: x.cpu(),
    ],
)
def test_what_waits_for_the_device(read: Any) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(lambda x: (read(x), x * 2)[1], row())
    assert not torch.cuda.is_current_stream_capturing()
    places = torch.tensor([1, 0])
    capture(lambda x, places: x[places] * 2, row(), places)


def test_calls_that_the_graph_does_not_fit() -> None:
    layer = Layer()
    graphed = capture(layer, row())
    assert graphed is layer
    for unlike in (row(1, 8), row().detach(), row().double().detach().requires_grad_()):
        with pytest.raises(AssertionError, match="unlike the samples"):
            graphed(unlike)
        graphed.eval()(unlike.float())  # not replayed
        graphed.train()
    graphed(row())
    layer.linear.weight.data = layer.linear.weight.data.clone()
    with pytest.raises(AssertionError, match=r"than at the capture: linear\.weight"):
        graphed(row())


def test_overwritten_activations() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, second = (capture(Wrapper(Layer()), row(*shape), pool=pool) for shape in SHAPES)
    loss = first(row()).sum()
    second(row(*SHAPES[1]))
    with pytest.raises(AssertionError, match="overwritten"):
        loss.backward()
    with pytest.raises(AssertionError, match="overwritten"):
        first(first(row())).sum().backward()
    first(row()).sum().backward()
    with pytest.raises(AssertionError, match=r"overwrite the gradient of layer\.linear\.weight"):
        first(row()).sum().backward()  # torch keeps the graph's own memory as the gradient


@pytest.mark.parametrize(
    "add",
    [
        lambda layer, _: layer.linear.register_forward_hook(lambda *_: None),
        lambda layer, _: layer.linear.register_forward_pre_hook(lambda *_: None),
        lambda layer, _: layer.register_full_backward_hook(lambda *_: None),
        lambda layer, _: layer.linear.register_full_backward_pre_hook(lambda *_: None),
        lambda layer, _: layer.linear.weight.register_hook(lambda _: None),
        lambda _, sample: sample.register_hook(lambda _: None),
    ],
)
def test_hooks_that_only_the_capture_would_run(add: Any) -> None:
    layer, sample = Layer(), row()
    handle = add(layer, sample)
    with pytest.raises(AssertionError, match="hooks"):
        capture(Wrapper(layer), sample)
    handle.remove()
    capture(Wrapper(layer), sample)


def test_hooks_on_gradients_run_once_per_pass() -> None:
    layer, seen = Layer(), []
    parameters = dict(layer.named_parameters())
    nodes = []
    for name, weights in parameters.items():
        weights.register_post_accumulate_grad_hook(lambda weights, name=name: seen.append((name, weights.grad.clone())))
        nodes.append(weights.expand_as(weights).grad_fn.next_functions[0][0])  # as Horovod does
        nodes[-1].register_hook(lambda *_, name=name: seen.append((f"{name}: node", None)))
    graphed = capture(Wrapper(layer), row())
    assert not seen
    for _ in range(2):
        layer.zero_grad()
        graphed(row()).sum().backward()
        assert sorted(name for name, _ in seen) == sorted([*parameters, *(f"{name}: node" for name in parameters)])
        assert all(gradient.any() for name, gradient in seen if name in parameters)
        seen.clear()


def test_launches() -> None:
    dry, wet = capture(Layer(0.0), row()), capture(Layer(), row())
    x = row()
    with counted_launches() as counted:
        wet(dry(x)).sum().backward()
    # Backward: the sum's upstream gradient is made (1) and copied in (its expansion is a view).
    assert counted.replays == 4 and counted.operations["replay"] == 4
    assert counted.operations["seed and offset"] == 2  # the backward pass draws none
    assert counted.operations["aten::copy_"] == 4 and counted.operations["aten::sum"] == 1
    assert counted.launches == counted.operations.total() and not counted.operations["aten::addmm"]

    weights = [torch.ones(8, requires_grad=True) for _ in range(40)]
    for tensor in weights:
        tensor.grad = torch.ones(8)
    optimizer = torch.optim.AdamW(weights, fused=True)
    optimizer.step()
    with counted_launches() as counted:
        optimizer.step()
        x.view(-1).t().detach()
    assert counted.operations == {"aten::_foreach_add_": 1, "aten::_fused_adamw_": 2} and counted.launches == 3


def test_multi_tensor_launches() -> None:
    for sizes, lists, launches in (
        ([1] * 110, 1, 1),
        ([1] * 111, 1, 2),
        ([0] * 9 + [1] * 36, 4, 1),
        ([65536 * 320], 2, 1),
        ([65536 * 320 + 1], 2, 2),
        ([65536 * 321] + [1] * 63, 2, 2),  # the first tensor's rest is one of 64
        ([65536 * 321] + [1] * 64, 2, 3),
        ([], 1, 0),
    ):
        assert multi_tensor_launches(sizes, lists) == launches
