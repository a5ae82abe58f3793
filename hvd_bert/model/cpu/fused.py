"""The compiled operations of fused.cpp: attention with dropout, dropout + residual + layer norm, linear layers in bf16.

To compile them, run `python -m hvd_bert.model.cpu.fused`, as env/setup.sh does. Without them, other kernels are used.
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
MULTIPLE = 32  # head sizes and layer sizes must be multiples of this
FLAGS = (
    "-O3 -std=c++20 -fPIC -fopenmp -fno-strict-aliasing -mfma -mvaes -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"
    " -mavx512bf16 -DCPU_CAPABILITY_AVX512 -DCPU_CAPABILITY=AVX512"
)


def library() -> Path:
    """Return the path of the compiled library. Its name contains a hash of source, torch version and compiler flags."""
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {FLAGS.split()}".encode()).hexdigest()[:12]
    return Path(sysconfig.get_path("platlib")) / f"hvd_bert_fused-{digest}.so"


def build() -> None:
    """Compile the operations into `library()`. The environment variable CXX names the compiler; default: g++."""
    from torch.utils import cpp_extension  # slow to import

    compiler, folder = os.environ.get("CXX", "g++"), library().parent
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        subprocess.run([compiler, *FLAGS.split(), *includes, "-c", str(SOURCE)], check=True, cwd=scratch)
        # Linked without -fopenmp, so that torch's own OpenMP runs the threads.
        libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
        subprocess.run([compiler, "-shared", "fused.o", "-o", "fused.so", *libraries], check=True, cwd=scratch)
        os.replace(f"{scratch}/fused.so", library())


@cache
def available() -> bool:
    """Load the compiled operations. Returns whether they exist for this torch version and run on this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY may lower it
    if not (capability.startswith("AVX512") and {"avx512_bf16", "vaes"} <= machine.cpu_flags() and library().exists()):
        return False
    try:
        torch.ops.load_library(str(library()))
        torch.ops.hvd_bert.linear(torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(32, 32), torch.zeros(32))
    except (OSError, RuntimeError) as error:  # compiled for another system, or oneDNN is limited to older instructions
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
    """dropout(softmax(scaling q k^T)) v within each window, with dropout probability `dropped` / 65,536.

    Tensors are [N, heads, head size], fp32 or bf16.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *heads, lengths, dropped, scaling = inputs
        heads = [tensor.detach() if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in heads]
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.attention_backward, (lengths, dropped, scaling)
        output, *kept = torch.ops.hvd_bert.attention(*heads, *ctx.options, _seed())
        ctx.save_for_backward(*heads, output, *kept)
        return output  # type: ignore[no-any-return]


class LinearInBf16(_Operation):
    """Linear layer in bf16: rows [..., in] (fp32 or bf16), weight [out, in] and bias (fp32) -> [..., out] (bf16)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.linear_backward, (rows.dtype,)
        rows = rows.detach().to(torch.bfloat16).contiguous()
        ctx.save_for_backward(rows, weight)
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return torch.ops.hvd_bert.linear(rows, weight.detach(), bias.detach())  # type: ignore[no-any-return]


class AddNorm(_Operation):
    """layer_norm(dropout(rows) + residual). `rows`: [..., size] in fp32 or bf16. All other tensors are fp32."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, epsilon, dropped = inputs
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        ctx.of_inputs, ctx.options = torch.ops.hvd_bert.add_norm_backward, (dropped, tensors[0].dtype)
        output, *kept = torch.ops.hvd_bert.add_norm(*tensors, epsilon, dropped, _seed())
        ctx.save_for_backward(*kept, inputs[2])
        return output  # type: ignore[no-any-return]


def _seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().numpy())  # from the generator that checkpoints save


if __name__ == "__main__":
    build()
