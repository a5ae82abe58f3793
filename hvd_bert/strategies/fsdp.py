"""torch's FSDP2 (`fully_shard`): shards weights, gradients and optimizer state of each layer over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import Strategy, optimizer_states

WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE = StateDictOptions(full_state_dict=True)


class FSDPStrategy(Strategy):
    """Shards a copy of the model, layer by layer.

    The unsharded model remains for evaluation and saving, so every rank also holds a whole copy of the weights.
    """

    module: Any
    separates_comm = False  # ranks wait for each other inside forward and backward passes

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        world.broadcast_tensors(model.state_dict())
        self.trained = sharded_copy(model, init_device_mesh(world.device.type, (world.size,)))
        self._guard_forward()
        return self.trained

    def _guard_forward(self) -> None:
        """Add hooks that limit how long the forward pass waits for other ranks' weights."""
        waits = ExitStack()

        def begin(*_: object) -> None:
            waits.enter_context(self._guard("the step's weights"))

        def end(*_: object) -> None:
            waits.close()

        uncompiled: Callable[..., Any] = torch.compiler.disable
        self.trained.register_forward_pre_hook(uncompiled(begin), prepend=True)
        self.trained.register_forward_hook(uncompiled(end), always_call=True)

    def micro_batches(self) -> AbstractContextManager[Any]:
        # Don't share casts: each micro-batch gathers the weights again, and earlier casts would pass them no gradient.
        return nullcontext()

    def _average_next(self, averages: bool) -> None:
        self.module.set_requires_gradient_sync(averages)

    def backward(self, loss: Tensor) -> None:
        with self._guard():
            super().backward(loss)

    def _norm(self) -> Tensor:
        with self._guard():
            norm = super()._norm()
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather_model(self) -> nn.Module:
        self.model.load_state_dict(get_model_state_dict(self.module, options=WHOLE))
        return self.model

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Any] = get_model_state_dict(self.module, options=WHOLE_ON_RANK_0)
        return weights

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        states: Any = get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE_ON_RANK_0)
        return {
            f"{parameter}/{name}": value
            for parameter, state in states.get("state", {}).items()
            for name, value in state.items()
        }

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        set_model_state_dict(self.module, dict(weights), options=WHOLE)
        names = self._names()
        named = [{**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in groups]
        saved: dict[str, Any] = {"state": optimizer_states(tensors), "param_groups": named}
        set_optimizer_state_dict(self.module, self.optimizer, saved, options=WHOLE)


def sharded_copy(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Copy a model, and shard each layer of the copy over the ranks of `mesh`."""
    copied = copy.deepcopy(model)
    # In reverse order, so that lists inside a layer, as in ALBERT, are sharded before the layer.
    for layers in reversed([module for module in copied.modules() if isinstance(module, nn.ModuleList)]):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    return copied
