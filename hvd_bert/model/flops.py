"""Useful FLOP of training: the matrix products that an encoder's windows need, without padding and recomputation.

Also GPUs' peak FLOP/s, the reference of the MFU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hvd_bert.config.settings import TrainArguments
from hvd_bert.distributed.world import World
from hvd_bert.model.cpu import kernels
from hvd_bert.model.families import family_of, max_tokens

BACKWARD = 2  # times the forward pass: gradients of both factors, each as expensive as the product


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of a forward pass over windows of n tokens: per_pass + the sum of n * per_token + n^2 * per_pair.

    Attributes:
        per_pass: Work that does not depend on the windows, for example on DeBERTa's relative positions.
        per_token: Linear layers: 2 FLOP for each weight, as often as a pass uses it.
        per_pair: Scores and weighted sums of attention. Local attention counts as if it were global.
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


_counted: WeakKeyDictionary[nn.Module, ForwardFlops] = WeakKeyDictionary()


def forward_flops(model: Any) -> ForwardFlops:
    """The FLOP of a transformers model with a head per token, counted in passes over three short windows.

    This needs no names of a family's layers or settings. A model is counted once: call this first while the model is on
    the CPU and no strategy has wrapped it.
    """
    if model not in _counted:
        _counted[model] = _count_passes(model)
    return _counted[model]


def with_adapters(flops: ForwardFlops, model: nn.Module) -> ForwardFlops:
    """The FLOP of a model after adapters (LoRA) were added and the other weights of its encoder frozen."""
    trained = {name: 2 * p.numel() for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    adapters = sum(count for name, count in trained.items() if "lora_" in name)
    frozen = flops.per_token + adapters - sum(trained.values())
    return replace(flops, per_token=flops.per_token + adapters, frozen=frozen)


def try_once(model: Any) -> Any:
    """The same model, after its encoder ran over one short window, which fails if the configuration is wrong."""
    training = model.training
    model.eval()
    _run(model.base_model, _unit(model))
    return model.train(training)


def _unit(model: Any) -> int:
    """The length of the shortest window. Longformer pads its input to a multiple of its attention window."""
    return int(np.max(getattr(model.config, "attention_window", 2)))


def _count_passes(model: Any) -> ForwardFlops:
    encoder, training, unit = model.base_model, model.training, _unit(model)
    model.eval()
    one, two, three = (_count(encoder, length * unit) for length in (1, 2, 3))
    model.train(training)
    per_pair = (three - 2 * two + one) // (2 * unit**2)
    per_token = (two - one) // unit - 3 * unit * per_pair
    in_encoder = set(encoder.modules())
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in in_encoder]
    return ForwardFlops(
        per_pass=one - unit * per_token - unit**2 * per_pair,
        per_token=per_token + sum(2 * head.weight.numel() for head in heads),
        per_pair=per_pair,
        crossover=per_token // max(per_pair, 1),  # Longformer may attend in its windows only
    )


def _run(encoder: Any, length: int) -> None:
    """A forward pass over one window of `length` tokens, without gradients."""
    config = encoder.config
    tokens = torch.full((1, length), config.vocab_size - 1, device=encoder.device)  # 0 or 1 may be padding
    if family_of(config).positions_after_padding:  # padding has no position, and Longformer's window may exceed them
        tokens[:, max_tokens(config) :] = config.pad_token_id
    # Without gradients, and so without their memory. FlopCounterMode fails with DeBERTa-v2 inside of torch.no_grad.
    weights = {name: weight.detach() for name, weight in encoder.named_parameters()}
    functional_call(encoder, weights, kwargs={"input_ids": tokens})


def _count(encoder: Any, length: int) -> int:
    formulas: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
    with kernels.override(kernels.TORCHS), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        _run(encoder, length)
    return int(counter.get_total_flops())


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """For an operator that torch's counter does not know. The arguments are shapes."""
    return int(sdpa_flop_count(query, key, value))


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
