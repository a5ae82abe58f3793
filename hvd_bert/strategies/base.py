"""Strategies: how the ranks of a world train a model. The base class trains in a single process (--strategy none).

In each step, the loop calls `backward` once per micro-batch, inside `micro_batches`. Then it calls `synchronize`,
`clip` and `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.config.settings import ParallelArguments
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.config.training import TrainArguments
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.model.precision import keep_casts
from hvd_bert.strategies.word_rows import WordRows, word_embedding

CHANGING = ("lr", "initial_lr", "step")  # entries of a parameter group that change in training; "step": LAMB's
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyOptions:
    """Settings that strategies read.

    `accumulation`: micro-batches per step. Their gradients are summed, so each micro-batch's loss must be its share of
    the step's loss.
    """

    train: TrainArguments
    parallel: ParallelArguments
    accumulation: int


class FusedClip:
    """Lets a fused optimizer clip gradients and skip steps on the device, so that the host does not wait for the norm.

    Uses the attributes that `GradScaler.step` sets (torch/amp/grad_scaler.py, torch 2.6 to 2.13): the optimizer divides
    the gradients by grad_scale, and skips the step if found_inf is not 0. An enabled scaler would read the gradients
    once more.
    """

    skips_step = False

    def __init__(self, optimizer: Any, args: TrainArguments) -> None:
        self._optimizer, self.limit, self._fp16 = optimizer, args.max_grad_norm, args.fp16

    def clip(self, norm: Tensor) -> None:
        """Make the optimizer's next step clip the gradients by their norm. A norm that is not finite skips the step."""
        if self.limit:  # the inverse of clip_grad_norm_'s factor
            self._optimizer.grad_scale = ((norm + 1e-6) / self.limit).clamp(min=1.0)
        if not self._fp16:  # under fp16, the scaler sets found_inf
            self._optimizer.found_inf = torch.logical_not(norm < torch.inf).float()  # isfinite would launch 4 kernels


class HostClip:
    """Clips the gradients of a module. The host waits for the norm and skips the step if it is not finite.

    Under fp16, the scaler skips the step instead.
    """

    def __init__(self, module: nn.Module, args: TrainArguments) -> None:
        self._module, self.limit, self._fp16 = module, args.max_grad_norm, args.fp16
        self.skips_step = False

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm is `norm`, and set `skips_step`."""
        self.skips_step = not self._fp16 and not torch.isfinite(norm)
        if self.limit:
            nn.utils.clip_grads_with_norm_(self._module.parameters(), self.limit, norm)


class Strategy:
    """Trains `model` with gradients averaged over all ranks. Gradients are in fp32, even with autocast.

    Attributes:
        trained: The model that holds the trained parameters: `model`, or a copy that is sharded over the ranks.
        module: The module that the loop calls for the forward pass: `trained`, or a wrapper of it.
        optimizer: The optimizer whose learning rate the schedule sets.
    """

    # Whether time spent waiting for other ranks can be measured separately from computation.
    separates_comm = True

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        """Give all ranks rank 0's weights, and create the optimizer with `make_optimizer(module)`. A collective."""
        self.model = self.trained = model
        self.options = options
        self._world = world
        self._micro_batches = 0  # number of finished micro-batches in the current step
        self._has_stepped = False
        self.module = self._distribute(model, world)
        optimizer: Any = make_optimizer(self.module)
        fused = bool(optimizer.param_groups[0].get("fused"))
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.train.fp16)
        # Autograd stores the first gradient without a copy, in a CUDA graph's own memory, which the next micro-batch
        # overwrites (pytorch#169545). So gradients start as zeros, to which autograd adds in place.
        self._keeps_gradients = options.accumulation > 1 and options.train.captures_graphs
        for parameter in self._trained() if self._keeps_gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        self._average_next(options.accumulation == 1)
        self._word_rows = self._make_word_rows() if fused else None  # LARS writes into the zeros that WordRows reuses
        self.optimizer = self._wrap(optimizer)
        args = options.train
        self.clipping = FusedClip(self.optimizer, args) if fused else HostClip(self.module, args)

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        """Return the module for the forward pass. Subclasses broadcast rank 0's weights, and may wrap or shard it."""
        return model

    def _wrap(self, optimizer: Any) -> Any:
        """Return the optimizer that the loop uses. Subclasses may wrap it, to average gradients or shard its state."""
        return optimizer

    def _make_word_rows(self) -> WordRows | None:
        """Make the word embedding's gradient sparse, if supported; else return None. On GPUs, it was not measured."""
        dense = self.options.train.deterministic or self.options.train.torch_compile
        if dense or self._world.device.type != "cpu" or not self._has_word_rows():
            return None
        embedding = word_embedding(self.model)
        return WordRows(embedding) if embedding else None

    def _has_word_rows(self) -> bool:
        return type(self) is Strategy

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        """Register `mark`, to be called when this rank's last gradient is ready and `backward` waits for other ranks.

        Does nothing by default.
        """

    def _guard(self, name: str = "the step's gradients") -> AbstractContextManager[None]:
        """Context manager around a call that may wait for other ranks. If the wait exceeds the limit, the job ends.

        `name`: what the call waits for, for the message. Does nothing in the first step, in which the call may compile
        the model for minutes.
        """
        return self._world.limit_wait(lambda: [name]) if self._has_stepped else nullcontext()

    def micro_batches(self) -> AbstractContextManager[Any]:
        """Context manager around the micro-batches of a step: autocast casts each weight once per step."""
        return keep_casts(self._world.device)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a micro-batch's loss, and add them to the step's gradients.

        With several ranks, the step's last call also starts to average the gradients.
        """
        self.scaler.scale(loss).backward()
        self._micro_batches = (self._micro_batches + 1) % self.options.accumulation
        self._average_next(self._micro_batches == self.options.accumulation - 1)

    def _average_next(self, averages: bool) -> None:
        """Prepare the next micro-batch. Does nothing by default.

        `averages`: whether the micro-batch is the step's last, whose backward pass averages the gradients.
        """

    def synchronize(self) -> None:
        """Wait until the gradients are averaged. Does nothing by default."""

    def clip(self) -> Tensor:
        """Clip the averaged gradients. Returns their norm before clipping (0-dim, on the device).

        If the norm is NaN or infinite, it is so on all ranks, and `step` leaves the weights unchanged.
        """
        if self._word_rows:
            self._word_rows.make_dense()  # here, not in `synchronize`, whose time counts as exposed communication
        self.scaler.unscale_(self.optimizer)
        norm = self._norm()
        self.clipping.clip(norm)
        return norm

    def _norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def step(self) -> None:
        """Update the weights with the clipped gradients, and clear the gradients."""
        with self._guard():
            if not self.clipping.skips_step:
                self._apply()
        self._has_stepped = True
        if self._keeps_gradients:
            gradients: Any = [parameter.grad for parameter in self._trained()]
            torch._foreach_zero_(gradients)
        else:
            self.optimizer.zero_grad()

    def _apply(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def gather_model(self) -> nn.Module:
        """Return the whole model with current weights on every rank, for evaluation or saving. A collective."""
        return self.model

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Return a checkpoint's state: weights, optimizer tensors by "parameter/name", and the rest for JSON.

        The state is unsharded, and complete on rank 0 only. A collective.
        """
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rest = {"groups": groups, "scaler": self.scaler.state_dict()}
        return self._weights(), self._optimizer_tensors(), rest

    def load_state(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Restore what `state` returned. Every rank must pass the complete, unsharded state. A collective."""
        both = zip(self.optimizer.param_groups, rest["groups"], strict=True)
        groups = [
            group | {name: saved[name] for name in CHANGING if saved.get(name) is not None} for group, saved in both
        ]
        self._load(weights, tensors, groups)
        if rest["scaler"]:
            self.scaler.load_state_dict(rest["scaler"])

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.trained.named_parameters()}

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = self._names()
        return {
            f"{names[id(parameter)]}/{name}": value
            for parameter, state in self.optimizer.state.items()
            for name, value in state.items()
        }

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        self.model.load_state_dict(weights)
        names, states = self._names(), optimizer_states(tensors)
        order = [names[id(parameter)] for group in groups for parameter in group["params"]]
        own = self.optimizer.state_dict()["param_groups"]  # its "params" are numbers
        numbered = [{**group, "params": mine["params"]} for group, mine in zip(groups, own, strict=True)]
        state = {number: states[name] for number, name in enumerate(order) if name in states}
        self.optimizer.load_state_dict({"state": state, "param_groups": numbered})


def optimizer_states(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Convert a dict with keys "parameter/name" to nested dicts: parameter -> name -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.rpartition("/")
        found.setdefault(parameter, {})[name] = value
    return found


def strategy_class(strategy: str) -> type[Strategy]:
    """Import the class of a strategy. Raises UserError, with the install command, if its package is missing."""
    row = STRATEGIES[strategy]
    if row.missing:
        raise UserError(f"--strategy {strategy}: {row.missing}, or choose another strategy.")
    found: type[Strategy] = resolve_name(row.path)
    return found
