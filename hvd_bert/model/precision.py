"""Sets a model's precision, evaluation mode and gradient checkpointing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from hvd_bert.config.training import TrainArguments
from hvd_bert.errors import UserError

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(args: TrainArguments) -> None:
    """Set the precision of fp32 matrix products, apply --deterministic, and turn off kernels with wrong gradients."""
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
        # Deterministic mode fills every new tensor, to make reads of uninitialized memory reproducible.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # With a mask (padded batches, local attention), cuDNN's attention returns NaN gradients (pytorch#196678).
    if "2.11" <= torch.__version__ < "2.14":
        torch.backends.cuda.enable_cudnn_sdp(False)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Make the autocast context of a forward pass in "fp32", "bf16" or "fp16". Weights and gradients stay in fp32."""
    dtype = AUTOCAST[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def keep_casts(device: torch.device) -> torch.autocast:
    """Context manager around a step: autocast casts each weight once per step instead of once per micro-batch.

    Autocast keeps cast weights until the thread's outermost autocast context ends, which is this context. Recomputed
    layers on a GPU and DataParallel's replicas run in other threads, which cast again.
    """
    return torch.autocast(device.type, enabled=False)


def recompute_layers(model: Any) -> None:
    """Turn on the model's own gradient checkpointing for training. It does not change losses and gradients.

    Raises UserError if the model does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it. Omit the flag, and lower"
            " --per_device_train_batch_size if memory is short."
        )
    transformers_logging.set_verbosity_error()  # otherwise transformers warns about a cache, which encoders never use
    # Newer versions of transformers have this name, and warn about the old name.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # reentrant checkpoints would run the hooks that average gradients too late


@contextmanager
def evaluating(model: nn.Module, eager: bool = False) -> Iterator[None]:
    """Context manager: put the model into evaluation mode without gradients. `eager`: bypass compiled code."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager") if eager else nullcontext():
        yield
    model.train(was_training)
