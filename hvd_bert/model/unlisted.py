"""Tests whether a model whose family `families.py` does not list can be trained."""

from __future__ import annotations

from typing import Any

import torch

from hvd_bert.errors import UserError, short_reason
from hvd_bert.model.families import ENCODERS, described, generates, max_tokens
from hvd_bert.model.precision import evaluating

AT_LEAST = 32  # minimum tokens of the longer test window
SPECIAL = ("bos", "cls", "decoder_start", "eos", "mask", "pad", "sep", "unk")  # bos_token_id and so on in config.json


def check_unlisted(model: Any, max_seq_length: int) -> None:
    """Run a model's forward and backward pass on a full window and on a window of half the length, with padding.

    `max_seq_length`: length of the full window. At least AT_LEAST is used, if the model has as many positions.
    Freezes weights that get no gradient: ranks could not average their gradients, and weight decay would change them.
    Raises ValueError if a pass fails, as in models that need inputs other than tokens, or if padding changes results;
    UserError if a decoder fails.
    """
    length = min(max(max_seq_length, AT_LEAST), max_tokens(model.config))
    half, name = length // 2, model.config.model_type
    mask = torch.arange(length) < torch.tensor([[length], [half]])
    rows = _windows(model.config, length, half)
    try:
        with evaluating(model), torch.enable_grad():
            both, alone = _logits(model, rows, mask), _logits(model, rows[1:, :half], mask[1:, :half])
            both.sum().backward()
    except Exception as error:
        if generates(model.config):
            source = f"{model.name_or_path} is {described(model.config)}"
            raise UserError(f"{source}, which cannot be trained on spans. {ENCODERS}") from None
        reason = short_reason(error)
        raise ValueError(f"{name} models are not a listed family, and {length} tokens alone fail: {reason}") from None
    for weights in model.parameters():
        weights.requires_grad_(weights.grad is not None)
    model.zero_grad()
    per_token = (both.shape[1], alone.shape[1]) == (length, half)  # the head returns logits per token
    padded = both[1:, :half] if per_token else both[1:]
    if not (padded - alone).abs().max() <= 1e-5 * alone.abs().max():  # also true for NaN
        raise ValueError(f"padding changes the results of {name} models")


def _windows(config: Any, length: int, half: int) -> torch.Tensor:
    """Make windows of random tokens, [2, length]. The second has `half` tokens. Both end with eos, as BART requires."""
    special = {getattr(config, f"{name}_token_id", None) for name in SPECIAL}
    words = torch.tensor([word for word in range(config.vocab_size) if word not in special])
    rows = words[torch.randint(len(words), (2, length), generator=torch.Generator().manual_seed(0))]
    if isinstance(eos := getattr(config, "eos_token_id", None), int):
        rows[0, -1] = rows[1, half - 1] = eos
    return rows


def _logits(model: Any, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=rows, token_type_ids=torch.zeros_like(rows), attention_mask=mask)
    logits: torch.Tensor = output["start_logits" if "start_logits" in output else "logits"]
    return logits
