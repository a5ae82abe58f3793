"""Horovod's engine: gradients averaged by ring-allreduce while the backward pass still runs.

One optimizer step of the loop is `backward` x accumulation, `synchronize`, `clip`, `step`. The traps of
Horovod 0.28 that this file closes are named where they are closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hvd_bert.config import Config
from hvd_bert.world import World


class HorovodEngine:
    """Wraps model and optimizer so that every rank steps with the mean of all ranks' gradients.

    `optimizer` must have its final parameter groups: groups added after the wrapping would take class defaults.
    `accumulation`: backward passes before a step; Horovod sums them (and does not average), so the losses must
    already be shares of the step's loss. Gradients are fp32 whatever the autocast: Horovod cannot send bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulation: int,
        config: Config,
        world: World,
    ) -> None:
        import horovod.torch as hvd

        self.model = model
        fp16_allreduce = config.horovod.fp16_allreduce
        self.optimizer: Any = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=accumulation,
            compression=hvd.Compression.fp16 if fp16_allreduce else hvd.Compression.none,
            gradient_predivide_factor=config.horovod.gradient_predivide_factor,
            # Which gradients share a buffer depends on when they are ready, and with three ranks or more the order of
            # a sum on its place in the buffer. One group is sent whole: always the same buffers, but no overlap.
            groups=1 if config.train.deterministic else None,
        )
        # The parameters only: broadcasting a fresh AdamW's state makes a hidden step that decays every weight.
        if world.size > 1:  # alone on a GPU this would need a Horovod with NCCL for nothing
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self.max_grad_norm = config.train.max_grad_norm or float("inf")
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.train.fp16)
        # fp16 on the wire turns a gradient above 65504 into inf: such a step is skipped, on all ranks alike, since
        # all hold the same mean. Looking costs a device synchronisation per step, so only then.
        self.skip_overflow = fp16_allreduce and not config.train.fp16
        self.skipped_steps = 0
        self._finite = True

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a share of this rank's step loss; the last of a step's passes starts the allreduce."""
        self.scaler.scale(loss).backward()

    def synchronize(self) -> None:
        """Wait for the mean gradients: unscaling and clipping are of the mean, not of one rank's part."""
        self.optimizer.synchronize()

    def clip(self) -> torch.Tensor:
        """Clip the mean gradients. Returns their norm before that (0-dim, on the device)."""
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if self.skip_overflow:
            self._finite = bool(torch.isfinite(norm))
        return norm

    def step(self) -> bool:
        """Apply the clipped gradients and forget them. False if they had overflowed: the weights stay as they are."""
        applied = self._finite
        if applied:
            scale = self.scaler.get_scale()
            with self.optimizer.skip_synchronize():
                self.scaler.step(self.optimizer)
            self.scaler.update()
            applied = self.scaler.get_scale() >= scale  # it is lowered after an overflow
        self.skipped_steps += not applied
        self.optimizer.zero_grad()  # no set_to_none: the wrapped optimizer's does not take it
        return applied

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a checkpoint needs beside the weights: AdamW's tensors as "parameter/slot", and the rest for JSON."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tensors = {
            f"{names[id(parameter)]}/{slot}": value
            for parameter, slots in self.optimizer.state.items()
            for slot, value in slots.items()
        }
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return tensors, {"groups": groups, "scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], rest: dict[str, Any]) -> None:
        """Take over what `state` gave, in this or another process."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        number_of: dict[str, int] = {}
        groups = []
        for group, saved in zip(self.optimizer.param_groups, rest["groups"], strict=True):
            first = len(number_of)
            number_of |= {names[id(parameter)]: first + i for i, parameter in enumerate(group["params"])}
            groups.append({**saved, "params": list(range(first, len(number_of)))})
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            name, slot = key.rsplit("/", 1)
            state.setdefault(number_of[name], {})[slot] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if rest["scaler"]:
            self.scaler.load_state_dict(rest["scaler"])
        self.skipped_steps = rest["skipped_steps"]
