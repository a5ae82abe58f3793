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
    attention_products: str = TORCH  # inside this package's attention, fp32: or "openblas"
    attention: str = TORCH  # with dropout: or "own" or "fused"
    dropout: str = TORCH  # or "own"
    allocator: str = TORCH  # settings of malloc: or "own"
    norm: str = TORCH  # dropout, residual and layer norm: or "fused", in one pass


class Choice(NamedTuple):
    """The kernels for a kind of CPU. All other precisions use torch's."""

    kind: str
    fp32: Kernels = Kernels()
    bf16: Kernels = Kernels()


TORCHS, OTHER = Kernels(), "other"
_PRODUCTS_BY_TORCH = Kernels(attention=OWN, dropout=OWN, allocator=OWN)
# MiniLM on 1 thread per rank. docs/evidence/benchmarks.md has the ranges.
_ROWS = (
    # Zen 5, fp32: steps are 1.47 times as fast with linear layers by oneDNN, 1.01 with dropout, 1.10 with attention,
    # 1.74 with all. Attention's products reach 109 to 218 GFLOP/s with OpenBLAS, 62 to 83 with MKL. Huge pages save
    # 5 to 7 % of the CPU time. bf16: 1.06 with dropout, 1.18 with attention.
    Choice("AMD, AVX-512", replace(_PRODUCTS_BY_TORCH, linear=ONEDNN, attention_products=OPENBLAS), _PRODUCTS_BY_TORCH),
    # Zen 4 without AVX-512, fp32: 1.08 times with linear layers by OpenBLAS, 1.04 with dropout, 1.18 with attention,
    # 1.30 with all. Zen 3, fp32: with all 1.24 times the windows/s of the HF Trainer, which has the same allocator.
    Choice("AMD, AVX2", replace(_PRODUCTS_BY_TORCH, linear=OPENBLAS, attention_products=OPENBLAS), _PRODUCTS_BY_TORCH),
    # Sapphire Rapids, fp32: 13.8 windows/s with oneDNN and OpenBLAS, 17.5 with torch's products. Model 167, compiled:
    # attention 1.4 times as fast in fp32 and 2.1 times in bf16, linear layers in bf16 1.2 times; steps in bf16 1.4.
    # Dropout, residual and layer norm in one pass: steps 1.02 times as fast in fp32, 1.06 in bf16.
    Choice(
        "Intel, AMX",
        Kernels(attention=FUSED, dropout=OWN, allocator=OWN, norm=FUSED),
        Kernels(FUSED, attention=FUSED, dropout=OWN, allocator=OWN, norm=FUSED),
    ),
    *map(Choice, ("Intel, AVX-512", "Intel, AVX2", "aarch64", OTHER)),  # not measured
)
TABLE = {row.kind: row for row in _ROWS}

_VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, aarch64
_choice: Choice | None = None  # of this process; None: not chosen yet


def kind_of(cpuinfo: Mapping[str, str], architecture: str, capability: str) -> str:
    """The kind of CPU, a key of TABLE, from its entries of /proc/cpuinfo, from `platform.machine()`, and from the
    instruction set that torch uses, which ATEN_CPU_CAPABILITY may lower."""
    vendor = _VENDORS.get(cpuinfo.get("vendor_id", ""))
    level = "AVX-512" if capability.startswith("AVX512") else capability  # a torch may tell more: AVX512_VNNI
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
    choose(cpu_kernels)
    if device.type != "cpu":
        return
    if chosen(precision).allocator == OWN:
        keep_memory()
    if precision == "bf16" and emulates_bf16():
        name = machine.cpu_name()
        log.warning("--bf16: this CPU (%s) emulates it, many times slower than fp32. Leave out --bf16.", name)


def choose(cpu_kernels: str) -> Choice:
    """Choose only the kernels."""
    global _choice
    _choice = auto_choice() if cpu_kernels == "auto" else Choice(kind_of_machine())
    return _choice


def kind_of_machine() -> str:
    """`kind_of` this machine."""
    return kind_of(machine.cpuinfo(), platform.machine(), torch.backends.cpu.get_cpu_capability())


def auto_choice() -> Choice:
    """The choice of "auto" for this machine."""
    kind = kind_of_machine()
    return Choice(kind, *map(without_missing, TABLE[kind][1:]))


@contextmanager
def override(kernels: Kernels) -> Iterator[None]:
    """Context manager: use these kernels as far as installed, for example TORCHS, which torch's tools can follow."""
    global _choice
    before, _choice = _choice, Choice("", without_missing(kernels), without_missing(kernels))
    try:
        yield
    finally:
        _choice = before


def chosen(precision: str | torch.dtype) -> Kernels:
    """The kernels for tensors of a precision, with the current number of threads."""
    choice = _choice or choose("auto")
    if precision in ("fp32", torch.float32):
        # OpenBLAS computes one small matrix after the other, so threads do not help.
        return choice.fp32 if torch.get_num_threads() == 1 else _without(OPENBLAS, choice.fp32)
    if precision not in ("bf16", torch.bfloat16):
        return TORCHS
    # Compiled linear layers are split into few parts.
    return choice.bf16 if torch.get_num_threads() == 1 else _with_torchs_linear(choice.bf16)


def record(precision: str, device: torch.device) -> dict[str, str] | None:
    """The kind of CPU and its kernels, for the run's record and its checkpoints; None for a run on GPUs."""
    return {"cpu": kind_of_machine(), **asdict(chosen(precision))} if device.type == "cpu" else None


def without_missing(kernels: Kernels) -> Kernels:
    """Drop kernels that this installation lacks."""
    # Not public; torch.compile's CPU back end uses it.
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    kernels = kernels if has_onednn else _without(ONEDNN, kernels)
    if FUSED in asdict(kernels).values() and not fused.available():
        kernels = replace(_without(FUSED, kernels), attention=OWN)
    return kernels if has_openblas() else _without(OPENBLAS, kernels)


@cache
def _with_torchs_linear(kernels: Kernels) -> Kernels:
    return replace(kernels, linear=TORCH)


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
