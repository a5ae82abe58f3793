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
    """Peak learning rate for the global batch of so many devices (GPUs, or processes on CPUs).

    Linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: You et al. 2019 (arXiv:1904.00962); none: as given. At most
    `lr_scaling_limit` times what is given. Their F1 is measured in docs/evidence/results.md.
    """
    return args.learning_rate * min(_scaling(args, devices), args.lr_scaling_limit)


def _scaling(args: TrainArguments, devices: int) -> float:
    """What the rule of `lr_scaling` multiplies the learning rate by, without its limit."""
    of_one = args.per_device_train_batch_size * args.gradient_accumulation_steps
    ratio = devices * of_one / (args.lr_base_batch_size or of_one)
    return float(ratio ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[args.lr_scaling])


def scaling_advice(args: TrainArguments, devices: int, peak: float) -> list[str]:
    """What to look out for where `lr_scaling` has met its limit, or brought the learning rate above HIGH_RATE.

    `peak`: the learning rate's. A run that goes on has it from its checkpoint, whatever the world is now.
    """
    said, wanted = [], _scaling(args, devices)
    times = f"{peak / args.learning_rate:.3g} times --learning_rate"
    if wanted > args.lr_scaling_limit and math.isclose(peak, scaled_learning_rate(args, devices)):
        said.append(
            f"The learning rate's peak is {times} (--lr_scaling_limit), and not the {wanted:.3g} times of --lr_scaling"
            f" {args.lr_scaling}: 8 times lost 10 points of F1 where it was tried, and 4 times 4"
            " (docs/evidence/results.md)."
            " With fewer windows a step less is lost."
        )
    if args.lr_scaling != "none" and peak > max(args.learning_rate, HIGH_RATE):
        or_sqrt = ", or give --lr_scaling sqrt" if args.lr_scaling == "linear" else ""
        said.append(
            f"The learning rate's peak is {peak:.2g}, {times} (--lr_scaling {args.lr_scaling}); the BERT paper's are"
            f" 2e-05 to 5e-05, smaller models take more. If the loss does not fall, lower --learning_rate{or_sqrt}."
        )
    return said


def make_optimizer(model: nn.Module, args: TrainArguments, devices: int) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only: biases and layer norms (1-dim parameters) are left alone."""
    learning_rate = scaled_learning_rate(args, devices)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=True)


def warmup_steps(args: TrainArguments, total_steps: int) -> int:
    """Steps of warm-up: `warmup_steps` if given, a share of all if it is below 1, else `warmup_ratio` of all."""
    ratio = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    return int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(total_steps * ratio)


def make_schedule(optimizer: Any, args: TrainArguments, total_steps: int) -> Any:
    """Learning-rate schedule for `total_steps` steps; built on the wrapped optimizer, whose groups it changes."""
    try:
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps(args, total_steps), total_steps)
    except (ValueError, TypeError) as error:
        raise UserError(f"--lr_scheduler_type {args.lr_scheduler_type}: {error}") from None
