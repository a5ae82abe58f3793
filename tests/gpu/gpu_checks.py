"""Check attention kernels or Horovod's sums: python gpu_checks.py NAME ARGUMENTS... DEVICE JSON_FILE."""

import json
import os
import sys
from pathlib import Path

import torch
from test_attention import reference

from hvd_bert.config.training import TrainArguments
from hvd_bert.errors import UserError
from hvd_bert.model import attention as ours
from hvd_bert.model.attention import make_windows
from hvd_bert.model.precision import set_precision
from hvd_bert.strategies.horovod import check_bf16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Allowed error, in eps. The errors of torch's kernels are at most 6 in fp32, and 1.3 in fp16 and bf16.
ROUNDINGS = {torch.float32: 24, torch.float16: 9, torch.bfloat16: 9}
LENGTHS = {"cuda": [384, 17, 128, 1, 250, 96, 63, 300], "cpu": [40, 7, 1, 33]}
HEADS, HEAD_SIZE, WINDOW_SIZE, DROPOUT = 12, 64, 16, 0.1
SIGMAS = 6.0  # allowed deviation of a mean over random numbers, in standard deviations


def kernels(device, dtype):
    """Return the device's kernels for a dtype, each with a `window_size` (None: attention to all tokens)."""
    half, fused = dtype != torch.float32, ours.gpu_kernels(device) if device.type == "cuda" else set()
    fits = {ours.by_window: True, ours.by_jagged: True, ours.by_flash: half and ours.by_flash in fused}
    fits |= {ours.by_efficient: dtype != torch.bfloat16 and ours.by_efficient in fused}
    fits |= {ours.by_probabilities: not half and device.type == "cpu"}
    local = [(kernel, WINDOW_SIZE) for kernel in (ours.by_window, ours.by_flash) if fits[kernel]]
    return [(kernel, None) for kernel in fits if fits[kernel]] + local


def errors(kernel, window_size, device, dtype):
    """Test a kernel on random tensors [N, heads, head size].

    Returns name -> error divided by the allowed error. A result with NaN has the error NaN, which is not <= 1.
    """
    lengths, eps, generator = LENGTHS[device.type], torch.finfo(dtype).eps, torch.Generator().manual_seed(0)
    windows, allowed = make_windows(lengths, device, window_size), ROUNDINGS[dtype] * eps
    shape = (sum(lengths), HEADS, HEAD_SIZE)
    *tensors, upstream = (torch.randn(shape, generator=generator).to(device, dtype) for _ in "qkvg")

    def both_passes(dropout, exact=False):
        inputs = [(tensor.double() if exact else tensor).detach().requires_grad_() for tensor in tensors]
        if exact:
            rows = [tensor.transpose(0, 1)[None] for tensor in inputs]
            output = reference(*rows, lengths, HEAD_SIZE**-0.5, 384 if window_size is None else window_size)[0]
        else:
            output = kernel(*inputs, windows, dropout, HEAD_SIZE**-0.5)
        gradients = torch.autograd.grad(output, inputs, upstream.to(output.dtype))
        return [tensor.detach().double() for tensor in (output, *gradients)]

    pairs = zip(both_passes(0.0), both_passes(0.0, exact=True), strict=True)
    shares = [(found - exact).abs().max() / (allowed * exact.abs().max()) for found, exact in pairs]
    found = {"both passes": float(torch.stack(shares).max())}  # NaN if any is NaN
    if window_size is not None:
        return found
    # With values of 1, the output is the sum of the remaining probabilities divided by 1 - p, which is 1 on average.
    equal = torch.zeros_like(upstream)  # all probabilities of a window are equal
    output = kernel(equal, equal, torch.ones_like(equal), windows, DROPOUT, 1.0).double()[..., 0]
    # Variance of the sum of all outputs: p / (1 - p) / length per token and head, so p / (1 - p) per window and head.
    variance = len(lengths) * HEADS * DROPOUT / (1 - DROPOUT)
    chance = SIGMAS * variance**0.5 / output.numel() + 4 * eps
    changed = bool((output - 1).abs().max() > 4 * eps)
    found["dropout"] = abs(float(output.mean()) - 1) / chance if changed else float("inf")
    # The output is linear in the values: <output, upstream> = <values, gradient> if both passes drop the same elements.
    output, *_, gradient = both_passes(DROPOUT)
    one, other = output * upstream.double(), gradient * tensors[2].double()
    found["dropout's gradient"] = float((one.sum() - other.sum()).abs() / (allowed * one.norm()))
    return found


def attention(precision, device_type):
    """Check all kernels for a dtype. Returns whether all are right, a text, and the errors."""
    set_precision(TrainArguments())  # turns off kernels that training does not use
    torch.manual_seed(0)
    device, dtype, found = torch.device(device_type), DTYPES[precision], {}
    for kernel, window_size in kernels(device, dtype):
        found[kernel.__name__ + ", local" * (window_size is not None)] = errors(kernel, window_size, device, dtype)
    wrong = [f"{name}: {kind}" for name, shares in found.items() for kind, share in shares.items() if not share <= 1]
    largest = max(max(shares.values()) for shares in found.values())
    return not wrong, f"wrong: {'; '.join(wrong)}" if wrong else f"{', '.join(found)}: {largest:.2f} of it", found


def sums(hvd, device, dtypes):
    """Check sums, scaled sums and fused averages, and that a sum waits until the device has computed the values.

    Returns name -> whether the result is right.
    """
    right, size = {}, 2048 if device.type == "cuda" else 64
    for name, dtype in dtypes.items():
        values, *many = (torch.randn(size, device=device).to(dtype) for size in (100_003, 1, 7, 768, 768 * 768, 3072))
        found = [hvd.allreduce(values, op=hvd.Sum, name=f"sum.{name}")]
        found += [hvd.allreduce(values, op=hvd.Sum, name=f"scaled.{name}", prescale_factor=2.0)]
        found += hvd.grouped_allreduce(many, op=hvd.Average, name=f"many.{name}")
        right[name] = all(map(torch.equal, found, [values, 2 * values, *many]))
    for number in range(50):
        factor = torch.randn(size, size, device=device)
        product = (factor @ factor @ factor).sum(0)
        expected = 2 * product
        hvd.synchronize(hvd.allreduce_async_(product, op=hvd.Sum, name="product", prescale_factor=2.0))
        right[f"product {number}"] = torch.equal(product, expected)
    return right


def horovod(device_type):
    """Check sums in all dtypes that this Horovod can send. In a world of 1, a sum equals the tensor.

    Returns whether all are right, a text, and the names of wrong sums.
    """
    os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")  # one process needs no MPI
    import horovod.torch as hvd

    hvd.init()
    device, dtypes, unsent = torch.device(device_type), dict(DTYPES), ""
    if device_type == "cuda" and not hvd.nccl_built():
        return False, "this Horovod was built without NCCL: run `bash env/setup.sh --with-nccl`", None
    try:
        check_bf16(device)
    except UserError:
        unsent = f", this Horovod cannot send {dtypes.popitem()[0]}"
    wrong = [name for name, holds in sums(hvd, device, dtypes).items() if not holds]
    return not wrong, (f"wrong: {', '.join(wrong)}" if wrong else "exact") + unsent, wrong


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(json.dumps(globals()[sys.argv[1]](*sys.argv[2:-1])))
