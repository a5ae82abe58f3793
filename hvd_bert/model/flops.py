"""Useful FLOP of training: the matrix products that an encoder's windows need, without padding and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from hvd_bert.model.cpu import linear
from hvd_bert.model.families import family_of, max_tokens

BACKWARD = 2  # times the forward pass: gradients of both factors, each as expensive as the product


@dataclass(frozen=True)
class ForwardFlops:
    """FLOP of a forward pass over windows of n tokens: per_pass + the sum of n * per_token + n^2 * per_pair.

    Attributes:
        per_pass: Work that does not depend on the windows, for example on DeBERTa's relative positions.
        per_token: Linear layers: 2 FLOP for each weight, as often as a pass uses it.
        per_pair: Scores and weighted sums of attention. Local attention counts as if it were global.
        crossover: The window length in tokens at which attention costs as much as the rest of the encoder: 2304 tokens
            for MiniLM, 4608 for BERT-base.
    """

    per_pass: int
    per_token: int
    per_pair: int
    crossover: int

    def training(self, lengths: ArrayLike, passes: int = 1) -> float:
        """FLOP of `passes` forward and backward passes over windows of `lengths` tokens in all.

        Embedding look-ups and elementwise operations are not counted, as usual for the model FLOP utilization
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        forward = passes * self.per_pass + self.per_token * tokens.sum() + self.per_pair * (tokens**2).sum()
        return float((1 + BACKWARD) * forward)


_counted: WeakKeyDictionary[nn.Module, ForwardFlops] = WeakKeyDictionary()


def forward_flops(model: Any) -> ForwardFlops:
    """The FLOP of a transformers model with a head per token, counted in passes over three short windows.

    This needs no names of a family's layers or settings. A model is counted once: call this first while the model is on
    the CPU and no strategy has wrapped it.
    """
    if model not in _counted:
        _counted[model] = _count_passes(model)
    return _counted[model]


def try_once(model: Any) -> None:
    """Run the model's encoder over one short window, which fails if the configuration is wrong."""
    training = model.training
    model.eval()
    _run(model.base_model, _unit(model))
    model.train(training)


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
        crossover=per_token // max(per_pair, 1),  # FNet has no attention
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
    with linear.replaced_by_torchs(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        _run(encoder, length)
    return int(counter.get_total_flops())


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """For an operator that torch's counter does not know. The arguments are shapes."""
    return int(sdpa_flop_count(query, key, value))
