"""Measure the CPU's kernels next to torch's own, to find out whether the trainer's table is right for this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from hvd_bert.model.cpu import fused, kernels
from hvd_bert.model.cpu.kernels import FUSED, ONEDNN, OPENBLAS, OWN, TORCH, Kernels
from hvd_bert.model.precision import autocast
from hvd_bert.tools.doctor.report import CheckResult, ok, warning

BUDGET_S, ROUNDS = 2.0, 3  # for all operations; at least so many rounds of each
SLOWER, CLEARLY_SLOWER = 1.05, 1.15  # times as long
ROWS, HIDDEN, INNER = 1430, 384, 1536  # MiniLM's; 8 windows of SQuAD
WINDOWS, HEADS, DROPOUT = [179] * 8, 12, 0.1
LINEAR = {name: Kernels(linear=name) for name in (TORCH, ONEDNN, OPENBLAS)}
LINEAR_IN_BF16 = {name: Kernels(linear=name) for name in (TORCH, FUSED)}
ATTENTION = {TORCH: Kernels(), OWN: Kernels(attention=OWN), FUSED: Kernels(attention=FUSED)}


def lines() -> list[CheckResult]:
    """The check: about BUDGET_S of measurements, and whether the CPU computes in bf16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen, emulated = kernels.default_choice(), kernels.emulates_bf16()
        found = [
            kernel_line("Linear", chosen.kind, in_turns(_linear("fp32"), LINEAR), chosen.fp32.linear),
            kernel_line("Attention", chosen.kind, in_turns(_attention(), ATTENTION), chosen.fp32.attention),
        ]
        if chosen.bf16.linear == FUSED:
            seconds = in_turns(_linear("bf16"), LINEAR_IN_BF16)
            found.append(kernel_line("Linear in bf16", chosen.kind, seconds, FUSED))
    finally:
        torch.set_num_threads(threads)
    if kernels.TABLE[chosen.kind].bf16.attention == FUSED and not fused.available():
        hint = "Run python -m hvd_bert.model.cpu.fused on a host with a compiler for C++20, such as g++ 11."
        found.append(warning("Fused kernels", "not compiled, so training is slower", hint))
    return [*found, bf16_line(emulated)]


def in_turns(work: Callable[[], object], variants: Mapping[str, Kernels]) -> dict[str, float]:
    """Median CPU seconds with each variant that is usable here."""
    usable = {name: variant for name, variant in variants.items() if kernels.without_missing(variant) == variant}
    seconds: dict[str, list[float]] = {name: [] for name in usable}
    end = time.perf_counter() + BUDGET_S / 2
    while len(seconds[TORCH]) <= ROUNDS or time.perf_counter() < end:
        for name, variant in usable.items():
            with kernels.override(variant):
                start = time.process_time()  # other programs take less effect on it
                work()
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first one warms up


def _linear(precision: str) -> Callable[[], object]:
    from hvd_bert.model.cpu.linear import Linear

    layer, rows = Linear(HIDDEN, INNER), torch.randn(ROWS, HIDDEN)
    inputs = [rows.requires_grad_(), *layer.parameters()]

    def both_passes() -> object:
        with autocast(rows.device, precision):
            output = layer(rows)
        return torch.autograd.grad(output, inputs, torch.ones_like(output))

    return both_passes


def _attention() -> Callable[[], object]:
    from hvd_bert.model.attention import attend_within_windows, make_windows  # slow: imports transformers

    shape = (1, HEADS, sum(WINDOWS), HIDDEN // HEADS)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    upstream, module = torch.randn(shape).transpose(1, 2), nn.Module()
    windows = make_windows(WINDOWS, q.device)

    def both_passes() -> object:
        output, _ = attend_within_windows(module, q, k, v, None, dropout=DROPOUT, windows=windows)
        return torch.autograd.grad(output, [q, k, v], upstream)

    return both_passes


def kernel_line(name: str, kind: str, seconds: Mapping[str, float], chosen: str) -> CheckResult:
    """Whether the chosen kernel of an operation is the right one. `seconds`: by kernel."""
    speeds = ", ".join(f"{kernel} {1e3 * value:.1f} ms" for kernel, value in seconds.items())
    found = f"{kind}: {chosen} is used; forward and backward pass: {speeds}"
    fastest = min(seconds, key=seconds.__getitem__)
    if chosen != TORCH and seconds[chosen] > SLOWER * seconds[TORCH]:
        hint = "If a second check on the idle machine agrees, train with --cpu_kernels torch, and report this line."
        return warning(name, f"{found}. torch's own is faster", hint)
    if seconds[chosen] > CLEARLY_SLOWER * seconds[fastest]:
        hint = "If a second check on the idle machine agrees, report this line: a training could be faster."
        return warning(name, f"{found}. {fastest} is faster, but not used on this kind of CPU", hint)
    return ok(name, found)


def bf16_line(emulated: bool) -> CheckResult:
    if emulated:
        hint = "Leave out --bf16 on this CPU."
        return warning("bf16", "emulated by this CPU, many times slower than fp32", hint)
    return ok("bf16", "computed by this CPU's own instructions")
