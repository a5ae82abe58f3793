"""DeepSpeed's ZeRO, which shards the optimizer state (stage 1) or also the gradients (stage 2) over the ranks.

DeepSpeed is an optional package. Forward and backward passes run as in the other strategies, in fp32 or with torch's
autocast.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import Strategy

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's moving averages


class DeepSpeedStrategy(Strategy):
    """Trains with ZeRO. DeepSpeed clips gradients and updates weights in one call, so `clip` does both."""

    module: Any
    separates_comm = False  # ranks wait for each other inside `backward` and `clip`

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # else DeepSpeed probes and logs
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Users cannot act on torch's warnings about DeepSpeed's calls.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        # Imported late: it takes seconds and probes for accelerators.
        self._deepspeed = deepspeed = import_module("deepspeed")
        world.broadcast_tensors(model.state_dict())
        # Without this, DeepSpeed compiles an allreduce for the ranks of a host. A rank that is killed during the
        # compilation leaves a lock that blocks all later runs.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed takes the rank's device from LOCAL_RANK, or from Open MPI's variable.
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
        os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
        deepspeed.init_distributed(dist_backend="nccl" if world.device.type == "cuda" else "gloo")
        return model

    def _wrap(self, optimizer: Any) -> Any:
        options, self.optimizer = self.options, optimizer
        # DeepSpeed's default, limited to the model's size: each backward pass allocates a bucket (2 GB).
        bucket = min(500_000_000, sum(parameter.numel() for parameter in self.model.parameters()))
        self.module, *_ = self._deepspeed.initialize(
            model=self.module,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,  # unused: the loop makes the micro-batches
                "gradient_accumulation_steps": options.accumulation,
                "gradient_clipping": options.train.max_grad_norm,
                "zero_optimization": {"stage": options.parallel.zero_stage, "reduce_bucket_size": bucket},
                "zero_allow_untested_optimizer": True,  # torch's AdamW, as in the other strategies
                # Otherwise DeepSpeed disables autocast. The empty list keeps all gradients in fp32.
                "torch_autocast": {
                    "enabled": options.train.bf16,
                    "dtype": "bfloat16",
                    "lower_precision_safe_modules": [],
                },
            },
        )
        self._zero: Any = self.module.optimizer
        self._make_state(torch.zeros(()))
        return optimizer

    def backward(self, loss: Tensor) -> None:
        with self._guard():
            self.module.backward(loss * self.options.accumulation)  # DeepSpeed divides by it
        self._micro_batches += 1
        if self._micro_batches < self.options.accumulation:
            self.module.step()  # here, it only counts the micro-batch

    def clip(self) -> Tensor:
        self._micro_batches = 0
        with self._guard():
            self.module.step()
        return torch.as_tensor(self.module.get_global_grad_norm())

    def step(self) -> None:
        self._has_stepped = True  # `clip` has updated the weights

    def _sharded(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name. DeepSpeed neither shards nor updates frozen parameters."""
        return {name: parameter for name, parameter in self.trained.named_parameters() if parameter.requires_grad}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        whole = self._deepspeed.utils.safe_get_full_optimizer_state
        step = next(iter(self.optimizer.state.values()))["step"]
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._sharded().items():
            tensors[f"{name}/step"] = step.clone()
            tensors |= {f"{name}/{moment}": whole(parameter, moment) for moment in MOMENTS}
        return tensors

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(saved)
        self._make_state(next(value for name, value in tensors.items() if name.endswith("/step")))
        self.model.load_state_dict(weights)
        utils = self._deepspeed.utils
        for name, parameter in self._sharded().items():
            utils.safe_set_full_fp32_param(parameter, weights[name].to(parameter.device))
            for moment in MOMENTS:
                utils.safe_set_full_optimizer_state(parameter, tensors[f"{name}/{moment}"].to(parameter.device), moment)

    def _make_state(self, step: Tensor) -> None:
        """Create AdamW's state with step count `step` and zero moments.

        DeepSpeed 0.19 itself makes this state accessible only after the first step, and only for the first parameter
        group.
        """
        for part in self._zero.single_partition_of_fp32_groups:
            moments = {name: torch.zeros_like(part) for name in MOMENTS}
            self.optimizer.state[part] = {"step": step.to(part.device, torch.float32).clone(), **moments}
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()
