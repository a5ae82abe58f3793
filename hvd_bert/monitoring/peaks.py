"""Peak FLOP/s of GPUs, from which the model FLOP utilization (MFU) is calculated."""

from __future__ import annotations

import torch

from hvd_bert.config.training import TrainArguments
from hvd_bert.distributed.world import World

TERA = 1e12

# Peak TFLOP/s of dense matrix products, by torch.cuda.get_device_name() without the brand. Figures that are published
# only for sparse matrices are halved. The peak of unlisted devices, such as MIG instances, is unknown.
# Sources: NVIDIA's "V100 Tensor Core GPU" and "V100S" data sheets, 2020; "Tesla T4" data sheet, 2019; "A100 Tensor Core
# GPU" data sheet, 2021; "H100 Tensor Core GPU Architecture", 2022 (SXM5, PCIe); "H100" and "H200" data sheets, 2024
# (NVL, H200); "L40S" data sheet, 2023.
_V100 = {"fp16": 125.0, "fp32": 15.7}
_V100_PCIE = {"fp16": 112.0, "fp32": 14.0}
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}
_NVL = {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0}
PEAKS: dict[str, dict[str, float]] = {
    "V100-SXM2-16GB": _V100,
    "V100-SXM2-32GB": _V100,
    "V100-PCIE-16GB": _V100_PCIE,
    "V100-PCIE-32GB": _V100_PCIE,
    "V100S-PCIE-32GB": {"fp16": 130.0, "fp32": 16.4},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100-PCIE-80GB": _A100,
    "A100 80GB PCIe": _A100,
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "H100 80GB HBM3": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2},
    "H100 NVL": _NVL,
    "H200": {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67.0},
    "H200 NVL": _NVL,
}


def published_peak(device_name: str, precision: str) -> float | None:
    """Return a GPU's peak FLOP/s, or None if PEAKS lacks it. `precision`: fp32, tf32, bf16 or fp16."""
    model = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    figures = PEAKS.get(model, {})
    without_tf32 = precision == "tf32" and "tf32" not in figures  # torch then computes in fp32
    tflops = figures.get("fp32" if without_tf32 else precision)
    return None if tflops is None else tflops * TERA


def peak_flops(args: TrainArguments, peak_tflops: float | None, world: World) -> float | None:
    """Return the sum of the peak FLOP/s of all ranks' devices, or None if any of them is unknown. A collective.

    `peak_tflops`: --peak_tflops, the peak per device; None: look it up by the device's name.
    """
    mine = None
    if peak_tflops is not None:
        mine = peak_tflops * TERA
    elif world.device.type == "cuda":
        precision = "tf32" if args.tf32 and args.precision == "fp32" else args.precision
        mine = published_peak(torch.cuda.get_device_name(world.device), precision)
    peaks = world.allgather(None if mine is None else mine * world.devices)
    return None if None in peaks else sum(peaks)
