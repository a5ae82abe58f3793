"""The optimizer and its parameter groups, the learning rate and its schedule, the moving average of the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.optimization import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from hvd_bert.config.training import TrainArguments
from hvd_bert.errors import UserError

# Name patterns of parameters without weight decay. Copied from transformers' `Trainer.get_decay_parameter_names`, since
# importing the Trainer is slow.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def scaled_learning_rate(args: TrainArguments, devices: int) -> float:
    """Return the peak learning rate for the global batch of `devices` GPUs (or processes on CPUs).

    --lr_scaling linear is from Goyal et al. 2017 (arXiv:1706.02677), sqrt from You et al. 2019 (arXiv:1904.00962); none
    leaves --learning_rate unchanged. The factor is at most --lr_scaling_limit. docs/evidence/results.md compares the F1
    scores.
    """
    ratio = args.windows_per_step(devices) / _base_batch(args)
    factor = float(ratio ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[args.lr_scaling])
    return args.learning_rate * min(factor, args.lr_scaling_limit)


def _base_batch(args: TrainArguments) -> int:
    """Return the global batch for which --learning_rate was chosen."""
    return args.lr_base_batch_size or args.windows_per_step(devices=1)


def large_batch_note(args: TrainArguments, global_batch: int, peak: float) -> str | None:
    """Return a note if the global batch is larger than the batch that --learning_rate is meant for, else None.

    `global_batch`, `peak`: the run's global batch and peak learning rate. A resumed run has its checkpoint's values, so
    they are not calculated from the world size here.
    """
    base = _base_batch(args)
    if global_batch <= base:
        return None
    origin = "of one device" if args.lr_base_batch_size is None else "of --lr_base_batch_size"
    return (
        f"The global batch of {global_batch} is {global_batch / base:.3g} times the {base} {origin}, at a peak learning"
        f" rate of {peak:.3g} (--lr_scaling {args.lr_scaling}): scores may be lower."
        f" Remedies: --global_batch {base}, --lr_scaling linear (docs/guides/troubleshooting.md)"
    )


def check_optimizer(optim: str) -> None:
    """Raise UserError if the package of the optimizer `optim` is not installed."""
    if optim != "adamw_torch_fused" and find_spec("pytorch_optimizer") is None:
        install = "pip install .[pytorch_optimizer]"
        raise UserError(f"--optim {optim}: pytorch_optimizer is not installed. Run `{install}`.")


def make_optimizer(model: nn.Module, args: TrainArguments, devices: int) -> torch.optim.Optimizer:
    """Make the optimizer of --optim. Weight decay excludes biases and norms, as in transformers' Trainer.

    The head's parameter groups come first, since the learning rate of the first group is logged. LAMB is from You et
    al. 2019 (arXiv:1904.00962), without bias correction; LARS is from You et al. 2017 (arXiv:1708.03888).
    """
    learning_rate = scaled_learning_rate(args, devices)
    decaying = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    factor = args.layerwise_lr_decay
    depths = layer_depths(model) if factor < 1 else {}
    kinds = itertools.product(sorted({0, *depths.values()}), (True, False))
    members: dict[tuple[int, bool], list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[depths.get(id(parameter), 0), name in decaying].append(parameter)
    groups = [
        {"params": params, "weight_decay": args.weight_decay if decays else 0.0, "lr": learning_rate * factor**depth}
        for (depth, decays), params in members.items()
        if params or not depths
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    if args.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon, fused=True)
    layerwise: Any = import_module("pytorch_optimizer")
    optimizer: torch.optim.Optimizer = (
        layerwise.Lamb(groups, lr=learning_rate, betas=betas, eps=args.adam_epsilon)
        if args.optim == "lamb"
        else layerwise.LARS(groups, lr=learning_rate, momentum=args.adam_beta1)
    )
    return optimizer


def layer_depths(model: nn.Module) -> dict[int, int]:
    """Map id(parameter) to its depth below the head: 1 in the last of n layers, n in the first, n + 1 in embeddings.

    Relative-position weights count as embeddings. The head's parameters are left out. Raises UserError if the model has
    no list of layers, for example because all layers share their weights.
    """
    network: Any = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    count = network.config.num_hidden_layers if network else 0
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    layers = next(lists, None)
    if not layers:
        raise UserError(
            f"--layerwise_lr_decay: {type(network or model).__name__} has no list of layers with separate weights."
            " Omit the flag."
        )
    encoder = network.base_model.named_parameters()
    depths = {id(p): count + 1 for name, p in encoder if "embed" in name or "relative" in name}
    return depths | {id(p): count - i for i, layer in enumerate(layers) for p in layer.parameters()}


def warmup_steps(args: TrainArguments, total_steps: int) -> int:
    """Return the number of warm-up steps, from --warmup_steps (a share of all steps if below 1) or --warmup_ratio."""
    ratio = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    return int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(total_steps * ratio)


def make_schedule(optimizer: Any, args: TrainArguments, total_steps: int) -> Any:
    """Make the learning-rate schedule over `total_steps` steps. `optimizer`: the strategy's wrapped optimizer."""
    return get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps(args, total_steps), total_steps)


class WeightAverage:
    """Exponential moving average of the trained weights (--ema_decay), evaluated and saved in place of the weights.

    After each step: average = decay x average + (1 - decay) x weight. The first average is the initial weight.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._averages: list[Tensor] = [weight.detach().clone() for weight in self._weights]
        # Fused SGD updates all averages with few kernels: average -= lr x (average - weight). The weight is passed as
        # the gradient, which `maximize` negates, and weight decay adds the average.
        self._sgd: Any = torch.optim.SGD(self._averages, lr=1 - decay, weight_decay=1, maximize=True, fused=True)

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """Update the averages after a step. After a skipped step, whose `grad_norm` is not finite, nothing changes."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.grad = weight.detach()
        # found_inf skips the update on the device, so the host does not wait. isfinite would launch more kernels.
        self._sgd.found_inf = torch.logical_not(grad_norm < torch.inf).float()
        self._sgd.step()

    def swap(self) -> None:
        """Exchange the model's weights with their averages."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            weight.data, average.data = average.data, weight.data

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: the model holds the averages in place of its weights inside the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
