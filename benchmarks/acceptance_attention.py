"""The checks of gpu_acceptance.py of the attention kernels: each against padded attention, and its dropout.

The reference is padded attention in float64. A kernel may be as far from it as torch's padded kernel of the same dtype,
times FACTOR, plus a few roundings. Each precision runs in its own process:

    python benchmarks/acceptance_attention.py cuda FOUND.json bf16
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from acceptance_place import Outcome, Place
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from hvd_bert.model import attention
from hvd_bert.model.attention import Kernel, Windows, make_windows

FACTOR, ROUNDINGS = 3.0, 8.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = {"cuda": [384, 17, 128, 1, 250, 96, 63, 300], "cpu": [40, 7, 1, 33]}
HEADS, HEAD_SIZE, REACH, DROPOUT = 12, 64, 16, 0.1
SCALING = HEAD_SIZE**-0.5
SIGMAS = 6.0  # allowed deviation of a mean over random numbers
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernels(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Kernel, int | None]]:
    """Those that the device has for the dtype, each with its `reach` (local attention; None: all tokens attend)."""
    half, fused = dtype != torch.float32, attention.fused(device)
    yield "by_window", attention.by_window, None
    yield "by_window, local", attention.by_window, REACH
    yield "by_jagged", attention.by_jagged, None
    if attention.by_efficient in fused and dtype != torch.bfloat16:
        yield "by_efficient", attention.by_efficient, None
    if attention.by_flash in fused and half:
        yield "by_flash", attention.by_flash, None
        yield "by_flash, local", attention.by_flash, REACH
    if device.type == "cpu" and not half:
        yield "by_probabilities", attention.by_probabilities, None


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


def results(attend: Attend, tensors: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients, in float64."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    output = attend(query, key, value)
    gradients = torch.autograd.grad(output, [query, key, value], upstream.to(output.dtype))
    return [tensor.detach().double() for tensor in (output, *gradients)]


class Trial:
    """A kernel on windows with random tensors of one dtype."""

    def __init__(self, kernel: Kernel, reach: int | None, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel, self.device, self.dtype = kernel, device, dtype
        self.lengths = LENGTHS[device.type]
        self.windows = make_windows(self.lengths, device, reach)
        self.shape = (sum(self.lengths), HEADS, HEAD_SIZE)
        generator = torch.Generator().manual_seed(0)
        *self.tensors, self.upstream = (torch.randn(self.shape, generator=generator).to(device, dtype) for _ in "qkvg")
        self.rounding = torch.finfo(dtype).eps

    def attend(self, dropout: float) -> Attend:
        return lambda query, key, value: self.kernel(query, key, value, self.windows, dropout, SCALING)

    def excess(self) -> float:
        """The largest error of output and gradients, over what is allowed. At most 1 is right, NaN is wrong."""
        reference = partial(padded, windows=self.windows)
        exact = results(reference, [tensor.double() for tensor in self.tensors], self.upstream.double())
        torchs = results(reference, self.tensors, self.upstream)
        found = results(self.attend(0.0), self.tensors, self.upstream)
        shares = []
        for mine, other, expected in zip(found, torchs, exact, strict=True):
            allowed = FACTOR * (other - expected).abs().max() + ROUNDINGS * self.rounding * expected.abs().max()
            shares.append((mine - expected).abs().max() / allowed.where(allowed.isfinite(), torch.nan))
        return float(torch.stack(shares).max())  # NaN if any is NaN, unlike Python's max

    def dropout_error(self) -> float:
        """With values 1 the output of a head is the sum of the kept probabilities over 1 - p, whose mean is 1.

        Returns how far the mean over all tokens is from 1, over what chance explains. At most 1 is right.
        """
        equal = torch.zeros(self.shape, device=self.device, dtype=self.dtype)  # a token attends to its window alike
        output = self.attend(DROPOUT)(equal, equal, torch.ones_like(equal)).double()[..., 0]
        per_token = torch.tensor(self.lengths).repeat_interleave(torch.tensor(self.lengths)).double()
        variance = float((DROPOUT / (1 - DROPOUT) / per_token).sum()) * HEADS
        chance = SIGMAS * variance**0.5 / (len(per_token) * HEADS) + 4 * self.rounding
        changed = bool((output - 1).abs().max() > 4 * self.rounding)
        return abs(float(output.mean()) - 1) / chance if changed else float("inf")

    def dropout_gradient_error(self) -> float:
        """The output is linear in the values: <output, upstream> = <values, their gradient>, if both passes drop the
        same. Returns the difference over what roundings explain. At most 1 is right."""
        found = results(self.attend(DROPOUT), self.tensors, self.upstream)
        one, other = found[0] * self.upstream.double(), found[3] * self.tensors[2].double()
        return float((one.sum() - other.sum()).abs() / (ROUNDINGS * self.rounding * one.norm()))

    def milliseconds(self) -> float:
        """The median time of a forward and a backward pass with dropout."""
        attend, (query, key, value) = self.attend(DROPOUT), (t.detach().requires_grad_() for t in self.tensors)

        def both() -> None:
            torch.autograd.grad(attend(query, key, value), [query, key, value], self.upstream)

        timer = Timer("both()", globals={"both": both}, num_threads=torch.get_num_threads())
        return 1000 * timer.blocked_autorange().median


def check(device_type: str, precision: str) -> Outcome:
    """All kernels of a dtype."""
    device, dtype = torch.device(device_type), DTYPES[precision]
    torch.manual_seed(0)
    found, times = {}, {}
    for name, kernel, reach in kernels(device, dtype):
        trial = Trial(kernel, reach, device, dtype)
        found[name] = trial.excess()
        if reach is None:
            found[f"{name}, dropout"] = trial.dropout_error()
            found[f"{name}, dropout's gradient"] = trial.dropout_gradient_error()
        times[name] = trial.milliseconds()
    wrong = [name for name, share in found.items() if not share <= 1]
    text = f"wrong: {', '.join(wrong)}" if wrong else f"{', '.join(found)}: at most {max(found.values()):.2f} of it"
    return Outcome(text, not wrong, {"share_of_tolerance": found, "milliseconds": times})


def check_apart(place: Place, precision: str) -> Outcome:
    return place.outcome(f"attention-{precision}", __file__, precision)


GOAL = f"padded attention, to {FACTOR:g} x torch's own error"
CHECKS = {f"attention kernels, {name}": (GOAL, partial(check_apart, precision=name)) for name in DTYPES}

if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asdict(check(sys.argv[1], sys.argv[3]))), encoding="utf-8")
