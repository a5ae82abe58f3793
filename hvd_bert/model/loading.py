"""Loads a model's configuration and weights, and refuses models that cannot be trained."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering
from transformers.models.auto.configuration_auto import AutoConfig

from hvd_bert import hub
from hvd_bert.config.data import ModelArguments
from hvd_bert.errors import UserError, log
from hvd_bert.machine import free_memory
from hvd_bert.model.families import class_with_head, find_family
from hvd_bert.storage.reading import GIB

LORA_CHECKPOINT = (  # end of a message that begins with a folder's name
    "is a checkpoint of a training with --lora_rank, which can only be resumed. Name the output folder of the finished"
    " training."
)
# Setting of config.json -> supported value. transformers' encoders ignore other values, or fail.
SUPPORTED = {
    "position_embedding_type": "absolute",
    "quantization_config": None,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
}
# Values that a family supports in addition: (family, setting, value).
SUPPORTED_BY_FAMILY = {("jina_embeddings_v3", "position_embedding_type", "rotary")}


def load_encoder(kind: Any, args: ModelArguments, config: Any, needs_head: bool) -> Any:
    """Load a model of class `kind` from --model_name_or_path, in fp32. Raises UserError if weights are missing.

    A missing pooler gets new weights. So does a missing head, unless `needs_head`.
    """
    name = args.model_name_or_path
    model, info = hub.load_pretrained(
        kind,
        str(name),
        **args.on_hub,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the error raised below is clearer
    )
    sizes = {key: f"{key}: {[*saved]} instead of {[*needed]}" for key, saved, needed in info["mismatched_keys"]}
    new, encoder = sizes.keys() | info["missing_keys"], f"{model.base_model_prefix}."
    # Not every pretrained model has a pooler.
    lost = [key for key in sorted(new) if key.startswith(encoder) and (key in sizes or ".pooler." not in key)]
    if lost:
        saved = sorted(info["unexpected_keys"])
        raise UserError(f"{name} {_why_lost(lost, saved, encoder, ', '.join(sizes.get(key, key) for key in lost[:3]))}")
    described = ", ".join(sizes.get(key, key) for key in sorted(new)[:3])
    if needs_head and new:
        raise UserError(
            f"{name} has no trained head for this task ({described}), so its results would be random. Train it first,"
            " or name a model that is fine-tuned for this task."
        )
    if sizes:
        log.info("%s: the saved head has another size (%s), so it gets new weights.", name, described)
    return model


def _why_lost(lost: list[str], saved: list[str], encoder: str, described: str) -> str:
    """Return the end of an error message that begins with the model's name: why weights are missing, and what to do.

    `lost`: weights of the model that the checkpoint lacks. `saved`: weights in the checkpoint that the model does not
    have. `described`: description of the first lost weights.
    """
    if any(".lora_A." in key for key in saved):
        return LORA_CHECKPOINT
    ending = lost[0].removeprefix(encoder)
    prefixes = [key.removesuffix(ending).removesuffix(encoder) for key in saved if key.endswith(f".{ending}")]
    if prefixes:
        return (
            f"has weights whose names begin with {prefixes[0]!r} ({saved[0]}). If they come from a wrapper such as DDP,"
            " save the model inside it (`model.module`). Otherwise remove the prefix from the names."
        )
    if saved and not any("." in key for key in saved):
        return f"has a weights file with the entries {', '.join(saved[:3])}. Save only the one that has the weights."
    return f"lacks weights that its configuration needs ({described}, ...). Name another model."


def load_config(name: str, args: ModelArguments, copies: int = 1, head: Any = AutoModelForQuestionAnswering) -> Any:
    """Load and check a configuration.

    Raises UserError if it is unsupported, or if `copies` of the model's weights in fp32 exceed the free memory.
    """
    config = hub.load_pretrained(AutoConfig, name, **args.on_hub)
    kind = class_with_head(head, config, name)
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    with hub.reported(name):
        _check_config(config)
        needed, free = copies * 4 * num_weights(config, kind), free_memory()
        if needed > free:
            raise ValueError(f"it needs {needed / GIB:,.1f} GiB of memory, but {free / GIB:.1f} GiB are free")
    return config


def _check_config(config: Any) -> None:
    """Raise ValueError if a model with this configuration cannot be built or trained."""
    if find_family(config).positions_after_padding and not isinstance(config.pad_token_id, int):
        raise ValueError("config.json: pad_token_id is missing, after which the positions start")
    for name, supported in SUPPORTED.items():
        value = getattr(config, name, supported)
        if value != supported and (config.model_type, name, str(value)) not in SUPPORTED_BY_FAMILY:
            found = json.dumps(value, default=repr)
            raise ValueError(f"config.json: {name} must be {json.dumps(supported)}, not {found}")


def num_weights(config: Any, kind: Any) -> int:
    """Count the weights of a model of class `kind`, without allocating them."""
    config = copy.deepcopy(config)
    config.num_labels = 2  # start and end; the configuration may be a classifier's
    with torch.device("meta"):
        model = kind(config)
    return sum(weights.numel() for weights in model.parameters())
