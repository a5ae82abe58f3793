"""A process with two fake A100s, whose tensors have shapes, types and devices, but no values (torch's FakeTensor).

    python machine.py LIBRARY RESULTS [CHECK...]       LIBRARY: device.cpp, compiled

Runs the named checks of checks.py, by default all, and writes RESULTS: check -> traceback, or null. With a CPU build of
torch, this tests the package's code for GPUs up to the kernels: a wrong argument, a dtype that a kernel refuses, or a
tensor on the CPU is an error as on a GPU. `tests/unit/test_fake_cuda.py` starts this program.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before torch, which looks for devices only once

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend
from torch.nn.parallel import _functions, parallel_apply, replicate
from torch.utils import _foreach_utils

from hvd_bert.model.layers import place

OVERRIDES = torch.library.Library("aten", "IMPL")
NAME = "NVIDIA A100-SXM4-80GB"


class Properties:
    """The properties of a fake device."""

    uuid = "8c1a2b3c-0000-0000-0000-000000000000"
    total_memory = 80 * 2**30
    multi_processor_count = 108


class Stream(nullcontext[None]):
    """A stream of a fake device."""

    def is_capturing(self) -> bool:
        return False


class Event:
    """An event in a fake stream. 1 ms passes between two events."""

    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Machine:
    """Replacements for the functions of torch.cuda that the package uses. `pinned`: number of tensors pinned so far."""

    pinned: ClassVar[int] = 0
    mode: ClassVar[Any] = None
    functions: ClassVar[dict[str, Any]] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: 2,
        "set_device": lambda device: None,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: Properties,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "device": lambda device: nullcontext(),
        "Event": Event,
    }


def install() -> None:
    """Replace torch.cuda, and other functions that need a CUDA build of torch."""
    for name, function in Machine.functions.items():
        setattr(torch.cuda, name, function)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    Tensor.pin_memory = _pin  # type: ignore[method-assign]
    sdpa._select_sdp_backend = _backend
    _foreach_utils._foreach_supported_types.append(FakeTensor)  # treat fake tensors like a GPU's
    OVERRIDES.impl("_efficient_attention_backward", _efficient_backward, "Meta", allow_override=True)
    # DataParallel copies the weights by these functions.
    _functions.Broadcast = replicate.__globals__["Broadcast"] = _Broadcast  # type: ignore[misc]
    replicate.__globals__["comm"] = _Copies
    parallel_apply.__globals__["threading"] = SimpleNamespace(Lock=threading.Lock, Thread=_OneAfterTheOther)
    torch.accelerator.current_stream = lambda device=None: Stream()  # type: ignore[assignment]
    torch.accelerator.device_index = lambda device: nullcontext()  # type: ignore[assignment, misc]


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")  # torch's message
    Machine.pinned += 1
    return tensor


def _backend(query: Tensor, *_: Any) -> SDPBackend:
    """Choose the kernel for jagged tensors as torch does, but without querying the device."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    flash = half and query.size(-1) % 8 == 0 and query.size(-1) <= 256
    return SDPBackend.FLASH_ATTENTION if flash else SDPBackend.EFFICIENT_ATTENTION


def _efficient_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    """Return fake gradients. Torch 2.13's own function for fake tensors lacks one of the operation's arguments."""
    return (*map(torch.empty_like, (query, key, value)), torch.empty((), device=query.device))


class _OneAfterTheOther(threading.Thread):
    """A DataParallel thread that runs alone, because two threads would share the fake tensors' mode."""

    def start(self) -> None:
        super().start()
        self.join()

    def run(self) -> None:
        with Machine.mode:
            super().run()


class _Broadcast:
    @staticmethod
    def apply(devices: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(f"cuda:{device}", copy=True) for device in devices for tensor in tensors)


class _Copies:
    @staticmethod
    def broadcast_coalesced(tensors: list[Tensor], devices: list[int]) -> list[list[Tensor]]:
        return [[tensor.to(f"cuda:{device}") for tensor in tensors] for device in devices]


def fake() -> AbstractContextManager[Any]:
    """Context manager: make new tensors, on the CPU or on a GPU, fake, that is, without values."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # jagged tensors have a symbolic length


def on_gpu(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, let `place` prepare its layers for a GPU, and replace its weights by fake ones on the first GPU."""
    with unset_fake_temporarily():
        model = make()
    # Skip Module.to, which refuses fake tensors because they have weak references.
    model.to = lambda device: None  # type: ignore[assignment, method-assign]
    place(model, torch.device("cuda", 0))
    del model.to
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = torch.empty_like(tensor, device="cuda")
                    tensors[name] = nn.Parameter(moved) if tensors is module._parameters else moved
    return model


def main() -> None:
    """Run the checks one after another, and write their results."""
    install()
    import checks

    results: dict[str, str | None] = {}
    warnings.simplefilter("error", UserWarning)
    for name in sys.argv[3:] or checks.CHECKS:
        function = checks.CHECKS[name]
        start = time.process_time()
        try:
            with fake() as Machine.mode:
                function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{name}: {time.process_time() - start:.1f} s")
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    sys.modules["machine"] = sys.modules["__main__"]  # the checks import this module by its name
    main()
