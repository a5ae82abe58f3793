"""Horovod's strategy: ring-allreduce averages gradients while the backward pass still runs.

`Training._step` (training/loop.py) scales the loss so that the average over ranks is the mean over all windows of the
step. Comments name the pitfalls of Horovod 0.28 that the code avoids.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.strategies.base import Strategy

# Maximum world size for sparse gradients. With more ranks, gathering their rows may send more than a dense allreduce.
MAX_GATHERING = 16
NCCL_WITH_BF16 = 21000  # NCCL 2.10.0 as Horovod encodes it, the first version with bf16


class Bf16Compression:
    """Sends gradients as bf16, in which they do not overflow in practice. Same interface as `hvd.Compression.fp16`."""

    @staticmethod
    def compress(gradient: Tensor) -> tuple[Tensor, torch.dtype]:
        return gradient.bfloat16(), gradient.dtype

    @staticmethod
    def decompress(gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.to(dtype)


def check_bf16(device: torch.device) -> None:
    """Raise UserError if this Horovod cannot allreduce bf16 tensors on `device`."""
    import horovod.torch as hvd

    on_gpu = device.type == "cuda"
    found = hasattr(hvd.mpi_ops.mpi_lib, f"horovod_torch_allreduce_async_torch_{'cuda_' * on_gpu}BFloat16Tensor")
    if not found or (on_gpu and (hvd.nccl_built() < NCCL_WITH_BF16 or hvd.rocm_built())):
        raise UserError(
            f"--bf16_allreduce: this Horovod cannot send bf16 from a {'GPU' if on_gpu else 'CPU'}. Build release 0.28.1"
            f" with the project's patch by `bash env/setup.sh{' --with-nccl' * on_gpu}`, or use --fp16_allreduce."
        )


def backward_groups(model: nn.Module, limit: int) -> list[list[nn.Parameter]]:
    """Divide the trained parameters into at most `limit` groups of nearly equal bytes, in backward-pass order.

    The entries of module lists count as layers. The last layer comes first, and groups are split only between layers.
    All other parameters follow, since the gradients of embeddings and shared parameters are complete only at the end.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layer_of = {weight: layer for stack in stacks for layer in stack for weight in layer.parameters()}
    trained = [weight for weight in reversed([*model.parameters()]) if weight.requires_grad]
    trained.sort(key=lambda weight: weight not in layer_of)
    groups: list[list[nn.Parameter]] = []
    remaining, filled, share = sum(weight.nbytes for weight in trained), 0, 0.0
    for _, layer in groupby(trained, lambda weight: id(layer_of.get(weight, weight))):
        weights = [*layer]
        size = sum(weight.nbytes for weight in weights)
        if not groups or filled + size / 2 > share:
            filled, share = 0, remaining / (limit - len(groups))
            groups.append([])
        groups[-1] += weights
        filled += size
        remaining -= size
    return groups


class HorovodStrategy(Strategy):
    """Wraps the optimizer in Horovod's, which sends each gradient as soon as the backward pass has computed it."""

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        if self.options.parallel.bf16_allreduce:
            with world.raise_on_all_ranks():
                check_bf16(world.device)
        # Not the optimizer state: to broadcast a new AdamW's, Horovod takes a hidden step that decays the weights.
        world.broadcast_tensors(model.state_dict())  # a single rank sends nothing, so it needs no NCCL
        return model

    def _wrap(self, optimizer: Any) -> Any:
        import horovod.torch as hvd

        parallel = self.options.parallel
        half = Bf16Compression if parallel.bf16_allreduce else hvd.Compression.fp16
        groups = backward_groups(self.model, parallel.num_groups) if parallel.num_groups else None
        # Call this with the final parameter groups: groups added later would get the optimizer class's defaults.
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            op=hvd.Average,
            backward_passes_per_step=self.options.accumulation,
            compression=half if self._is_compressed else hvd.Compression.none,
            # Gradients are put into buffers in the order in which they become ready. From 3 ranks on, a gradient's
            # position in its buffer decides the order of summation, and so the rounding. A single group always has the
            # same buffer, but its allreduce does not overlap with the backward pass.
            groups=1 if self.options.train.deterministic else groups,
        )
        # Fused optimizers have this attribute. Without it, `GradScaler.step` (see `FusedClip`) waits for the device to
        # decide whether to skip a step.
        wrapped._step_supports_amp_scaling = getattr(optimizer, "_step_supports_amp_scaling", False)
        return wrapped

    @property
    def _is_compressed(self) -> bool:
        return self.options.parallel.fp16_allreduce or self.options.parallel.bf16_allreduce

    def _has_word_rows(self) -> bool:
        """Return whether ranks gather sparse gradients, which pays off up to MAX_GATHERING ranks.

        Horovod does not support them in groups or with compression.
        """
        dense = self.options.parallel.num_groups or self._is_compressed
        return not dense and self._world.size <= MAX_GATHERING

    def synchronize(self) -> None:
        with self._world.limit_wait(self._not_averaged):
            self.optimizer.synchronize()

    def _not_averaged(self) -> list[str]:
        """Return the names of the parameters whose averaged gradients have not arrived yet."""
        import horovod.torch as hvd

        def has_arrived(handle: int) -> bool:
            try:
                return bool(hvd.poll(handle))
            except (RuntimeError, ValueError):  # synchronize has already released the handle
                return True

        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        handles = {key: handle for key, (handle, _) in self.optimizer._handles.items()}
        # A sparse gradient has a function instead of a handle, so its arrival cannot be tested. Name it only if no
        # dense gradient is late.
        late = [key for key, handle in handles.items() if not callable(handle) and not has_arrived(handle)]
        late = late or [key for key, handle in handles.items() if callable(handle)]
        return [names[id(p)] for key in late for p in (key if isinstance(key, tuple) else (key,))]

    def _apply(self) -> None:
        with self.optimizer.skip_synchronize():
            super()._apply()
