"""Chooses CPU kernels by the CPU model only, so that a resumed run uses the same kernels on the same CPU model.

`TABLE` has the choices for measured CPU models. Other CPU models use torch's own kernels. benchmarks/cpu_kernels.py
measures the kernels on a machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
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
    """The implementation of each operation: "torch", this package's ("own", or "fused" if compiled), or a library's."""

    linear: str = TORCH  # fp32: also "onednn" or "openblas"; bf16: also "fused"
    attention: str = TORCH  # with dropout: also "own" or "fused"
    norm: str = TORCH  # dropout + residual + layer norm; also "fused"
    allocator: str = TORCH  # malloc's settings; also "own"


class Choice(NamedTuple):
    """The kernels for a CPU model by precision. fp16 uses torch's kernels."""

    fp32: Kernels = Kernels()
    bf16: Kernels = Kernels()


TORCH_ONLY, OTHER = Kernels(), "other"
_FUSED = Kernels(attention=FUSED, norm=FUSED, allocator=OWN)
_OWN = Kernels(attention=OWN, allocator=OWN)
# docs/evidence/benchmarks.md has the measurements: each kernel saves at least 5 % of a step on one of these CPU models.
TABLE = {
    "AMD, AVX-512": Choice(replace(_FUSED, linear=ONEDNN), _FUSED),
    "AMD, AVX2": Choice(replace(_OWN, linear=OPENBLAS), _OWN),
    "Intel, AMX": Choice(_FUSED, replace(_FUSED, linear=FUSED)),
    **dict.fromkeys(("Intel, AVX-512", "Intel, AVX2", "aarch64", OTHER), Choice()),  # not measured
}

_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, aarch64
_choice: Choice | None = None  # this process's choice; None until it is made


def cpu_model() -> str:
    """Return this machine's CPU model, a key of TABLE: vendor and instruction set.

    ATEN_CPU_CAPABILITY can select a lower instruction set.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return "aarch64"
    cpuinfo, level = machine.cpuinfo(), torch.backends.cpu.get_cpu_capability()
    vendor = _VENDORS.get(cpuinfo.get("vendor_id", ""))
    if level.startswith("AVX512"):  # newer versions of torch have more levels, such as AVX512_VNNI
        level = "AMX" if vendor == "Intel" and "amx_tile" in machine.cpu_flags(cpuinfo) else "AVX-512"
    return f"{vendor}, {level}" if f"{vendor}, {level}" in TABLE else OTHER


def start(cpu_kernels: str, precision: str, device: torch.device) -> None:
    """Choose kernels and apply the allocator's settings for this process. Call this before large allocations.

    `cpu_kernels`: "auto" (chosen by CPU model) or "torch". Logs a warning if the precision is slow on the CPU.
    """
    select(cpu_kernels)
    if device.type != "cpu":
        return
    if active(precision).allocator == OWN:
        keep_memory()
    flags = machine.cpu_flags()  # empty if they are unknown
    if precision == "bf16" and flags and flags.isdisjoint(_BF16):
        name = machine.cpu_name()
        log.warning("--bf16: this CPU (%s) emulates it, many times slower than fp32. Leave out --bf16.", name)
    if precision == "fp16":
        log.warning("--fp16: several times slower than fp32 on a CPU. Leave out --fp16.")


def select(cpu_kernels: str) -> Choice:
    """Choose this process's kernels, without applying the allocator's settings. `cpu_kernels`: as in `start`."""
    global _choice
    _choice = Choice(*map(without_missing, TABLE[cpu_model()])) if cpu_kernels == "auto" else Choice()
    return _choice


@contextmanager
def override(kernels: Kernels) -> Iterator[None]:
    """Context manager: use these kernels, except those that are not installed, for fp32 and bf16."""
    global _choice
    before, _choice = _choice, Choice(without_missing(kernels), without_missing(kernels))
    try:
        yield
    finally:
        _choice = before


def active(precision: str | torch.dtype) -> Kernels:
    """Return the kernels for tensors of a precision, with the current number of threads."""
    choice = _choice or select("auto")
    chosen = {"fp32": choice.fp32, torch.float32: choice.fp32, "bf16": choice.bf16, torch.bfloat16: choice.bf16}
    kernels = chosen.get(precision, TORCH_ONLY)
    return kernels if torch.get_num_threads() == 1 else _for_threads(kernels)


def record(precision: str, device: torch.device) -> dict[str, str] | None:
    """Return the CPU model and its kernels, for the run's record and checkpoints; None on GPUs."""
    return {"cpu": cpu_model(), **asdict(active(precision))} if device.type == "cpu" else None


def without_missing(kernels: Kernels) -> Kernels:
    """Replace kernels that this installation lacks: by torch's, or compiled attention by "own"."""
    # _linear_pointwise is private, so test for it. torch.compile's CPU back end uses it, too.
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    kernels = kernels if has_onednn else _without(ONEDNN, kernels)
    if FUSED in asdict(kernels).values() and not fused.available():
        kernels = replace(_without(FUSED, kernels), attention=OWN)
    return kernels if has_openblas() else _without(OPENBLAS, kernels)


@cache
def _for_threads(kernels: Kernels) -> Kernels:
    """For several threads, replace OpenBLAS, which runs one thread, and compiled linear layers, by torch's kernels."""
    kernels = _without(OPENBLAS, kernels)
    return replace(kernels, linear=TORCH) if kernels.linear == FUSED else kernels


@cache
def _without(library: str, kernels: Kernels) -> Kernels:
    return replace(kernels, **{name: TORCH for name, value in asdict(kernels).items() if value == library})


@cache
def has_openblas() -> bool:
    """Return whether numpy's BLAS is OpenBLAS with one thread."""
    built = np.show_config(mode="dicts")
    library = built["Build Dependencies"]["blas"]["name"] if isinstance(built, dict) else ""
    return "openblas" in library and openblas_threads() == 1


def openblas_threads() -> int:
    """Return the number of threads that OpenBLAS takes from the environment when numpy is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0]
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))
