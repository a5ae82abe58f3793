"""What a strategy is: how a model is trained by the ranks of a world. The base is one process (--strategy none).

One optimizer step of the loop is `backward` x accumulation, `synchronize`, `clip`, `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.distributed.world import World

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyOptions:
    """`accumulation`: backward passes before a step; they are summed (and not averaged), so the losses must already be
    shares of the step's loss. `max_grad_norm`: 0 never clips. `fp16`: scale the losses for fp16's range. `bf16`: the
    forward pass is autocast. `deterministic`: sums in the same order in each run. `fp16_allreduce`,
    `gradient_predivide_factor`, `num_groups` (0: none): Horovod's. `zero_stage`: DeepSpeed's.
    """

    accumulation: int = 1
    max_grad_norm: float = 0.0
    fp16: bool = False
    bf16: bool = False
    deterministic: bool = False
    fp16_allreduce: bool = False
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    zero_stage: int = 2


class Strategy:
    """Trains `model` with the mean of all ranks' gradients.

    Attributes: `module`: what the loop calls for the forward pass; `optimizer`: whose learning rate the schedule sets;
    `skipped_steps`: steps that left the weights as they were, because a gradient had overflowed. Gradients are fp32
    whatever the autocast.
    """

    # Whether the time that the step waits for other ranks can be told from its computing.
    tells_exposed_comm = True

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        """A collective: the weights are rank 0's afterwards. `make_optimizer` is called with `module`."""
        self.model = model
        self.options = options
        self.module = self._distribute(model, world)
        self.optimizer: Any = make_optimizer(self.module)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.fp16)
        self.skipped_steps = 0
        self._passes = 0
        self._average_next(options.accumulation == 1)

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        return model

    @property
    def trained(self) -> nn.Module:
        """The model that `module` trains: `model`, or the copy of it that the ranks share out."""
        return self.model

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        """Have `mark` called when the last gradients are computed, if `backward` then waits for the other ranks."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a share of this rank's step loss; the last of a step's passes starts the averaging."""
        self.scaler.scale(loss).backward()
        self._passes = (self._passes + 1) % self.options.accumulation
        self._average_next(self._passes == self.options.accumulation - 1)

    def _average_next(self, averages: bool) -> None:
        """Told before each pass: whether it is a step's last, whose backward pass averages the gradients."""

    def synchronize(self) -> None:
        """Wait for the mean gradients: unscaling and clipping are of the mean, not of one rank's part."""

    def clip(self) -> Tensor:
        """Clip the mean gradients. Returns their norm before that (0-dim, on the device)."""
        self.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self.module.parameters(), self.options.max_grad_norm or float("inf"))

    def step(self) -> bool:
        """Apply the clipped gradients and forget them. False if they had overflowed: the weights stay as they are."""
        applied = self._apply()
        self.skipped_steps += not applied
        self.optimizer.zero_grad()
        return applied

    def _apply(self) -> bool:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale  # it is lowered after an overflow

    def whole_model(self) -> nn.Module:
        """The model with the weights of now, whole on every rank, to be scored or saved. A collective."""
        return self.model

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint needs, whole on rank 0: weights, the optimizer's tensors as "parameter/slot", and the rest
        for JSON. A collective."""
        rest = {"groups": self._groups(), "scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}
        return self._weights(), self._optimizer_tensors(), rest

    def load_state(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], rest: dict[str, Any]) -> None:
        """Take over what `state` gave, in this or another process; all of it is whole on every rank. A collective."""
        self._load(weights, tensors, rest["groups"])
        if rest["scaler"]:
            self.scaler.load_state_dict(rest["scaler"])
        self.skipped_steps = rest["skipped_steps"]

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

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
        state = {number_of[name]: slots for name, slots in slots_of(tensors).items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": numbered})


def slots_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by "parameter/slot" -> parameter -> slot -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        found.setdefault(name, {})[slot] = value
    return found
