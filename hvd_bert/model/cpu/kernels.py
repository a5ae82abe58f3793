"""Which kernels compute on the CPU: a function of the kind of CPU, so that a resumed run uses the same ones.

`TABLE` has the choice for each kind, with the measurement behind it. Without a measurement, it is torch's own kernels.
`hvd-bert doctor` measures whether the table is right for its machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from hvd_bert import machine
from hvd_bert.errors import log
from hvd_bert.model.cpu import fused
from hvd_bert.model.cpu.malloc import keep_memory

TORCH, OWN, FUSED, ONEDNN, OPENBLAS = "torch", "own", "fused", "onednn", "openblas"


@dataclass(frozen=True)
class Kernels:
    """What computes each operation: torch's own kernel, this package's (fused: compiled), or a library's."""

    linear: str = TORCH  # fp32: or "onednn" or "openblas"; bf16: or "fused"
    attention: str = TORCH  # with dropout: or "own" or "fused"
    norm: str = TORCH  # dropout, residual and layer norm: or "fused", in one pass
    allocator: str = TORCH  # settings of malloc: or "own"


class Choice(NamedTuple):
    """The kernels for a kind of CPU. All other precisions use torch's."""

    kind: str
    fp32: Kernels = Kernels()
    bf16: Kernels = Kernels()


TORCH_ONLY, OTHER = Kernels(), "other"
_FUSED = Kernels(attention=FUSED, norm=FUSED, allocator=OWN)
_OWN = Kernels(attention=OWN, allocator=OWN)
# docs/evidence/benchmarks.md has the measurements: each kernel saves at least 5 % of a step on one of these CPUs.
_ROWS = (
    Choice("AMD, AVX-512", replace(_FUSED, linear=ONEDNN), _FUSED),
    Choice("AMD, AVX2", replace(_OWN, linear=OPENBLAS), _OWN),
    Choice("Intel, AMX", _FUSED, replace(_FUSED, linear=FUSED)),
    *map(Choice, ("Intel, AVX-512", "Intel, AVX2", "aarch64", OTHER)),  # not measured
)
TABLE = {row.kind: row for row in _ROWS}

_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, aarch64
_choice: Choice | None = None  # the process's choice; None: not made yet


def cpu_kind(cpuinfo: Mapping[str, str], architecture: str, capability: str) -> str:
    """The kind of CPU, a key of TABLE, from its entries of /proc/cpuinfo, from `platform.machine()`, and from the
    instruction set that torch uses, which ATEN_CPU_CAPABILITY may lower."""
    vendor = _VENDORS.get(cpuinfo.get("vendor_id", ""))
    level = "AVX-512" if capability.startswith("AVX512") else capability  # torch may name more: AVX512_VNNI
    if vendor == "Intel" and level == "AVX-512" and "amx_tile" in machine.cpu_flags(cpuinfo):
        level = "AMX"
    kind = "aarch64" if architecture in ("aarch64", "arm64") else f"{vendor}, {level}"
    return kind if kind in TABLE else OTHER


def emulates_bf16() -> bool:
    """Whether this machine's CPU has no instructions for products in bf16; False if its flags are unknown."""
    flags = machine.cpu_flags()
    return bool(flags) and flags.isdisjoint(_BF16)


def start(cpu_kernels: str, precision: str, device: torch.device) -> None:
    """Choose for this process, before large allocations: kernels and the allocator's settings.

    `cpu_kernels`: "auto", by the kind of CPU, or "torch". Warns if the CPU emulates the precision.
    """
    select(cpu_kernels)
    if device.type != "cpu":
        return
    if active(precision).allocator == OWN:
        keep_memory()
    if precision == "bf16" and emulates_bf16():
        name = machine.cpu_name()
        log.warning("--bf16: this CPU (%s) emulates it, many times slower than fp32. Leave out --bf16.", name)


def select(cpu_kernels: str) -> Choice:
    """Choose only the kernels."""
    global _choice
    _choice = default_choice() if cpu_kernels == "auto" else Choice(own_cpu_kind())
    return _choice


def own_cpu_kind() -> str:
    """The `cpu_kind` of this machine."""
    return cpu_kind(machine.cpuinfo(), platform.machine(), torch.backends.cpu.get_cpu_capability())


def default_choice() -> Choice:
    """The choice of "auto" for this machine."""
    kind = own_cpu_kind()
    return Choice(kind, *map(without_missing, TABLE[kind][1:]))


@contextmanager
def override(kernels: Kernels) -> Iterator[None]:
    """Context manager: use these kernels as far as installed. torch's tools can follow TORCH_ONLY."""
    global _choice
    before, _choice = _choice, Choice("", without_missing(kernels), without_missing(kernels))
    try:
        yield
    finally:
        _choice = before


def active(precision: str | torch.dtype) -> Kernels:
    """The kernels for tensors of a precision, with the current number of threads."""
    choice = _choice or select("auto")
    own = {"fp32": choice.fp32, torch.float32: choice.fp32, "bf16": choice.bf16, torch.bfloat16: choice.bf16}
    kernels = own.get(precision, TORCH_ONLY)
    return kernels if torch.get_num_threads() == 1 else _for_threads(kernels)


def record(precision: str, device: torch.device) -> dict[str, str] | None:
    """The kind of CPU and its kernels, for the run's record and its checkpoints; None for a run on GPUs."""
    return {"cpu": own_cpu_kind(), **asdict(active(precision))} if device.type == "cpu" else None


def without_missing(kernels: Kernels) -> Kernels:
    """Drop kernels that this installation lacks."""
    # Not public; torch.compile's CPU back end uses it.
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    kernels = kernels if has_onednn else _without(ONEDNN, kernels)
    if FUSED in asdict(kernels).values() and not fused.available():
        kernels = replace(_without(FUSED, kernels), attention=OWN)
    return kernels if has_openblas() else _without(OPENBLAS, kernels)


@cache
def _for_threads(kernels: Kernels) -> Kernels:
    """OpenBLAS has one thread (`has_openblas`), and compiled linear layers have too few parts for several."""
    kernels = _without(OPENBLAS, kernels)
    return replace(kernels, linear=TORCH) if kernels.linear == FUSED else kernels


@cache
def _without(library: str, kernels: Kernels) -> Kernels:
    return replace(kernels, **{name: TORCH for name, value in asdict(kernels).items() if value == library})


@cache
def has_openblas() -> bool:
    """Whether numpy's BLAS is OpenBLAS with one thread."""
    built = np.show_config(mode="dicts")
    library = built["Build Dependencies"]["blas"]["name"] if isinstance(built, dict) else ""
    return "openblas" in library and openblas_threads() == 1


def openblas_threads() -> int:
    """The number of threads that OpenBLAS reads from the environment when numpy is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0]
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))
