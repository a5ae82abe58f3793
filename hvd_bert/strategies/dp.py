"""torch's DataParallel: a single process with several GPUs. For comparison only: a process per GPU is faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hvd_bert.distributed.world import World
from hvd_bert.model.attention import make_windows
from hvd_bert.strategies.base import Strategy


class DPStrategy(Strategy):
    """Splits each batch over the GPUs of this process, and sums the GPUs' gradients on the first GPU."""

    def _distribute(self, model: nn.Module, world: World) -> nn.Module:
        return WindowParallel(model, device_ids=world.gpus)


class WindowParallel(nn.DataParallel[nn.Module]):
    """DataParallel that splits packed batches at window borders. All other batches are split as in torch."""

    _packed = False

    def scatter(self, inputs: Any, kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        self._packed = bool(kwargs and kwargs.get("windows"))
        if not kwargs or not self._packed:
            return super().scatter(inputs, kwargs, device_ids)
        batches = split_windows(kwargs, [torch.device("cuda", number) for number in device_ids])
        return [() for _ in batches], batches

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        # DataParallel's threads inherit whether autocast is on, but not its dtype: bf16 would become fp16.
        dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        forwards = [torch.autocast("cuda", dtype, enabled)(replica.__call__) for replica in replicas]
        return super().parallel_apply(forwards, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return join_windows(outputs, output_device) if self._packed else super().gather(outputs, output_device)


def split_windows(tokens: dict[str, Any], devices: list[torch.device]) -> list[dict[str, Any]]:
    """Split a packed batch's model inputs into one batch per device, in the order of the windows.

    `tokens`: inputs from `evaluation.forward.model_inputs`. The batches' window counts differ by at most one. If there
    are fewer windows than devices, the last devices get no batch.
    """
    lengths = tokens["windows"].lengths
    shares = [share.tolist() for share in np.array_split(lengths, min(len(devices), len(lengths)))]
    sizes = [sum(share) for share in shares]
    rows = {name: value.split(sizes, dim=1) for name, value in tokens.items() if name != "windows"}
    return [
        {name: row[i].to(device, non_blocking=True) for name, row in rows.items()}
        | {"windows": make_windows(share, device)}
        for i, (share, device) in enumerate(zip(shares, devices, strict=False))
    ]


def join_windows(outputs: list[Any], device: Any) -> Any:
    """Concatenate the model's outputs for the batches from `split_windows` on `device`."""
    first = outputs[0]
    for name in first:  # class logits: a row per window; token logits: one row for all windows
        dimension = 0 if name == "logits" and first[name].ndim == 2 else 1
        first[name] = torch.cat([output[name].to(device) for output in outputs], dim=dimension)
    return first
