"""Gradient checkpointing: the backward pass computes each layer again, instead of keeping its activations."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging as transformers_logging

from hvd_bert.errors import UserError


def recompute_layers(model: Any) -> None:
    """Turn on the model's own gradient checkpointing for training. Weights, losses and gradients stay the same.

    Random numbers are restored for the second computation, so dropout is the same, too. Raises UserError if the model
    has none.
    """
    # The newer name of the same method, about whose older name transformers warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None or not model.supports_gradient_checkpointing:
        raise UserError(
            f"--gradient_checkpointing: {type(model).__name__} does not support it. Omit the flag, and lower"
            " --per_device_train_batch_size if memory is short."
        )
    transformers_logging.set_verbosity_error()  # it would warn that encoders have no cache, which they never use
    enable({"use_reentrant": False})  # the reentrant kind would not run the hooks that average gradients in time
