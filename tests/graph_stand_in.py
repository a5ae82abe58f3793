"""Run a command with CUDA graphs that are recorded and replayed on the CPU, and a GPU's attention kernels.

    python graph_stand_in.py MODULE_OR_FILE ARGUMENTS...    see gpu_kernels.py; $GPU_GRAPHS gets the number of replays

torch's own `make_graphed_callables` runs on a stand-in for `CUDAGraph`, which records ATen operations and runs them
again on the same memory. Wrong results on a GPU are AssertionErrors here: memory that the graph does not own, arguments
unlike the samples, hooks that only the capture would run, activations that another replay has overwritten.
"""

from __future__ import annotations

import atexit
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.cuda import graphs
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

MAKE = graphs.make_graphed_callables
HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # these wait for the device, and are no ATen operation on the CPU
UNLAUNCHED = ("aten::empty", "aten::new_empty", "aten::record_stream", "aten::resize_", "aten::set_", "profiler::")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
making: list[Group] = []  # the call of make_graphed_callables in progress
capturing: list[CUDAGraph] = []
counting: list[Launches] = []


@dataclass
class Launches:
    """Launches that a GPU would have: one per operation at least, as some operations have several kernels there."""

    launches: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    replays: int = 0

    def add(self, operation: str, launches: int = 1) -> None:
        self.launches += launches
        self.operations[operation] += launches


replayed = Launches()  # by the whole process: replays and their launches


def storages(tree: Any) -> dict[int, Any]:
    """By identity. Who keeps the result keeps the memory."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


def is_view(operation: Any, inputs: Any, outputs: Any) -> bool:
    """Whether all outputs lie in the inputs' memory, which is not written."""
    writes = operation._schema.is_mutable and torch.Tag.inplace_view not in operation.tags
    found = storages(outputs)
    return bool(found) and not writes and found.keys() <= storages(inputs).keys()


def waits(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host needs the result before it can go on."""
    name = operation._schema.name
    if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operation.tags))


def refused(operation: Any) -> RuntimeError:
    return RuntimeError(f"{operation}: CUDA error: operation not permitted when stream is capturing")


class HostReads(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in HOST:
            raise refused(function)
        return function(*args, **(kwargs or {}))


class Pool:
    """Memory that graphs share."""

    def __init__(self) -> None:
        self.written: dict[int, Any] = {}  # by operations of its graphs
        self.intact: set[CUDAGraph] = set()  # forward passes whose activations no other replay has overwritten


class Group:
    """The graphs of one call of make_graphed_callables: all forward ones, then the backward ones."""

    def __init__(self, callables: tuple[Any, ...], samples: tuple[Any, ...]) -> None:
        self.modules = [function for function in callables if isinstance(function, nn.Module)]
        self.graphs: list[CUDAGraph] = []
        self.half = len(callables)
        self.static = storages([samples, *([*module.parameters(), *module.buffers()] for module in self.modules)])
        for module in (part for module in self.modules for part in module.modules()):
            assert not any(getattr(module, kind) for kind in MODULE_HOOKS), f"only the capture would run {module}'s hooks"
        names = [(name, weights) for module in self.modules for name, weights in module.named_parameters()]
        for name, tensor in [*names, *(("a sample argument", sample) for sample in tree_leaves(samples))]:
            assert not tensor._backward_hooks, f"the capture would take in the tensor hooks of {name}"

    def grad(self, *args: Any, function: Any = torch.autograd.grad, **kwargs: Any) -> Any:
        """torch.autograd.grad: make_graphed_callables gives backward graphs their upstream gradients by it."""
        if capturing:
            self.static |= storages(kwargs["grad_outputs"])
        return function(*args, **kwargs)


class CUDAGraph(TorchDispatchMode):
    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()
        self.group = making[-1]
        self.group.graphs.append(self)
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.random = False

    def capture_begin(self, pool: Pool | None = None, **_: Any) -> None:
        self._pool, self.host = pool or Pool(), HostReads()
        self.drawn = torch.get_rng_state()
        capturing.append(self)
        self.host.__enter__()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self.host.__exit__(None, None, None)
        capturing.remove(self)
        torch.set_rng_state(self.drawn)  # a capture draws nothing on a GPU

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        self.operations.clear()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(operation, args, kwargs):
            raise refused(operation)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # `.data = ...` does not reach these
            drawn = torch.get_rng_state()
            outputs = operation(*args, **kwargs)
            self.random |= not torch.equal(drawn, torch.get_rng_state())
            results = tree_map_only(Tensor, Tensor.detach, tree_leaves(outputs))
        known = self.group.static | self._pool.written
        if operation is torch.ops.aten.lift_fresh.default and args[0].dim() == 0:
            self._pool.written |= storages(args)  # a Python scalar
        elif not is_view(operation, inputs, outputs):
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and tensor.numel() and tensor.untyped_storage()._cdata not in known:
                    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                    raise AssertionError(f"{operation} reads a tensor that is no static input: {kind}")
            own = storages(inputs)
            new = [isinstance(t, Tensor) and t.untyped_storage()._cdata not in own for t in results]
            self._pool.written |= storages([t for t, is_new in zip(results, new, strict=True) if is_new])
            copied = [t if is_new else None for t, is_new in zip(results, new, strict=True)]
            if not operation._schema.name.startswith(UNLAUNCHED):
                self.operations.append((operation, *inputs, copied))
        return outputs

    def replay(self) -> None:
        if capturing:
            raise refused("replay")
        self.check_order()
        for launches in (replayed, *counting):
            launches.replays += 1
            launches.add("replay")
            if self.random:
                launches.add("random numbers' seed and offset", 2)
        below = torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast()
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), below[0], below[1]:
            for operation, args, kwargs, outputs in self.operations:
                for output, found in zip(outputs, tree_leaves(operation(*args, **kwargs)), strict=True):
                    if output is not None:
                        output.copy_(found)

    def check_order(self) -> None:
        """A backward pass needs what its forward pass has left in the pool."""
        group, place, pool = self.group, self.group.graphs.index(self), self._pool
        if place < group.half:
            pool.intact = {graph for graph in pool.intact if graph.group is group} | {self}
        else:
            forward = group.graphs[place - group.half]
            assert forward in pool.intact, f"callable {place - group.half}: a replay has overwritten its activations"
            pool.intact.remove(forward)


def checked(function: Callable[..., Any], module: Any, samples: Any) -> Callable[..., Any]:
    """A graphed function that refuses what its graph does not fit."""

    def kinds(args: Any) -> list[Any]:
        return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tree_leaves(args)]

    def places() -> dict[str, Any]:
        tensors = [*module.named_parameters(), *module.named_buffers()] if isinstance(module, nn.Module) else []
        return {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors}

    expected, captured, training = kinds(samples), places(), getattr(module, "training", True)

    def call(*args: Any) -> Any:
        if getattr(module, "training", True) == training:  # else torch does not replay
            assert kinds(args) == expected, f"arguments unlike the samples: {kinds(args)}, captured with {expected}"
            moved = [name for name, found in places().items() if captured.get(name) != found]
            assert not moved, f"memory or requires_grad has changed since the capture: {', '.join(moved)}"
        return function(*args)

    return call


def make_graphed_callables(callables: Any, sample_args: Any, *rest: Any, **options: Any) -> Any:
    several = isinstance(callables, tuple)
    every, samples = (callables, sample_args) if several else ((callables,), (sample_args,))
    making.append(group := Group(every, samples))
    try:
        with mock.patch.object(torch.autograd, "grad", group.grad):
            made = MAKE(every, samples, *rest, **options)
    finally:
        making.pop()
    found = []
    for function, original, sample in zip(made, every, samples, strict=True):
        if isinstance(function, nn.Module):
            function.forward = checked(function.forward, function, sample)  # type: ignore[method-assign]
            found.append(function)
        else:
            found.append(checked(function, original, sample))
    return tuple(found) if several else found[0]


def multi_tensor_launches(sizes: Iterable[int], lists: int) -> int:
    """Launches of a foreach or fused operation over tensors of `sizes` elements, in so many lists.

    After multi_tensor_apply in ATen/native/cuda/MultiTensorApply.cuh, with the limits of CUDA 12 (CUDA 13's are larger).
    """
    most_tensors, most_chunks = (110, 64, 48, 36, 30)[lists - 1], 320
    launches = tensors = chunks = 0
    for size in sizes:
        tensors += bool(size)
        left = -(-size // 65536)
        while left:
            taken = min(left, most_chunks - chunks)
            left, chunks = left - taken, chunks + taken
            if chunks == most_chunks or (not left and tensors == most_tensors):
                launches, chunks, tensors = launches + 1, 0, bool(left)
    return launches + bool(chunks)


class CountingMode(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
            own = storages(args).keys()
            depth = len(lists) + (not storages(outputs).keys() <= own)
            if "_fused_" in name:
                depth -= 1  # the steps travel apart
            elif "norm" in name:
                depth = 1  # a second kernel sums up the chunks
                self.launches.add(name)
            self.launches.add(name, multi_tensor_launches([t.numel() for t in lists[0]], depth))
        elif not name.startswith(UNLAUNCHED) and not is_view(operation, (args, kwargs), outputs):
            self.launches.add(name)
        return outputs


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Counts, inside the block, the launches on a GPU: a graph's replay is one."""
    counting.append(launches := Launches())
    try:
        with CountingMode(launches):
            yield launches
    finally:
        counting.remove(launches)


class Stream:
    """All work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...


streams = [Stream()]


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    streams.append(chosen or streams[-1])
    try:
        yield
    finally:
        streams.pop()


def install(setattr_: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Put the stand-ins in torch's place; `setattr_`: monkeypatch.setattr, to undo it."""
    if not hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache = lambda: None
    for module in (torch.cuda, graphs):
        setattr_(module, "CUDAGraph", CUDAGraph)
        setattr_(module, "make_graphed_callables", make_graphed_callables)
    setattr_(graphs, "_graph_pool_handle", Pool)
    setattr_(graphs, "_cuda_isCurrentStreamCapturing", lambda: bool(capturing))
    for name, stand_in in {"Stream": Stream, "stream": stream, "synchronize": lambda *_: None}.items():
        setattr_(torch.cuda, name, stand_in)
    for name in ("current_stream", "default_stream"):
        setattr_(torch.cuda, name, lambda *_, name=name: streams[-1 if name == "current_stream" else 0])


def write_replays(file: str) -> None:
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(f"{replayed.replays}\n")


if __name__ == "__main__":
    import graph_stand_in  # the same module that tests import

    graph_stand_in.install()
    atexit.register(lambda: write_replays(os.environ["GPU_GRAPHS"]))
    runpy.run_path(os.path.join(os.path.dirname(__file__), "gpu_kernels.py"), run_name="__main__")
