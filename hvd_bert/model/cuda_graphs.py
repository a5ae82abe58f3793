"""CUDA graphs: a layer's passes are recorded once per number of tokens, then started by one call instead of by 40.

A step of small or medium batches is bound by the host that starts a thousand kernels. A graph has fixed shapes, so
packed batches are padded to a multiple of `BUCKET` tokens (data/collate.py). Each part of the model is one node of
autograd by torch.cuda.make_graphed_callables: gradients still arrive part by part, and the hooks by which Horovod and
DDP average them run as without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hvd_bert.config.training import TrainArguments
from hvd_bert.errors import UserError
from hvd_bert.model import attention
from hvd_bert.model.attention import Windows


def wanted(args: TrainArguments, device: torch.device) -> bool:
    """Whether a training on `device` uses graphs: not on CPUs."""
    return args.cuda_graphs and device.type == "cuda"


def parts_of(model: Any, whole: bool) -> list[nn.Module]:
    """The parts of a model to record, in the order of the forward pass: the `whole` model, or embeddings, layers, head.

    Layers send their gradients while those of the layers below are computed. Raises UserError if the model does not
    take packed windows.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != attention.NAME:
        name = getattr(config, "model_type", type(model).__name__)
        raise UserError(
            f"--cuda_graphs needs packed windows, but these {name} models get padded ones, or none. Omit the flag, or"
            " --padding."
        )
    if whole and not type(model).__name__.endswith("ForSequenceClassification"):  # there, shapes follow the lengths
        return [model]
    encoder = model.base_model
    lists = (part for part in encoder.modules() if isinstance(part, nn.ModuleList))
    layers = next((part for part in lists if len(part) == config.num_hidden_layers), None)
    middle = [*layers] if layers else [encoder.encoder]  # ALBERT uses one layer several times
    ends = getattr(encoder, "embeddings", None), getattr(model, "qa_outputs", None)
    return [part for part in (ends[0], *middle, ends[1]) if part is not None]


class CudaGraphs:
    """Replaces the forward methods of `parts` of a model, each of which runs once per pass.

    In training mode, inputs of the shapes that `record` has seen take the graphs; all others run eagerly.
    """

    def __init__(self, parts: Sequence[nn.Module], autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """`autocast`: of a forward pass; it must not keep casts, which no replay would repeat."""
        self.autocast = autocast
        self._parts = [_Part(part, self) for part in parts]
        self._pool = torch.cuda.graph_pool_handle()  # passes do not overlap, so graphs of all shapes share memory
        trained = {p for part in parts for p in part.parameters() if p.requires_grad}
        # A node without a reference is freed, and the next one works on the stream that is then current: the references
        # keep recording from making them on its own stream.
        self._nodes = [get_gradient_edge(parameter).node for parameter in trained]
        self.calls: list[_Call] | None = None  # of a pass that is being recorded
        self.copied: dict[int, Tensor] = {}  # id of a static input -> the tensor whose content it has

    def record(self, forward: Callable[[], object]) -> None:
        """Record graphs for the shapes that `forward`, a pass of the whole model, has. It draws random numbers."""
        self.calls = []
        with self.autocast():
            forward()
        calls, self.calls = self.calls, None
        assert [call.part for call in calls] == self._parts
        every = {id(tensor): tensor for call in calls for tensor in call.tensors}  # parts share the windows' borders
        statics = {key: t.detach().clone().requires_grad_(t.requires_grad) for key, t in every.items()}
        inputs = tuple(tuple(statics[id(tensor)] for tensor in call.tensors) for call in calls)
        every.clear()  # frees the pass's activations
        for call in calls:
            call.tensors.clear()
        torch.cuda.make_graphed_callables(tuple(calls), inputs, allow_unused_input=True, pool=self._pool)
        for call, own in zip(calls, inputs, strict=True):
            call.part.graphs[call.inputs] = call.forward, own

    def close(self) -> None:
        """Give the parts their own forward methods back, and free the graphs."""
        for part in self._parts:
            part.restore()
        self._parts, self._nodes = [], []
        self.copied.clear()


class _Part:
    """A part of the model, whose forward method it replaces."""

    def __init__(self, module: nn.Module, owner: CudaGraphs) -> None:
        self.module, self.eager, self.owner = module, module.forward, owner
        self._compiled = module._compiled_call_impl  # --torch_compile has compiled the call around `forward`
        if self._compiled:
            module._compiled_call_impl = None
            self.eager = torch.compile(module.forward, dynamic=True)
        self.graphs: dict[Hashable, tuple[Callable[..., Any], Sequence[Tensor]]] = {}
        module.forward = self._forward

    def restore(self) -> None:
        del self.module.forward
        self.module._compiled_call_impl = self._compiled
        self.graphs.clear()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.eager(*args, **kwargs)
        tensors: list[Tensor] = []
        inputs = _describe(args, tensors), tuple((name, _describe(value, tensors)) for name, value in kwargs.items())
        if self.owner.calls is not None:
            self.owner.calls.append(_Call(self, inputs, tensors))
        if inputs not in self.graphs:
            return self.eager(*args, **kwargs)
        graph, statics = self.graphs[inputs]
        copied = self.owner.copied
        for i, static in enumerate(statics):
            if static.requires_grad:
                continue  # each part's own
            if copied.get(id(static)) is tensors[i]:
                tensors[i] = static  # a part before this one has copied it
            else:
                copied[id(static)] = tensors[i]
        return graph(*tensors)


class _Call(nn.Module):
    """A call of a part, as a module that takes only tensors, for make_graphed_callables."""

    def __init__(self, part: _Part, inputs: tuple[Any, Any], tensors: list[Tensor]) -> None:
        super().__init__()
        self.module = part.module  # its parameters and buffers are static inputs, too
        self.part, self.inputs, self.tensors = part, inputs, tensors

    def forward(self, *tensors: Tensor) -> Any:
        rest = iter(tensors)
        args = _rebuild(self.inputs[0], rest)
        kwargs = {name: _rebuild(value, rest) for name, value in self.inputs[1]}
        with self.part.owner.autocast():  # not around the recording: backward passes have none
            return self.part.eager(*args, **kwargs)


class _Input(NamedTuple):
    """A tensor among a part's inputs."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class _Borders(NamedTuple):
    """`Windows` among a part's inputs, without the lengths, which a graph must not read."""

    cu_seqlens: Any
    longest: int
    reach: int | None


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """Add the tensors in `value` to `tensors`. Returns, hashable, what must be equal for a graph to fit."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Input(value.shape, value.dtype, value.requires_grad)
    if isinstance(value, Windows):
        return _Borders(_describe(value.cu_seqlens, tensors), value.longest, value.reach)
    return tuple(_describe(part, tensors) for part in value) if type(value) is tuple else value


def _rebuild(described: Any, tensors: Iterator[Tensor]) -> Any:
    """The value that `_describe` described, with the next of `tensors` in place of its own."""
    if isinstance(described, _Input):
        return next(tensors)
    if isinstance(described, _Borders):
        return Windows([], next(tensors), described.longest, described.reach)
    return tuple(_rebuild(part, tensors) for part in described) if type(described) is tuple else described
