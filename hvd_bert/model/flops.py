"""Useful FLOP of training: the matrix products that an encoder's windows need, without padding and recomputation.

Also GPUs' peak FLOP/s, the reference of the MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from hvd_bert.config.settings import TrainArguments
from hvd_bert.distributed.world import World

BACKWARD = 2  # times the forward pass: gradients of both factors, each as expensive as the product


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of a forward pass over windows of n tokens: per_pass + the sum of n * per_token + n^2 * per_pair.

    Attributes:
        per_pass: Work that does not depend on the windows, for example on DeBERTa's relative positions.
        per_token: Linear layers: 2 FLOP for each weight, as often as a pass uses it; Longformer's attention.
        per_pair: Scores and weighted sums of attention. ModernBERT's local attention counts as if it were global.
        frozen: Of `per_token`, that of weights without a gradient, whose backward pass is as expensive as the forward.
        crossover: The window length in tokens at which attention costs as much as the rest of the encoder: 2304 tokens
            for MiniLM, 4608 for BERT-base.
    """

    per_pass: int
    per_token: int
    per_pair: int
    crossover: int
    frozen: int = 0

    def training(self, lengths: ArrayLike, passes: int = 1) -> float:
        """FLOP of `passes` forward and backward passes over windows of `lengths` tokens in all.

        Embedding look-ups and elementwise operations are not counted, as usual for the model FLOP utilization
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        forward = passes * self.per_pass + self.per_token * tokens.sum() + self.per_pair * (tokens**2).sum()
        return float((1 + BACKWARD) * forward - self.frozen * tokens.sum())


def forward_flops(model: Any) -> ForwardFlops:
    """The FLOP of a transformers model of one of FAMILIES with a head, which counts as if it took each token."""
    config, hidden, layers = model.config, model.config.hidden_size, model.config.num_hidden_layers
    encoder, head, frozen, per_pass = 0, 0, 0, 0
    for name, part in model.named_modules():
        positions_or_question = ".pos_" in name or "_global" in name  # DeBERTa's, see below; Longformer's, not counted
        unused = "original_module" in name  # peft's copy
        if not isinstance(part, nn.Linear | nn.Conv1d) or positions_or_question or unused:
            continue
        flops = 2 * part.weight.numel()
        if "albert_layer_groups" in name:  # layers share the weights
            flops = flops * layers // config.num_hidden_groups
        frozen += 0 if part.weight.requires_grad else flops
        if not name.startswith(f"{model.base_model_prefix}."):
            head += flops
        elif ".pooler" in name:
            per_pass += flops
        else:
            encoder += flops
    attended = config.num_attention_heads * getattr(config, "head_dim", hidden // config.num_attention_heads)
    per_pair = 4 * attended * layers * getattr(config, "inner_group_num", 1)
    if config.model_type == "longformer":  # its chunks overlap: 4 for scores, 3 for weighted sums
        encoder += 7 * hidden * sum(config.attention_window)
        per_pair = 0
    if getattr(config, "relative_attention", False):  # DeBERTa's
        per_position = 2 * hidden * layers * len(config.pos_att_type)  # and token, or row of the positions' weights
        if config.model_type == "deberta":  # two positions per token
            encoder += 2 * hidden * per_position
            per_pair += 2 * per_position
        else:
            positions = model.base_model.encoder.rel_embeddings.num_embeddings
            encoder += positions * per_position
            per_pass += positions * hidden * per_position
    return ForwardFlops(per_pass, encoder + head, per_pair, encoder // max(per_pair, 1), frozen)


TERA = 1e12

# Dense matrix products in TFLOP/s, by torch.cuda.get_device_name() without the brand. Figures that are published with
# sparsity only are halved. Unlisted names, such as those of MIG instances, have no peak.
# NVIDIA: "V100 Tensor Core GPU" and "V100S" data sheets, 2020; "Tesla T4" data sheet, 2019; "A100 Tensor Core GPU" data
# sheet, 2021; "H100 Tensor Core GPU Architecture", 2022 (SXM5, PCIe); "H100" and "H200" data sheets, 2024 (NVL, H200);
# "L40S" data sheet, 2023.
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
    """Peak FLOP/s of a GPU by its name, or None if unlisted. `precision`: fp32, tf32, bf16 or fp16."""
    model = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    figures = PEAKS.get(model, {})
    without_tf32 = precision == "tf32" and "tf32" not in figures  # torch then computes in fp32
    tflops = figures.get("fp32" if without_tf32 else precision)
    return None if tflops is None else tflops * TERA


def peak_flops(args: TrainArguments, peak_tflops: float | None, world: World) -> float | None:
    """Peak FLOP/s of all devices of all ranks, or None if one of them is unknown. A collective.

    `peak_tflops`: the user's figure for one device, if given.
    """
    mine = None
    if peak_tflops is not None:
        mine = peak_tflops * TERA
    elif world.device.type == "cuda":
        precision = "tf32" if args.tf32 and args.precision == "fp32" else args.precision
        mine = published_peak(torch.cuda.get_device_name(world.device), precision)
    peaks = world.allgather(None if mine is None else mine * world.devices)
    return None if None in peaks else sum(peaks)
