"""Which kernels the CPU uses, by its kind; products of many small matrices by numpy's BLAS and by torch."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from hvd_bert import machine
from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.kernels import FUSED, OPENBLAS, OWN, TORCH_ONLY, Kernels

CPU = torch.device("cpu")
ZEN5 = "AuthenticAMD", "fpu sse2 avx avx2 fma avx512f avx512bw avx512_bf16 avx512_vnni"
ZEN3 = "AuthenticAMD", "fpu sse2 avx avx2 fma vaes"
SAPPHIRE_RAPIDS = "GenuineIntel", "fpu avx avx2 fma avx512f avx512bw avx512_bf16 amx_bf16 amx_tile amx_int8"
ICE_LAKE = "GenuineIntel", "fpu avx avx2 fma avx512f avx512bw avx512_vnni"
HYGON = "HygonGenuine", "fpu avx avx2 fma"


def cpuinfo(vendor: str, flags: str) -> str:
    processor = f"vendor_id\t: {vendor}\nmodel name\t: A CPU @ 2.0 GHz\nflags\t\t: {flags}\nbugs\t\t:\n"
    return f"processor\t: 0\n{processor}\nprocessor\t: 1\n{processor}\n"


NEOVERSE = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve bf16 i8mm\nCPU implementer\t: 0x41\n\n"


@pytest.mark.parametrize(
    ("text", "architecture", "capability", "kind", "emulates"),
    [
        (cpuinfo(*ZEN5), "x86_64", "AVX512", "AMD, AVX-512", False),
        (cpuinfo(*ZEN5), "x86_64", "AVX2", "AMD, AVX2", False),  # ATEN_CPU_CAPABILITY
        (cpuinfo(*ZEN3), "x86_64", "AVX2", "AMD, AVX2", True),
        (cpuinfo(*SAPPHIRE_RAPIDS), "x86_64", "AVX512", "Intel, AMX", False),
        (cpuinfo(*ICE_LAKE), "x86_64", "AVX512", "Intel, AVX-512", True),
        (cpuinfo(*HYGON), "x86_64", "AVX2", "other", True),
        (NEOVERSE, "aarch64", "SVE256", "aarch64", False),
        ("", "arm64", "DEFAULT", "aarch64", False),
    ],
)
def test_kind_of_cpu(text, architecture, capability, kind, emulates, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text(text)
    assert kernels.cpu_kind(machine.cpuinfo(), architecture, capability) == kind
    assert kernels.emulates_bf16() is emulates


def test_choice_of_this_process(monkeypatch):
    before = kernels.select("auto")
    try:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert kernels.active("fp32") == kernels.active(torch.float32) == before.fp32
        assert kernels.active(torch.float16) == TORCH_ONLY
        kernels.select("torch")
        assert kernels.active("fp32") == kernels.active("bf16") == TORCH_ONLY
        assert kernels.record("bf16", CPU) == {"cpu": before.kind, **asdict(TORCH_ONLY)}
        assert kernels.record("fp32", torch.device("cuda", 0)) is None
    finally:
        kernels.select("auto")


def test_some_kernels_are_for_one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(kernels, "without_missing", lambda wanted: wanted)
    for library in (OPENBLAS, FUSED):
        with kernels.override(Kernels(library, OWN)):
            assert kernels.active("fp32") == Kernels(attention=OWN)


def test_emulated_bf16_is_a_warning_that_names_the_flag(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    for cpu, precision, device in ((ZEN3, "fp32", CPU), (ZEN5, "bf16", CPU), (ZEN3, "bf16", torch.device("cuda", 0))):
        machine.CPUINFO.write_text(cpuinfo(*cpu))
        kernels.start("auto", precision, device)
    assert caplog.messages == []
    kernels.start("torch", "bf16", CPU)
    assert len(caplog.messages) == 1 and "--bf16" in caplog.text and "A CPU @ 2.0 GHz" in caplog.text


def test_threads_as_openblas_reads_them(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    for own, omp, expected in (("2", "1", 2), (None, "3,2", 3), (None, "none", 5), (None, None, 5)):
        for name, value in (("OPENBLAS_NUM_THREADS", own), ("OMP_NUM_THREADS", omp)):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        assert kernels.openblas_threads() == expected
