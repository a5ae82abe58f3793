"""torch's DistributedDataParallel: the peer that Horovod is measured against."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import Strategy

# What newer versions of torch call it, with a warning for the older name.
_NEWER = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEWER else "broadcast_buffers"


class DDPStrategy(Strategy):
    """Wraps the model: its backward pass averages buckets of gradients, and ends when all have arrived."""

    module: DistributedDataParallel

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        buffers: dict[str, Any] = {_SYNC_BUFFERS: False}  # they are the same on all ranks and never change
        return DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **buffers,
            gradient_as_bucket_view=True,
            # DDP fills its buckets anew after the first step, so a run that was gone on with would sum in another
            # order than one that was not; it does not where parameters may be unused.
            find_unused_parameters=self.options.deterministic,
        )

    def _average_next(self, averages: bool) -> None:
        self.module.require_backward_grad_sync = averages  # what its no_sync() sets; the next forward pass reads it

    def mark_gradients(self, mark: Callable[[], None]) -> None:
        for parameter in list(self.model.parameters())[:5]:  # BERT's embeddings: first used, and so last to have theirs
            parameter.register_post_accumulate_grad_hook(lambda _: mark())
