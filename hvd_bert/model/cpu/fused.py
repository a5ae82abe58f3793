"""The operations of fused.cpp, for CPUs with AVX-512 and AMX: attention with dropout, dropout + residual + layer norm,
and linear layers in bf16.

`python -m hvd_bert.model.cpu.fused` compiles them, as env/setup.sh does. Without them, this package's other kernels and
torch's compute the same (`kernels.py`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_bert import machine
from hvd_bert.errors import log

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 32  # of sizes of heads and layers
FLAGS = [
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fopenmp",
    "-fno-strict-aliasing",
    "-mfma",
    "-mvaes",
    "-mf16c",
    "-DCPU_CAPABILITY_AVX512",
    "-DCPU_CAPABILITY=AVX512",
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")),
]


def library() -> Path:
    """Where the compiled operations are: in the environment, by source, flags and torch."""
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {FLAGS}".encode()).hexdigest()[:12]
    return Path(sysconfig.get_path("platlib")) / f"hvd_bert_fused-{digest}.so"


def build() -> None:
    """Compile the operations, with the compiler of the environment variable CXX, else g++."""
    from torch.utils import cpp_extension  # slow

    compiler, folder = os.environ.get("CXX", "g++"), library().parent
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = f"{scratch}/fused.o", f"{scratch}/fused.so"
        subprocess.run([compiler, *FLAGS, *includes, "-c", str(SOURCE), "-o", compiled], check=True)
        # Not with -fopenmp: then the threads are those of torch's own OpenMP.
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        subprocess.run([compiler, "-shared", compiled, "-o", linked, *libraries, "-ltorch_cpu", "-lc10"], check=True)
        os.replace(linked, library())


@cache
def available() -> bool:
    """Whether the operations are compiled for this torch, and this CPU has their instructions."""
    has_instructions = {"avx512_bf16", "amx_bf16", "vaes"} <= machine.cpu_flags()
    capability = torch.backends.cpu.get_cpu_capability()  # which the user may lower
    if not (has_instructions and capability.startswith("AVX512") and library().exists()):
        return False
    try:
        torch.ops.load_library(str(library()))
        torch.ops.hvd_bert.linear(torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(32, 32), torch.zeros(32))
    except (OSError, RuntimeError) as error:  # compiled for another system, or oneDNN may not use all instructions
        log.warning("The compiled kernels cannot be used: %s. Others compute the same.", str(error).splitlines()[0])
        return False
    return True


class Attention(torch.autograd.Function):
    """dropout(softmax(scaling q k^T)) v in each window; tensors are [N, heads, head size], fp32 or bf16.

    Of 65,536 cases, an element becomes 0 in `dropped`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        query, key, value, lengths, dropped, scaling = inputs
        query, key, value = (_with_whole_heads(tensor.detach()) for tensor in (query, key, value))
        options = (lengths, dropped, scaling)
        output, sums, bits = torch.ops.hvd_bert.attention(query, key, value, *options, _seed())
        ctx.save_for_backward(query, key, value, output, sums, bits)
        ctx.options = options
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = _with_whole_heads(gradient)
        gradients = torch.ops.hvd_bert.attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None


def _seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().numpy())  # a checkpoint's random state covers it


def _with_whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class LinearInBf16(torch.autograd.Function):
    """rows [N, in], fp32 or bf16, times weight [out, in] transposed, plus bias, both fp32: [N, out] in bf16."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.dtype, ctx.has_bias = rows.dtype, bias is not None
        rows = rows.detach().to(torch.bfloat16).contiguous()
        ctx.save_for_backward(rows, weight)
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return torch.ops.hvd_bert.linear(rows, weight.detach(), bias.detach())  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = torch.ops.hvd_bert.linear_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.dtype)
        return gradients if ctx.has_bias else (*gradients[:2], None)


class AddNorm(torch.autograd.Function):
    """layer_norm(dropout(rows) + residual): rows [N, size], fp32 or bf16; residual, weight, bias and result in fp32."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        rows, residual, weight, bias, epsilon, dropped = inputs
        tensors = (rows.detach().contiguous(), residual.detach().contiguous(), weight.detach(), bias.detach())
        output, *kept = torch.ops.hvd_bert.add_norm(*tensors, epsilon, dropped, _seed())
        ctx.save_for_backward(*kept, weight)
        ctx.options = (dropped, rows.dtype)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        options = (*ctx.saved_tensors, *ctx.options)
        return *torch.ops.hvd_bert.add_norm_backward(gradient.contiguous(), *options), None, None


def in_shape(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The rows in another shape, as torch's linear layers return theirs: no view, after which FSDP would lose the
    gradients of an in-place operation."""
    return torch.ops.aten._unsafe_view(rows, shape)  # type: ignore[no-any-return]


if __name__ == "__main__":
    build()
