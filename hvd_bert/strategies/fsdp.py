"""torch's FSDP2 (`fully_shard`): shards weights, gradients and optimizer state of each layer over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
from hvd_bert.strategies.base import MakeOptimizer, Strategy, StrategyOptions, optimizer_slots

WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE = StateDictOptions(full_state_dict=True)


class FSDPStrategy(Strategy):
    """Shards a copy of the model, layer by layer. The model itself stays whole, to evaluate and save.

    So every rank holds one more copy of the weights than FSDP needs.
    """

    module: Any
    separates_comm = False  # it waits inside forward and backward

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        super().__init__(model, make_optimizer, options, world)
        self._guard_forward()

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        world.broadcast_tensors(model.state_dict())
        return sharded_copy(model, init_device_mesh(world.device.type, (world.size,)))

    @property
    def trained(self) -> nn.Module:
        trained: nn.Module = self.module
        return trained

    def passes(self) -> AbstractContextManager[Any]:
        # Each pass gathers the weights again. Through casts of an earlier pass, their gradients would be lost.
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
        state: Any = get_optimizer_state_dict(self.module, self.optimizer, options=WHOLE_ON_RANK_0)
        return {
            f"{name}/{slot}": value for name, slots in state.get("state", {}).items() for slot, value in slots.items()
        }

    def _load(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
        set_model_state_dict(self.module, dict(weights), options=WHOLE)
        names = self._names()
        numbered = [
            {**saved, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group, saved in zip(self.optimizer.param_groups, groups, strict=True)
        ]
        saved_state: dict[str, Any] = {"state": optimizer_slots(tensors), "param_groups": numbered}
        set_optimizer_state_dict(self.module, self.optimizer, saved_state, options=WHOLE)


def sharded_copy(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy of the model, with each layer sharded."""
    module = copy.deepcopy(model)
    # In reverse: lists inside a layer, as ALBERT's, come first.
    for layers in reversed([part for part in module.modules() if isinstance(part, nn.ModuleList)]):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module
