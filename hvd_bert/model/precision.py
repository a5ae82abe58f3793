"""Precision of the forward pass and of matrix products."""

from __future__ import annotations

import os

import torch

from hvd_bert.config.settings import TrainArguments

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(args: TrainArguments) -> None:
    """Set the precision of matrix products and, with --deterministic, make all kernels deterministic."""
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast for a forward pass in "fp32", "bf16" or "fp16"; weights and gradients stay in fp32."""
    dtype = AUTOCAST[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
