"""torch's DistributedDataParallel, the baseline for Horovod."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import Strategy

# Newer torch versions use another name for this argument, and warn about the old name.
_NEWER = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEWER else "broadcast_buffers"


class DDPStrategy(Strategy):
    """Wraps the model. The backward pass averages gradients in buckets, and returns when all are averaged."""

    module: DistributedDataParallel

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        buffers: dict[str, Any] = {_SYNC_BUFFERS: False}  # buffers are equal on all ranks and never change
        return DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **buffers,
            gradient_as_bucket_view=True,
            # DDP rebuilds its buckets after the first step, so a resumed run would reduce in a different order. It does
            # not rebuild them if parameters may be unused.
            find_unused_parameters=self.options.train.deterministic,
        )

    def backward(self, loss: Tensor) -> None:
        with self._guard():
            super().backward(loss)

    def _average_next(self, averages: bool) -> None:
        self.module.require_backward_grad_sync = averages  # as in no_sync(); the next forward pass reads it

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        # A hook on all gradients: models register parameters in any order, and may use only some of them.
        register_multi_grad_hook(self._trained(), lambda _: mark())
