"""AdamW's parameter groups, the learning rate and its schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers.optimization import get_scheduler

from hvd_bert.config.settings import TrainArguments
from hvd_bert.errors import UserError

HIGH_RATE = 1e-4  # twice the highest of the BERT paper (Devlin et al. 2019, appendix A.3)


def scaled_learning_rate(args: TrainArguments, devices: int) -> float:
    """Peak learning rate for the global batch of `devices` GPUs (or processes on CPUs).

    Linear: Goyal et al. 2017 (arXiv:1706.02677). Sqrt: You et al. 2019 (arXiv:1904.00962). None: unchanged. The factor
    is at most `lr_scaling_limit`. docs/evidence/results.md compares the rules' F1.
    """
    return args.learning_rate * min(_scaling(args, devices), args.lr_scaling_limit)


def _scaling(args: TrainArguments, devices: int) -> float:
    """The factor of the learning rate by the rule `lr_scaling`, without the limit."""
    device_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    ratio = devices * device_batch / (args.lr_base_batch_size or device_batch)
    return float(ratio ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[args.lr_scaling])


def scaling_advice(args: TrainArguments, devices: int, peak: float) -> list[str]:
    """Warnings if `lr_scaling` reached its limit or raised the learning rate above HIGH_RATE.

    `peak`: the peak learning rate. A resumed run has it from its checkpoint, whatever the world size.
    """
    advice, factor = [], _scaling(args, devices)
    times = f"{peak / args.learning_rate:.3g} times --learning_rate"
    if factor > args.lr_scaling_limit and math.isclose(peak, scaled_learning_rate(args, devices)):
        advice.append(
            f"The peak learning rate is {times}: --lr_scaling_limit caps the factor {factor:.3g} of --lr_scaling"
            f" {args.lr_scaling}. A factor of 4 cost 4 points of F1 and a factor of 8 cost 10 where they were measured"
            " (docs/evidence/results.md). A smaller global batch costs less."
        )
    if args.lr_scaling != "none" and peak > max(args.learning_rate, HIGH_RATE):
        or_sqrt = " or use --lr_scaling sqrt" if args.lr_scaling == "linear" else ""
        advice.append(
            f"The peak learning rate is {peak:.2g}, {times} (--lr_scaling {args.lr_scaling}). The BERT paper uses 2e-05"
            f" to 5e-05; smaller models tolerate more. If the loss does not fall, lower --learning_rate{or_sqrt}."
        )
    return advice


def make_optimizer(model: nn.Module, args: TrainArguments, devices: int) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, not on biases and layer norms (1-dim parameters)."""
    learning_rate = scaled_learning_rate(args, devices)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=True)


def warmup_steps(args: TrainArguments, total_steps: int) -> int:
    """Number of warm-up steps: `warmup_steps` (below 1 a share of all steps), else by `warmup_ratio`."""
    ratio = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    return int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(total_steps * ratio)


def make_schedule(optimizer: Any, args: TrainArguments, total_steps: int) -> Any:
    """Learning-rate schedule over `total_steps` steps, for the strategy's (wrapped) optimizer."""
    try:
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps(args, total_steps), total_steps)
    except (ValueError, TypeError) as error:
        raise UserError(f"--lr_scheduler_type {args.lr_scheduler_type}: {error}") from None
