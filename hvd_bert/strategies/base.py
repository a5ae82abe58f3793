"""A strategy: how the ranks of a world train a model. The base class is a single process (--strategy none).

In a step, the loop calls `backward` per micro-batch, inside `micro_batches`, then `synchronize`, `clip` and `step`.
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

CHANGING = ("lr", "initial_lr", "step")  # entries of a parameter group that change; LAMB counts its steps there
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyOptions:
    """Settings that strategies read.

    `accumulation`: micro-batches per step. Their gradients are summed, so each loss is a share of the step's loss.
    """

    train: TrainArguments
    parallel: ParallelArguments
    accumulation: int


class FusedClip:
    """Lets a fused optimizer clip the gradients and skip a step on the device. The host does not wait for the norm.

    As `GradScaler.step` does (torch/amp/grad_scaler.py, torch 2.6 to 2.13): the optimizer divides the gradients by
    grad_scale, and skips the step if found_inf is not 0. An enabled scaler would read the gradients once more.
    """

    skips_step = False

    def __init__(self, optimizer: Any, args: TrainArguments) -> None:
        self._optimizer, self.limit, self._fp16 = optimizer, args.max_grad_norm, args.fp16

    def clip(self, norm: Tensor) -> None:
        """Prepare the optimizer's next step."""
        if self.limit:  # the inverse of clip_grad_norm_'s factor
            self._optimizer.grad_scale = ((norm + 1e-6) / self.limit).clamp(min=1.0)
        if not self._fp16:  # under fp16 the scaler sets it
            self._optimizer.found_inf = torch.logical_not(norm < torch.inf).float()  # isfinite would be 4 kernels


class HostClip:
    """Clips the gradients of a module. The host waits for the norm, to skip a step; under fp16 the scaler skips it."""

    def __init__(self, module: nn.Module, args: TrainArguments) -> None:
        self._module, self.limit, self._fp16 = module, args.max_grad_norm, args.fp16
        self.skips_step = False

    def clip(self, norm: Tensor) -> None:
        """Clip the gradients by their norm."""
        self.skips_step = not self._fp16 and not torch.isfinite(norm)
        if self.limit:
            nn.utils.clip_grads_with_norm_(self._module.parameters(), self.limit, norm)


class Strategy:
    """Trains `model` with gradients averaged over all ranks. Gradients are fp32, also with autocast.

    Attributes:
        trained: The trained model: `model`, or a copy of it that is sharded over the ranks.
        module: The module that the loop calls for the forward pass of `trained`.
        optimizer: The optimizer whose learning rate the schedule sets.
    """

    # Whether time spent waiting for other ranks can be measured apart from computation.
    separates_comm = True

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        """A collective: all ranks get rank 0's weights. `make_optimizer` is called with `module`."""
        self.model = self.trained = model
        self.options = options
        self._world = world
        self._micro_batches = 0  # finished ones of the current step
        self._has_stepped = False
        self.module = self._distribute(model, world)
        optimizer: Any = make_optimizer(self.module)
        fused = bool(optimizer.param_groups[0].get("fused"))
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.train.fp16)
        # Autograd stores the first gradient without a copy: a CUDA graph's own memory, which the next micro-batch
        # overwrites (pytorch#169545). Later gradients are added in place.
        self._keeps_gradients = options.accumulation > 1 and options.train.captures_graphs
        for parameter in self._trained() if self._keeps_gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        self._average_next(options.accumulation == 1)
        self._word_rows = self._make_word_rows() if fused else None  # LARS writes into gradients whose zeros are reused
        self.optimizer = self._wrap(optimizer)
        args = options.train
        self.clipping = FusedClip(self.optimizer, args) if fused else HostClip(self.module, args)

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        """Give all ranks rank 0's weights. Returns `module`."""
        return model

    def _wrap(self, optimizer: Any) -> Any:
        """Wrap the optimizer in the strategy's own one, if it has one, which averages gradients or shards its state."""
        return optimizer

    def _make_word_rows(self) -> WordRows | None:
        """Make the word embedding's gradient sparse, on CPUs, where it was measured. torch.compile makes dense ones."""
        dense = self.options.train.deterministic or self.options.train.torch_compile
        if dense or self._world.device.type != "cpu" or not self._has_word_rows():
            return None
        embedding = word_embedding(self.model)
        return WordRows(embedding) if embedding else None

    def _has_word_rows(self) -> bool:
        return type(self) is Strategy

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        """Register `mark`, called when the last gradient is ready, if `backward` also waits for other ranks."""

    def _guard(self, name: str = "the step's gradients") -> AbstractContextManager[None]:
        """Context manager around a call that also waits for other ranks: if one stalls, the job ends.

        It does nothing in the first step, in which the call may compile the model, for minutes.
        """
        return self._world.limit_wait(lambda: [name]) if self._has_stepped else nullcontext()

    def micro_batches(self) -> AbstractContextManager[Any]:
        """Context manager around the micro-batches of a step: autocast casts the weights once for all of them."""
        return keep_casts(self._world.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a share of the step's loss. The step's last call starts the averaging."""
        self.scaler.scale(loss).backward()
        self._micro_batches = (self._micro_batches + 1) % self.options.accumulation
        self._average_next(self._micro_batches == self.options.accumulation - 1)

    def _average_next(self, averages: bool) -> None:
        """Called before each micro-batch. `averages`: it is the last one of a step."""

    def synchronize(self) -> None:
        """Wait for the averaged gradients, which `clip` needs."""
        if self._word_rows:
            self._word_rows.make_dense()

    def clip(self) -> Tensor:
        """Clip the averaged gradients. Returns their norm before clipping (0-dim, on the device).

        A norm that is NaN or infinite is so on all ranks. Then `step` leaves the weights unchanged.
        """
        self.scaler.unscale_(self.optimizer)
        norm = self._norm()
        self.clipping.clip(norm)
        return norm

    def _norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def step(self) -> None:
        """Apply and clear the clipped gradients."""
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
        """The model with current weights, whole on every rank, to evaluate or save. A collective."""
        return self.model

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """State for a checkpoint, whole on rank 0: weights, the optimizer's tensors as "parameter/name", and the rest
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
            f"{names[id(parameter)]}/{name}": value
            for parameter, state in self.optimizer.state.items()
            for name, value in state.items()
        }

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        self.model.load_state_dict(weights)
        names, states = self._names(), optimizer_states(tensors)
        order = [names[id(parameter)] for group in groups for parameter in group["params"]]
        own = self.optimizer.state_dict()["param_groups"]  # with numbers in place of parameters
        numbered = [{**group, "params": mine["params"]} for group, mine in zip(groups, own, strict=True)]
        state = {number: states[name] for number, name in enumerate(order) if name in states}
        self.optimizer.load_state_dict({"state": state, "param_groups": numbered})


def optimizer_states(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by "parameter/name" -> parameter -> name -> tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.rpartition("/")
        found.setdefault(parameter, {})[name] = value
    return found


def strategy_class(strategy: str) -> type[Strategy]:
    """The class of a strategy. Raises UserError, with the install command, if its package is missing."""
    row = STRATEGIES[strategy]
    if row.missing:
        raise UserError(f"--strategy {strategy}: {row.missing}, or choose another strategy.")
    found: type[Strategy] = resolve_name(row.path)
    return found
