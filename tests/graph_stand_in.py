"""Run a command with CUDA graphs that are recorded and replayed on the CPU, and with a GPU's attention kernels.

    python graph_stand_in.py MODULE_OR_FILE ARGUMENTS...    as gpu_kernels.py

$GPU_GRAPHS, if set, gets the number of replays; $MOST_GRAPHS: see `install`.

torch's own make_graphed_callables runs on a stand-in for CUDAGraph, which records ATen operations and runs them again
on the same memory. What would silently compute something wrong on a GPU is an AssertionError.
"""

from __future__ import annotations

import atexit
import os
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.cuda import graphs
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_bert.model import cuda_graphs, layers
from hvd_bert.strategies.base import Strategy
from hvd_bert.training import graphs as training_graphs
from hvd_bert.training import start

MAKE, GRAD = graphs.make_graphed_callables, torch.autograd.grad
HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # they wait for a GPU, but are no ATen operations on the CPU
UNLAUNCHED = ("aten::empty", "aten::new_empty", "aten::record_stream", "aten::resize_", "aten::set_", "profiler::")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def storages(tree: Any) -> dict[int, Any]:
    """By identity, which stays unique for as long as the result is kept."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


def launches_nothing(operation: Any, inputs: Any, outputs: Any) -> bool:
    """Whether an operation only allocates memory, or all its outputs are views of its inputs."""
    writes = operation._schema.is_mutable and torch.Tag.inplace_view not in operation.tags
    views = not writes and bool(found := storages(outputs)) and found.keys() <= storages(inputs).keys()
    return views or operation._schema.name.startswith(UNLAUNCHED)


def waits(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for values on the device."""
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


def refuse_hooks(part: nn.Module, _: Any) -> None:
    assert not any(getattr(part, kind) for kind in MODULE_HOOKS), f"only the capture would run hooks of {part}"


class Pool:
    """Memory that graphs share."""

    def __init__(self) -> None:
        self.written: dict[int, Any] = {}  # by recorded operations
        self.intact: set[CUDAGraph] = set()  # forward passes whose activations no other replay has overwritten


class Group:
    """The graphs of one call of make_graphed_callables: all forward ones, then all backward ones."""

    def __init__(self, callables: tuple[Any, ...], samples: tuple[Any, ...]) -> None:
        modules = [function for function in callables if isinstance(function, nn.Module)]
        self.weights = [named for module in modules for named in module.named_parameters()]
        self.graphs: list[CUDAGraph] = []
        self.half = len(callables)
        self.static = storages([samples, [(*module.parameters(), *module.buffers()) for module in modules]])
        for name, tensor in [*self.weights, *(("a sample argument", sample) for sample in tree_leaves(samples))]:
            assert not tensor._backward_hooks, f"the capture would take in the tensor hooks of {name}"

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """torch.autograd.grad, whose upstream gradients make_graphed_callables allocates outside of the capture."""
        if capturing:
            self.static |= storages(kwargs["grad_outputs"])
        return GRAD(*args, **kwargs)


making: list[Group] = []  # by the call of make_graphed_callables in progress
capturing: list[CUDAGraph] = []


class CUDAGraph(TorchDispatchMode):
    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()
        self.group, self.place = making[-1], len(making[-1].graphs)
        self.group.graphs.append(self)
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.random = False

    def capture_begin(self, pool: Pool | None = None, **_: Any) -> None:
        self._pool, self.host, self.drawn = pool or Pool(), HostReads(), torch.get_rng_state()
        self.hooks = register_module_forward_pre_hook(refuse_hooks)
        capturing.append(self)
        self.host.__enter__()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        self.host.__exit__(None, None, None)
        self.hooks.remove()
        capturing.remove(self)
        torch.set_rng_state(self.drawn)  # a GPU's capture draws nothing

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        self.operations.clear()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(operation, args, kwargs):
            raise refused(operation)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))  # `.data = ...` does not change these
            drawn = torch.get_rng_state()
            outputs = operation(*args, **kwargs)
            self.random |= not torch.equal(drawn, torch.get_rng_state())
            results = tree_map_only(Tensor, Tensor.detach, tree_leaves(outputs))
        if operation is torch.ops.aten.lift_fresh.default and args[0].dim() == 0:
            self._pool.written |= storages(args)  # a Python scalar
        own, written = storages(inputs), self._pool.written
        fresh = [t if isinstance(t, Tensor) and t.untyped_storage()._cdata not in own else None for t in results]
        if not launches_nothing(operation, inputs, outputs):
            for tensor in tree_leaves(inputs):
                place = tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) and tensor.numel() else None
                assert place is None or place in written or place in self.group.static, (
                    f"{operation} reads a tensor that is not a static input: {tensor.dtype} {list(tensor.shape)}"
                )
            self.operations.append((operation, *inputs, fresh))
        written |= storages(fresh)
        return outputs

    def replay(self) -> None:
        if capturing:
            raise refused("replay")
        self.check_memory()
        for launches in (replayed, *counting):
            launches.replays += 1
            launches.add("replay")
            if self.random:
                launches.add("seed and offset", 2)
        below = torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast()
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), below[0], below[1]:
            for operation, args, kwargs, outputs in self.operations:
                for output, found in zip(outputs, tree_leaves(operation(*args, **kwargs)), strict=True):
                    if output is not None:
                        output.copy_(found)

    def check_memory(self) -> None:
        """A backward pass must find the activations of its forward pass, and overwrite no gradient that is in use."""
        group, pool = self.group, self._pool
        if self.place < group.half:
            pool.intact = {graph for graph in pool.intact if graph.group is group} | {self}
            return
        forward = group.graphs[self.place % group.half]
        assert forward in pool.intact, "a backward pass's activations have been overwritten by another replay"
        pool.intact.remove(forward)
        own = storages([outputs for *_, outputs in self.operations])
        for name, weights in group.weights:
            assert not own.keys() & storages(weights.grad).keys(), f"the replay would overwrite the gradient of {name}"


def checked(function: Callable[..., Any], module: Any, samples: Any) -> Callable[..., Any]:
    """A graphed function that refuses what does not fit its graph."""

    def kinds(args: Any) -> list[Any]:
        return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tree_leaves(args)]

    def places() -> dict[str, Any]:
        tensors = [*module.named_parameters(), *module.named_buffers()] if isinstance(module, nn.Module) else []
        return {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in tensors}

    expected, captured, training = kinds(samples), places(), getattr(module, "training", True)

    def call(*args: Any) -> Any:
        if getattr(module, "training", True) == training:  # else torch calls the module itself
            assert kinds(args) == expected, f"arguments unlike the samples: {kinds(args)}, captured with {expected}"
            changed = [name for name, place in places().items() if captured.get(name) != place]
            assert not changed, f"other memory or requires_grad than at the capture: {', '.join(changed)}"
        return function(*args)

    return call


def make_graphed_callables(callables: Any, sample_args: Any, *rest: Any, **options: Any) -> Any:
    several = isinstance(callables, tuple)
    every, samples = (callables, sample_args) if several else ((callables,), (sample_args,))
    making.append(group := Group(every, samples))
    try:
        with mock.patch.object(torch.autograd, "grad", group.grad):
            made = list(MAKE(every, samples, *rest, **options))
    finally:
        making.pop()
    for place, (function, original, sample) in enumerate(zip(made, every, samples, strict=True)):
        if isinstance(function, nn.Module):
            function.forward = checked(function.forward, function, sample)
        else:
            made[place] = checked(function, original, sample)
    return tuple(made) if several else made[0]


def multi_tensor_launches(sizes: Iterable[int], lists: int) -> int:
    """Launches of a foreach or fused operation on that many lists of tensors, of `sizes` elements.

    As in multi_tensor_apply, ATen/native/cuda/MultiTensorApply.cuh, built with CUDA 12; CUDA 13's limits are larger.
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
                launches, chunks, tensors = launches + 1, 0, int(left > 0)
    return launches + (chunks > 0)


class Launches(TorchDispatchMode):
    """Counts a GPU's launches: one per operation, where some have several kernels, and one per replay."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.replays = 0
        self.operations: Counter[str] = Counter()

    def add(self, operation: str, launches: int = 1) -> None:
        self.launches += launches
        self.operations[operation] += launches

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
            depth = len(lists) + (not operation._schema.is_mutable) - ("_fused_" in name)  # the steps are passed apart
            norms = name == "aten::_foreach_norm"  # one list, and a second kernel that sums up the chunks
            self.add(name, multi_tensor_launches([t.numel() for t in lists[0]], 1 if norms else depth) + norms)
        elif not launches_nothing(operation, (args, kwargs), outputs):
            self.add(name)
        return outputs


replayed = Launches()  # all replays of this process
counting: list[Launches] = []


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Counts the launches inside the block."""
    with Launches() as launches:
        counting.append(launches)
        try:
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


def install(setattr_: Callable[[Any, str, Any], Any] = setattr, most: int = training_graphs.MOST) -> None:
    """Put the stand-ins in place, and have the trainer take the CPU for a GPU where it makes graphs.

    `setattr_`: monkeypatch.setattr, which undoes it after a test. `most`: sizes that may have graphs; 0: none has.
    """
    setattr_(cuda_graphs, "wanted", lambda args, _: args.cuda_graphs)
    setattr_(Strategy, "_make_word_rows", lambda _: None)
    setattr_(start, "place", lambda model, device, _: layers.place(model, device, compiled=True))  # no layers for CPUs
    setattr_(training_graphs, "MOST", most)
    if not hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache = lambda: None
    for module in (torch.cuda, graphs):
        setattr_(module, "CUDAGraph", CUDAGraph)
        setattr_(module, "make_graphed_callables", make_graphed_callables)
    setattr_(graphs, "_graph_pool_handle", Pool)
    setattr_(graphs, "_cuda_isCurrentStreamCapturing", lambda: bool(capturing))
    setattr_(torch.cuda, "Stream", Stream)
    setattr_(torch.cuda, "stream", stream)
    setattr_(torch.cuda, "synchronize", lambda *_: None)
    setattr_(torch.cuda, "current_stream", lambda *_: streams[-1])
    setattr_(torch.cuda, "default_stream", lambda *_: streams[0])


def main(file: str) -> None:
    def write() -> None:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(f"{replayed.replays}\n")

    install(most=int(os.environ.get("MOST_GRAPHS", training_graphs.MOST)))
    os.environ.setdefault("GPU_KERNELS", os.devnull)
    atexit.register(write)
    runpy.run_path(str(Path(__file__).with_name("gpu_kernels.py")), run_name="__main__")


if __name__ == "__main__":
    from graph_stand_in import main  # of the module that the command may import too

    main(os.environ.get("GPU_GRAPHS", os.devnull))
