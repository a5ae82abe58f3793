"""CPU kernels: the choice per CPU model, and results compared with torch or with formulas."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import ElectraConfig
from transformers.models.electra.modeling_electra import ElectraSelfOutput

from hvd_bert import machine
from hvd_bert.model import attention
from hvd_bert.model.cpu import fused, kernels, linear
from hvd_bert.model.cpu.attention import LEVELS, keep_mask, kept_scale
from hvd_bert.model.cpu.kernels import FUSED, ONEDNN, OPENBLAS, OWN, TORCH_ONLY, Kernels
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.model.layers import AddAndNorm
from hvd_bert.model.precision import autocast

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
    ("text", "architecture", "capability", "model", "emulates"),
    [
        (cpuinfo(*ZEN5), "x86_64", "AVX512", "AMD, AVX-512", False),
        (cpuinfo(*ZEN5), "x86_64", "AVX2", "AMD, AVX2", False),  # the user set ATEN_CPU_CAPABILITY=avx2
        (cpuinfo(*ZEN3), "x86_64", "AVX2", "AMD, AVX2", True),
        (cpuinfo(*SAPPHIRE_RAPIDS), "x86_64", "AVX512", "Intel, AMX", False),
        (cpuinfo(*ICE_LAKE), "x86_64", "AVX512", "Intel, AVX-512", True),
        (cpuinfo(*HYGON), "x86_64", "AVX2", "other", True),
        (NEOVERSE, "aarch64", "SVE256", "aarch64", False),
        ("", "arm64", "DEFAULT", "aarch64", False),
    ],
)
def test_cpu_model_and_the_warning_that_it_emulates_bf16(
    text, architecture, capability, model, emulates, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text(text)
    monkeypatch.setattr("platform.machine", lambda: architecture)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels, "_choice", None)  # monkeypatch restores the process's choice
    assert kernels.record("fp32", CPU)["cpu"] == model
    kernels.start("torch", "fp32", CPU)
    kernels.start("torch", "bf16", torch.device("cuda", 0))
    assert not caplog.messages
    kernels.start("torch", "bf16", CPU)
    assert [("--bf16" in line, "A CPU @ 2.0 GHz" in line) for line in caplog.messages] == [(True, True)] * emulates
    caplog.clear()
    kernels.start("torch", "fp16", torch.device("cuda", 0))
    kernels.start("torch", "fp16", CPU)
    assert ["--fp16" in line for line in caplog.messages] == [True]


def test_choice_of_this_process(monkeypatch):
    monkeypatch.setattr(kernels, "_choice", None)  # monkeypatch restores the process's choice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    chosen = kernels.select("auto")
    assert kernels.active("fp32") == kernels.active(torch.float32) == chosen.fp32
    assert kernels.active(torch.float16) == TORCH_ONLY
    kernels.select("torch")
    assert kernels.active("fp32") == kernels.active("bf16") == TORCH_ONLY
    assert kernels.record("bf16", CPU).items() >= asdict(TORCH_ONLY).items()
    assert kernels.record("fp32", torch.device("cuda", 0)) is None


def test_some_kernels_are_for_one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(kernels, "without_missing", lambda wanted: wanted)
    for library in (OPENBLAS, FUSED):
        with kernels.override(Kernels(library, OWN)):
            assert kernels.active("fp32") == Kernels(attention=OWN)


def test_number_of_threads_of_openblas(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    for openblas, omp, expected in (("2", "1", 2), (None, "3,2", 3), (None, "none", 5), (None, None, 5)):
        for name, value in (("OPENBLAS_NUM_THREADS", openblas), ("OMP_NUM_THREADS", omp)):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        assert kernels.openblas_threads() == expected


needs_openblas = pytest.mark.skipif(not kernels.has_openblas(), reason="numpy has no OpenBLAS with one thread")
needs_onednn = pytest.mark.skipif(
    kernels.without_missing(Kernels(ONEDNN)) != Kernels(ONEDNN), reason="this torch has no oneDNN"
)


def with_gradients(layer: nn.Linear, values: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    result = layer(values)
    return [result, *torch.autograd.grad(result, [values, *layer.parameters()], upstream)]


@pytest.fixture(params=[pytest.param(ONEDNN, marks=needs_onednn), pytest.param(OPENBLAS, marks=needs_openblas)])
def library(request, monkeypatch):
    """Run a test with each library for matrix products."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with kernels.override(Kernels(linear=request.param)):
        yield


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape, bias", [((1, 37, 24), True), ((37, 24), False), ((1, 1, 24), True)])
# With more outputs than inputs (24), oneDNN computes the weight's gradient transposed.
@pytest.mark.parametrize("size_out", [7, 24, 40])
def test_result_and_gradients(shape, size_out, bias):
    torch.manual_seed(0)
    layer = Linear(24, size_out, bias)
    values = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(*shape[:-1], size_out)
    found = with_gradients(layer, values, upstream)
    assert found[2].is_contiguous()
    with kernels.override(kernels.TORCH_ONLY):
        torch.testing.assert_close(found, with_gradients(layer, values, upstream), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("library")
def test_storage_of_a_weight_can_be_resized_as_by_fsdp():
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
    with kernels.override(kernels.TORCH_ONLY):
        assert torch.equal(layer(values), nn.functional.linear(values, layer.weight, layer.bias))
    with pytest.raises(AssertionError, match="was called"):
        layer(values)


MANY = 4_000_000  # so many samples that an error of 1 / 512 (a rate in 8 bits) is at least 7 standard deviations


# Some of these rates cannot be represented in 8 bits.
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.003, 1 / 512, 0.5 + 1 / 512, 1 - 1 / 512])
def test_rate_and_scale_of_dropout(p):
    torch.manual_seed(0)
    dropped = (keep_mask(torch.Size([MANY]), p) == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / MANY))
    assert 1 / kept_scale(p) == pytest.approx(1 - p, abs=0.5 / LEVELS)


HEADS, DROPPED = 3, 6554
needs_fused = pytest.mark.skipif(not fused.available(), reason="not compiled, or a CPU without the instructions")


def dropout_factors(bits: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Unpack the operation's mask bits. Returns each window's dropout factors, float64 [heads, T, T]."""
    masks, bits = [], bits.view(torch.int32)
    for length in lengths:
        words = -(-length // 32)
        of_window, bits = bits.split([HEADS * length * words, len(bits) - HEADS * length * words])
        single = of_window.view(HEADS, length, words, 1) >> torch.arange(32) & 1
        masks.append(single.flatten(2)[..., :length].double() * 65536 / (65536 - DROPPED))
    return masks


def by_hand(q, k, v, masks, scaling):
    outputs, start = [], 0
    for mask in masks:
        length = mask.shape[1]
        query, key, value = (tensor[start : start + length].transpose(0, 1) for tensor in (q, k, v))
        scores = query @ key.transpose(1, 2) * scaling
        outputs.append((scores.softmax(-1) * mask @ value).transpose(0, 1))
        start += length
    return torch.cat(outputs)


@needs_fused
@pytest.mark.parametrize(
    ("dtype", "size", "lengths", "tolerance"),
    [
        (torch.float32, 32, [179, 33, 1, 384, 64], 1e-6),
        (torch.bfloat16, 32, [179, 33, 1, 384, 64], 1e-2),
        (torch.bfloat16, 64, [101, 17], 1e-2),
    ],
)
def test_attention_equals_its_formula_with_the_same_dropout(dtype, size, lengths, tolerance):
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, k, v, gradient = (torch.randn(tokens, HEADS, size).to(dtype) for _ in range(4))
    options = (lengths, DROPPED, size**-0.5)
    output, sums, bits = torch.ops.hvd_bert.attention(q, k, v, *options, 2**40 + 1)
    found = torch.ops.hvd_bert.attention_backward(gradient, q, k, v, output, sums, bits, *options)
    masks = dropout_factors(bits, lengths)
    share = sum(mask.count_nonzero() for mask in masks) / sum(mask.numel() for mask in masks)
    assert share == pytest.approx(0.9, abs=0.01)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = by_hand(*exact, masks, size**-0.5)
    gradients = torch.autograd.grad(expected, exact, gradient.double())
    for one, other in zip((output, *found), (expected, *gradients), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@needs_fused
def test_attention_repeats_with_the_generator_and_threads_do_not_change_it():
    query, windows = torch.randn(90, HEADS, 32), attention.make_windows([50, 40], torch.device("cpu"))
    outputs = []
    for seed, threads in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        outputs.append(attention.by_fused(query, query, query, windows, 0.1, 0.2))
    torch.set_num_threads(1)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


@needs_fused
@pytest.mark.parametrize(
    ("tokens", "size_in", "size_out", "bias"), [(67, 64, 96, True), (5, 96, 32, False), (64, 32, 1536, True)]
)
def test_linear_layer_in_bf16(tokens, size_in, size_out, bias):
    torch.manual_seed(0)
    layer, rows = Linear(size_in, size_out, bias=bias), torch.randn(2, tokens, size_in, requires_grad=True)
    upstream = torch.randn(2, tokens, size_out).bfloat16()
    found = []
    torch.set_num_threads(1)  # with more threads, the layer uses torch's kernel
    for chosen in (Kernels(linear=FUSED), kernels.TORCH_ONLY):
        with kernels.override(chosen), torch.autocast("cpu", torch.bfloat16):
            found.append(with_gradients(layer, rows, upstream))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= 1e-2 * other.abs().max()


@needs_fused
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_dropout_residual_and_layer_norm_equal_their_formula(dtype, tolerance):
    torch.manual_seed(0)
    rows, residual, gradient = torch.randn(137, 64).to(dtype), torch.randn(137, 64) * 2 + 1, torch.randn(137, 64)
    weight, bias = torch.randn(64) + 1, torch.randn(64)
    output, normalized, factors, bits = torch.ops.hvd_bert.add_norm(rows, residual, weight, bias, 1e-12, DROPPED, 5)
    mask = (bits.view(torch.int32)[..., None] >> torch.arange(32) & 1).flatten(1).double() * 65536 / (65536 - DROPPED)
    assert mask.count_nonzero() / mask.numel() == pytest.approx(0.9, abs=0.01)
    exact = [tensor.double().requires_grad_() for tensor in (rows, residual, weight, bias)]
    expected = torch.nn.functional.layer_norm(exact[0] * mask + exact[1], (64,), *exact[2:], 1e-12)
    gradients = torch.autograd.grad(expected, exact, gradient.double())
    found = torch.ops.hvd_bert.add_norm_backward(gradient, normalized, factors, bits, weight, DROPPED, dtype)
    assert found[0].dtype == dtype
    for one, other in zip((output, *found), (expected, *gradients), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@needs_fused
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_layer_with_the_fused_norm(precision, tolerance):
    layer = AddAndNorm(ElectraSelfOutput(ElectraConfig(hidden_size=64, hidden_dropout_prob=0.0)))
    inputs, results = (torch.randn(1, 9, 64, requires_grad=True), torch.randn(1, 9, 64, requires_grad=True)), []
    for chosen in (Kernels(norm=FUSED), kernels.TORCH_ONLY):
        with kernels.override(chosen), autocast(torch.device("cpu"), precision):
            output = layer(*inputs)
        results.append([output, *torch.autograd.grad(output.square().sum(), [*inputs, *layer.parameters()])])
    assert "AddNorm" in results[0][0].grad_fn.name() and not results[0][0]._is_view()
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_kernels_without_the_compiled_operations(monkeypatch):
    wanted = Kernels(FUSED, attention=FUSED, norm=FUSED)
    monkeypatch.setattr(fused, "available", lambda: False)
    assert kernels.without_missing(wanted) == Kernels(attention=OWN)
    heads = CPU, torch.float32, 0.1
    with kernels.override(wanted):
        assert attention.choose(*heads, 32) is attention.by_probabilities
    monkeypatch.setattr(fused, "available", lambda: True)
    with kernels.override(wanted):
        assert attention.choose(*heads, 32) is attention.by_fused
        assert attention.choose(*heads, 40) is attention.by_probabilities
        assert attention.choose(*heads, 32, local=True) is attention.by_probabilities


def test_settings_of_malloc_by_the_user_are_not_changed():
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "LD_PRELOAD"):
        assert not keep_memory({"PATH": "/bin", name: "1"})


COUNT = """
import resource, sys, torch
from hvd_bert.model.cpu.malloc import keep_memory

done = keep_memory({}) if sys.argv[1] == "keep" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(12 << 20) for _ in range(2)]  # glibc returns blocks above 32 MiB by default
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(10):  # until the heap has memory for each
    faults()
print(done, min(faults() for _ in range(5)))
"""


def printed_by(program: str, *words: str) -> list[str]:
    """Run Python code without MALLOC_* variables, which change glibc's defaults. Returns the printed words."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words = (sys.executable, "-c", program, *words)
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_freed_memory_is_reused():
    done, faults = printed_by(COUNT, "keep")
    if done != "True":
        pytest.skip("this C library has no mallopt")
    assert int(faults) == 0 < int(printed_by(COUNT, "plain")[1])
