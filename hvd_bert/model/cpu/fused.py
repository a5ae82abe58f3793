"""The operations of fused.cpp: attention with dropout, dropout + residual + layer norm, and linear layers in bf16.

`python -m hvd_bert.model.cpu.fused` compiles them, as env/setup.sh does. Without them, other kernels are used.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvd_bert import machine
from hvd_bert.errors import log

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 32  # sizes of heads and layers must be multiples of this
FLAGS = (
    "-O3 -std=c++20 -fPIC -fopenmp -fno-strict-aliasing -mfma -mvaes -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"
    " -mavx512bf16 -DCPU_CAPABILITY_AVX512 -DCPU_CAPABILITY=AVX512"
)


def library() -> Path:
    """Path of the compiled operations in the Python environment. Its name has a hash of source, torch and flags."""
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {FLAGS.split()}".encode()).hexdigest()[:12]
    return Path(sysconfig.get_path("platlib")) / f"hvd_bert_fused-{digest}.so"


def build() -> None:
    """Compile the operations, with the compiler of the environment variable CXX, else g++."""
    from torch.utils import cpp_extension  # slow

    compiler, folder = os.environ.get("CXX", "g++"), library().parent
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        subprocess.run([compiler, *FLAGS.split(), *includes, "-c", str(SOURCE)], check=True, cwd=scratch)
        # Not with -fopenmp, so that torch's own OpenMP runs the threads.
        libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
        subprocess.run([compiler, "-shared", "fused.o", "-o", "fused.so", *libraries], check=True, cwd=scratch)
        os.replace(f"{scratch}/fused.so", library())


@cache
def available() -> bool:
    """Whether the operations are compiled for this torch, and this CPU has their instructions."""
    capability = torch.backends.cpu.get_cpu_capability()  # the user may have lowered it
    if not (capability.startswith("AVX512") and {"avx512_bf16", "vaes"} <= machine.cpu_flags() and library().exists()):
        return False
    try:
        torch.ops.load_library(str(library()))
        torch.ops.hvd_bert.linear(torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(32, 32), torch.zeros(32))
    except (OSError, RuntimeError) as error:  # compiled for another system, or oneDNN may not use all instructions
        log.warning("The compiled kernels cannot be used: %s. Others compute the same.", str(error).splitlines()[0])
        return False
    return True


class _Operation(torch.autograd.Function):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.of_inputs(gradient.contiguous(), *ctx.saved_tensors, *ctx.options)
        return tuple(one if needed else None for one, needed in zip_longest(gradients, ctx.needs_input_grad))


class Attention(_Operation):
    """dropout(softmax(scaling q k^T)) v in each window, with `dropped` of 65,536 probabilities set to 0; tensors are
    [N, heads, head size], fp32 or bf16."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *heads, lengths, dropped, scaling = inputs
        heads = [tensor.detach() if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in heads]
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.attention_backward, (lengths, dropped, scaling)
        output, *kept = torch.ops.hvd_bert.attention(*heads, *ctx.options, _seed())
        ctx.save_for_backward(*heads, output, *kept)
        return output  # type: ignore[no-any-return]


class LinearInBf16(_Operation):
    """rows [..., in], fp32 or bf16, times weight [out, in] transposed, plus bias, both fp32: [..., out] in bf16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.linear_backward, (rows.dtype,)
        rows = rows.detach().to(torch.bfloat16).contiguous()
        ctx.save_for_backward(rows, weight)
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return torch.ops.hvd_bert.linear(rows, weight.detach(), bias.detach())  # type: ignore[no-any-return]


class AddNorm(_Operation):
    """layer_norm(dropout(rows) + residual): rows [..., size], fp32 or bf16; all other tensors fp32."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, epsilon, dropped = inputs
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.add_norm_backward, (dropped, tensors[0].dtype)
        output, *kept = torch.ops.hvd_bert.add_norm(*tensors, epsilon, dropped, _seed())
        ctx.save_for_backward(*kept, inputs[2])
        return output  # type: ignore[no-any-return]


def _seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().numpy())  # a checkpoint's random state covers it


if __name__ == "__main__":
    build()
