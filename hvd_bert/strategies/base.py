"""A strategy: how the ranks of a world train a model. The base class is a single process (--strategy none).

One optimizer step of the loop is `backward` once per micro-batch, inside `passes`, then `synchronize`, `clip`, `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
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

CHANGING = ("lr", "initial_lr", "step")  # entries of a parameter group that change; LAMB counts its steps there
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyOptions:
    """Settings that strategies read.

    `accumulation`: backward passes per step. Their gradients are summed, so each loss is a share of the step's loss.
    """

    train: TrainArguments
    parallel: ParallelArguments
    accumulation: int


class Strategy:
    """Trains `model` with the gradients averaged over all ranks, which each subclass does in its own way. Gradients are
    fp32, also with autocast.

    Attributes:
        module: The module that the loop calls for the forward pass.
        optimizer: The optimizer whose learning rate the schedule sets.
    """

    # Whether time spent waiting for other ranks can be measured apart from computation.
    separates_comm = True

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        """A collective: all ranks get rank 0's weights. `make_optimizer` is called with `module`."""
        self.model = model
        self.options = options
        self._world = world
        self.module = self._distribute(model, world)
        self.optimizer: Any = make_optimizer(self.module)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.train.fp16)
        self._passes = 0
        self._has_stepped = False
        self._fused = bool(self.optimizer.param_groups[0].get("fused"))
        self._finite = True  # the norm, as far as the host waits for it: a fused optimizer skips a step by itself
        # Autograd takes over the first gradient that it gets: a CUDA graph's own memory, which the next pass overwrites
        # (pytorch#169545).
        self._keeps_gradients = options.accumulation > 1 and options.train.captures_graphs
        for parameter in self._trained() if self._keeps_gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        self._average_next(options.accumulation == 1)
        self._word_rows = self._make_word_rows()

    def _make_word_rows(self) -> WordRows | None:
        """On CPUs, where it was measured. A compiled model has dense gradients. LARS writes into the gradients, whose
        zeros are kept."""
        args = self.options.train
        dense = args.deterministic or args.torch_compile or not self._fused
        if dense or self._world.device.type != "cpu" or not self._has_word_rows():
            return None
        embedding = word_embedding(self.model)
        return WordRows(embedding) if embedding else None

    def _has_word_rows(self) -> bool:
        return type(self) is Strategy

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        return model

    @property
    def trained(self) -> nn.Module:
        """The model that `module` trains: `model`, or a copy of it that is sharded over the ranks."""
        return self.model

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        """Register `mark`, called when the last gradient is ready, if `backward` also waits for other ranks."""

    def _guard(self, name: str = "the step's gradients") -> AbstractContextManager[None]:
        """Around a call that also waits for other ranks: if one stalls, the job ends.

        Not in the first step, in which the call may compile the model, for minutes.
        """
        return self._world.limit_wait(lambda: [name]) if self._has_stepped else nullcontext()

    def _guard_forward(self) -> None:
        """Guard the forward pass of `module`."""
        inside = ExitStack()

        def begin(*_: object) -> None:
            inside.enter_context(self._guard("the step's weights"))

        def end(*_: object) -> None:
            inside.close()

        uncompiled: Callable[..., Any] = torch.compiler.disable
        self.module.register_forward_pre_hook(uncompiled(begin), prepend=True)
        self.module.register_forward_hook(uncompiled(end), always_call=True)

    def passes(self) -> AbstractContextManager[Any]:
        """Context manager around the passes of a step, whose weights stay the same: autocast casts them once."""
        return keep_casts(self._world.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a share of the step's loss. The last pass of a step starts the averaging."""
        self.scaler.scale(loss).backward()
        self._passes = (self._passes + 1) % self.options.accumulation
        self._average_next(self._passes == self.options.accumulation - 1)

    def _average_next(self, averages: bool) -> None:
        """Called before each pass. `averages`: it is the last one of a step, whose backward pass averages."""

    def synchronize(self) -> None:
        """Wait for the averaged gradients, which `clip` needs."""
        if self._word_rows:
            self._word_rows.make_dense()

    def clip(self) -> Tensor:
        """Clip the averaged gradients. Returns their norm before clipping (0-dim, on the device).

        A norm that is NaN or infinite is so on all ranks. Then `step` leaves the weights as they are. A fused optimizer
        clips in `step`.
        """
        self.scaler.unscale_(self.optimizer)
        norm, limit = self._norm(), self.options.train.max_grad_norm
        if not self._fused:
            self._finite = self.options.train.fp16 or bool(torch.isfinite(norm))
            if limit:
                nn.utils.clip_grads_with_norm_(self.module.parameters(), limit, norm)
            return norm
        # As `GradScaler.step` does (torch/amp/grad_scaler.py, torch 2.6 to 2.13). A fused optimizer reads both on the
        # device: it divides the gradients by grad_scale, and skips the step if found_inf is not 0. An enabled scaler
        # in its place would pass over the gradients once more.
        if limit:
            self.optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # clip_grad_norm_'s factor, inverted
        if not self.options.train.fp16:  # under fp16 the scaler sets it
            self.optimizer.found_inf = torch.logical_not(norm < torch.inf).float()  # isfinite would be 4 kernels
        return norm

    def _norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def step(self) -> None:
        """Apply and clear the clipped gradients. With a fused optimizer, the host does not wait to learn whether the
        step was skipped."""
        with self._guard():
            self._apply()
        self._has_stepped = True
        if self._keeps_gradients:
            gradients: Any = [parameter.grad for parameter in self._trained()]
            torch._foreach_zero_(gradients)
        else:
            self.optimizer.zero_grad()

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _apply(self) -> None:
        if self._finite:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def gather_model(self) -> nn.Module:
        """The model with current weights, whole on every rank, to evaluate or save. A collective."""
        return self.model

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """State for a checkpoint, whole on rank 0: weights, the optimizer's tensors as "parameter/slot", and the rest
        for JSON. A collective."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rest = {"groups": groups, "scaler": self.scaler.state_dict()}
        return self._weights(), self._optimizer_tensors(), rest

    def load_state(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Restore what `state` returned. The arguments are whole on every rank. A collective."""
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
            f"{names[id(parameter)]}/{slot}": value
            for parameter, slots in self.optimizer.state.items()
            for slot, value in slots.items()
        }

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        self.model.load_state_dict(weights)
        names = self._names()
        number_of: dict[str, int] = {}
        numbered = []
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            first = len(number_of)
            number_of |= {names[id(parameter)]: first + i for i, parameter in enumerate(group["params"])}
            numbered.append({**saved, "params": list(range(first, len(number_of)))})
        state = {number_of[name]: slots for name, slots in optimizer_slots(tensors).items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": numbered})


def optimizer_slots(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by "parameter/slot" -> parameter -> slot -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        found.setdefault(name, {})[slot] = value
    return found


def strategy_class(strategy: str) -> type[Strategy]:
    """The class of a strategy. Raises UserError, with the install command, if its package is missing."""
    row = STRATEGIES[strategy]
    if row.missing:
        raise UserError(f"--strategy {strategy}: {row.missing}, or choose another strategy.")
    found: type[Strategy] = resolve_name(row.path)
    return found
