"""The checks of gpu_acceptance.py of the attention kernels: each against padded attention, and its dropout.

The reference is padded attention in float64. A kernel may be as far from it as torch's padded kernel of the same dtype,
times FACTOR, plus a few roundings. Each precision runs in its own process:

    python benchmarks/acceptance_attention.py cuda bf16 FOUND.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from acceptance_place import Outcome, Place
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hvd_bert.model.attention import (
    Kernel,
    Windows,
    by_efficient,
    by_flash,
    by_jagged,
    by_probabilities,
    by_window,
    fused,
    make_windows,
)

FACTOR, ROUNDINGS = 3.0, 8.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = [384, 17, 128, 1, 250, 96, 63, 300]
HEADS, HEAD_SIZE, REACH, DROPOUT = 12, 64, 16, 0.1
TIMED = 20
SIGMAS = 6.0  # of a mean over random numbers


def kernels(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Kernel, int | None]]:
    """Those that the device has for the dtype, each with its `reach` (local attention; None: all tokens attend)."""
    half = dtype != torch.float32
    yield "by_window", by_window, None
    yield "by_window, local", by_window, REACH
    yield "by_jagged", by_jagged, None
    if by_efficient in fused(device) and dtype != torch.bfloat16:
        yield "by_efficient", by_efficient, None
    if by_flash in fused(device) and half:
        yield "by_flash", by_flash, None
        yield "by_flash, local", by_flash, REACH
    if device.type == "cpu" and not half:
        yield "by_probabilities", by_probabilities, None


def padded(query: Tensor, key: Tensor, value: Tensor, windows: Windows) -> Tensor:
    """The same attention by torch, over a batch with a row per window and a mask. Tensors are [N, heads, head size]."""
    rows = [torch.nn.utils.rnn.pad_sequence(t.split(windows.lengths), batch_first=True) for t in (query, key, value)]
    places = torch.arange(max(windows.lengths), device=query.device)
    mask = (places < torch.tensor(windows.lengths, device=query.device)[:, None])[:, None, None]
    if windows.reach is not None:
        mask = mask & ((places[:, None] - places).abs() <= windows.reach)
        mask = mask | (places[:, None] == places)  # padding attends to itself: no row without a token
    by_head = [row.transpose(1, 2) for row in rows]
    output = scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], attn_mask=mask).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(output, windows.lengths, strict=True)])


def results(attend: object, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients, in float64."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attend(*inputs)  # type: ignore[operator]
    gradients = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
    return [tensor.detach().double() for tensor in (output, *gradients)]


def excess(kernel: Kernel, reach: int | None, lengths: list[int], device: torch.device, dtype: torch.dtype) -> float:
    """The largest error of the output and the gradients, over what is allowed. At most 1 is right, NaN is wrong."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    *tensors, upstream = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    windows = make_windows(lengths, device, reach)
    exact = results(partial(padded, windows=windows), [tensor.double() for tensor in tensors], upstream.double())
    torchs = results(partial(padded, windows=windows), tensors, upstream)
    scaling = HEAD_SIZE**-0.5
    found = results(lambda q, k, v: kernel(q, k, v, windows, 0.0, scaling), tensors, upstream)
    shares = []
    for mine, other, expected in zip(found, torchs, exact, strict=True):
        allowed = FACTOR * (other - expected).abs().max() + ROUNDINGS * torch.finfo(dtype).eps * expected.abs().max()
        shares.append((mine - expected).abs().max() / allowed.where(allowed.isfinite(), torch.nan))
    return float(torch.stack(shares).max())  # NaN if any is NaN, unlike Python's max


def dropout_error(kernel: Kernel, lengths: list[int], device: torch.device, dtype: torch.dtype) -> float:
    """With values 1 the output of a head is the sum of the kept probabilities over 1 - p, whose mean is 1.

    Returns how far the mean over all tokens is from 1, over what chance explains. At most 1 is right.
    """
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    equal = torch.zeros(shape, device=device, dtype=dtype)  # a token attends to all of its window alike
    windows = make_windows(lengths, device)
    output = kernel(equal, equal, torch.ones_like(equal), windows, DROPOUT, 1.0).double()[..., 0]
    per_token = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)).double()
    variance = float((DROPOUT / (1 - DROPOUT) / per_token).sum()) * HEADS
    chance = SIGMAS * variance**0.5 / (len(per_token) * HEADS) + 4 * torch.finfo(dtype).eps
    changed = bool((output - 1).abs().max() > 4 * torch.finfo(dtype).eps)
    return abs(float(output.mean()) - 1) / chance if changed else float("inf")


def dropout_gradient_error(kernel: Kernel, lengths: list[int], device: torch.device, dtype: torch.dtype) -> float:
    """The output is linear in the values: <output, upstream> = <values, their gradient>, if both passes drop the same.

    Returns the difference over what roundings explain. At most 1 is right.
    """
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    windows = make_windows(lengths, device)
    found = results(lambda q, k, v: kernel(q, k, v, windows, DROPOUT, HEAD_SIZE**-0.5), tensors[:3], tensors[3])
    one, other = found[0] * tensors[3].double(), found[3] * tensors[2].double()
    return float((one.sum() - other.sum()).abs() / (ROUNDINGS * torch.finfo(dtype).eps * one.norm()))


def milliseconds(
    kernel: Kernel, reach: int | None, lengths: list[int], device: torch.device, dtype: torch.dtype
) -> float:
    """Of a forward and a backward pass with dropout, the median."""
    tensors = [torch.randn(sum(lengths), HEADS, HEAD_SIZE, device=device, dtype=dtype) for _ in range(4)]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    windows, seconds = make_windows(lengths, device, reach), []
    for _ in range(TIMED):
        start = time.perf_counter()
        output = kernel(query, key, value, windows, DROPOUT, HEAD_SIZE**-0.5)
        torch.autograd.grad(output, [query, key, value], tensors[3])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def check(device_type: str, precision: str) -> Outcome:
    """All kernels of a dtype."""
    device, dtype = torch.device(device_type), DTYPES[precision]
    lengths = LENGTHS if device_type == "cuda" else [40, 7, 1, 33]
    torch.manual_seed(0)
    found = {name: excess(kernel, reach, lengths, device, dtype) for name, kernel, reach in kernels(device, dtype)}
    for name, kernel, reach in kernels(device, dtype):
        if reach is None:
            found[f"{name}, dropout"] = dropout_error(kernel, lengths, device, dtype)
            found[f"{name}, dropout's gradient"] = dropout_gradient_error(kernel, lengths, device, dtype)
    wrong = [name for name, share in found.items() if not share <= 1]
    text = f"wrong: {', '.join(wrong)}" if wrong else f"{', '.join(found)}: at most {max(found.values()):.2f} of it"
    times = {
        name: milliseconds(kernel, reach, lengths, device, dtype) for name, kernel, reach in kernels(device, dtype)
    }
    return Outcome(text, not wrong, {"share_of_tolerance": found, "milliseconds": times})


def check_apart(place: Place, precision: str) -> Outcome:
    """In a process that ends: its CUDA context would exclude all others from a GPU in mode Exclusive_Process."""
    name = f"attention-{precision}"
    return Outcome(**place.record(name, [sys.executable, __file__, place.device, precision, str(place.file(name))]))


CHECKS = {
    f"attention kernels, {precision}": (
        f"padded attention, to {FACTOR:g} x torch's own error",
        partial(check_apart, precision=precision),
    )
    for precision in DTYPES
}

if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(asdict(check(sys.argv[1], sys.argv[2]))), encoding="utf-8")
