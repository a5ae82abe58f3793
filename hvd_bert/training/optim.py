"""Optimizer with parameter groups, learning rate with schedule, and moving average of the weights."""

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

# Names of parameters without weight decay, as in `Trainer.get_decay_parameter_names`, which is slow to import.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def scaled_learning_rate(args: TrainArguments, devices: int) -> float:
    """Return the peak learning rate for the global batch of `devices` GPUs (or processes on CPUs).

    Linear: Goyal et al. 2017 (arXiv:1706.02677). Sqrt: You et al. 2019 (arXiv:1904.00962). None: unchanged. The factor
    is at most `lr_scaling_limit`. docs/evidence/results.md compares the rules' F1.
    """
    ratio = args.windows_per_step(devices) / _base_batch(args)
    factor = float(ratio ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[args.lr_scaling])
    return args.learning_rate * min(factor, args.lr_scaling_limit)


def _base_batch(args: TrainArguments) -> int:
    """The global batch that --learning_rate is meant for."""
    return args.lr_base_batch_size or args.windows_per_step(devices=1)


def large_batch_note(args: TrainArguments, global_batch: int, peak: float) -> str | None:
    """Return a note on a global batch above the base batch, else None.

    `global_batch`, `peak`: the run's, which a resumed run takes from its checkpoint, whatever the world size.
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
    """Raise UserError if an optimizer is not installed."""
    if optim != "adamw_torch_fused" and find_spec("pytorch_optimizer") is None:
        install = "pip install .[pytorch_optimizer]"
        raise UserError(f"--optim {optim}: pytorch_optimizer is not installed. Run `{install}`.")


def make_optimizer(model: nn.Module, args: TrainArguments, devices: int) -> torch.optim.Optimizer:
    """Make the optimizer. Weight decay excludes biases and norms, as in transformers' Trainer.

    The head's groups come first, since the learning rate of the first group is logged.
    LAMB: You et al. 2019 (arXiv:1904.00962), without bias correction. LARS: You et al. 2017 (arXiv:1708.03888).
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
    """Return id(parameter) -> depth below the head: 1 in the last of n layers, n in the first, n + 1 in embeddings.

    Embeddings include relative positions. The head's parameters are missing. Raises UserError if the model has no list
    of layers, or if its layers share weights.
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
    """Number of warm-up steps: `warmup_steps` (below 1 a share of all steps), else by `warmup_ratio`."""
    ratio = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    return int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(total_steps * ratio)


def make_schedule(optimizer: Any, args: TrainArguments, total_steps: int) -> Any:
    """Make the learning-rate schedule over `total_steps` steps. `optimizer`: as wrapped by the strategy."""
    return get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps(args, total_steps), total_steps)


class WeightAverage:
    """Exponential moving average of the trained weights (--ema_decay), evaluated and saved in place of the weights.

    After each step: average = decay x average + (1 - decay) x weights. It begins with the initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._weights: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._averages: list[Tensor] = [weight.detach().clone() for weight in self._weights]
        # average -= lr x (average - weight), by few kernels: maximize negates the gradient, which is the weight, and
        # weight decay adds the average.
        self._sgd: Any = torch.optim.SGD(self._averages, lr=1 - decay, weight_decay=1, maximize=True, fused=True)

    @torch.no_grad()
    def update(self, grad_norm: Tensor) -> None:
        """Update the averages after a step. A step without a finite gradient norm was skipped and changes nothing."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.grad = weight.detach()
        # On the device, as in Strategy.clip: the host does not wait. isfinite takes more kernels.
        self._sgd.found_inf = torch.logical_not(grad_norm < torch.inf).float()
        self._sgd.step()

    def swap(self) -> None:
        """Exchange the model's weights and their averages."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            weight.data, average.data = average.data, weight.data

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: the model has the averages inside the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
