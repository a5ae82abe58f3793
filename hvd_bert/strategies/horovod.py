"""Horovod's strategy: gradients averaged by ring-allreduce while the backward pass still runs.

The traps of Horovod 0.28 that this file closes are named where they are closed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvd_bert.distributed.world import World
from hvd_bert.strategies.base import MakeOptimizer, Strategy, StrategyOptions


class HorovodStrategy(Strategy):
    """Wraps the optimizer: each gradient goes on its way to the other ranks as soon as the backward pass has made it.

    Horovod cannot send bf16, so gradients are fp32, or fp16 on the wire alone.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, options: StrategyOptions, world: World) -> None:
        import horovod.torch as hvd

        super().__init__(model, make_optimizer, options, world)
        self._world = world
        # The optimizer has its final parameter groups: groups added after the wrapping would take class defaults.
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=model.named_parameters(),
            backward_passes_per_step=options.accumulation,
            compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
            gradient_predivide_factor=options.gradient_predivide_factor,
            # Which gradients share a buffer depends on when they are ready, and with three ranks or more the order of
            # a sum on its place in the buffer. One group is sent whole: always the same buffers, but no overlap.
            groups=1 if options.deterministic else options.num_groups or None,
        )
        # The parameters only: broadcasting a fresh AdamW's state makes a hidden step that decays every weight.
        world.broadcast_tensors(model.state_dict())  # alone on a GPU this needs no Horovod with NCCL
        # fp16 on the wire turns a gradient above 65504 into inf: such a step is skipped, on all ranks alike, since
        # all hold the same mean. Looking costs a device synchronisation per step, so only then.
        self._skip_overflow = options.fp16_allreduce and not options.fp16
        self._finite = True

    def synchronize(self) -> None:
        with self._world.waiting(self._not_averaged):
            self.optimizer.synchronize()

    def _not_averaged(self) -> list[str]:
        """The names of the parameters whose mean gradients have not come yet."""
        import horovod.torch as hvd

        def has_come(handle: int) -> bool:
            try:
                return bool(hvd.poll(handle))
            except (RuntimeError, ValueError):  # it was waited for, and is forgotten
                return True

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        late = [key for key, (handle, _) in self.optimizer._handles.items() if not has_come(handle)]
        return [names[id(p)] for key in late for p in (key if isinstance(key, tuple) else (key,))]

    def clip(self) -> Tensor:
        norm = super().clip()
        if self._skip_overflow:
            self._finite = bool(torch.isfinite(norm))
        return norm

    def _apply(self) -> bool:
        if not self._finite:
            return False
        with self.optimizer.skip_synchronize():
            return super()._apply()
